"""The connections to the servers: made when the view names them, given up when a server was restarted.

A server takes the pushes of a worker only after the worker's Attach. A worker has joined when the leaders of all
partitions know it and each rank has been taken; an observer, which attaches to none, as soon as it has a view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvd.core import requests
from kvd.core.machine import Connect, Disconnect, Effect, Received, ServerPeer
from kvd.core.outbox import Outbox
from kvd.core.places import START
from kvd.core.pseudonyms import pseudonym
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.moves import Moves
from kvd.core.worker.predecessor import Predecessor
from kvd.core.worker.resting import Resting
from kvd.core.worker.servers import NOT_CONNECTED, Servers
from kvd.protocol.messages import Attach, Clocks, ComeTo, Done, ErrorCode, Member, MemberState, Refused, Rest


class Connections:
    """Keeps the table of servers up to date.

    Args:
        emit: takes effects, in their order.
    """

    def __init__(
        self,
        session: SchedulerSession,
        servers: Servers,
        moves: Moves,
        outbox: Outbox,
        calls: CallBook,
        asker: Asker,
        predecessor: Predecessor,
        resting: Resting,
        emit: Callable[[Effect], None],
    ) -> None:
        self._session = session
        self._view = session.view
        self._servers = servers
        self._moves = moves
        self._outbox = outbox
        self._calls = calls
        self._asker = asker
        self._predecessor = predecessor
        self._resting = resting
        self._emit = emit
        self._is_observer = session.identity.role == "observer"
        self._attached: set[int] = set()  # incarnations of servers that know this worker
        self._joining: list[InFlight] = []  # wait for the servers and all workers
        self._visiting: list[InFlight] = []  # wait for the servers alone

    # ── joining ──

    def join(self, call: InFlight, request: requests.JoinCluster) -> None:
        """Completes the call with the rank when nobody is missing whom it waits for."""
        (self._joining if request.wait_for_workers else self._visiting).append(call)
        call.hold(self._withdraw)
        self._check_joined()

    def _withdraw(self, call: InFlight) -> None:
        (self._joining if call in self._joining else self._visiting).remove(call)

    def _check_joined(self) -> None:
        if not self._joining and not self._visiting:
            return
        if not self._session.joined or self._view.epoch == (0, 0):
            return
        if not self._is_observer and (not self._view.all_leaders_active() or self.unreached_servers()):
            return
        is_apart = self._session.predecessor in (MemberState.LOST, MemberState.BACK)
        if is_apart and self._view.by_incarnation(pseudonym(self._session.incarnation)) is None:
            return  # its program must not push before it knows that the rounds go on without it
        if self._session.predecessor in (MemberState.DONE, MemberState.GONE) and self._predecessor.finish():
            for server in self._active_servers():
                message = ComeTo(0, self._predecessor.place)
                self._asker.ask(None, ServerPeer(server.incarnation), message, lambda event: None)
        self._predecessor.end_learning()
        self._let_in(self._visiting)
        if self._is_observer or not self._view.missing_workers():
            self._let_in(self._joining)

    def _let_in(self, calls: list[InFlight]) -> None:
        for call in calls:
            call.let_go()
            self._calls.complete(call, self._session.rank)
        calls.clear()

    def unreached_servers(self) -> list[Member]:
        """The leaders that are active and do not know this worker: it has not reached them, or they hang."""
        leads = self._view.leads()
        there = [server for server in self._active_servers() if server.rank in leads]
        return [server for server in there if self._servers.at_rank(server.rank) not in self._attached]

    def _active_servers(self) -> list[Member]:
        return [server for server in self._view.servers() if server.state is MemberState.ACTIVE]

    # ── the view ──

    def view_changed(self) -> None:
        """Connects to the servers that are new, and gives up those that are gone. First: what waited for an old one may
        go to a new one."""
        self._servers.view_changed()
        if not self._session.joined:
            return
        replaced = []
        for server in self._view.servers():
            connected = self._servers.at_rank(server.rank)
            if connected is not NOT_CONNECTED and connected != server.incarnation:
                replaced.append((connected, server.rank))
                self._attached.discard(connected)
                self._servers.disconnect(server.rank)
                self._emit(Disconnect(connected))
                connected = NOT_CONNECTED
            if server.state is MemberState.ACTIVE:
                if connected is NOT_CONNECTED:
                    self._connect(server)
                elif self._view.partitions and connected not in self._attached and not self._is_observer:
                    self.attach(connected)  # it was gone before it answered, and is back
        before = {partition: self._servers.peer_of(partition) for partition in self._view.partition_numbers()}
        self._servers.find_leaders()
        if not self._predecessor.is_known and not self._is_observer:
            self._ask_new_leaders(before)
        self._moves.view_changed(replaced)
        self._check_joined()

    def _connect(self, server: Member) -> None:
        self._servers.connect(server.rank, server.incarnation)
        peer = self._servers.at_rank(server.rank)
        self._emit(Connect(peer, server.address, server.key))
        if not self._is_observer:
            self.attach(peer)

    def _ask_new_leaders(self, before: Mapping[int, ServerPeer]) -> None:
        """What a server said of the predecessor did not count the partitions that it has got since."""
        for partition, earlier in before.items():
            leader = self._servers.peer_of(partition)
            if leader not in (earlier, NOT_CONNECTED) and earlier is not NOT_CONNECTED:
                self._attached.discard(leader)
                for entry in self._outbox.entries():
                    if entry.peer == leader and isinstance(entry.send.message, Attach):
                        self._outbox.settle(entry)
                self.attach(leader)

    # ── attaching ──

    def attach(self, server: ServerPeer) -> None:
        """Makes this worker known to a server, unless a request for that is on its way."""
        for entry in self._outbox.entries():
            if entry.peer == server and isinstance(entry.send.message, Attach):
                return

        def answered(event: Received) -> None:
            message = event.message
            if isinstance(message, Refused) and message.error in (ErrorCode.REPLACED, ErrorCode.NOT_ALLOWED):
                self._session.replaced(message.text)
            if isinstance(message, Clocks):
                self._session.succeeded_the_dead()  # a scheduler that was restarted without its record cannot know
                self._learn_of_predecessor(server, message)
            if isinstance(message, Done | Clocks):
                self._attached.add(server)
                if self._view.partitions and self._resting.is_on:
                    self._asker.ask(None, server, Rest(0), lambda event: None)
                self._check_joined()

        self._asker.ask(None, server, Attach(0, max(self._session.rank, 0)), answered)

    def _learn_of_predecessor(self, server: ServerPeer, clocks: Clocks) -> None:
        """One that left in good order has stopped nowhere: its successor begins a program."""
        if self._session.predecessor != MemberState.LEFT:
            self._predecessor.learn(clocks)
        elif clocks.place and server not in self._attached:
            self._asker.ask(None, server, ComeTo(0, START), lambda event: None)
