"""The scheduler's cost for many workers, in figures that no clock makes: frames and bytes."""

from __future__ import annotations

import asyncio

from benchmarks.many import Crowd, measure


def test_a_barrier_is_announced_to_those_who_wait_there_and_to_nobody_else() -> None:
    found = asyncio.run(measure(80))
    assert found.all_know_all
    assert found.barrier.frames == 80
    assert found.barrier.nbytes < 80 * 32
    assert found.heartbeats.frames == 80


def test_when_many_join_nobody_is_told_the_same_twice() -> None:
    """That all are told of all is a square. If all of it were sent at each change, it would be a cube."""

    async def bytes_of_all(workers: int) -> int:
        crowd = Crowd(workers)
        crowd.start()
        try:
            return (await crowd.join()).nbytes
        finally:
            crowd.stop()

    small, large = (asyncio.run(bytes_of_all(workers)) for workers in (20, 80))
    assert large < 1.5 * 16 * small
