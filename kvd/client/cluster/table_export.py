"""Which rows the servers have of a table, for its export."""

from __future__ import annotations

import numpy as np

from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.node.storage.table_file import Exported
from kvd.protocol.messages import ALL_ROWS, ListRows
from kvd.tables.row_values import Ids


async def listed(engine: Engine, name: str, parts: int, since: int | None) -> Exported:
    """The rows of all parts. Its version is the oldest one of theirs: each change after it is in the next export.

    A coroutine for the engine's loop, see `Engine.run`.

    Raises:
        KeyNotFound, NotAllowed: as `KVStore.export_table`.
    """
    versions, found = [], []
    for index in range(parts):
        version, ids = await _list_of(engine, name, index, since, evicted=False)
        versions.append(version)
        found.append(ids)
    evicted = None
    if since is not None:
        lists = [await _list_of(engine, name, index, since, evicted=True) for index in range(parts)]
        evicted = np.sort(np.concatenate([ids for _, ids in lists]))
    return Exported(np.sort(np.concatenate(found)), evicted, since, min(versions))


async def _list_of(engine: Engine, name: str, index: int, since: int | None, *, evicted: bool) -> tuple[int, Ids]:
    """The ids of one part, and its version when the first ones were read."""
    versions: list[int] = []
    pages: list[Ids] = []
    after, more = -1, True
    while more:
        message = ListRows(0, name, index, ALL_ROWS if since is None else since, after, evicted)
        ((page, payload, nbytes),) = await engine.call(requests.SliceControl(name, (message,)))
        ids = np.frombuffer(payload, np.int64, nbytes // 8).copy() if nbytes else np.zeros(0, np.int64)
        versions.append(page.version)
        pages.append(ids)
        more = page.more and len(ids) > 0
        after = int(ids[-1]) if more else after
    return versions[0], np.concatenate(pages)
