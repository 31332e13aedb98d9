"""Publication of views: each is saved before it is announced, and so are the answers that depend on it.

A node is told what has changed since the view that it was told of last. If that did not arrive, it says so with a
Heartbeat, and is told what has changed since the view that it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvd.core.machine import Peer, Send
from kvd.core.pseudonyms import public_member
from kvd.protocol.messages import (
    Epoch,
    ErrorCode,
    Join,
    Member,
    NodeName,
    NotYet,
    NotYetReason,
    Partition,
    Refused,
    RunEntry,
    View,
    ViewChange,
)

PAGE_BYTES = 40 << 10  # of the 64 KiB of a header, for the members of one message
MAX_LEFT = 1024  # places that were given back, remembered
MAX_TOLD = 64  # answers to nodes that know different views: a node says which it knows
MEMBER_BYTES = 80  # of a member in a message, without its texts: as msgpack, numbers and the lengths of texts at most
RUN_BYTES = 32  # of a run, without its texts

Place = tuple[str, int]
Told = tuple[View, ...] | tuple[ViewChange, ...]


class ViewHistory:
    """The newest view that was announced, and for each of its parts the number of the view that brought it.

    A node that knows an earlier view is sent the difference, anyone else all of it.

    `change` counts the views. Settings and shards hardly ever change: then everyone is sent the whole view.
    """

    def __init__(self, view: View, change: int) -> None:
        self._view = view
        self._public: View | None = None  # for all but servers; made when it is asked for
        self._change = change
        self._reaches_back_to = change  # who knows an earlier view is sent all of this one
        self._members: OrderedDict[Place, tuple[Member, int]] = OrderedDict()  # the latest change last
        self._pseudonymous: dict[Place, Member] = {}
        self._left: OrderedDict[Place, int] = OrderedDict()  # the latest last
        self._partitions_since = [change] * len(view.partitions)
        self._runs_since = change
        self._known: dict[tuple[bool, int], Told] = {}  # what was made of this view: by whether for servers, and base
        self._take_members(view, change)

    @property
    def newest(self) -> View:
        """As servers are told of it."""
        return self._view

    @property
    def public(self) -> View:
        """As all others are."""
        if self._public is None:
            members = tuple([self._pseudonymous[member.role, member.rank] for member in self._view.members])
            self._public = View(self._view.settings, members, self._view.shards, (), self._view.partitions)
        return self._public

    def add(self, view: View, change: int) -> None:
        """This view, with this number, is the newest one."""
        before, self._view, self._public, self._change = self._view, view, None, change
        self._known = {}
        if (view.settings, view.shards) != (before.settings, before.shards):
            self._reaches_back_to = change
        self._take_partitions(before.partitions, view.partitions, change)
        if view.runs != before.runs:
            self._runs_since = change
        self._take_members(view, change)

    def told(self, base: int | None, *, to_servers: bool) -> Told:
        """The messages for a node that knows the view of this number; None: none of these views."""
        base = -1 if base is None or base < self._reaches_back_to else min(base, self._change)
        found = self._known.get((to_servers, base))
        if found is None:
            whole = self._view if to_servers else self.public
            change = None if base < 0 else self._since(base, to_servers=to_servers)
            found = pages(whole) if change is None else (change,)
            if len(self._known) >= MAX_TOLD:
                self._known.clear()
            self._known[to_servers, base] = found
        return found

    def _take_members(self, view: View, change: int) -> None:
        for member in view.members:
            place = member.role, member.rank
            known = self._members.get(place)
            if known is None or (known[0] is not member and known[0] != member):
                self._members[place] = member, change
                self._members.move_to_end(place)
                self._pseudonymous[place] = public_member(member)
                self._left.pop(place, None)
        if len(self._members) > len(view.members):
            there = {(member.role, member.rank) for member in view.members}
            for place in [place for place in self._members if place not in there]:
                del self._members[place], self._pseudonymous[place]
                self._left[place] = change
                if len(self._left) > MAX_LEFT:
                    _, forgotten = self._left.popitem(last=False)
                    self._reaches_back_to = max(self._reaches_back_to, forgotten)

    def _take_partitions(self, before: tuple[Partition, ...], after: tuple[Partition, ...], change: int) -> None:
        if len(before) != len(after):
            self._reaches_back_to = change
            self._partitions_since = [change] * len(after)
            return
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                self._partitions_since[number] = change

    def _since(self, base: int, *, to_servers: bool) -> ViewChange | None:
        """None: it would not be much shorter than the whole view, or too long for a message."""
        has_runs = self._runs_since > base and to_servers
        members: list[Member] = []
        nbytes = sum([run_nbytes(run) for run in self._view.runs]) if has_runs else 0
        for place in reversed(self._members):
            member, change = self._members[place]
            if change <= base:
                break
            members.append(member if to_servers else self._pseudonymous[place])
            nbytes += member_nbytes(member)
            if nbytes > PAGE_BYTES:
                return None
        members.reverse()
        left = tuple([NodeName(*place) for place, change in self._left.items() if change > base])
        partitions = tuple(
            [
                (number, entry)
                for number, entry in enumerate(self._view.partitions)
                if self._partitions_since[number] > base
            ]
        )
        runs = self._view.runs if has_runs else ()
        return ViewChange(base, tuple(members), left, partitions, has_runs, runs)


def pages(view: View) -> tuple[View, ...]:
    """The view in messages that are short enough. The first one has all but members if there are several."""
    parts: list[list[Member]] = [[]]
    nbytes = 0
    for member in view.members:
        own = member_nbytes(member)
        if nbytes + own > PAGE_BYTES:
            parts.append([])
            nbytes = 0
        parts[-1].append(member)
        nbytes += own
    if len(parts) == 1 and nbytes <= PAGE_BYTES // 4:
        return (view,)
    count = len(parts) + 1
    first = View(view.settings, (), view.shards, view.runs, view.partitions, 0, count)
    rest = [View(view.settings, tuple(part), (), (), (), page, count) for page, part in enumerate(parts, 1)]
    return (first, *rest)


def member_nbytes(member: Member) -> int:
    """What a member takes in a message, at most."""
    texts = member.node_id, member.address, member.reason, member.key, member.principal
    return MEMBER_BYTES + sum([len(text.encode()) for text in texts])


def run_nbytes(run: RunEntry) -> int:
    """What a run takes in a message, at most."""
    return RUN_BYTES + len(run.job.encode()) + len(run.token.encode())


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
