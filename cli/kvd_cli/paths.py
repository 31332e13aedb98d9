"""Slow paths between the nodes of a cluster, from its status, with reason and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kvd.core.machine import BEING_OPENED
from kvd.protocol.messages import PathKind
from kvd.transport.links.sealing import OVER_TCP, reason_over_tcp, remedy_for
from kvd_cli.copies import Report

_GONE: Final = ("left", "dead", "gone", "lost")


class _Way(NamedTuple):
    """Path of messages between two nodes, such as "worker 0 → server 1"."""

    name: str
    path: str
    reason: str
    is_within_host: bool


def slow_paths(report: Report) -> list[str]:
    """Return a line for each reason why values take a slower path than necessary."""
    within: dict[str, list[str]] = {}
    between: dict[str, list[str]] = {}
    for way in _ways(report):
        if way.is_within_host and way.path in (PathKind.ZMQ, PathKind.UNIX_SOCKET):
            within.setdefault(way.reason.partition(f"; {OVER_TCP}")[0], []).append(way.name)
        elif not way.is_within_host and way.path == PathKind.ZMQ and not report.get("insecure"):
            between.setdefault(reason_over_tcp(way.reason), []).append(way.name)
    return [
        *(
            f"slow: {_listed(ways)} without shared memory, though both run on one host: {reason or 'unknown'}. "
            f"{_remedy_within_host(reason)}"
            for reason, ways in within.items()
        ),
        *(
            f"slow: {_listed(ways)} by ZeroMQ's own encryption (CURVE), which takes several times as long as an "
            f"encrypted link: {reason}. {remedy_for(reason)}"
            for reason, ways in between.items()
        ),
    ]


def _listed(ways: list[str]) -> str:
    return ", ".join(dict.fromkeys(ways))


def _remedy_within_host(reason: str) -> str:
    if reason.startswith("no link at this host") or "turned off" in reason:
        return (
            'Set shared_memory = "auto" (KVD_SHARED_MEMORY) for both, and let containers of one host share its network '
            "namespace."
        )
    if "runs as user" in reason:
        return "Run the servers and workers of a host as one user."
    return "Shared memory takes Linux 5.1, memfd_create (a seccomp profile may forbid it), and free memory."


def _ways(report: Report) -> Iterator[_Way]:
    """Return the path between each pair of present nodes, once it is decided."""
    members = {f"{member['role']} {member['rank']}": member for member in report["members"]}
    by_incarnation = {member.get("incarnation"): name for name, member in members.items()}
    for server in report.get("servers", ()):
        here = f"server {server['rank']}"
        ways = [(worker, here, path) for worker, path in server.get("paths", {}).items()]
        for incarnation, path in server.get("paths_to_servers", {}).items():
            ways.append((here, by_incarnation.get(incarnation, ""), path))
        for begin, end, path in ways:
            kind, _, reason = path.partition(": ")
            there = [member for name in (begin, end) if _is_there(member := members.get(name)) and member is not None]
            if len(there) == 2 and reason != BEING_OPENED and all(member.get("host") for member in there):
                yield _Way(f"{begin} → {end}", kind, reason, there[0]["host"] == there[1]["host"])


def _is_there(member: Report | None) -> bool:
    return member is not None and member["state"] not in _GONE
