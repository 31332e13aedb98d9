"""Which worker processes a server serves: an incarnation attaches, is named by a view, and is replaced by another."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvd.core.machine import LogEntry, Peer, PeerKind, PeerPath, Received
from kvd.core.membership import ViewState, name_of
from kvd.core.principals import Principal, key_text
from kvd.core.server.effects import ServerEffects
from kvd.core.server.keys import KeyTable
from kvd.protocol.messages import OVER_LINKS, Attach, Clocks, Done, ErrorCode, Member, NotYetReason, PathKind

MAX_ATTACHING = 1024
MAX_REPLACED = 1 << 16
LINK_GONE = PeerPath(PathKind.ZMQ, "the link is gone")


class _Attaching(NamedTuple):
    """Who waits for its view."""

    peer: Peer
    attach: Attach
    principal: Principal


class Attachments:
    """The workers that have attached, by incarnation and by rank."""

    def __init__(self, view: ViewState, table: KeyTable, effects: ServerEffects) -> None:
        self._view = view
        self._table = table
        self._effects = effects
        self._ranks: dict[int, int] = {}  # incarnation → rank
        self._keys: dict[int, str] = {}  # incarnation → the name of the key under which it attached
        self._holders: dict[int, int] = {}  # rank → incarnation
        self._successors: set[int] = set()  # incarnations whose rank was here before they came
        self._newcomers: set[int] = set()  # incarnations that have sent nothing but their Attach
        self._replaced: OrderedDict[int, None] = OrderedDict()  # incarnations of workers whose messages no longer count
        self._attaching: dict[int, _Attaching] = {}  # incarnations that no view has named yet
        self._paths: dict[int, PeerPath] = {}  # rank → how its messages travel, as its Attach said
        self._came_over: dict[int, Peer] = {}  # rank → the connection of its last message

    # ── who is it? ──

    def find(self, incarnation: int) -> int | None:
        """The rank of a worker; None for anyone else."""
        return self._ranks.get(incarnation)

    def is_replaced(self, incarnation: int) -> bool:
        """It was a worker, and another incarnation has its rank: it is no observer either."""
        return incarnation in self._replaced

    def is_foreign(self, event: Received) -> bool:
        """Whether the sender's incarnation attached under another key: somebody else speaks in its name."""
        key = self._keys.get(event.sender)
        return key is not None and key != event.principal.name

    def refuse_foreign(self, event: Received) -> None:
        """Tells a sender that its incarnation attached under another key."""
        request = getattr(event.message, "request", 0)
        self._refuse_key(event.peer, request, event.principal, self._keys[event.sender])

    def _refuse_key(self, peer: Peer, request: int, principal: Principal, key: str) -> None:
        text = (
            f"this process joined under {key_text(key)}, and this connection has {principal.describe()}: "
            f"use one key for all connections of a process"
        )
        self._effects.refuse(peer, request, ErrorCode.NOT_ALLOWED, text)

    def rank_of(self, event: Received, request: int) -> int | None:
        """The rank of the sender. Anyone who is no worker here is told to attach."""
        rank = self._ranks.get(event.sender)
        if rank is None:
            text = "this server does not know the sender as a worker"
            self._effects.not_yet(event.peer, request, NotYetReason.NOT_ATTACHED, text)
        else:
            self._came_over[rank] = event.peer
            if self._newcomers:
                self._newcomers.discard(event.sender)
        return rank

    @property
    def ranks(self) -> list[int]:
        """The ranks that are attached."""
        return sorted(self._holders)

    def path_of(self, rank: int) -> str:
        """How a worker's messages travel, for people: as its Attach said, unless that was a link and they no longer
        come over one."""
        said = self._paths[rank]
        is_link = said.kind in OVER_LINKS
        return (LINK_GONE if is_link and self._came_over[rank].kind is not PeerKind.LINK else said).describe()

    # ── attaching ──

    def attach(self, event: Received, attach: Attach) -> None:
        rank = self._ranks.get(event.sender)
        if rank is not None:
            self._welcome(event.sender, rank, event.peer, attach)
            return
        if event.sender in self._replaced:
            text = "another process took this one's place: stop it"
            self._effects.refuse(event.peer, attach.request, ErrorCode.REPLACED, text)
            return
        member = self._view.by_incarnation(event.sender)
        if member is not None and member.role == "worker":
            self._welcome_if_its_own(member, _Attaching(event.peer, attach, event.principal))
        elif len(self._attaching) < MAX_ATTACHING:
            self._attaching[event.sender] = _Attaching(event.peer, attach, event.principal)  # its view is on its way

    def _welcome_if_its_own(self, member: Member, who: _Attaching) -> None:
        """The scheduler says under which key this incarnation joined."""
        if who.principal.name != member.principal:
            self._refuse_key(who.peer, who.attach.request, who.principal, member.principal)
            return
        self._keys[member.incarnation] = member.principal
        self._welcome(member.incarnation, member.rank, who.peer, who.attach)

    def _welcome(self, incarnation: int, rank: int, peer: Peer, attach: Attach) -> None:
        """A successor, whose rank pushed or made keys here before it came, is answered with Clocks: a scheduler without
        its record may not know that there was a predecessor. It may ask again when more slices have come here."""
        if incarnation not in self._ranks:
            self._newcomers.add(incarnation)
        if incarnation in self._newcomers:
            counted = [group.log.own_clock(rank) for group in self._table.groups.values()]
            if any(counted) or (rank == 0 and counted) or rank in self._view.ranks_apart():
                self._successors.add(incarnation)
        self._ranks[incarnation] = rank
        self._holders[rank] = incarnation
        self._paths[rank] = PeerPath(attach.path, attach.path_reason)
        self._came_over[rank] = peer
        if incarnation in self._successors:
            self._effects.send(peer, self._clocks(attach.request, rank))
        else:
            self._effects.send(peer, Done(attach.request))

    def _clocks(self, request: int, rank: int) -> Clocks:
        """How far the rank has come with all slices together."""
        logs = [group.log for group in self._table.groups.values()]
        if not logs:
            return Clocks(request, 0, 0, 0, 0)  # its keys may have been deleted since it came
        counted = [log.own_clock(rank) for log in logs]
        versions = [log.version for log in logs]
        if rank in self._view.ranks_apart():  # the others went on without it, and it goes on where they are
            place = max(log.newest_place() for log in logs)
            trained = any(version > 0 for version in versions)
        else:
            place = max(log.progress_of(rank).place for log in logs)
            trained = any(log.progress_of(rank).place == place and log.has_trained(rank) for log in logs)
        oldest, newest = min(versions), max(versions)
        return Clocks(request, min(counted), max(counted), oldest, newest, place, trained=trained)

    # ── the view ──

    def detach_replaced(self) -> list[tuple[int, int]]:
        """Detaches the workers whose rank another incarnation has now: (rank, incarnation) of each."""
        detached = []
        for member in self._view.members.values():
            if member.role != "worker" or member.incarnation in self._replaced:  # a scheduler without its record
                continue  # may take a process for new that has long had a successor
            holder = self._holders.get(member.rank)
            if holder is not None and holder != member.incarnation:
                self._detach(member.rank, holder)
                detached.append((member.rank, holder))
        return detached

    def _detach(self, rank: int, incarnation: int) -> None:
        self._ranks.pop(incarnation, None)
        self._keys.pop(incarnation, None)
        self._holders.pop(rank, None)
        self._successors.discard(incarnation)
        self._newcomers.discard(incarnation)
        self._replaced[incarnation] = None
        while len(self._replaced) > MAX_REPLACED:
            self._replaced.popitem(last=False)
        text = f"{name_of('worker', rank)} was replaced; its open contributions are dropped"
        self._effects.emit(LogEntry("info", text))

    def welcome_named(self) -> None:
        """Answers those who attached before a view named them."""
        for incarnation in list(self._attaching):
            member = self._view.by_incarnation(incarnation)
            if member is not None and member.role == "worker" and incarnation not in self._replaced:
                self._welcome_if_its_own(member, self._attaching.pop(incarnation))

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError unless each rank has one holder, which was not replaced."""
        assert self._ranks == {incarnation: rank for rank, incarnation in self._holders.items()}, (
            "a rank has two holders"
        )
        assert self._keys.keys() == self._ranks.keys(), "a worker has attached under no key"
        assert self._successors | self._newcomers <= self._ranks.keys(), "a successor is not attached"
        assert self._replaced.keys().isdisjoint(self._ranks), "a replaced worker is attached"
