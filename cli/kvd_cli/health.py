"""Faults of a cluster, found in its status, and their remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvd.transport.finding import Finding
from kvd_cli.copies import (
    Partition,
    Report,
    degraded_advice,
    differences,
    failed_copies,
    led_by,
    lost,
    numbers_of,
    partitions_of,
)
from kvd_cli.disagreements import disagreements
from kvd_cli.limits import snapshot_too_old, too_full, uneven
from kvd_cli.paths import slow_paths
from kvd_cli.reachability import no_answers
from kvd_cli.standstills import standstills_of

SLICES_EACH: Final = 8
"""With this many slices per server, a server without any is no accident: the odds are a thousand to one."""

_FROM_CHECKPOINT: Final = "start the job again from a checkpoint"


@dataclass(frozen=True, slots=True)
class Health:
    """Verdict on a cluster.

    Attributes:
        is_healthy: whether no node is dead, missing or silent, no active worker's process has ended, no server has left
            its workers, nothing has waited for too long, each value has as many copies as it should and they were
            always alike, the scheduler can save its state, no memory or table of open files is nearly full, and
            snapshots are taken as scheduled.
        advice: a line for each thing that is or looks wrong, with what to do.
    """

    is_healthy: bool
    advice: tuple[str, ...]


def health_of(report: Report, handshakes: Mapping[int, Finding] | None = None) -> Health:
    """Judge a cluster by its status.

    Args:
        report: the status.
        handshakes: the results of handshakes with servers that did not answer, by rank.
    """
    workers, servers = _dead(report, "worker"), _dead(report, "server")
    ended, deserters = _ended_workers(report), _servers_that_left(report)
    partitions = partitions_of(report)
    degraded = degraded_advice(partitions, [*servers, *_left(report, "server")])
    missing = list(report["missing"])
    silent = no_answers(report, handshakes or {})
    advice = []
    if servers:
        advice.append(f"dead: {', '.join(servers)}. {_what_is_gone(servers, partitions)}")
    if deserters:
        advice.append(f"left: {', '.join(deserters)}, while workers are active. {_what_is_gone(deserters, partitions)}")
    advice += degraded
    differed = differences(report)
    failed = failed_copies(report)
    advice += differed + failed
    are_values_lost = _are_values_lost([*servers, *deserters], partitions)
    if workers:
        advice.append(f"dead: {', '.join(workers)}. {_start_again(workers, are_values_lost=are_values_lost)}")
    advice += [] if are_values_lost else _advice_on_workers_apart(report)
    if ended:
        advice.append(f"process ended: {', '.join(ended)}. {_start_again(ended, are_values_lost=are_values_lost)}")
    standstills = standstills_of(report)
    advice += standstills.findings + standstills.notes
    if missing:
        advice.append(f"missing: {', '.join(missing)}. The job waits until all have joined.")
    advice += silent
    unsaved = report.get("cannot_save", "")
    if unsaved:
        advice.append(
            f"the scheduler cannot save its state: {unsaved}. Free space in its state_dir, or make it writable. Until "
            "then joining, leaving and barriers wait; pushes and pulls continue."
        )
    if report.get("insecure"):
        advice.append(
            "insecure: this cluster has no keys. Whoever reaches its ports can read and change everything, and end it. "
            "Leave out --insecure (KVD_INSECURE) everywhere unless the network is closed."
        )
    full, old = too_full(report), snapshot_too_old(report)
    advice += [*full, *old, *uneven(report), *disagreements(report), *slow_paths(report)]
    advice += [_emptied(name) for name in _empty_servers(report)]
    copies, fewer = degraded or differed or failed, _in_state(report, "worker", "lost", "back")
    shrunk = set(fewer).difference(_new(report))
    stalled = standstills.findings
    gone = servers or deserters or workers or ended or missing or silent
    wrong = gone or copies or shrunk or stalled or unsaved or full or old
    return Health(not wrong, tuple(advice))


def _advice_on_workers_apart(report: Report) -> list[str]:
    """Return advice on workers without which rounds continue for now."""
    advice = []
    lost, late, new = _in_state(report, "worker", "lost"), _late(report), _new(report)
    back = [name for name in _in_state(report, "worker", "back") if name not in (*late, *new)]
    if lost:
        advice.append(f"lost: {', '.join(lost)}. The job continues without, degraded. {_start_again(lost)}")
    if late:
        advice.append(
            f"late: {', '.join(late)}. The others continue without, degraded, until the program reaches its next step "
            "of kv.steps, or calls kv.resume(). If that happens often, see what slows it down, or raise quorum_grace_s."
        )
    if back:
        advice.append(
            f"back: {', '.join(back)}, and not in the rounds yet. They take part once the program reaches its next "
            "step of kv.steps, or calls kv.resume()."
        )
    if new:
        advice.append(
            f"new: {', '.join(new)}, not in the rounds yet: from the next step of kv.steps on, or after kv.resume()."
        )
    return advice


def _dead(report: Report, role: str) -> list[str]:
    return _in_state(report, role, "dead")


def _in_state(report: Report, role: str, *states: str) -> list[str]:
    return [f"{m['role']} {m['rank']}" for m in report["members"] if m["state"] in states and m["role"] == role]


def _new(report: Report) -> list[str]:
    """Return advice on workers that joined a running job and do not take part yet."""
    return [f"worker {m['rank']}" for m in report["members"] if m["state"] == "back" and m.get("is_new", False)]


def _late(report: Report) -> list[str]:
    """Return advice on stragglers that do not take part again yet."""
    return [f"worker {m['rank']}" for m in report["members"] if m["state"] == "back" and m.get("is_late", False)]


def _ended_workers(report: Report) -> list[str]:
    """Return advice on workers with ended processes that rounds still wait for."""
    return [
        f"worker {m['rank']}"
        for m in report["members"]
        if m["role"] == "worker" and m["state"] in ("active", "idle") and m["process_ended"]
    ]


def _servers_that_left(report: Report) -> list[str]:
    """Return advice on stopped servers that held the only copy of keys that workers need."""
    if not any(m["role"] == "worker" and m["state"] in ("active", "idle") for m in report["members"]):
        return []
    left, partitions = _left(report, "server"), partitions_of(report)
    if not partitions:
        return left
    last = {partition.leader for partition in lost(partitions, left)}
    return [name for name in left if name in last]


def _left(report: Report, role: str) -> list[str]:
    return _in_state(report, role, "left")


def _what_is_gone(servers: list[str], partitions: Sequence[Partition]) -> str:
    """Describe the fate of the keys of servers that are gone."""
    they, one = ("they", "them") if len(servers) > 1 else ("it", "it")
    gone = lost(partitions, servers)
    if gone:
        verb = "were" if len(servers) > 1 else "was"
        return (
            f"No other server has {numbers_of(gone)} of the keys. If {they} {verb} only stopped or cut off, let {one} "
            f"continue, and nothing is lost. Otherwise {_FROM_CHECKPOINT}."
        )
    if partitions:
        return f"Nothing is lost: other servers lead what {they} led. Start {one} again under the same node id."
    keys = "their parts of the keys are" if len(servers) > 1 else "its part of the keys is"
    return f"With replicas=1 {keys} gone: {_FROM_CHECKPOINT}."


def _are_values_lost(gone: Sequence[str], partitions: Sequence[Partition]) -> bool:
    """Return whether values are lost because all servers that held them are gone."""
    return bool(gone) and (not partitions or bool(lost(partitions, gone)))


def _start_again(workers: list[str], *, are_values_lost: bool = False) -> str:
    if are_values_lost:
        they = "them" if len(workers) > 1 else "it"
        return f"Starting {they} again does not help: values are gone with a server, see above."
    if len(workers) > 1:
        return "Start them again under the same node id, and they get their ranks back."
    return "Start it again under the same node id, and it gets its rank back."


def _empty_servers(report: Report) -> list[str]:
    """Return advice on servers that must have lost their keys: they hold none, unlike the others."""
    partitions = partitions_of(report)
    answered = [
        server
        for server in report.get("servers", ())
        if "error" not in server and (not partitions or led_by(f"server {server['rank']}", partitions))
    ]
    slices = sum(server["slices"] for server in answered)
    has_optimizer = any(server["optimizer"] for server in answered)
    return [
        f"server {server['rank']}"
        for server in answered
        if not server["keys"]
        and slices
        and (slices >= SLICES_EACH * len(answered) or (has_optimizer and not server["optimizer"]))
    ]


def _emptied(name: str) -> str:
    return f"empty: {name} holds no keys, but others do. If it was restarted, its part is gone: {_FROM_CHECKPOINT}."
