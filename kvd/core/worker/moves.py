"""What becomes of open requests when a view changes who leads the partitions.

A partition that moves to another server keeps its lineage: what was open at the old leader goes to the new one, with
the same request numbers and bytes. One whose lineage changed has lost its contents: the keys in it are LOST, and its
requests end. So do requests about a process that is gone, and the waiting for a leader that is gone and has no
successor; its pushes stay, should it come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvd.core.machine import Peer, ServerPeer
from kvd.core.membership import ViewState
from kvd.core.outbox import Entry, Outbox
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.keys import KeyTable
from kvd.core.worker.message_plans import MessagePlan
from kvd.core.worker.servers import NO_PARTITION, NOT_CONNECTED, Servers
from kvd.protocol.messages import ComeTo, DeclareBatch, PullBatch, PushBatch, Rest, SetOptimizer, UpdateOptimizer

_TOLD_TO_EVERYONE = (SetOptimizer, UpdateOptimizer, ComeTo, Rest)


class Moves:
    """Lets open requests follow their partitions.

    Args:
        declare: tells the leader of a plan what is in its batch, with a message of this priority.
        moved: is told of the requests that have another peer now.
    """

    def __init__(
        self,
        view: ViewState,
        servers: Servers,
        keys: KeyTable,
        outbox: Outbox,
        calls: CallBook,
        asker: Asker,
        declare: Callable[[MessagePlan, int], None],
        moved: Callable[[Sequence[Entry]], None],
    ) -> None:
        self._view = view
        self._servers = servers
        self._keys = keys
        self._outbox = outbox
        self._calls = calls
        self._asker = asker
        self._declare = declare
        self._moved = moved
        self._lineages: dict[int, int] = {}  # of the partitions, in the last view that named one

    def view_changed(self, replaced: Sequence[tuple[ServerPeer, int]]) -> None:
        """The connections are up to date.

        Args:
            replaced: the processes, with their ranks, whose seats others have.
        """
        lost = self._lost_partitions()
        if lost:
            self._keys.mark_lost(self._view)
        if self._view.partitions:
            for partition in lost:
                self._end(_is_for(partition), self._view.leader_of(partition))
            self._follow()
        for peer, rank in replaced:
            self._excuse(peer)
            self._end(_goes_to(peer), rank)
        self._end_waiting()

    def _lost_partitions(self) -> list[int]:
        """The partitions that have another lineage than in the view before."""
        lost = []
        for partition in self._view.partition_numbers():
            if self._view.has_begun_anew(partition, self._lineages.get(partition, 0)):
                lost.append(partition)
            self._lineages[partition] = self._view.lineage_of(partition) or self._lineages.get(partition, 0)
        return lost

    # ── requests that go elsewhere ──

    def _follow(self) -> None:
        peers = {number: self._servers.peer_of(number) for number in self._view.partition_numbers()}

        def peer_for(entry: Entry) -> Peer:
            """A leader that cannot be reached yet may be one later."""
            peer = peers.get(_partition_of(entry), NOT_CONNECTED)
            return entry.peer if peer is NOT_CONNECTED else peer

        moved = self._outbox.redirect(peer_for)
        if moved:
            self._declare_ahead(moved)
            self._moved(moved)

    def _declare_ahead(self, moved: Sequence[Entry]) -> None:
        """The new leaders are told of the batches before they get the messages that name them."""
        priority = 1 + max(entry.priority for entry in moved)
        told = {entry.send.message.batch for entry in moved if isinstance(entry.send.message, DeclareBatch)}
        for entry in moved:
            plan = entry.topic
            if isinstance(entry.send.message, PushBatch | PullBatch) and plan.declared_to != entry.peer:
                if plan.batch in told:
                    plan.declared_to = entry.peer
                else:
                    self._declare(plan, priority)

    # ── requests that end ──

    def _end(self, are_lost: Callable[[Entry], bool], rank: int) -> None:
        """What they were about is gone for good."""
        self._calls.abandon_requests(are_lost, self._servers.loss_error(rank))
        self._asker.fail_requests(are_lost, rank)

    def _end_waiting(self) -> None:
        """For servers that are gone, and may come back."""
        leads = self._view.leads() if self._servers.gone else {}
        for server in self._servers.gone:
            peer = ServerPeer(server.incarnation)
            if server.rank in leads:
                self._calls.abandon_requests(self._waits_for(peer, server.rank), self._servers.loss_error(server.rank))
            else:
                self._excuse(peer)
                self._end(_goes_to(peer), server.rank)

    def _waits_for(self, gone: Peer, rank: int) -> Callable[[Entry], bool]:
        """Whether a request went to this server, or would go there if it could be reached."""
        named = enumerate(self._view.partitions)
        led = {number for number, partition in named if partition.leader == rank}
        return lambda entry: entry.peer == gone or _partition_of(entry) in led

    def _excuse(self, peer: Peer) -> None:
        """A server that leads nothing need not know what everyone is told: its successors are told by the others."""
        for entry in self._outbox.entries():
            is_told = entry.peer == peer and isinstance(entry.send.message, _TOLD_TO_EVERYONE)
            if is_told and entry.topic == NO_PARTITION:
                self._asker.excuse(entry)


def _is_for(partition: int) -> Callable[[Entry], bool]:
    return lambda entry: _partition_of(entry) == partition


def _goes_to(peer: Peer) -> Callable[[Entry], bool]:
    return lambda entry: entry.peer == peer


def _partition_of(entry: Entry) -> int:
    """The partition whose leader a request is for."""
    topic: MessagePlan | int = entry.topic
    return topic if isinstance(topic, int) else topic.partition
