"""Whose turn it is: calls on keys queue behind earlier ones there, and wait until the keys let them start."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from kvd.core import requests
from kvd.core.machine import Span
from kvd.core.membership import name_of
from kvd.core.session import SchedulerSession
from kvd.core.worker.calls import Call, CallBook, WorkerSettings
from kvd.core.worker.keys import LOST, READY, UNKNOWN, MessagePlan, WorkerKey
from kvd.errors import KvdError, NodeLost, NotAllowed
from kvd.protocol.specs import KeySpec


class KeyQueue(CallBook):
    """The queues of the keys."""

    def __init__(self, settings: WorkerSettings, session: SchedulerSession) -> None:
        super().__init__(settings, session)
        self._keys: dict[str, WorkerKey] = {}
        self._unsettled: set[Call] = set()  # pushes accepted and not settled
        self._plans: dict[tuple[WorkerKey, ...], list[MessagePlan]] = {}  # how repeated calls are cut into messages

    def _key(self, name: str) -> WorkerKey:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = WorkerKey(name)
        return key

    def _place(self, key: WorkerKey, spec: KeySpec) -> None:
        """The spec and the servers of a key are known; however calls on it were cut before is void."""
        key.place(spec, self.view, self._servers)
        self._plans.clear()

    def _on_keys(self, call: Call, request: Any) -> None:
        """Queues the call behind the earlier ones on its keys; starts it if there are none."""
        if isinstance(request, requests.Transfer):
            known = self._keys
            call.keys = [known.get(item.key) or self._key(item.key) for item in request.items]
            if request.push:
                self._unsettled.add(call)
            if self._nothing_is_in_the_way(call):  # most calls do not need the queues
                self._start_or_fail(call)
                return
        else:
            call.keys = [self._key(request.key)]
        wait = isinstance(request, requests.DescribeKey) and request.wait
        for key in call.keys:
            key.queue.append(call)
        for key in call.keys:
            if key.state == UNKNOWN and not call.completed:
                self._look_up(key, wait)
        self._try_start(call)

    def _nothing_is_in_the_way(self, call: Call) -> bool:
        window, pushes = self.view.settings.rounds_ahead, call.pushes
        for key in call.keys:
            if key.state != READY or key.queue or (pushes and (key.broken or key.holds_back(window))):
                return False
        return len(call.keys) < 2 or len(set(call.keys)) == len(call.keys)

    def _try_start(self, call: Call) -> bool:
        """Starts the call if it is the first in the queues of all its keys, and they let it."""
        if call.started or call.completed:
            return False
        window = self.view.settings.rounds_ahead
        for key in call.keys:
            if key.state < READY or key.queue[0] is not call:
                return False
            if call.pushes and key.holds_back(window) and key.state == READY and key.broken is None:
                return False
        for key in call.keys:
            key.queue.popleft()
        self._start_or_fail(call)
        for key in call.keys:
            if key.queue:
                self._out_of_queue(key)
        return True

    def _start_or_fail(self, call: Call) -> None:
        error = self._start_error(call)
        if error is not None:
            self._unsettled.discard(call)
            self._complete(call, error=error)
        else:
            call.started = True
            self._start(call)
        if call.pushes:
            self._check_unsettled(call)

    def _out_of_queue(self, key: WorkerKey) -> None:
        while key.queue and self._try_start(key.queue[0]):
            pass

    def _withdraw(self, call: Call) -> None:
        """A call that was not started leaves its queues; one that only pulled lets the rounds go on."""
        if not call.started:
            for key in call.keys:
                if call in key.queue:
                    key.queue.remove(call)
                    self._out_of_queue(key)
            self._check_unsettled(call)
        elif not call.pushes:
            self._release_pulls(call)

    def _start_error(self, call: Call) -> KvdError | None:
        for key in call.keys:
            if key.state == LOST:
                rank = (key.lost_servers(self.view) or [0])[0]
                return NodeLost(self._lost_text(rank), node=name_of("server", rank))
            if self._gone_servers:
                gone = [error for rank in key.incarnations if (error := self._gone_error(self._servers.get(rank)))]
                if gone:
                    return gone[0]
            if call.pushes and key.broken is not None:
                text = f"an earlier push of {key.name!r} was taken in part only ({key.broken}): call rewind to go on"
                return NotAllowed(text, key=key.name)
        if isinstance(call.request, requests.Transfer):
            return self._transfer_error(call, call.request)
        return None

    def _start(self, call: Call) -> None:
        request = call.request
        key = call.keys[0] if call.keys else None
        if isinstance(request, requests.Transfer):
            self._transfer(call, request)
        elif isinstance(request, requests.DescribeKey):
            assert key is not None
            self._complete(call, key.spec)
        elif isinstance(request, requests.ClockOf):
            assert key is not None
            self._complete(call, key.clock)
        elif isinstance(request, requests.SliceControl):
            assert key is not None
            questions: list[tuple[Any, Any, tuple[Span, ...]]] = []
            for index, message in enumerate(request.messages):
                peer = self._servers.get(key.servers[index])
                payload = (Span(request.payloads[index], 0, request.nbytes[index]),) if request.payloads else ()
                questions.append((peer, message, payload))
            self._gather(call, questions)

    def _check_unsettled(self, call: Call) -> None:
        """Tells those who flush when a push is settled, or was never begun."""
        if not call.pushes or call.unsettled or (call not in self._unsettled and not call.flushers):
            return
        self._unsettled.discard(call)
        flushers, call.flushers = call.flushers, []
        for flusher in flushers:
            flusher.remaining -= 1
            if flusher.remaining == 0:
                self._complete(flusher)
        self._check_staged()

    def _check_staged(self) -> None:
        if self._waiting_staged and not self._outbox.unstaged:
            waiting, self._waiting_staged = self._waiting_staged, []
            self._outbox.asks_staged = False
            for call in waiting:
                assert isinstance(call.request, requests.Control)
                self._control(call, call.request)

    # ── what the other parts of the worker do ──

    @abstractmethod
    def _look_up(self, key: WorkerKey, wait: bool = False) -> None:
        """Asks what the key is."""

    @abstractmethod
    def _transfer(self, call: Call, transfer: requests.Transfer) -> None:
        """Pushes and pulls."""

    @abstractmethod
    def _transfer_error(self, call: Call, transfer: requests.Transfer) -> KvdError | None:
        """Why the call cannot be made, if it cannot."""

    @abstractmethod
    def _release_pulls(self, call: Call) -> None:
        """What the call pulled is here, or not wanted any more."""

    @abstractmethod
    def _control(self, call: Call, request: requests.Control) -> None:
        """Asks the servers."""
