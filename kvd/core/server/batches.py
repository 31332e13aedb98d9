"""The batches that workers have declared: slices that they move together again and again, under a number."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvd.protocol.messages import SliceId

MAX_SLICE_IDS = 1 << 18  # of all batches of one sender; the batches that it declared first are forgotten


@dataclass(slots=True, eq=False)
class Batch:
    """Slices, in their order. Senders that declare the same slices share one batch."""

    slice_ids: tuple[SliceId, ...]
    group: int | None = None  # of exactly these slices, in this order: its number, since a group holds their bytes
    is_apart: bool = False  # some of them were pushed alone: they are not fused again
    declared: int = 0  # how many senders have it


class BatchTable:
    """Batches by sender and number.

    Attributes:
        of: by sender. To read only.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[SliceId, ...], Batch] = {}
        self.of: dict[int, OrderedDict[int, Batch]] = {}
        self._slice_ids: dict[int, int] = {}  # how many there are in the batches of a sender

    def find(self, sender: int, number: int) -> Batch | None:
        batches = self.of.get(sender)
        return None if batches is None else batches.get(number)

    def declare(self, sender: int, number: int, slice_ids: tuple[SliceId, ...]) -> None:
        """Notes the batch. A number keeps its first meaning."""
        batches = self.of.setdefault(sender, OrderedDict())
        if number in batches:
            return
        batch = self._batches.get(slice_ids)
        if batch is None:
            batch = self._batches[slice_ids] = Batch(slice_ids)
        batch.declared += 1
        batches[number] = batch
        total = self._slice_ids.get(sender, 0) + len(slice_ids)
        while total > MAX_SLICE_IDS and len(batches) > 1:
            total -= len(self._release(batches.popitem(last=False)[1]).slice_ids)
        self._slice_ids[sender] = total

    def drop_sender(self, sender: int) -> None:
        self._slice_ids.pop(sender, None)
        for batch in self.of.pop(sender, {}).values():
            self._release(batch)

    def _release(self, batch: Batch) -> Batch:
        batch.declared -= 1
        if batch.declared == 0:
            del self._batches[batch.slice_ids]
        return batch
