"""The parts of a store without a cluster, put together."""

from __future__ import annotations

from kvd.client.calls.backend import Backend, StoreFacts, StoreType
from kvd.client.local.keys import LocalKeys
from kvd.client.local.rounds import LocalClosing, LocalRounds, NoNodes
from kvd.client.local.updates import LocalUpdates
from kvd.client.local.values import LocalValues
from kvd.config import Config


def open_local(kind: StoreType, config: Config) -> Backend:
    """A store in this process: one worker, no servers."""
    keys = LocalKeys()
    updates = LocalUpdates(keys, config.merge)
    values = LocalValues(keys, updates)
    return Backend(
        facts=StoreFacts(
            type=kind.name,
            rank=0,
            local_rank=0,
            num_workers=1,
            num_servers=0,
            merge=config.merge,
            restarted=False,
            distributed=False,
            versioned=True,
            round_timeout_s=config.round_timeout_s,
        ),
        values=values,
        assignments=values,
        binding=values,
        rounds=LocalRounds(keys, kind.name),
        updates=updates,
        nodes=NoNodes(keys),
        closing=LocalClosing(keys),
    )
