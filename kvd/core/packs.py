"""The packs that workers have declared: slices that they move together again and again, under a number."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvd.core.units import Unit
from kvd.protocol.messages import Place

MAX_PLACES = 1 << 18  # of all packs of one sender; the packs that it declared first are forgotten


@dataclass(slots=True, eq=False)
class Pack:
    """Slices, in their order. All who declare the same places have the same pack."""

    places: tuple[Place, ...]
    unit: Unit | None = None  # of exactly these slices, in this order
    is_apart: bool = False  # somebody pushes some of them alone: they are not fused again
    declared: int = 0  # by so many senders


class PackTable:
    """Packs by sender and number."""

    def __init__(self) -> None:
        self._packs: dict[tuple[Place, ...], Pack] = {}
        self._of: dict[int, OrderedDict[int, Pack]] = {}
        self._places: dict[int, int] = {}  # how many there are in the packs of a sender

    def find(self, sender: int, number: int) -> Pack | None:
        packs = self._of.get(sender)
        return None if packs is None else packs.get(number)

    def declare(self, sender: int, number: int, places: tuple[Place, ...]) -> None:
        """Notes the pack. A number means what it meant first."""
        packs = self._of.setdefault(sender, OrderedDict())
        if number in packs:
            return
        pack = self._packs.get(places)
        if pack is None:
            pack = self._packs[places] = Pack(places)
        pack.declared += 1
        packs[number] = pack
        total = self._places.get(sender, 0) + len(places)
        while total > MAX_PLACES and len(packs) > 1:
            total -= len(self._release(packs.popitem(last=False)[1]).places)
        self._places[sender] = total

    def drop_sender(self, sender: int) -> None:
        self._places.pop(sender, None)
        for pack in self._of.pop(sender, {}).values():
            self._release(pack)

    def _release(self, pack: Pack) -> Pack:
        pack.declared -= 1
        if pack.declared == 0:
            del self._packs[pack.places]
        return pack
