"""Counts of dead nodes by the node ids of ps-lite."""

from __future__ import annotations

from kvd.client.calls.backend import Nodes
from kvd.client.calls.checks import node_number, seconds
from kvd.errors import NotAllowed

SCHEDULER_MASK = 1
ROLE_MASKS = {"server": 2, "worker": 4}
FIRST_NODE_ID = 8  # smaller ids are sums of masks


def count_dead(nodes: Nodes, node_id: int, timeout: float) -> int:
    """Return how many of the nodes with this id or group mask are dead, see `kvd.KVStore.num_dead_node`."""
    node_id, timeout_s = node_number(node_id), seconds(timeout)
    dead = nodes.dead_nodes(timeout_s)
    if node_id >= FIRST_NODE_ID:
        role, rank = ("worker" if node_id % 2 else "server"), (node_id - FIRST_NODE_ID) // 2
        counts = nodes.most_nodes()
        if rank >= counts[role]:
            raise _no_node_error(node_id, role, rank, counts["server"], counts["worker"])
        return sum(node.role == role and node.rank == rank for node in dead)
    count = int(bool(node_id & SCHEDULER_MASK) and nodes.is_scheduler_dead(timeout_s))
    return count + sum(bool(node_id & ROLE_MASKS[node.role]) for node in dead)


def _no_node_error(node_id: int, role: str, rank: int, num_servers: int, num_workers: int) -> NotAllowed:
    return NotAllowed(
        f"there is no node {node_id}, which would be {role} {rank}: this job has {_ids('server', num_servers)} and "
        f"{_ids('worker', num_workers)}; 1 is the scheduler, 2 all servers, 4 all workers, and sums of these are groups"
    )


def _ids(role: str, count: int) -> str:
    """The ids of all nodes of a role, in words."""
    if not count:
        return f"no {role}s"
    first = FIRST_NODE_ID + (role == "worker")
    if count == 1:
        return f"{role} 0 as node {first}"
    ids = ", ".join(str(first + 2 * rank) for rank in range(min(count, 3)))
    return f"{role}s 0 to {count - 1} as nodes {ids}" + (f", … {first + 2 * (count - 1)}" if count > 3 else "")
