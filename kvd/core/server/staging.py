"""What is staged for the rounds of one slice: contributions whose round is still open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from kvd.core.machine import Contribution


@dataclass(slots=True)
class Staging:
    """Sync contributions by their rounds, asynchronous ones in the order of their arrival.

    Attributes:
        rounds: clock → rank → contribution.
        nbytes: of all that was added and not dropped, until it is released: the round that is being applied as well.
    """

    rounds: dict[int, dict[int, Contribution]] = field(default_factory=dict)
    arrived: list[Contribution] = field(default_factory=list)
    nbytes: int = 0

    def drop(self, rank: int) -> None:
        """What this rank has staged is forgotten."""
        gone = [contribution for contribution in self.arrived if contribution.rank == rank]
        if gone:
            self.arrived = [contribution for contribution in self.arrived if contribution.rank != rank]
        gone += [contributions.pop(rank) for contributions in self.rounds.values() if rank in contributions]
        self.release(gone)

    def clear(self) -> None:
        """All is forgotten."""
        self.release(self.open())
        self.rounds, self.arrived = {}, []

    def release(self, contributions: Iterable[Contribution]) -> None:
        """Nobody needs the bytes of these any more."""
        for contribution in contributions:
            if contribution.span is not None:
                self.nbytes -= contribution.span.nbytes

    def open(self) -> Iterator[Contribution]:
        """Those whose round is open."""
        return chain(self.arrived, *[contributions.values() for contributions in self.rounds.values()])

    def part(self, offset: int, nbytes: int) -> Staging:
        """The same for a range of the bytes. Not while a round is being applied."""
        rounds = {
            clock: {rank: contribution.part(offset, nbytes) for rank, contribution in contributions.items()}
            for clock, contributions in self.rounds.items()
        }
        made = Staging(rounds, [contribution.part(offset, nbytes) for contribution in self.arrived])
        made.nbytes = nbytes_of(made.open())
        return made


def nbytes_of(contributions: Iterable[Contribution]) -> int:
    total = 0
    for contribution in contributions:
        if contribution.span is not None:
            total += contribution.span.nbytes
    return total
