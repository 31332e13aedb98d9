"""The parts of a store without a cluster, put together."""

from __future__ import annotations

from kvd.client.calls.backend import Backend, StoreFacts, StoreType
from kvd.client.calls.healing import Healing
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.local.keys import LocalKeys
from kvd.client.local.rounds import LocalClosing, LocalRounds, NoNodes
from kvd.client.local.snapshots import LocalSnapshots
from kvd.client.local.tables import LocalTables
from kvd.client.local.updates import LocalUpdates
from kvd.client.local.values import LocalValues
from kvd.config import Config
from kvd.core.worker.step_loops import StepLoops


def open_local(kind: StoreType, config: Config) -> Backend:
    """A store in this process: one worker, no servers."""
    loops = StepLoops(None, is_strict=False)
    keys = LocalKeys(lambda: loops.place)
    steps = ProgramSteps(loops, lambda: updates.has_optimizer())
    updates = LocalUpdates(keys, steps, config.merge)
    tables = LocalTables(keys, updates)
    values = LocalValues(keys, updates, tables, steps)
    healing = Healing(steps, None)
    snapshots = LocalSnapshots(keys, updates, steps, healing, kind.name, config)
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
        tables=tables,
        assignments=values,
        deletion=values,
        binding=values,
        rounds=LocalRounds(keys, steps, kind.name),
        steps=steps,
        updates=updates,
        snapshots=snapshots,
        nodes=NoNodes(keys),
        closing=LocalClosing(keys, snapshots, steps),
        healing=healing,
    )
