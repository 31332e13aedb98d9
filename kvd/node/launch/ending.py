"""Processes are told to end, and killed if they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final

from kvd.node.launch.child import Child

KILL_GRACE_S: Final = 1.0
"""How long a guard that was told to kill its command may take, before it is killed itself."""


async def end_all(
    children: Collection[Child], at_once: asyncio.Future[None], grace_s: float, say: Callable[[str], None]
) -> None:
    """Ends these processes: SIGTERM, then SIGKILL after the grace, or when `at_once` is done."""
    running = [child for child in children if not child.exited.done()]
    if running and not at_once.done():
        for child in running:
            child.terminate()
        events: set[asyncio.Future[Any]] = {asyncio.gather(*(child.exited for child in running)), at_once}
        await asyncio.wait(events, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        running = [child for child in running if not child.exited.done()]
        if running and not at_once.done():
            names = ", ".join(child.name for child in running)
            say(f"killing {names}: still running {grace_s:g} s after SIGTERM")
    if running:
        await _kill(running)


async def _kill(running: Collection[Child]) -> None:
    for child in running:
        child.kill()
    exits = {child.exited for child in running}
    _, stuck = await asyncio.wait(exits, timeout=KILL_GRACE_S)
    for child in running:
        if child.exited in stuck:
            child.kill_session()
    await asyncio.wait(exits)
