"""The values of one push, on their way from the arguments of a call to the items of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvd.client.calls.values import Source
from kvd.client.cluster.compression import Compressing, GradientCompression, Room
from kvd.core.requests import Item


class PushedValues:
    """Values that travel as they are.

    Args:
        names: of their keys.
    """

    some_encoded = False
    sets_out: Callable[[Sequence[int]], None] | None = None

    def __init__(self, names: Sequence[str], sources: Sequence[Source]) -> None:
        self.names = names
        self.sources = sources

    def items(self, targets: Sequence[Any]) -> tuple[Item, ...]:
        """The items of the request, with the memory that each key is pulled into; None: it is not pulled."""
        return tuple(
            [
                Item(name, spec, data, target)
                for name, (data, spec), target in zip(self.names, self.sources, targets, strict=True)
            ]
        )


class CompressedValues(PushedValues):
    """Values of which those with a room are compressed, when it is certain that they are pushed."""

    some_encoded = True

    def __init__(
        self,
        names: Sequence[str],
        sources: Sequence[Source],
        rooms: Sequence[Room | None],
        compression: GradientCompression,
        compressing: Compressing,
    ) -> None:
        super().__init__(names, sources)
        self._rooms = rooms
        self._compression = compression
        self._compressing = compressing

    def items(self, targets: Sequence[Any]) -> tuple[Item, ...]:
        """The same. What compression leaves over of the values is counted in the next push: call it once."""
        items: list[Item] = []
        notes = []
        for item, source, room in zip(super().items(targets), self.sources, self._rooms, strict=True):
            if room is not None:
                encoded, note = self._compression.encode(self._compressing, item.key, source, room)
                item = item._replace(source=room.memory, encoded=encoded)
                if note is not None:
                    notes.append((len(items), note))
            items.append(item)
        if notes:
            self.sets_out = partial(_note_clocks, notes)
        return tuple(items)


def _note_clocks(notes: Sequence[tuple[int, Callable[[int], None]]], clocks: Sequence[int]) -> None:
    for place, note in notes:
        note(clocks[place])
