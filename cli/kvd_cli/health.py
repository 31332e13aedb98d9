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
        is_healthy: whether no node is dead, missing or silent, no active worker's process has ended, no server has left
            its workers, and the scheduler can save its state.
        advice: a line for each thing that is or looks wrong, with what to do.
    """

    is_healthy: bool
    advice: tuple[str, ...]


def health_of(report: Report) -> Health:
    """Judge a cluster by its status."""
    workers, servers = _dead(report, "worker"), _dead(report, "server")
    ended, deserters = _ended_workers(report), _servers_that_left(report)
    missing = list(report["missing"])
    silent = {f"server {server['rank']}": server["error"] for server in report.get("servers", ()) if "error" in server}
    advice = []
    if servers:
        advice.append(f"dead: {', '.join(servers)}. {_keys_are_gone(servers)}")
    if deserters:
        advice.append(f"left: {', '.join(deserters)}, while workers are active. {_keys_are_gone(deserters)}")
    if workers:
        advice.append(f"dead: {', '.join(workers)}. {_start_again(workers)}")
    if ended:
        advice.append(f"process ended: {', '.join(ended)}. {_start_again(ended)}")
    if missing:
        advice.append(f"missing: {', '.join(missing)}. The job waits until all have joined.")
    if silent:
        advice.append(
            f"no answer: {', '.join(silent)}. Check its log, whether its process hangs or is stopped, and whether "
            "this host can reach its address."
        )
    unsaved = report.get("cannot_save", "")
    if unsaved:
        advice.append(
            f"the scheduler cannot save its state: {unsaved}. Free space in its state_dir, or make it writable. Until "
            "then joining, leaving and barriers wait; pushes and pulls go on."
        )
    if report.get("insecure"):
        advice.append(
            "insecure: this cluster has no keys. Whoever reaches its ports can read and change everything, and end it. "
            "Leave out --insecure (KVD_INSECURE) everywhere unless the network is closed."
        )
    advice += [_emptied(name) for name in _empty_servers(report)]
    return Health(not (servers or deserters or workers or ended or missing or silent or unsaved), tuple(advice))


def _dead(report: Report, role: str) -> list[str]:
    return [f"{m['role']} {m['rank']}" for m in report["members"] if m["state"] == "dead" and m["role"] == role]


def _ended_workers(report: Report) -> list[str]:
    """Workers that the rounds wait for although their processes have ended; their timeouts have not."""
    return [
        f"worker {m['rank']}"
        for m in report["members"]
        if m["role"] == "worker" and m["state"] == "active" and m["process_ended"]
    ]


def _servers_that_left(report: Report) -> list[str]:
    """Servers that were stopped while a worker still needs their keys."""
    members = report["members"]
    if not any(m["role"] == "worker" and m["state"] == "active" for m in members):
        return []
    return [f"server {m['rank']}" for m in members if m["role"] == "server" and m["state"] == "left"]


def _keys_are_gone(servers: list[str]) -> str:
    keys = "their parts of the keys are" if len(servers) > 1 else "its part of the keys is"
    return f"With replicas=1 {keys} gone: {_FROM_CHECKPOINT}."


def _start_again(workers: list[str]) -> str:
    if len(workers) > 1:
        return "Start them again under the same node id, and they get their ranks back."
    return "Start it again under the same node id, and it gets its rank back."


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
