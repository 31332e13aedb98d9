"""Standstills of a job, from the status of its cluster: overlong waits, the nodes to blame, and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvd.core.open_waits import LEAST_STANDSTILL_S, TIMES_USUAL, UNKNOWN_STANDSTILL_S
from kvd.core.worker.words import barrier_title
from kvd_cli.copies import Report
from kvd_cli.output import lasting

_NAMED: Final = 4  # nodes in one line
_TAKING_PART: Final = ("active", "returning")


@dataclass(frozen=True, slots=True)
class Standstills:
    """Overlong waits of a job.

    Attributes:
        findings: a line for each wait that has lasted too long.
        notes: a line for each long wait in which nothing may be wrong.
    """

    findings: tuple[str, ...]
    notes: tuple[str, ...]


class _Nodes:
    """Nodes of a report by name, such as "worker 1"."""

    def __init__(self, report: Report) -> None:
        self._members = {f"{member['role']} {member['rank']}": member for member in report["members"]}
        self._barriers = {
            worker: (barrier_title(wait["name"]), wait["waits_for"])
            for wait in report.get("barrier_waits", ())
            for worker in wait["entered"]
        }

    def is_known_to_be_gone(self, name: str) -> bool:
        """Return whether another line reports the node as dead, lost, ended or missing."""
        member = self._members.get(name)
        return member is None or member["state"] in ("dead", "gone", "lost", "left") or member["process_ended"]

    def is_silent(self, name: str) -> bool:
        return bool(self._members.get(name, {}).get("is_silent", False))

    def silent(self) -> list[str]:
        """Return the silent nodes that take part. A server that does not answer is reported elsewhere."""
        return [
            name
            for name, member in self._members.items()
            if member["role"] == "worker"
            and member["state"] not in ("done", "left", "dead", "gone", "lost")
            and not member["process_ended"]
            and self.is_silent(name)
        ]

    def taking_part(self) -> list[str]:
        """Return the workers that rounds wait for, without those that wait at a barrier."""
        return [
            name
            for name, member in self._members.items()
            if member["role"] == "worker"
            and member["state"] in _TAKING_PART
            and not member["process_ended"]
            and name not in self._barriers
        ]

    def described(self, names: Sequence[str]) -> str:
        """Describe the nodes with host and process id."""
        texts = [self._description(name) for name in names[:_NAMED]]
        more = len(names) - _NAMED
        return ", ".join(texts) + (f" and {more} more" if more > 0 else "")

    def _description(self, name: str) -> str:
        member = self._members.get(name)
        if member is None:
            return name
        host = member.get("host_name", "")
        return f"{name} (node {member['node_id']}, process {member['pid']}{f' on host {host}' if host else ''})"

    def remedy(self, name: str) -> str:
        """Return the remedy for a node that others wait for."""
        member = self._members.get(name)
        if member is None:
            return ""
        pid, host = member["pid"], member.get("host_name", "")
        there = f" on host {host}" if host else ""
        if self.is_silent(name):
            return (
                f"{name} was last heard {lasting(member['last_heard_s'])} ago, so its process is stopped or cut off. "
                f"See its state with ps -o pid,stat,wchan:20,cmd -p {pid}{there}: if that is T, kill -CONT {pid} lets "
                "it continue. Otherwise check the network."
            )
        if name.startswith("server "):
            return f"Look at its log, and at its disk and network{there}."
        if name in self._barriers:
            title, others = self._barriers[name]
            waits_for = f", where it waits for {', '.join(others[:_NAMED])}" if others else ""
            return f"{name} is at {title}{waits_for}: all workers must make these calls in the same order."
        return (
            f"{name} is heard, so its process runs. Its program is elsewhere: in a data loader, at a lock, or in an "
            f"evaluation that only it makes. See where with py-spy dump --pid {pid}{there}."
        )


def standstills_of(report: Report) -> Standstills:
    """Find the waits that have lasted too long."""
    nodes, findings, notes, named = _Nodes(report), [], [], set[str]()
    for wait in _open_waits(report):
        waits_for = [name for name in wait.waits_for if not nodes.is_known_to_be_gone(name)]
        if not waits_for or wait.age_s < LEAST_STANDSTILL_S:
            continue
        text = f"{wait.what} has waited for {lasting(wait.age_s)} for {nodes.described(waits_for)}{_usually(wait)}."
        if wait.standstill_s is not None and wait.age_s >= wait.standstill_s:
            first = next(filter(nodes.is_silent, waits_for), waits_for[0])
            findings.append(f"stalled: {text} {nodes.remedy(first)}")
            named.update(waits_for)
        elif wait.standstill_s is None or wait.is_unusual:
            notes.append(f"waiting: {text}{_patience(wait)}")
    for name, pushed in _workers_behind(report, nodes):
        if name not in named:
            every = "" if pushed["usual_s"] is None else f", where it usually pushes every {lasting(pushed['usual_s'])}"
            text = f"{nodes.described([name])} has pushed nothing for {lasting(pushed['ago_s'])}{every}"
            findings.append(f"stalled: {text}; the others continue. {nodes.remedy(name)}")
            named.add(name)
    findings += [
        f"silent: {nodes.described([name])}. {nodes.remedy(name)}" for name in nodes.silent() if name not in named
    ]
    if not (findings or notes):
        notes += _quiet(report, nodes)
    return Standstills(tuple(findings), tuple(notes))


@dataclass(frozen=True, slots=True)
class _Wait:
    """Wait for nodes: of a round, at a barrier, for a key.

    Attributes:
        standstill_s: the age from which it is a finding; None: never.
        usual_s: usual duration of a step in seconds; None if unknown.
    """

    what: str
    waits_for: Sequence[str]
    age_s: float
    standstill_s: float | None
    usual_s: float | None

    @property
    def is_unusual(self) -> bool:
        """Return whether the wait has lasted longer than a usual step."""
        return self.usual_s is None or self.age_s >= 2 * self.usual_s


def _open_waits(report: Report) -> Iterable[_Wait]:
    usual_s = max((s["usual_step_s"] for s in _answered(report) if s.get("usual_step_s") is not None), default=None)
    seen: set[tuple[str, ...]] = set()
    rounds = [entry for server in _answered(report) for entry in server.get("open_rounds", ())]
    for entry in sorted(rounds, key=lambda entry: -entry["age_s"]):
        waits_for = tuple(entry["waits_for"])
        if waits_for not in seen:
            seen.add(waits_for)
            key, number = entry["key"], entry["round"]
            what = f"round {number} of key {key!r}" if number else f"init of key {key!r}"
            yield _Wait(what, waits_for, entry["age_s"], entry["standstill_s"], entry["usual_s"])
    for entry in report.get("barrier_waits", ()):
        limit_s = entry["standstill_s"]
        if limit_s is not None:
            limit_s = max(limit_s, UNKNOWN_STANDSTILL_S if usual_s is None else TIMES_USUAL * usual_s)
        title = barrier_title(entry["name"])
        yield _Wait(f"{entry['entered'][0]} at {title}", entry["waits_for"], entry["age_s"], limit_s, usual_s)


def _usually(wait: _Wait) -> str:
    return "" if wait.usual_s is None else f", where a step usually takes {lasting(wait.usual_s)}"


def _patience(wait: _Wait) -> str:
    return "" if wait.standstill_s is None else f" It counts as stalled after {lasting(wait.standstill_s)}."


def _workers_behind(report: Report, nodes: _Nodes) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Return the workers of an asynchronous job that stopped pushing while others continue, with their last pushes."""
    latest: dict[str, Mapping[str, Any]] = {}
    for server in _answered(report):
        for name, pushed in server.get("last_pushes", {}).items():
            if name not in latest or pushed["ago_s"] < latest[name]["ago_s"]:
                latest[name] = pushed
    behind = {name: pushed for name, pushed in latest.items() if pushed["ago_s"] >= pushed["standstill_s"]}
    if len(behind) == len(latest):
        return
    taking_part = nodes.taking_part()
    yield from ((name, pushed) for name, pushed in behind.items() if name in taking_part)


def _quiet(report: Report, nodes: _Nodes) -> list[str]:
    """Return a line if no worker has pushed for long although none waits for another."""
    paces = [
        (server["last_step_ago_s"], server["usual_step_s"])
        for server in _answered(report)
        if server.get("last_step_ago_s") is not None and server.get("usual_step_s") is not None
    ]
    workers = nodes.taking_part()
    if not paces or not workers:
        return []
    ago_s, usual_s = min(paces)
    if ago_s < max(LEAST_STANDSTILL_S, TIMES_USUAL * usual_s):
        return []
    return [
        f"quiet: no worker has pushed for {lasting(ago_s)}, where a step usually takes {lasting(usual_s)}. None waits "
        "for another, so the programs evaluate, write a checkpoint or load data, or hang there. See where with py-spy "
        f"dump --pid: {nodes.described(workers)}."
    ]


def _answered(report: Report) -> list[Report]:
    return [server for server in report.get("servers", ()) if "error" not in server]
