"""The servers that a worker is connected to, which partitions they lead, and the error that ends a call to one that is
gone."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import Peer, ServerPeer
from kvd.core.membership import ViewState, name_of
from kvd.errors import NodeLost
from kvd.protocol.messages import Member, MemberState

NO_PARTITION = -1  # of a request that is about the process that it goes to
NOT_CONNECTED = ServerPeer(0)  # no incarnation is 0: what is sent there waits for its deadline


class _Peers(dict[int, ServerPeer]):
    """By rank or partition; NOT_CONNECTED for one that is not there."""

    def __missing__(self, number: int) -> ServerPeer:
        return NOT_CONNECTED


class Servers:
    """A server is addressed by its incarnation; the tables find it by rank, and by the partitions that it leads.
    Connections changes the tables.

    Attributes:
        gone: the servers that the view lists as dead or left.
        orphans: the partitions whose leaders are gone, with no other server to take their place.
        peer_of: gives the leader of a partition, or NOT_CONNECTED.
        at_rank: gives the server of a rank, or NOT_CONNECTED. This is for what concerns the process, and no key.
    """

    def __init__(self, view: ViewState) -> None:
        self._view = view
        self._connected = _Peers()
        self._leaders = _Peers()
        self.gone: list[Member] = []
        self.orphans: frozenset[int] = frozenset()
        self.peer_of: Callable[[int], ServerPeer] = self._leaders.__getitem__  # the hot path asks: no call in between
        self.at_rank: Callable[[int], ServerPeer] = self._connected.__getitem__

    def view_changed(self) -> None:
        self.gone = [server for server in self._view.servers() if server.state in (MemberState.DEAD, MemberState.LEFT)]
        ranks = {server.rank for server in self.gone}
        leader_of = self._view.leader_of
        self.orphans = frozenset(number for number in self._view.partition_numbers() if leader_of(number) in ranks)

    def connect(self, rank: int, incarnation: int) -> None:
        self._connected[rank] = ServerPeer(incarnation)

    def disconnect(self, rank: int) -> None:
        del self._connected[rank]

    def find_leaders(self) -> None:
        """The view or the connections have changed."""
        self._leaders.clear()
        for partition in self._view.partition_numbers():
            peer = self.at_rank(self._view.leader_of(partition))
            if peer is not NOT_CONNECTED:
                self._leaders[partition] = peer

    def everyone(self, *, only_there: bool = False) -> list[tuple[ServerPeer, int]]:
        """The servers that are asked when all are: those that lead something, and those that may come to it.

        Args:
            only_there: without those that are not in the view.

        Returns:
            Each with the first partition that it leads, or NO_PARTITION.
        """
        told = self._view.leads()
        there = self._view.servers()
        if self._view.partitions:
            for server in there:
                if server.state is MemberState.ACTIVE:
                    told.setdefault(server.rank, NO_PARTITION)
        if only_there:
            ranks = {server.rank for server in there}
            told = {rank: partition for rank, partition in told.items() if rank in ranks}
        return [(self.at_rank(rank), told[rank]) for rank in sorted(told)]

    def whoever_leads(self, *, only_there: bool = False) -> list[tuple[ServerPeer, int]]:
        """Those who are told what each leader has to know: the leader of each partition, whoever that comes to be, and
        the servers that lead nothing, with NO_PARTITION. One that leads several is told as often: each partition may
        move by itself. The argument is that of `everyone`."""
        if not self._view.partitions:
            return self.everyone(only_there=only_there)
        leaders = [(self.peer_of(partition), partition) for partition in self._view.partition_numbers()]
        return leaders + [entry for entry in self.everyone() if entry[1] == NO_PARTITION]

    # ── losses ──

    def loss_text(self, rank: int) -> str:
        """What a caller is told when a server died."""
        name = name_of("server", rank)
        if self._view.settings.replicas < 2:
            what = "with replicas=1 its part of the keys is gone"
        elif rank in self._view.leads():
            what = "no in-sync replica of its part of the keys is left"
        else:
            return f"{name} died before it answered; nothing of the keys is lost: ask again"
        return f"{name} died, and {what}: start the job again from its last checkpoint"

    def loss_error(self, rank: int) -> NodeLost:
        """The error of a call that waits for the server of this rank."""
        member = self._view.members.get(("server", rank))
        last_seen_s, reason = (0.0, "") if member is None else (member.last_seen_s, member.reason)
        return NodeLost(self.loss_text(rank), node=name_of("server", rank), last_seen_s=last_seen_s, reason=reason)

    def orphan_error(self, partition: int) -> NodeLost | None:
        """The error of a request for this partition, if nobody serves it any more."""
        return self.loss_error(self._view.leader_of(partition)) if partition in self.orphans else None

    def gone_error(self, peer: Peer) -> NodeLost | None:
        """The error of a request about this process, if it is dead or has left.

        Args:
            peer: NOT_CONNECTED stands for a server that was gone before we could connect to it.
        """
        if peer is NOT_CONNECTED:
            server = next((member for member in self.gone if self.at_rank(member.rank) is NOT_CONNECTED), None)
        else:
            server = next((member for member in self.gone if member.incarnation == peer), None)
        return None if server is None else self.loss_error(server.rank)
