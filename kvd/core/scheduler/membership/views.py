"""Publication of views: each is saved before it is announced, and so are the answers that depend on it.

A node is told what has changed since the view that it was told of last. If that did not arrive, it says so with a
Heartbeat, and is told what has changed since the view that it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvd.core.machine import Peer, Send
from kvd.core.scheduler.membership.view_history import ViewHistory
from kvd.protocol.messages import Epoch, ErrorCode, Join, NotYet, NotYetReason, Refused, View

MOST_TOLD = {"server": 1 << 50, "worker": 1 << 40}
"""The largest generation that a node of this role is believed. A scheduler counts on from what it is told, and reaches
no limit of the protocol in that way. What workers are believed leaves room for what servers must be believed then."""

TOLD_AT_ONCE = 64  # nodes: with more, the changes of a short time are announced together
PAUSE_S = 1e-4  # per node, after an announcement to more


class Listener(NamedTuple):
    """A node that is told of views."""

    peer: Peer
    role: str
    incarnation: int


class _Withheld(NamedTuple):
    """An answer that waits until a view is saved.

    Attributes:
        welcomed: who it lets in: all of the view comes with it. None: it is no Welcome.
    """

    answer: Send
    welcomed: Listener | None = None


class Views:
    """The views in the order of their epochs. The newest may still be on its way to stable storage.

    Each change of what is saved has a token. If it leaves the view as it is, the view keeps its epoch.
    """

    def __init__(self, generation: int, change: int, view: View) -> None:
        """`view` is the first one. It is saved, or says nothing that would have to be."""
        self.generation = generation
        self.newest = change  # the change of the newest view
        self._newest_view = view
        self._is_behind = False  # nodes know a later one than the newest: the next counts as another, whatever it says
        self._history = ViewHistory(view, change)  # up to the newest one on stable storage
        self._saved = change
        self._announced = change
        self._pause_until = float("-inf")
        self._token = change
        self._saved_token = change
        self._unsaved: dict[int, tuple[int, View]] = {}  # token → the view that is being saved, and its change
        self._withheld: dict[int, list[_Withheld]] = {}  # token → answers that wait until it is saved
        self._told: dict[int, Epoch] = {}  # incarnation → the latest view that was sent to it

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
        self._is_behind = True

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
        self._newest_view = view
        self._history.add(view, self._saved)

    def told_to(self, role: str) -> View:
        """The newest view on stable storage, as nodes of this role are told of it."""
        return self._history.newest if role == "server" else self._history.public

    # ── changes ──

    def change(self, view: View, answers: Iterable[Send] = (), *, is_new: bool = True) -> int:
        """Makes `view` the newest one, and withholds the answers until it is saved. Returns the token to save it by.

        Args:
            is_new: it counts as another one also if it says the same.
        """
        self._token += 1
        if is_new or self._is_behind or view != self._newest_view:
            self.newest += 1
            self._newest_view = view
            self._is_behind = False
        self._unsaved[self._token] = self.newest, view
        withheld = [_Withheld(answer) for answer in answers]
        if withheld:
            self._withheld[self._token] = withheld
        return self._token

    def saved(self, token: int, nodes: Iterable[Listener], now: float) -> list[Send]:
        """The record with this token is on stable storage: what can be sent now, the newest view first, to all nodes.
        Who is let in is sent all of it then."""
        if token <= self._saved_token:
            return []
        self._saved_token = token
        change, view = self._unsaved[token]
        if change != self._saved:
            self._saved = change
            self._history.add(view, change)
        self._unsaved = {other: unsaved for other, unsaved in self._unsaved.items() if other > token}
        withheld = [
            entry for other in sorted(other for other in self._withheld if other <= token)
            for entry in self._withheld.pop(other)
        ]  # fmt: skip
        newcomers = {entry.welcomed.incarnation for entry in withheld if entry.welcomed is not None}
        sends = self.announcements([node for node in nodes if node.incarnation not in newcomers], now)
        for answer, welcomed in withheld:
            sends.append(answer)
            if welcomed is not None:
                sends += self.all_to(welcomed)
        return sends

    def when_saved(self, answer: Send, welcomed: Listener | None = None) -> list[Send]:
        """What can be sent now of an answer that depends on the newest view; otherwise it is withheld. A Welcome, to
        the node `welcomed`, brings the view."""
        if self._token > self._saved_token:
            self._withheld.setdefault(self._token, []).append(_Withheld(answer, welcomed))
            return []
        return [answer] if welcomed is None else [answer, *self.all_to(welcomed)]

    # ── who is told what ──

    def is_due(self, now: float) -> bool:
        """Whether nodes are to be told of the newest view."""
        return self._awaits_announcement and now >= self._pause_until

    def next_deadline(self) -> float | None:
        """When that is so, if nothing else happens."""
        return self._pause_until if self._awaits_announcement else None

    @property
    def _awaits_announcement(self) -> bool:
        return self._announced != self._saved and self._token == self._saved_token

    def announcements(self, nodes: Iterable[Listener], now: float) -> list[Send]:
        """Tells all nodes what they lack of the newest view on stable storage, if that is due."""
        if not self.is_due(now):
            return []
        self._announced = self._saved
        nodes = list(nodes)
        if len(nodes) > TOLD_AT_ONCE:
            self._pause_until = now + PAUSE_S * len(nodes)
        if len(self._told) > 2 * len(nodes) + TOLD_AT_ONCE:
            there = {node.incarnation for node in nodes}
            self._told = {incarnation: epoch for incarnation, epoch in self._told.items() if incarnation in there}
        sends: list[Send] = []
        for node in nodes:
            told = self._told.get(node.incarnation)
            if told != self.epoch:
                sends += self.catch_up(node, told)
        return sends

    def catch_up(self, node: Listener, known: Epoch | None) -> list[Send]:
        """What a node that knows this view has to be told."""
        if known is not None and known >= self.epoch:
            return []
        base = known.change if known is not None and known.generation == self.generation else None
        self._told[node.incarnation] = self.epoch
        return [Send(node.peer, message) for message in self._history.told(base, to_servers=node.role == "server")]

    def all_to(self, node: Listener) -> list[Send]:
        """The whole view."""
        self._told[node.incarnation] = self.epoch
        return self.shown(node.peer, node.role)

    def shown(self, peer: Peer, role: str) -> list[Send]:
        """The whole view, for one who is told of it when he asks."""
        return [Send(peer, message) for message in self._history.told(None, to_servers=role == "server")]

    def validate(self) -> None:
        """Raises AssertionError if a view counts as saved that was not made, or something waits for a saved one."""
        assert self._saved <= self.newest, f"view {self._saved} is saved, the newest is {self.newest}"
        waiting = [*self._unsaved, *self._withheld]
        assert all(token > self._saved_token for token in waiting), f"{waiting} wait for record {self._saved_token}"
