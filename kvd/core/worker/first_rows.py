"""The rows that a new table begins with: worker 0 puts them into its parts before the key is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvd.core.machine import Received, Span
from kvd.core.requests import Item
from kvd.core.worker.asking import Asker
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.keys import WorkerKey
from kvd.errors import KvdError
from kvd.protocol.messages import StoreState


@dataclass(slots=True, eq=False)
class _Filling:
    """A table whose rows are on their way."""

    call: InFlight
    key: WorkerKey
    item: Item
    remaining: int  # parts that lack some
    ended: Callable[[KvdError | None], None]


class FirstRows:
    """Puts rows into tables that nobody else knows yet."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def put(self, call: InFlight, key: WorkerKey, item: Item, ended: Callable[[KvdError | None], None]) -> None:
        """Sends the pages of the item. `ended` is told once: when all are stored, or of the first error.

        A part takes one page after the other: a server takes a page that comes again for one that it has if a later one
        has come since.
        """
        filled = [index for index, pages in enumerate(item.pages) if pages]
        filling = _Filling(call, key, item, len(filled), ended)
        for index in filled:
            self._send(filling, index, 0)
        if not filled:
            ended(None)

    def _send(self, filling: _Filling, index: int, number: int) -> None:
        key, item = filling.key, filling.item
        offset, nbytes = item.pages[index][number]
        message = StoreState(0, key.name, index, 0, (), key.creation)
        stored = partial(self._stored, filling, index, number)
        payload = (Span(item.source, offset, nbytes),)
        self._asker.ask_leader(filling.call, key.partitions[index], message, stored, payload)

    def _stored(self, filling: _Filling, index: int, number: int, event: Received) -> None:
        if not filling.remaining:
            return  # another part has failed
        error = self._asker.error_of(event)
        if error is not None:
            filling.remaining = 0
            filling.ended(error)
        elif number + 1 < len(filling.item.pages[index]):
            self._send(filling, index, number + 1)
        else:
            filling.remaining -= 1
            if not filling.remaining:
                filling.ended(None)
