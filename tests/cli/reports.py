"""Reports of clusters, as `kvd.Observer.status` gives them."""

from __future__ import annotations

from typing import Any


def member(role: str, rank: int, state: str = "active", *, process_ended: bool = False) -> dict[str, Any]:
    known: dict[str, Any] = {"node_id": f"{role}-{rank}", "pid": 1, "reason": "", "address": "", "last_heard_s": 0.1}
    return {"role": role, "rank": rank, "state": state, "process_ended": process_ended, **known}


def server(rank: int, keys: int = 5, optimizer: Any = None) -> dict[str, Any]:
    figures = {"slices": 2 * keys, "bytes_led": 8 * keys, "bytes_staged": 0, "requests_waiting": 0, "waiting_for": []}
    return {"role": "server", "rank": rank, "keys": keys, **figures, "optimizer": optimizer}


def report(*servers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    members = [member("server", 0), member("server", 1), member("worker", 0)]
    return {"view": [1, 1], "members": members, "missing": [], "servers": list(servers), "jobs": [], **changes}


def partition(number: int, leader: int, backup: int | None = None, syncing: int | None = None) -> dict[str, Any]:
    def name(rank: int | None) -> str | None:
        return None if rank is None else f"server {rank}"

    return {"partition": number, "leader": name(leader), "backup": name(backup), "syncing": name(syncing)}


def copy_of(rank: int, leads: list[int], holds: list[int], waiting: int = 0, keys: int = 5) -> dict[str, Any]:
    """What a server says where there are two replicas."""
    return {**server(rank, keys if leads else 0), "leads": leads, "holds": holds, "records_waiting": waiting}
