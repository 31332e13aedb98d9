"""Watching of processes: what is no longer watched takes no descriptor."""

from __future__ import annotations

import asyncio
import os

from kvd.node.daemon.watch import ProcessWatch


def descriptors() -> set[str]:
    """What the open descriptors of this process refer to, pidfds only."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "pidfd" in target:
            found.add(name)
    return found


def test_a_process_that_is_forgotten_takes_no_descriptor() -> None:
    """As a process that opens and closes a hundred stores: each has a token of its own."""

    async def watch_many() -> None:
        watch = ProcessWatch(asyncio.get_running_loop())
        before = descriptors()
        for token in range(100):
            watch.watch(os.getpid(), lambda: None, token=token)
            assert len(descriptors() - before) == 1
            watch.forget(token)
        assert descriptors() == before
        watch.watch(os.getpid(), lambda: None, token=1)
        assert len(descriptors() - before) == 1, "it is watched again"
        watch.close()

    asyncio.run(watch_many())
