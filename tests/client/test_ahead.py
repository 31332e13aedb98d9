"""Work in order, the next piece of which begins while the caller uses the result of the one before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from kvd.client.cluster.ahead import one_ahead

pytestmark = pytest.mark.asyncio


class Work:
    """Pieces that note when they begin and end."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    async def piece(self, number: int) -> int:
        self.noted.append(f"{number} begins")
        try:
            await asyncio.sleep(0)
            if number == 5:
                raise ValueError("this one fails")
        except asyncio.CancelledError:
            self.noted.append(f"{number} is cancelled")
            raise
        return number

    def pieces(self, *numbers: int) -> list[Callable[[], Awaitable[int]]]:
        return [partial(self.piece, number) for number in numbers]


async def use(work: Work, *numbers: int, turns: int = 5, until: int = -1) -> None:
    """Takes as many turns of the loop for each result, and fails with the result `until`."""
    async with one_ahead(work.pieces(*numbers)) as results:
        async for result in results:
            for _ in range(turns):
                await asyncio.sleep(0)
            work.noted.append(f"{result} is used")
            if result == until:
                raise KeyError(result)


async def test_the_next_begins_while_one_is_used() -> None:
    work = Work()
    await use(work, 1, 2, 3)
    assert work.noted == ["1 begins", "2 begins", "1 is used", "3 begins", "2 is used", "3 is used"]


async def test_nothing_to_do() -> None:
    work = Work()
    await use(work)
    assert work.noted == []


async def test_the_error_of_a_piece_comes_in_its_place() -> None:
    work = Work()
    with pytest.raises(ValueError, match="this one fails"):
        await use(work, 1, 5, 2)
    assert work.noted == ["1 begins", "5 begins", "1 is used"]


async def test_what_has_begun_is_not_left_behind() -> None:
    work = Work()
    with pytest.raises(KeyError):
        await use(work, 1, 2, 3, turns=1, until=1)
    assert work.noted == ["1 begins", "2 begins", "1 is used", "2 is cancelled"]
    work = Work()
    with pytest.raises(KeyError):
        await use(work, 1, 5, 3, until=1)
    assert work.noted == ["1 begins", "5 begins", "1 is used"]
