"""Which optimizer the workers agree on. All that set one set the same; to change it, each sets the next one.

A worker that comes in when the job is under way, or takes part again after a loss, starts where the others are.

The optimizers that were set are a row of generations, and each rank has its place in it. A rank that sets the optimizer
of its own place changes nothing; one that sets that of a later place catches up; the first that sets another one begins
the next generation. A rank differs if it sets something else where others have gone on already, or if it pushes in a
round for which others have set the next one. Then the workers are at odds, and no round closes until that rank sets
what the others have (`disputes`). Ranks that never set an optimizer take part in nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass

from kvd.core.membership import name_of
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer
from kvd.protocol.messages import MAX_TEXT_CHARS

MAX_GENERATIONS = 64  # the oldest is forgotten: a worker that restarts and repeats it is at odds with the others


@dataclass(slots=True)
class _Place:
    """Where a rank is.

    Invariants:
        -1 <= repeated <= generation.
    """

    incarnation: int
    generation: int
    repeated: int  # a successor sets what its predecessor set before: up to here so far


class OptimizerAgreement:
    """The generations, the places, and who is at odds with the others.

    Attributes:
        disputes: who is at odds: rank → its incarnation, and what is wrong. To read only.
    """

    def __init__(self) -> None:
        self._generations: list[Optimizer | None] = []
        self._places: dict[int, _Place] = {}
        self.disputes: dict[int, tuple[int, str]] = {}

    @property
    def dispute(self) -> str:
        """Why no round closes; empty if all agree."""
        return next(iter(self.disputes.values()))[1] if self.disputes else ""

    @property
    def newest(self) -> Optimizer | None:
        """The optimizer of the latest generation, as it was set."""
        return self._generations[-1] if self._generations else None

    def learn(self, optimizer: Optimizer | None) -> None:
        """Other servers know this optimizer as the latest that was set: who sets it again changes nothing."""
        self._generations = [optimizer]
        self._places = {}

    def set(self, rank: int, incarnation: int, optimizer: Optimizer | None) -> bool:
        """The rank sets an optimizer. True if that begins a generation.

        Raises:
            NotAllowed: others have set another one; the workers are at odds now.
        """
        place = self._place_of(rank, incarnation)
        if self._repeats(place, optimizer):
            self.disputes.pop(rank, None)
            return False
        place.repeated = place.generation
        ahead = [other for other, where in self._places.items() if where.generation > place.generation]
        for number in range(max(place.generation, 0), len(self._generations)):
            if self._generations[number] == optimizer:
                place.generation = place.repeated = number
                self.disputes.pop(rank, None)
                return False
        if ahead:
            text = _difference(rank, optimizer, ahead, self._generations[place.generation + 1])
            self.differ(rank, text)
            raise NotAllowed(text)
        self._begin(place, optimizer)
        self.disputes.pop(rank, None)
        return True

    def set_apart(self, rank: int, incarnation: int, optimizer: Optimizer | None) -> bool:
        """A rank sets an optimizer without which the rounds go on so far: that must be one that the others have set.
        False: they have set none.

        Raises:
            NotAllowed: they have set others. The rank is not at odds with them, since it does not take part.
        """
        if not self._generations:
            return False
        if optimizer not in self._generations:
            others = [other for other in self._places if other != rank]
            raise NotAllowed(_difference(rank, optimizer, others, self._generations[-1]))
        place = self._place_of(rank, incarnation)
        place.repeated = self._generations.index(optimizer)
        place.generation = max(place.generation, place.repeated)
        return True

    def comes_in(self, rank: int) -> None:
        """The rank takes part from now on: whatever the others have set meanwhile, it has too."""
        if rank in self._places:
            self._places[rank].generation = len(self._generations) - 1

    def is_new(self, rank: int, incarnation: int, optimizer: Optimizer | None) -> bool:
        """Whether `set` would begin a generation, or a dispute; the place of the rank stays as it is."""
        place = self._places.get(rank)
        first = 0 if place is None or place.incarnation != incarnation else max(place.repeated, 0)
        return optimizer not in self._generations[first:]

    def late(self, rank: int) -> str:
        """What is wrong if the rank pushes now in a round of the last generation; empty if nothing is."""
        place = self._places.get(rank)
        if place is None or place.generation < 0 or place.generation == len(self._generations) - 1:
            return ""
        ahead = [other for other, where in self._places.items() if where.generation > place.generation]
        optimizer = self._generations[place.generation]
        return _difference(rank, optimizer, ahead, self._generations[place.generation + 1], has="still has")

    def differ(self, rank: int, text: str) -> None:
        """The rank is at odds with the others, until it sets what they have or is replaced."""
        self.disputes[rank] = self._places[rank].incarnation, text

    def drop_sender(self, incarnation: int) -> None:
        """The process was replaced. Its successor may set another optimizer."""
        for rank in [rank for rank, entry in self.disputes.items() if entry[0] == incarnation]:
            del self.disputes[rank]

    def _place_of(self, rank: int, incarnation: int) -> _Place:
        """The place of the rank. One with a new process begins to repeat."""
        place = self._places.get(rank)
        if place is None:
            place = self._places[rank] = _Place(incarnation, -1, -1)
        elif place.incarnation != incarnation:
            place.incarnation, place.repeated = incarnation, -1
        return place

    def _repeats(self, place: _Place, optimizer: Optimizer | None) -> bool:
        """Whether the rank sets what it, or its predecessor, has set before."""
        first = max(place.repeated, 0)
        for number in range(first, place.generation + 1):
            if self._generations[number] == optimizer:
                place.repeated = number
                return True
        return False

    def _begin(self, place: _Place, optimizer: Optimizer | None) -> None:
        del self._generations[place.generation + 1 :]
        self._generations.append(optimizer)
        place.generation = place.repeated = len(self._generations) - 1
        if len(self._generations) > MAX_GENERATIONS:
            del self._generations[0]
            for other in self._places.values():
                other.generation, other.repeated = max(other.generation - 1, -1), max(other.repeated - 1, -1)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        last = len(self._generations) - 1
        assert last < MAX_GENERATIONS, f"{last + 1} generations of optimizers"
        for rank, place in self._places.items():
            assert -1 <= place.repeated <= place.generation <= last, f"worker {rank} is at {place} of {last}"
        newest = max([place.generation for place in self._places.values()], default=-1)
        assert last == newest or (last == 0 and newest < 0), "a generation of nobody"


def _difference(
    rank: int, optimizer: Optimizer | None, others: Iterable[int], theirs: Optimizer | None, has: str = "sets"
) -> str:
    """What one worker has and the others do not."""
    names = " and ".join(name_of("worker", other) for other in sorted(others)) or "the others"
    if type(optimizer) is type(theirs) and is_dataclass(optimizer):
        pairs = [(each.name, getattr(optimizer, each.name), getattr(theirs, each.name)) for each in fields(optimizer)]
        different = [(name, own, other) for name, own, other in pairs if own != other]
        first = ", ".join(f"{name}={own!r}" for name, own, _ in different)
        second = ", ".join(f"{name}={other!r}" for name, _, other in different)
        what = f"{_kind(optimizer)}({first}), but {names} set {_kind(theirs)}({second})"
    else:
        what = f"{_kind(optimizer)}, but {names} set {_kind(theirs)}"
    text = f"the workers' optimizers differ: {name_of('worker', rank)} {has} {what}"
    advice = "; call set_optimizer with the same optimizer in all workers, between the same pushes"
    return text[: MAX_TEXT_CHARS - len(advice)] + advice


def _kind(optimizer: Optimizer | None) -> str:
    return "no optimizer" if optimizer is None else type(optimizer).__name__
