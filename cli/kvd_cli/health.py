"""What is wrong with a cluster, judged by its status, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Report = Mapping[str, Any]

SLICES_EACH: Final = 8
"""With this many slices per server, a server without any is no accident: the odds are a thousand to one."""

_FROM_CHECKPOINT: Final = "start the job again from a checkpoint"


@dataclass(frozen=True, slots=True)
class Health:
    """A verdict.

    Attributes:
        is_healthy: whether no node is dead, missing or silent.
        advice: a line for each thing that is or looks wrong, with what to do.
    """

    is_healthy: bool
    advice: tuple[str, ...]


def health_of(report: Report) -> Health:
    """Judge a cluster by its status."""
    workers, servers = _dead(report, "worker"), _dead(report, "server")
    missing = list(report["missing"])
    silent = {f"server {server['rank']}": server["error"] for server in report.get("servers", ()) if "error" in server}
    advice = []
    if servers:
        keys = "their parts of the keys are" if len(servers) > 1 else "its part of the keys is"
        advice.append(f"dead: {', '.join(servers)}. With replicas=1 {keys} gone: {_FROM_CHECKPOINT}.")
    if workers:
        them = "them" if len(workers) > 1 else "it"
        rank = "they get their ranks back" if len(workers) > 1 else "it gets its rank back"
        advice.append(f"dead: {', '.join(workers)}. Start {them} again under the same node id, and {rank}.")
    if missing:
        advice.append(f"missing: {', '.join(missing)}. The job waits until all have joined.")
    if silent:
        advice.append(
            f"no answer: {', '.join(silent)}. Check its log, whether its process hangs or is stopped, and whether "
            "this host can reach its address."
        )
    advice += [_emptied(name) for name in _empty_servers(report)]
    return Health(not (servers or workers or missing or silent), tuple(advice))


def _dead(report: Report, role: str) -> list[str]:
    return [f"{m['role']} {m['rank']}" for m in report["members"] if m["state"] == "dead" and m["role"] == role]


def _empty_servers(report: Report) -> list[str]:
    """Servers that must have lost their keys: they hold none, while the others hold many or have an optimizer."""
    answered = [server for server in report.get("servers", ()) if "error" not in server]
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
