"""Reads of several keys as they were after one step; `kvd.core.server.readings` says what that means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvd.core import requests
from kvd.core.machine import Copy, Effect, Received
from kvd.core.membership import ViewState
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import COMPLETED, InFlight
from kvd.core.worker.keys import KeyState
from kvd.core.worker.message_plans import MessagePlan, lists_of_slices
from kvd.core.worker.servers import Servers
from kvd.core.worker.transfer_plans import TransferPlans
from kvd.errors import DtypeMismatch, KeyNotFound, KvdError, ProtocolError, ShapeMismatch
from kvd.protocol.messages import MemberState, ReadDone, ReadSlices, Survey, Surveyed, Values


@dataclass(slots=True, eq=False)
class _Progress:
    """How far a Read has come."""

    call: InFlight
    read: requests.Read
    versions: list[requests.Versions | None]  # so far, one per item
    remaining: int  # messages that are not answered
    partitions: tuple[int, ...]  # whose leaders were asked
    remained: int  # of `remaining`, when the read was to be stopped last


class Readings:
    """The reads of this node, one at a time.

    Args:
        emit: takes effects, in their order.
    """

    def __init__(
        self,
        view: ViewState,
        servers: Servers,
        plans: TransferPlans,
        asker: Asker,
        calls: CallBook,
        emit: Callable[[Effect], None],
    ) -> None:
        self._view = view
        self._servers = servers
        self._plans = plans
        self._asker = asker
        self._calls = calls
        self._emit = emit
        self._open: _Progress | None = None

    # ── which steps there are ──

    def survey(self, call: InFlight, request: requests.Survey) -> KvdError | None:
        """Completes the call with the answers of all servers that lead a part of its keys."""
        if call.keys:
            lists = lists_of_slices(call.keys)
        else:
            leads, there = self._view.leads(), self._view.servers()
            ranks = [server.rank for server in there if server.state is MemberState.ACTIVE and server.rank in leads]
            lists = [(leads[rank], ()) for rank in ranks]

        def then(answers: list[Received], error: KvdError | None) -> None:
            self._look_again(call, error)
            result = [event.message for event in answers if isinstance(event.message, Surveyed)]
            if error is None and len(result) < len(answers):
                error = ProtocolError("a server did not answer which steps it has")
            self._calls.complete(call, result, error)

        call.start()
        self._asker.ask_all(call, [self._asker.to_leader(partition, Survey(0, ids)) for partition, ids in lists], then)
        return None

    # ── the values of a step ──

    def read(self, call: InFlight, read: requests.Read) -> KvdError | None:
        """Asks for the values; or says why it cannot."""
        for key, item in zip(call.keys, read.items, strict=True):
            try:
                if item.spec is not None:
                    key.check_value(item.spec, cast=False, what="out")
            except (ShapeMismatch, DtypeMismatch) as error:
                return error
        call.start()
        plans = self._plans.of(call.keys).messages
        asked = tuple(sorted({plan.partition for plan in plans}))
        progress = self._open = _Progress(call, read, [None] * len(call.keys), len(plans), asked, len(plans))
        for plan in plans:
            message = ReadSlices(0, read.number, read.step, read.is_over, plan.slice_ids)
            self._asker.ask_leader(call, plan.partition, message, partial(self._answered, progress, plan))
        if not plans:
            self._end(progress, [])
        return None

    def _answered(self, progress: _Progress, plan: MessagePlan, event: Received) -> None:
        message, call = event.message, progress.call
        if call.state is COMPLETED:
            return
        if isinstance(message, Surveyed):
            self._end(progress, None)
            return
        error = self._asker.error_of(event)
        fits = isinstance(message, Values) and event.nbytes == plan.nbytes
        if not isinstance(message, Values) or not fits or len(message.versions) != len(plan.slice_ids):
            error = error or ProtocolError("the server answered a read with something that does not fit")
            self._look_again(call, error)
            self._calls.complete(call, error=error)
            return
        for item, version in zip(plan.items, message.versions, strict=True):
            oldest, newest = progress.versions[item] or (version, version)
            progress.versions[item] = requests.Versions(min(oldest, version), max(newest, version))
        items = progress.read.items
        self._emit(Copy(event.payload, tuple([items[item].target for item in plan.items]), plan.rows))
        progress.remaining -= 1
        if progress.remaining == 0:
            self._end(progress, progress.versions)

    def _look_again(self, call: InFlight, error: KvdError | None) -> None:
        """No reader is asked before keys are deleted: when it meets a deletion, its next call looks them up again."""
        if isinstance(error, KeyNotFound):
            for key in call.keys:
                if key.state is KeyState.READY:
                    key.forget()
            self._plans.clear()

    def _end(self, progress: _Progress, result: Sequence[requests.Versions | None] | None) -> None:
        """Completes the call, and tells the servers that nothing which they sent for it is in use."""
        self._open = None
        self._calls.end(progress.call, result)
        asked = {self._servers.peer_of(partition): partition for partition in progress.partitions}
        for partition in asked.values():
            self._asker.ask_leader(None, partition, ReadDone(0, progress.read.number), lambda event: None)

    def stop(self, call: InFlight, request: requests.StopReading) -> None:
        """Ends a read whose step does not come."""
        progress, is_stuck = self._open, False
        if progress is not None and progress.read.number == request.number and progress.call.state is not COMPLETED:
            is_stuck = progress.remaining == progress.remained
            progress.remained = progress.remaining
            if is_stuck:
                self._end(progress, None)
        self._calls.complete(call, is_stuck)
