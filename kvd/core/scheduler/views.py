"""Publication of views: each is saved before it is announced, and so are the answers that depend on it."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.core.machine import Peer, Send
from kvd.core.pseudonyms import public_view
from kvd.protocol.messages import Epoch, ErrorCode, Join, NotYet, NotYetReason, Refused, View, Welcome

MOST_TOLD = {"server": 1 << 50, "worker": 1 << 40}
"""The largest generation that a node of this role is believed. A scheduler counts on from what it is told, and reaches
no limit of the protocol in that way. What workers are believed leaves room for what servers must be believed then."""


class Views:
    """The views in the order of their epochs. The newest may still be on its way to stable storage."""

    def __init__(self, generation: int, change: int, view: View) -> None:
        """`view` is the first one. It is saved, or says nothing that would have to be."""
        self.generation = generation
        self.newest = change  # the change of the newest view; its record has this token
        self._announced = view  # the newest one on stable storage
        self._public = public_view(view)
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

    @property
    def next_epoch(self) -> Epoch:
        """That of the view which the next change makes."""
        return Epoch(self.generation, self.newest + 1)

    def continue_after(self, epoch: Epoch) -> None:
        """A node knows this later view, of a scheduler whose record is lost: ours must count as newer."""
        self.generation = epoch.generation + 1

    def objection(self, join: Join, known: Epoch) -> Refused | NotYet | None:
        """Why a node that knows the view `known` cannot join, or not yet: it is not believed."""
        if known <= self.epoch or known.generation <= MOST_TOLD.get(join.role, 0) or join.role == "observer":
            return None
        text = f"this node says that it knows view {known.generation}.{known.change}"
        if join.role == "worker":
            return NotYet(join.request, NotYetReason.BUSY, f"{text}, of which the servers have yet to tell")
        return Refused(join.request, ErrorCode.PROTOCOL_ERROR, f"{text}, but no scheduler starts so often: restart it")

    def announce(self, view: View) -> None:
        """This view is on stable storage, and may be told."""
        self._announced, self._public = view, public_view(view)

    def told_to(self, role: str) -> View:
        """The newest view on stable storage, as nodes of this role are told of it."""
        return self._announced if role == "server" else self._public

    def change(self, view: View, answers: Iterable[Send] = ()) -> int:
        """Makes `view` the newest one, and withholds the answers until it is saved. Returns the token to save it by."""
        self.newest += 1
        self._unsaved[self.newest] = view
        withheld = list(answers)
        if withheld:
            self._withheld[self.newest] = withheld
        return self.newest

    def saved(self, token: int, nodes: Iterable[tuple[Peer, str]]) -> list[Send]:
        """The record with this token is on stable storage: what can be sent now, the newest view first, to all nodes,
        each with its role."""
        if token <= self._saved:
            return []
        self._saved = token
        self.announce(self._unsaved[token])
        self._unsaved = {change: view for change, view in self._unsaved.items() if change > token}
        sends = [Send(peer, self.told_to(role)) for peer, role in nodes] if token == self.newest else []
        for change in sorted(change for change in self._withheld if change <= token):
            sends += self._withheld.pop(change)
        return sends

    def when_saved(self, answer: Send, role: str = "") -> list[Send]:
        """What can be sent now of an answer that depends on the newest view; otherwise it is withheld. A Welcome, to a
        node of this role, brings the view."""
        if self.newest > self._saved:
            self._withheld.setdefault(self.newest, []).append(answer)
            return []
        if isinstance(answer.message, Welcome):
            return [answer, Send(answer.peer, self.told_to(role))]
        return [answer]

    def validate(self) -> None:
        """Raises AssertionError if a view counts as saved that was not made, or something waits for a saved one."""
        assert self._saved <= self.newest, f"view {self._saved} is saved, the newest is {self.newest}"
        waiting = [*self._unsaved, *self._withheld]
        assert all(change > self._saved for change in waiting), f"{waiting} wait for view {self._saved}"
