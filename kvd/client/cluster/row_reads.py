"""Rows of tables for an observer: those of a key are of one version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvd.client.calls.deadline import Deadline
from kvd.client.calls.keys import KeyList
from kvd.client.calls.tables import pulled_rows, wanted_rows
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.row_pulls import RowPull, row_pull
from kvd.core import requests
from kvd.errors import NotAllowed, RequestTimeout
from kvd.protocol.specs import KeySpec
from kvd.tables.wire import table_of_spec

TOO_FAST = "is updated faster than its rows are read: read fewer rows at a time"


class RowReads:
    """The reads of one observer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def read(self, keys: KeyList, specs: Mapping[str, KeySpec], row_ids: Any, out: Any, deadline: Deadline) -> Any:
        """The rows, as `kvd.Observer.row_sparse_pull`.

        Args:
            specs: of the keys, which are tables.
        """
        tables = {name: table_of_spec(spec) for name, spec in specs.items()}
        wanted = wanted_rows(keys, row_ids, out, tables.__getitem__, lambda name: keys.written.get(name, name))
        pulls = [
            row_pull(self._engine, specs[name], tables[name], [entry for entry in wanted if entry.name == name])
            for name in keys.names
        ]
        self._engine.run(self._read(pulls, deadline)).result()
        for pull in pulls:
            pull.spread()
        return pulled_rows(keys, wanted, out)

    async def _read(self, pulls: Sequence[RowPull], deadline: Deadline) -> None:
        """The newest rows. In a cluster that trains in rounds the parts of a table may be one version apart, since they
        are asked one after the other: the older one is there everywhere, and is read then."""
        for pull in pulls:
            while True:
                (there,) = await self._pull(pull, None, deadline)
                if there is None or there.oldest == there.newest or not self._engine.machine.view.is_sync:
                    break
                try:
                    await self._pull(pull, there.oldest, deadline)
                except NotAllowed:  # it is not kept any more
                    if deadline.left_s() == 0:
                        raise RequestTimeout(f"table {pull.item.key!r} {TOO_FAST}", outcome="not_sent") from None
                else:
                    break

    async def _pull(self, pull: RowPull, version: int | None, deadline: Deadline) -> Sequence[Any]:
        transfer = requests.Transfer(
            (pull.item,), push=False, pull=True, any_version=True, at_version=version, some_rows=True
        )
        versions: Sequence[Any] = await self._engine.call(transfer, deadline.left_s())
        return versions
