"""Waits for events, with a deadline: what tests do instead of sleeping for as long as it usually takes."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvd.testing.cluster import START_TIMEOUT_S, wait_until

T = TypeVar("T")

POLL_S = 0.002


async def eventually(holds: Callable[[], Any], what: str = "it happens", timeout_s: float = START_TIMEOUT_S) -> None:
    """Let the loop run until `holds` returns something true. The blocking form is `kvd.testing.cluster.wait_until`.

    Raises:
        AssertionError: after the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(POLL_S)


async def begun(function: str, call: Callable[..., T], *arguments: Any) -> asyncio.Task[T]:
    """Make a call in a thread. Return its task once that thread is in a call of the function with this name."""
    threads: list[threading.Thread] = []

    def make() -> T:
        threads.append(threading.current_thread())
        return call(*arguments)

    task = asyncio.create_task(asyncio.to_thread(make))
    await eventually(
        lambda: task.done() or (threads and _is_inside(threads[0], function)), f"a thread calls {function}"
    )
    return task


def wait_until_inside(thread: threading.Thread, function: str) -> None:
    """Wait until the thread is in a call of the function with this name."""
    wait_until(lambda: _is_inside(thread, function), f"{thread.name} calls {function}")


def _is_inside(thread: threading.Thread, function: str) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False
