"""A run that an operator has prepared: its program finds the keys of a snapshot (`kvd.client.cluster.preparing`)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from kvd.client.calls.snapshot_outcome import Outcome
from kvd.client.cluster.answers import list_keys
from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.protocol.messages import PREPARED

logger = logging.getLogger("kvd")


async def prepared_or(engine: Engine, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
    """What an operator has restored for this run, before anything was pushed; else what `work` restores."""
    outcome = Outcome.from_note(await engine.call(requests.ToldAt(PREPARED)))
    if outcome is None or any(entry.version for _, entry in await list_keys(engine)):
        return await work()
    logger.info("this run was prepared by kvd snapshot restore: the job goes on after step %d", outcome.steps)
    return outcome
