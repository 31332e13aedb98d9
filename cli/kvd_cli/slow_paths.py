"""Ways between hosts that are slower than they could be, by the status of a cluster with keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvd.core.machine import BEING_OPENED
from kvd.protocol.messages import PathKind
from kvd.transport.sealing import reason_over_tcp, remedy_for
from kvd_cli.copies import Report

_GONE: Final = ("left", "dead", "gone", "lost")


def slow_paths(report: Report) -> list[str]:
    """A line for each reason why values travel between hosts by ZeroMQ's own encryption."""
    if report.get("insecure"):
        return []  # nothing is encrypted
    found: dict[str, list[str]] = {}
    for way, reason in _fallbacks(report):
        found.setdefault(reason, []).append(way)
    return [
        f"slow: {', '.join(dict.fromkeys(ways))} by ZeroMQ's own encryption (CURVE), which takes several times as long "
        f"as an encrypted link: {reason}. {remedy_for(reason)}"
        for reason, ways in found.items()
    ]


def _fallbacks(report: Report) -> Iterator[tuple[str, str]]:
    """Each way between two hosts without a link, and why there is none."""
    members = {f"{member['role']} {member['rank']}": member for member in report["members"]}
    by_incarnation = {member.get("incarnation"): name for name, member in members.items()}
    for server in report.get("servers", ()):
        here = f"server {server['rank']}"
        ways = [(worker, here, path) for worker, path in server.get("paths", {}).items()]
        for incarnation, path in server.get("paths_to_servers", {}).items():
            ways.append((here, by_incarnation.get(incarnation, ""), path))
        for begin, end, path in ways:
            kind, _, reason = path.partition(": ")
            hosts = [members[name].get("host") for name in (begin, end) if _is_there(members.get(name))]
            if kind == PathKind.ZMQ and reason != BEING_OPENED and len(set(hosts)) == 2:
                yield f"{begin} → {end}", reason_over_tcp(reason)


def _is_there(member: Report | None) -> bool:
    return member is not None and member["state"] not in _GONE
