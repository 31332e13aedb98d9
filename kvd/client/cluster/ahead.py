"""Work in order, of which the next piece begins while the caller uses the result of the one before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def one_ahead(work: Iterable[Callable[[], Awaitable[T]]]) -> AsyncIterator[AsyncIterator[T]]:
    """The results, in order: at most one that the caller has not got yet, and no two pieces of work at once. When the
    block ends, what was begun has ended: it is cancelled, and its error is nobody's."""
    pieces = iter(work)
    pending: asyncio.Future[T] | None = None

    def begin() -> None:
        nonlocal pending
        piece = next(pieces, None)
        pending = None if piece is None else asyncio.ensure_future(piece())

    async def results() -> AsyncIterator[T]:
        while pending is not None:
            result = await pending
            begin()
            yield result

    begin()
    try:
        yield results()
    finally:
        if pending is not None:
            pending.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await pending
