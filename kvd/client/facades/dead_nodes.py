"""Counts dead nodes by the node ids of ps-lite."""

from __future__ import annotations

from kvd.client.calls.backend import Nodes
from kvd.client.calls.checks import node_number, seconds

SCHEDULER_MASK = 1
ROLE_MASKS = {"server": 2, "worker": 4}
FIRST_NODE_ID = 8  # smaller ids are sums of masks


def count_dead(nodes: Nodes, node_id: int, timeout: float) -> int:
    """How many of the nodes that `node_id` names are dead, see `kvd.KVStore.num_dead_node`."""
    node_id, timeout_s = node_number(node_id), seconds(timeout)
    dead = nodes.dead_nodes(timeout_s)
    if node_id >= FIRST_NODE_ID:
        role, rank = ("worker" if node_id % 2 else "server"), (node_id - FIRST_NODE_ID) // 2
        return sum(node.role == role and node.rank == rank for node in dead)
    count = int(bool(node_id & SCHEDULER_MASK) and nodes.is_scheduler_dead(timeout_s))
    return count + sum(bool(node_id & ROLE_MASKS[node.role]) for node in dead)
