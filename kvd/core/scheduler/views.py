"""Publication of views: each is saved before it is announced, and so are the answers that depend on it."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.core.machine import Peer, Send
from kvd.protocol.messages import Epoch, View, Welcome


class Views:
    """The views in the order of their epochs. The newest may still be on its way to stable storage."""

    def __init__(self, generation: int, change: int, view: View) -> None:
        """`view` is the first one. It is saved, or says nothing that would have to be."""
        self.generation = generation
        self.newest = change  # the change of the newest view; its record has this token
        self.announced = view
        self._saved = change
        self._unsaved: dict[int, View] = {}  # change → the view that is being saved
        self._withheld: dict[int, list[Send]] = {}  # change → answers that wait until it is saved

    @property
    def epoch(self) -> Epoch:
        """That of the newest view on stable storage: the one that may be announced."""
        return Epoch(self.generation, self._saved)

    @property
    def newest_epoch(self) -> Epoch:
        """That of the newest view; nodes know it when it is saved and announced."""
        return Epoch(self.generation, self.newest)

    def continue_after(self, epoch: Epoch) -> None:
        """A node knows this later view, of a scheduler whose record is lost: ours must count as newer."""
        self.generation = epoch.generation + 1

    def change(self, view: View, answers: Iterable[Send] = ()) -> int:
        """Makes `view` the newest one, and withholds the answers until it is saved. Returns the token to save it by."""
        self.newest += 1
        self._unsaved[self.newest] = view
        withheld = list(answers)
        if withheld:
            self._withheld[self.newest] = withheld
        return self.newest

    def saved(self, token: int, peers: Iterable[Peer]) -> list[Send]:
        """The record with this token is on stable storage: what can be sent now, the newest view to all peers first."""
        if token <= self._saved:
            return []
        self._saved = token
        self.announced = self._unsaved[token]
        self._unsaved = {change: view for change, view in self._unsaved.items() if change > token}
        sends = [Send(peer, self.announced) for peer in peers] if token == self.newest else []
        for change in sorted(change for change in self._withheld if change <= token):
            sends += self._withheld.pop(change)
        return sends

    def when_saved(self, answer: Send) -> list[Send]:
        """What can be sent now of an answer that depends on the newest view; otherwise it is withheld."""
        if self.newest > self._saved:
            self._withheld.setdefault(self.newest, []).append(answer)
            return []
        if isinstance(answer.message, Welcome):
            return [answer, Send(answer.peer, self.announced)]
        return [answer]

    def validate(self) -> None:
        """Raises AssertionError if a view counts as saved that was not made, or something waits for a saved one."""
        assert self._saved <= self.newest, f"view {self._saved} is saved, the newest is {self.newest}"
        waiting = [*self._unsaved, *self._withheld]
        assert all(change > self._saved for change in waiting), f"{waiting} wait for view {self._saved}"
