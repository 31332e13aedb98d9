"""Pushes and pulls: a call gets its clocks, goes out as messages, and its answers become copies and a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvd.core import requests
from kvd.core.machine import Copy, Effect, Received, Send, Span
from kvd.core.membership import ViewState
from kvd.core.outbox import Entry, Outbox
from kvd.core.worker.asking import Asker, is_kept
from kvd.core.worker.calls import CallBook
from kvd.core.worker.codings import coding_of, comes_encoded, fits, method_of
from kvd.core.worker.in_flight import COMPLETED, InFlight
from kvd.core.worker.keys import KeyState, WorkerKey
from kvd.core.worker.message_plans import MessagePlan, MessagePlans, plan_rows, plan_slices
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.pulled_versions import note_versions
from kvd.core.worker.push_window import (
    begin_pulls,
    begin_pushes,
    begin_reads,
    end_pulls,
    end_reads,
    mark_failing,
    settle_pushes,
)
from kvd.core.worker.servers import Servers
from kvd.core.worker.steps import StepCounter
from kvd.errors import (
    DtypeMismatch,
    KeyNotFound,
    KvdError,
    NotAllowed,
    Outcome,
    ProtocolError,
    RemoteError,
    RequestTimeout,
    ShapeMismatch,
)
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    DeclareBatch,
    Done,
    Part,
    Pull,
    PullBatch,
    PullRows,
    Push,
    PushBatch,
    Refused,
    Taken,
    Uncounted,
    Values,
)
from kvd.protocol.specs import table_text

UNPUSHED = (
    "Nothing was sent, and the other workers still wait for this call: repeat it with values that fit (a push of zeros "
    "adds nothing) before the next step, or each later push of this worker counts one round late"
)


def say_unpushed(error: RemoteError, view: ViewState) -> None:
    """Add to the error of a push that was refused before it took its clock what that means for the rounds: the others
    wait for this worker, and its next push counts in the round of the one that was refused."""
    if view.is_sync and view.settings.num_workers > 1:
        error.args = (f"{error.args[0]}. {UNPUSHED}", *error.args[1:])


class Transfer:
    """The data side of a worker.

    Args:
        emit: takes effects, in their order.
        wake: a key lets more calls start.
    """

    def __init__(
        self,
        view: ViewState,
        servers: Servers,
        plans: MessagePlans,
        participation: Participation,
        outbox: Outbox,
        asker: Asker,
        calls: CallBook,
        pushes: OpenPushes,
        steps: StepCounter,
        emit: Callable[[Effect], None],
        wake: Callable[[WorkerKey], None],
    ) -> None:
        self._view = view
        self._servers = servers
        self._plans = plans
        self._participation = participation
        self._outbox = outbox
        self._asker = asker
        self._calls = calls
        self._pushes = pushes
        self._steps = steps
        self._emit = emit
        self._wake = wake

    # ── messages out ──

    def start(self, call: InFlight, transfer: requests.Transfer) -> KvdError | None:
        """Gives every item its clock, and puts the messages of the call into the outbox; or says why it cannot."""
        error = self._error(call, transfer)
        if error is not None:
            return error
        if transfer.finds is not None:
            transfer.finds([key.spec for key in call.keys if key.spec is not None])
        is_left_out = transfer.push and self._participation.leaves_out(transfer.place)
        if is_left_out:
            transfer = replace(transfer, push=False, cast=False, some_encoded=False)
            self._pushes.settle(call)
        call.start()
        windows = [key.window for key in call.keys]
        plans = self._plans_of(call, transfer) if transfer.push or transfer.pull else ()
        call.transfer, call.windows, call.versions = transfer, windows, [None] * len(windows)
        call.remaining, call.counts = len(plans), not is_left_out
        takes_newest = transfer.any_version or not self._participation.in_rounds
        clocks: Sequence[int]
        if transfer.push:
            clocks = begin_pushes(windows)
            call.steps = self._steps.begin(call, clocks)
            if transfer.sets_out is not None:
                transfer.sets_out(clocks)
        elif takes_newest:
            clocks = [ANY_CLOCK if transfer.at_version is None else transfer.at_version] * len(windows)
        else:
            clocks = [window.clock for window in windows]
        if transfer.pull and self._view.is_sync and (transfer.push or not takes_newest):
            begin_pulls(windows)
            call.pulling = clocks
            if not transfer.push:
                call.hold(self._release)
        elif transfer.pull and not transfer.push:
            begin_reads(windows)
            call.is_reading = True
            call.hold(self._release)
        shared = clocks[0] if clocks and clocks.count(clocks[0]) == len(clocks) else None
        for plan in plans:
            if shared is None or plan.is_alone or not self._plans.use(plan, is_push=transfer.push):
                self._send_parts(call, plan, clocks)
            else:
                self._send_batch(call, plan, shared)
        if not plans:
            self._settle(call)
        return None

    def _plans_of(self, call: InFlight, transfer: requests.Transfer) -> Sequence[MessagePlan]:
        """Parts of tables, and slices that are decoded on one side, travel one by one, so that the sizes of others do
        not matter."""
        if not transfer.cast and not transfer.some_encoded and not transfer.some_rows and transfer.takes is None:
            return self._plans.of(call.keys, in_few=transfer.in_few)
        keys, items = call.keys, transfer.items
        tables = tuple([place for place, item in enumerate(items) if item.ranges is not None])
        coded = [
            place
            for place, (key, item) in enumerate(zip(keys, items, strict=True))
            if item.ranges is None and (method_of(key, item) is not None or comes_encoded(key, transfer))
        ]
        return [
            *plan_rows(keys, items, tables, is_push=transfer.push),
            *plan_slices(keys, items, coded),
            *self._plans.of(keys, without=(*tables, *coded)),
        ]

    def _error(self, call: InFlight, transfer: requests.Transfer) -> KvdError | None:
        if transfer.push:
            if not self._participation.in_rounds and not self._participation.leaves_out(transfer.place):
                return self._participation.push_error()
            if len(set(call.keys)) < len(call.keys):
                names = [key.name for key in call.keys]
                twice = next(name for name in names if names.count(name) > 1)
                return NotAllowed(f"key {twice!r} is pushed twice in one call: add the values first", key=twice)
        for key, item in zip(call.keys, transfer.items, strict=True):
            if item.spec is None:
                if transfer.pull and key.is_table:
                    return NotAllowed(table_text(key.name), key=key.name)
            elif item.spec is not key.checked_spec:
                try:
                    key.check_value(item.spec, cast=transfer.cast, what="value" if transfer.push else "out")
                except (ShapeMismatch, DtypeMismatch, NotAllowed) as error:
                    if transfer.push:
                        say_unpushed(error, self._view)
                    return error
        return None

    def _send_parts(self, call: InFlight, plan: MessagePlan, clocks: Sequence[int]) -> None:
        transfer = call.transfer
        assert transfer is not None
        parts = tuple(
            [
                Part(key, index, clocks[item], creation)
                for (key, index, creation), item in zip(plan.slice_ids, plan.items, strict=True)
            ]
        )
        number = self._asker.number()
        if transfer.push:
            step, settled = call.steps
            push = Push(
                number,
                parts,
                transfer.how,
                transfer.samples,
                transfer.pull,
                coding=coding_of(call.keys[plan.items[0]], transfer.items[plan.items[0]], plan),
                step=step,
                settled=settled,
                place=transfer.place,
            )
            self._send(call, plan, push)
        elif transfer.items[plan.items[0]].ranges is not None:
            self._send(call, plan, PullRows(number, parts[0]))
        else:
            takes = transfer.takes.compressor if transfer.takes is not None and plan.is_alone else ""
            self._send(call, plan, Pull(number, parts, takes))

    def _send_batch(self, call: InFlight, plan: MessagePlan, clock: int) -> None:
        transfer = call.transfer
        assert transfer is not None
        if plan.declared_to != self._servers.peer_of(plan.partition):
            self.declare(plan, transfer.priority)
        number = self._asker.number()
        if transfer.push:
            step, settled = call.steps
            message = PushBatch(
                number,
                plan.batch,
                clock,
                transfer.how,
                transfer.samples,
                transfer.pull,
                step=step,
                settled=settled,
                place=transfer.place,
            )
            self._send(call, plan, message)
        else:
            self._send(call, plan, PullBatch(number, plan.batch, clock))

    def declare(self, plan: MessagePlan, priority: int) -> None:
        """Tells the server what is in the batch, ahead of the message that names it."""
        server = self._servers.peer_of(plan.partition)
        batch = self._plans.declare(plan, server)
        message = DeclareBatch(self._asker.number(), batch, plan.slice_ids)
        entry = Entry(Send(server, message), lambda event: None, priority=priority, topic=plan.partition)
        self._outbox.add(entry)

    def _send(self, call: InFlight, plan: MessagePlan, message: Push | Pull | PullRows | PushBatch | PullBatch) -> None:
        transfer = call.transfer
        assert transfer is not None
        items = transfer.items
        payload: tuple[Span, ...] = ()
        if isinstance(message, PullRows) or (transfer.push and transfer.how != ABSENT):
            payload = plan.payload_of(items, transfer.whole)
        nbytes = 0  # a pull takes no credit: the push that it waits for may be behind it
        if payload and transfer.push:
            nbytes = sum([size for _, size in plan.ranges]) if plan.is_alone else plan.nbytes
        self._outbox.add(
            Entry(
                Send(self._servers.peer_of(plan.partition), message, payload),
                partial(self._answered, call, plan),
                nbytes,
                transfer.priority,
                plan.slice_ids if transfer.push else (),
                plan,
                call.entries,
            )
        )

    # ── answers in ──

    def _answered(self, call: InFlight, plan: MessagePlan, event: Received) -> None:
        """An answer to one message of a transfer."""
        message, transfer = event.message, call.transfer
        assert transfer is not None
        error: KvdError | None = None
        if isinstance(message, Uncounted) and transfer.push:
            call.counts = False
            self._participation.left_out(event.epoch)
        if (
            isinstance(message, Values | Uncounted)
            and transfer.pull
            and not event.fault
            and event.nbytes == plan.nbytes
            and (isinstance(message, Uncounted) or fits(call.keys[plan.items[0]], plan, message.coding))
            and len(message.versions) in (1, len(plan.slice_ids))
        ):
            self._copy_values(call, plan, message, event)
        elif isinstance(message, Refused):
            error = self._asker.error_of(event)
            if error is not None and transfer.push and is_kept(message):  # it is answered later
                self._pushes.keep(call, error)
                self._calls.complete(call, error=error)
                return
            if message.taken is not Taken.NOTHING:
                call.is_untaken = False
            if isinstance(error, KeyNotFound) and not self._participation.in_rounds:
                self._forget_deleted(call.keys)
        elif not isinstance(message, Done | Uncounted) or transfer.pull:
            error = ProtocolError(f"the server answered with a {type(message).__name__} that does not fit")
        call.remaining -= 1
        if error is None:
            call.is_untaken = False
        elif call.error is None:
            call.error = error
            if transfer.push:
                mark_failing(call.windows)
        if call.remaining == 0:
            self._settle(call)
        elif error is not None:
            self._calls.complete(call, error=error)

    def _copy_values(self, call: InFlight, plan: MessagePlan, values: Values | Uncounted, event: Received) -> None:
        """Notes the versions, and copies the values to where the call wants them. Once the call is completed, that
        memory is the program's again."""
        note_versions(call.versions, plan, values.versions)
        if call.state is not COMPLETED:
            assert call.transfer is not None
            items = call.transfer.items
            targets = tuple([items[item].target for item in plan.items])
            self._emit(Copy(event.payload, targets, plan.rows))

    # ── the end of a transfer ──

    def _settle(self, call: InFlight) -> None:
        """All messages are answered: the windows move on, the keys' next calls start, and the call is completed.

        A push that no server took gives its clock back.
        """
        if call.pulling or call.is_reading:
            self._end_pull(call)
            call.let_go()  # no cycle stays behind that keeps the program's memory
        if call.transfer is not None and call.transfer.push:
            settle_pushes(call.windows, call.error, call.is_untaken)
        for key in call.keys:
            if key.queue:
                self._wake(key)
        versions = call.versions if call.counts else requests.UncountedVersions(call.versions)
        self._calls.complete(call, versions, call.error)
        if call.is_push:
            self._pushes.settle(call)

    def _release(self, call: InFlight) -> None:
        """Nobody waits for the pull any more: the rounds that it held back go on."""
        self._end_pull(call)
        for key in call.keys:
            self._wake(key)

    def _end_pull(self, call: InFlight) -> None:
        end_pulls(call.windows, call.pulling)
        call.pulling = ()
        if call.is_reading:
            end_reads(call.windows)
            call.is_reading = False

    def _forget_deleted(self, keys: Sequence[WorkerKey]) -> None:
        """A reader, who is not asked before keys are deleted, has met a deletion: its next call looks at the keys
        again."""
        for key in keys:
            if key.state is KeyState.READY and not key.window.open_pushes:
                key.forget()
        self._plans.clear()

    # ── the program's memory ──

    def take_back(self, call: InFlight, request: requests.TakeBack) -> None:
        """Ends the transfers of these sources, and sends what is left of them from the copies."""
        copies = {id(source): copy for source, copy in request.copies}
        for earlier in self._calls.open_calls():
            transfer = earlier.request
            if isinstance(transfer, requests.Transfer) and any(id(item.source) in copies for item in transfer.items):
                text = "the caller stopped waiting; its pushes are still on their way"
                outcome: Outcome = "unknown" if earlier.may_have_happened else "not_sent"
                self._calls.abandon(earlier, RequestTimeout(text, outcome=outcome))
        self._outbox.replace_sources(copies)
        self._calls.complete(call)
