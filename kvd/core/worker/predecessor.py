"""What the servers say of the worker that had this rank before, and died."""

from __future__ import annotations

from kvd.core.places import START, PlaceKind, kind_of, place_of, step_of
from kvd.protocol.messages import Clocks


class Predecessor:
    """Learns from the servers until this worker has joined; later they would speak of its own pushes.

    Attributes:
        place: where its program stopped (`kvd.core.places`); START if it made no push in a loop, or there was none.
        trained: whether a contribution that it pushed there has counted.
    """

    def __init__(self) -> None:
        self.place = START
        self.trained = False
        self._is_known = False
        self._is_passed_over = False

    def learn(self, clocks: Clocks) -> None:
        """A server's answer to Attach."""
        if self._is_known or clocks.place < self.place:
            return
        self.trained = clocks.trained or (self.trained and clocks.place == self.place)
        self.place = clocks.place

    def finish(self) -> bool:
        """It had left the rounds before it died, so it had finished what it did there. True: that is news."""
        if self._is_known or self.place == START:
            return False
        self.trained = False
        if kind_of(self.place) is not PlaceKind.OUTSIDE:
            self.place = place_of(PlaceKind.OUTSIDE, step_of(self.place) + 1)
        return True

    def end_learning(self) -> None:
        """All servers have answered."""
        self._is_known = True

    def forget(self) -> None:
        """The program knows where it goes on."""
        self.place, self.trained = START, False

    def pass_over(self) -> None:
        """All of the step in which it stopped has counted, and the program has what that has changed."""
        self._is_passed_over = True

    @property
    def is_known(self) -> bool:
        """Whether nothing more is to be learned of it."""
        return self._is_known

    @property
    def is_redone(self) -> bool:
        """Whether the step in which it stopped is made again."""
        return kind_of(self.place) is PlaceKind.STEP and not self._is_passed_over
