"""The servers that a worker is connected to, and the error that ends a call to one that is gone."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import Peer, ServerPeer
from kvd.core.membership import ViewState, name_of
from kvd.errors import NodeLost
from kvd.protocol.messages import Member, MemberState


def loss_text(rank: int) -> str:
    """What a caller is told when a server died."""
    return (
        f"{name_of('server', rank)} died, and with replicas=1 its part of the keys is gone: "
        f"start the job again from its last checkpoint"
    )


NOT_CONNECTED = ServerPeer(0)  # no incarnation is 0: what is sent there waits for its deadline


class _ConnectedServers(dict[int, ServerPeer]):
    """Rank → peer; NOT_CONNECTED for a rank that is not there."""

    def __missing__(self, rank: int) -> ServerPeer:
        return NOT_CONNECTED


class Servers:
    """A server is addressed by its incarnation; the table finds it by rank. Connections changes the table.

    Attributes:
        gone: the servers that the view lists as dead or left.
        peer_of: gives the peer that we are connected to at a rank, or NOT_CONNECTED.
    """

    def __init__(self, view: ViewState) -> None:
        self._view = view
        self._connected = _ConnectedServers()
        self.gone: list[Member] = []
        self.peer_of: Callable[[int], ServerPeer] = self._connected.__getitem__  # the hot path asks: no call in between

    def view_changed(self) -> None:
        self.gone = [server for server in self._view.servers() if server.state in (MemberState.DEAD, MemberState.LEFT)]

    def connect(self, rank: int, incarnation: int) -> None:
        self._connected[rank] = ServerPeer(incarnation)

    def disconnect(self, rank: int) -> None:
        del self._connected[rank]

    def loss_error(self, rank: int) -> NodeLost:
        """The error of a call that waits for the server of this rank."""
        member = self._view.members.get(("server", rank))
        last_seen_s, reason = (0.0, "") if member is None else (member.last_seen_s, member.reason)
        return NodeLost(loss_text(rank), node=name_of("server", rank), last_seen_s=last_seen_s, reason=reason)

    def gone_error(self, peer: Peer) -> NodeLost | None:
        """The error of a request to this peer, if it is a server that is dead or has left.

        Args:
            peer: NOT_CONNECTED stands for a server that was gone before we could connect to it.
        """
        if peer is NOT_CONNECTED:
            server = next((member for member in self.gone if self.peer_of(member.rank) is NOT_CONNECTED), None)
        else:
            server = next((member for member in self.gone if member.incarnation == peer), None)
        return None if server is None else self.loss_error(server.rank)
