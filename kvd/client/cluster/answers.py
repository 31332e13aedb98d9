"""What the answers to requests carry besides their messages."""

from __future__ import annotations

from typing import Any

from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.protocol.messages import KeyEntry, ListKeys


def answer_bytes(answer: Any) -> bytes:
    """The payload of one answer to a Control request."""
    _, payload, nbytes = answer
    return bytes(payload[:nbytes]) if nbytes else b""


async def list_keys(engine: Engine) -> list[tuple[int, KeyEntry]]:
    """Every key of the cluster, once per server that leads a part of it, with the rank of that server.

    The servers answer in pages. For coroutines on the engine's loop, see `Engine.run`.
    """
    view = engine.machine.view
    while True:
        partitions, found = view.partitions, []
        there = {server.rank for server in view.servers()}
        for rank, partition in view.leads().items():
            found += [(rank, entry) for entry in await _list_of(engine, partition)] if rank in there else []
        if view.partitions == partitions:  # otherwise some keys were asked for at two servers, or at none
            return found


async def _list_of(engine: Engine, partition: int) -> list[KeyEntry]:
    """The keys of which the leader of this partition leads a part."""
    found: list[KeyEntry] = []
    after, more = "", True
    while more:
        ((page, _, _),) = await engine.call(requests.Control((ListKeys(0, after),), partitions=(partition,)))
        found += page.entries
        more = page.more
        after = page.entries[-1].key if page.entries else after
    return found
