"""The rows of tables for snapshots: worker 0 reads all parts, and stores rows in the parts of another cluster.

The coroutines run on the engine's loop, see `Engine.run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.errors import NotAllowed, ProtocolError
from kvd.protocol.messages import STATE_OF_ROWS, FetchState, StoreState
from kvd.protocol.specs import KeySpec
from kvd.tables.description import RowSparse
from kvd.tables.first_rows import PAGE_NBYTES
from kvd.tables.parts import parts_of
from kvd.tables.stored_rows import Page, StoredRows, joined, page_of
from kvd.tables.wire import table_of_spec


async def fetch_table(engine: Engine, name: str, spec: KeySpec) -> StoredRows:
    """All rows of a table, ids ascending, with what the optimizer keeps of them.

    Raises:
        NotAllowed: a part has changed meanwhile.
    """
    description = table_of_spec(spec)
    parts = await asyncio.gather(*[_fetch_part(engine, name, index, description) for index in range(spec.num_slices)])
    return joined([page.stored for pages in parts for page in pages], description)


async def _fetch_part(engine: Engine, name: str, index: int, description: RowSparse) -> Sequence[Page]:
    async def ask(first: int) -> Any:
        (answer,) = await engine.call(requests.SliceControl(name, (FetchState(0, name, index, first),)))
        return answer

    return await read_pages(ask, description, name)


async def read_pages(ask: Callable[[int], Awaitable[Any]], description: RowSparse, name: str) -> Sequence[Page]:
    """All rows of a part, page by page.

    Args:
        ask: gets the answer about the rows from this one on: message, payload and its bytes.

    Raises:
        NotAllowed: the part has changed meanwhile.
        ProtocolError: an answer makes no sense.
    """
    pages: list[Page] = []
    first, left = 0, 1
    while left:
        _, payload, nbytes = await ask(first)
        page = page_of(np.frombuffer(payload, np.uint8, nbytes), description, name)
        if pages and (page.version, page.stored.updates) != (pages[0].version, pages[0].stored.updates):
            raise NotAllowed(f"table {name!r} changes while it is read: all workers call snapshot between two steps")
        if page.rows_after and not len(page.stored.ids):
            raise ProtocolError(f"a page of table {name!r} has no rows, though {page.rows_after} are to come")
        pages.append(page)
        first, left = first + len(page.stored.ids), page.rows_after
    return pages


async def store_table(engine: Engine, name: str, stored: StoredRows) -> None:
    """Puts rows, which were checked, into a table that nobody has pushed to."""
    await _store(engine, name, stored, ())


async def store_table_state(engine: Engine, name: str, stored: StoredRows) -> None:
    """Puts what an optimizer keeps of rows, which was checked, in place of what it has kept."""
    await _store(engine, name, stored.without_rows(), STATE_OF_ROWS)


async def _store(engine: Engine, name: str, stored: StoredRows, slots: tuple[tuple[str, str], ...]) -> None:
    spec: KeySpec = await engine.call(requests.DescribeKey(name))
    part = parts_of(stored.ids, spec.num_slices)
    places = [np.flatnonzero(part == index) for index in range(spec.num_slices)]
    await asyncio.gather(*[_store_part(engine, name, index, stored, at, slots) for index, at in enumerate(places)])


async def _store_part(
    engine: Engine, name: str, index: int, stored: StoredRows, places: Any, slots: tuple[tuple[str, str], ...]
) -> None:
    """Page by page; one of no rows, too, since it says how many updates there were."""
    step = max(1, PAGE_NBYTES // stored.row_nbytes)
    for first in range(0, max(1, len(places)), step):
        page = stored.some(places[first : first + step]).to_bytes(_memory)
        message = StoreState(0, name, index, first if slots else 0, slots)
        await engine.call(requests.SliceControl(name, (message,), (page,), (page.nbytes,)))


def _memory(nbytes: int) -> np.ndarray[Any, Any]:
    return np.empty(nbytes, np.uint8)
