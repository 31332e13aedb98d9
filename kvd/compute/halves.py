"""A large calculation on two processors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

WORTH_A_THREAD = 1 << 20
"""Elements from which on the second processor saves much more than it takes to start a thread, a tenth of a
millisecond."""


def in_halves(work: Callable[[slice], None], count: int, elements: int) -> None:
    """Call ``work`` for two slices that make up ``count`` things, at the same time if they are of so many elements.

    What it does must be the same in any order, and release the GIL for most of its time. Raises what it raises, after
    both have ended.
    """
    if elements < WORTH_A_THREAD or count < 2 or processors() < 2:
        work(slice(0, count))
        return
    errors: list[BaseException] = []

    def second() -> None:
        try:
            work(slice(count // 2, count))
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    thread = threading.Thread(target=second, name="kvd-half")
    try:
        thread.start()
    except RuntimeError:  # the system grants no more threads
        work(slice(0, count))
        return
    try:
        work(slice(0, count // 2))
    finally:
        thread.join()
    if errors:
        raise errors[0]


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
