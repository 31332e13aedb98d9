"""Calls that ask the servers or the scheduler something besides values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Effect, Peer, Received, Span
from kvd.core.membership import ViewState
from kvd.core.outbox import Outbox
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import Call, CallBook
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.servers import Servers
from kvd.protocol.messages import StatusQuery, StoreState


class ControlCalls:
    """Asks one, some or all servers; if wanted, only when the pushes before have reached them.

    Attributes:
        waiting: the calls that wait until every push is staged.
    """

    def __init__(
        self,
        calls: CallBook,
        pushes: OpenPushes,
        asker: Asker,
        outbox: Outbox,
        view: ViewState,
        servers: Servers,
        participation: Participation,
        emit: Callable[[Effect], None],
    ) -> None:
        self.waiting: list[Call] = []
        self._calls = calls
        self._pushes = pushes
        self._asker = asker
        self._outbox = outbox
        self._view = view
        self._servers = servers
        self._participation = participation
        self._emit = emit

    # ── servers ──

    def control(self, call: Call, request: requests.Control) -> None:
        if request.staged_first and (self._outbox.unstaged or self._pushes.any_waiting()):
            self.waiting.append(call)
            call.hold(self._withdraw)
            for probe in self._outbox.ask_staged():
                self._emit(probe)
            return
        ranks = request.servers
        if ranks is None:
            there = tuple(server.rank for server in self._view.servers())
            ranks = there if self._participation.is_observer else tuple(range(self._view.settings.num_servers))
        messages = request.messages * len(ranks) if len(request.messages) == 1 else request.messages
        payload = () if request.payload is None else (Span(request.payload, 0, request.nbytes),)
        peers = [self._servers.peer_of(rank) for rank in ranks]
        self._asker.gather(call, list(zip(peers, messages, [payload] * len(peers), strict=True)))

    def all_staged(self) -> None:
        """The bytes of every push have arrived: the calls that waited for it go on."""
        waiting = self.waiting[:]
        self.waiting.clear()
        self._outbox.stop_asking_staged()
        for call in waiting:
            call.let_go()
            assert isinstance(call.request, requests.Control)
            self.control(call, call.request)

    def _withdraw(self, call: Call) -> None:
        self.waiting.remove(call)
        if not self.waiting:
            self._outbox.stop_asking_staged()

    def slice_control(self, call: Call, request: requests.SliceControl) -> None:
        """Asks the servers that lead the slices of the call's key."""
        (key,) = call.keys
        questions: list[tuple[Peer, Any, tuple[Span, ...]]] = []
        for index, given in enumerate(request.messages):
            message = replace(given, creation=key.creation) if isinstance(given, StoreState) else given
            payload = (Span(request.payloads[index], 0, request.nbytes[index]),) if request.payloads else ()
            questions.append((self._servers.peer_of(key.servers[index]), message, payload))
        self._asker.gather(call, questions)

    # ── the scheduler ──

    def tell_scheduler(self, call: Call, request: requests.TellScheduler) -> None:
        def answered(event: Received) -> None:
            self._calls.complete(call, error=self._asker.error_of(event))

        self._asker.ask(call, SCHEDULER, request.message, answered)

    def scheduler_status(self, call: Call, request: requests.SchedulerStatus) -> None:
        def answered(event: Received) -> None:
            self._calls.complete(call, (event.payload, event.nbytes), self._asker.error_of(event))

        self._asker.ask(call, SCHEDULER, StatusQuery(0), answered)
