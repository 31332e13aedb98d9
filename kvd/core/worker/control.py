"""Calls that ask the servers or the scheduler something besides values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Effect, Received, ServerPeer, Span
from kvd.core.outbox import Entry, Outbox
from kvd.core.worker.asking import Asker, Question
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import COMPLETED, InFlight
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.resting import Resting
from kvd.core.worker.servers import NO_PARTITION, Servers
from kvd.protocol.messages import (
    ComeTo,
    Command,
    CompressorQuery,
    Rest,
    SetOptimizer,
    StatusQuery,
    StoreState,
    UpdateOptimizer,
)

_OF_PROCESSES = (Command, StatusQuery)  # no other server can answer these in the place of one
_FOR_LEADERS = (
    SetOptimizer,
    UpdateOptimizer,
    CompressorQuery,
    ComeTo,
    Rest,
)  # who leads a partition later must have been told


class ControlCalls:
    """Asks one, some or all servers; if wanted, only when the pushes before have reached them.

    Attributes:
        waiting: the calls that wait until every push is staged, and how each goes on then.
    """

    def __init__(
        self,
        calls: CallBook,
        pushes: OpenPushes,
        asker: Asker,
        outbox: Outbox,
        servers: Servers,
        participation: Participation,
        resting: Resting,
        emit: Callable[[Effect], None],
    ) -> None:
        self.waiting: list[tuple[InFlight, Callable[[], None]]] = []
        self._calls = calls
        self._pushes = pushes
        self._asker = asker
        self._outbox = outbox
        self._servers = servers
        self._participation = participation
        self._resting = resting
        self._emit = emit

    # ── servers ──

    def control(self, call: InFlight, request: requests.Control) -> None:
        if request.staged_first and (self._outbox.unstaged or self._pushes.any_waiting()):
            self._wait(call, partial(self.control, call, request))
            return
        if any(isinstance(message, Rest) for message in request.messages):
            self._resting.begin()
        asked = self._asked(request)
        messages = request.messages * len(asked) if len(request.messages) == 1 else request.messages
        payload = () if request.payload is None else (Span(request.payload, 0, request.nbytes),)
        questions = [
            Question(peer, message, payload, NO_PARTITION if isinstance(message, _OF_PROCESSES) else partition)
            for (peer, partition), message in zip(asked, messages, strict=True)
        ]
        self._asker.gather(call, questions)

    def _asked(self, request: requests.Control) -> list[tuple[ServerPeer, int]]:
        """The servers, and for which partition each is asked."""
        if request.partitions is not None:
            return [(self._servers.peer_of(partition), partition) for partition in request.partitions]
        if request.servers is not None:
            return [(self._servers.at_rank(rank), NO_PARTITION) for rank in request.servers]
        if isinstance(request.messages[0], _FOR_LEADERS):
            return self._servers.whoever_leads(only_there=self._participation.is_observer)
        return self._servers.everyone(only_there=self._participation.is_observer)

    def _wait(self, call: InFlight, act: Callable[[], None]) -> None:
        self.waiting.append((call, act))
        call.hold(self._withdraw)
        for probe in self._outbox.ask_staged():
            self._emit(probe)

    def all_staged(self) -> None:
        """The bytes of every push have arrived: the calls that waited for it go on."""
        waiting = self.waiting[:]
        self.waiting.clear()
        self._outbox.stop_asking_staged()
        for call, act in waiting:
            call.let_go()
            act()

    def _withdraw(self, call: InFlight) -> None:
        self.waiting = [(other, act) for other, act in self.waiting if other is not call]
        if not self.waiting:
            self._outbox.stop_asking_staged()

    def moved(self, entries: Sequence[Entry]) -> None:
        """These requests go to other servers. Those that come after all pushes wait once more, until the pushes that
        went with them are there."""
        if not self._outbox.unstaged:
            return
        late = {entry for entry in entries if not entry.pushes}
        for call in self._calls.open_calls():
            if isinstance(call.request, requests.Control) and call.request.staged_first:
                for entry in late & call.entries:
                    self._outbox.settle(entry)
                    self._wait(call, partial(self._send_again, call, entry))

    def _send_again(self, call: InFlight, entry: Entry) -> None:
        gone = self._servers.orphan_error(entry.topic)
        if gone is not None:
            self._calls.complete(call, error=gone)
        elif call.state is not COMPLETED:
            self._asker.ask_leader(call, entry.topic, entry.send.message, entry.answered, entry.send.payload)

    def slice_control(self, call: InFlight, request: requests.SliceControl) -> None:
        """Asks the servers that lead the slices of the call's key."""
        (key,) = call.keys
        questions = []
        for place, given in enumerate(request.messages):
            message = replace(given, creation=key.creation) if isinstance(given, StoreState) else given
            payload = (Span(request.payloads[place], 0, request.nbytes[place]),) if request.payloads else ()
            questions.append(self._asker.to_leader(key.partitions[given.index], message, payload))
        self._asker.gather(call, questions)

    # ── the scheduler ──

    def tell_scheduler(self, call: InFlight, request: requests.TellScheduler) -> None:
        def answered(event: Received) -> None:
            self._calls.complete(call, error=self._asker.error_of(event))

        self._asker.ask(call, SCHEDULER, request.message, answered)

    def scheduler_status(self, call: InFlight, request: requests.SchedulerStatus) -> None:
        def answered(event: Received) -> None:
            self._calls.complete(call, (event.payload, event.nbytes), self._asker.error_of(event))

        self._asker.ask(call, SCHEDULER, StatusQuery(0), answered)
