"""Pushes and pulls: a call gets its clocks, goes out as messages, and its answers become copies and a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvd.core import requests
from kvd.core.machine import Copy, Effect, Received, Send, Span
from kvd.core.membership import ViewState
from kvd.core.outbox import Entry, Outbox
from kvd.core.worker.asking import Asker, is_kept
from kvd.core.worker.calls import CallBook
from kvd.core.worker.codings import coding_of, comes_encoded, fits, method_of
from kvd.core.worker.in_flight import COMPLETED, STARTED, InFlight
from kvd.core.worker.keys import KeyState, WorkerKey
from kvd.core.worker.message_plans import MessagePlan, plan_rows, plan_slices
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.pulled_versions import versions_of
from kvd.core.worker.push_window import (
    PushWindow,
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
from kvd.core.worker.transfer_plans import TransferPlans
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
        plans: TransferPlans,
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
        """Gives every item its clock, and puts the messages of the call into the outbox; or says why it cannot. A call
        with a plan needs no check."""
        plan = call.plan
        if plan is None:
            error = self._error(call, transfer)
            if error is not None:
                return error
        if transfer.finds is not None:
            keys = call.keys if plan is None else plan.keys
            transfer.finds([key.spec for key in keys if key.spec is not None])
        if plan is None and transfer.push and self._participation.leaves_out(transfer.place):
            transfer = replace(transfer, push=False, cast=False, some_encoded=False)
            self._pushes.settle(call)
            call.counts = False
        call.transfer = transfer
        push, pull = transfer.push, transfer.pull
        windows: Sequence[PushWindow]
        messages: Sequence[MessagePlan]
        if plan is None:
            call.start()
            windows = [key.window for key in call.keys]
            messages = self._plans_of(call, transfer) if transfer.push or transfer.pull else ()
        else:
            call.state = STARTED
            call.keys, windows, messages = plan.keys, plan.windows, plan.messages
            if push:
                self._pushes.accept(call)
        call.windows = windows
        call.remaining = len(messages)
        takes_newest = transfer.any_version or not self._participation.in_rounds
        clocks: Sequence[int]
        if push:
            clocks = begin_pushes(windows, pulls=pull and self._view.is_sync)
            call.steps = self._steps.begin(call, clocks)
            if pull and self._view.is_sync:
                call.pulling = clocks
            if transfer.sets_out is not None:
                transfer.sets_out(clocks)
        elif takes_newest:
            clocks = [ANY_CLOCK if transfer.at_version is None else transfer.at_version] * len(windows)
        else:
            clocks = [window.clock for window in windows]
        if pull and not push:
            if self._view.is_sync and not takes_newest:
                begin_pulls(windows)
                call.pulling = clocks
            else:
                begin_reads(windows)
                call.is_reading = True
            call.hold(self._release)
        has_batches = self._plans.batches and bool(clocks) and clocks.count(clocks[0]) == len(clocks)
        for message in messages:
            # A batch is named from the second use on. A push of several slices names one at once: the server then
            # treats them as one as long as their clocks are the same.
            if has_batches and not message.is_alone:
                message.uses += 1
                if message.uses > 1 or (push and len(message.slice_ids) > 1):
                    self._send_batch(call, message, clocks[0])
                    continue
            self._send_parts(call, message, clocks)
        if not messages:
            self.settle(call)
        return None

    def _plans_of(self, call: InFlight, transfer: requests.Transfer) -> Sequence[MessagePlan]:
        """The messages of a call without a plan.

        Parts of tables, and slices that are decoded on one side, travel one by one, so that the sizes of others do not
        matter.
        """
        if not transfer.cast and not transfer.some_encoded and not transfer.some_rows and transfer.takes is None:
            return self._plans.of(call.keys, in_few=transfer.in_few).messages
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
            *self._plans.of(keys, without=(*tables, *coded)).messages,
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
        transfer, items = call.transfer, call.items()
        assert transfer is not None
        if len(clocks) == 1:
            clocks = (*clocks,) * len(call.keys)  # that of a group
        parts = tuple(
            [
                Part(key, index, clocks[item], creation)
                for (key, index, creation), item in zip(plan.slice_ids, plan.items, strict=True)
            ]
        )
        number = self._asker.number()
        message: Push | Pull | PullRows
        if transfer.push:
            step, settled = call.steps
            message = Push(
                number,
                parts,
                transfer.how,
                transfer.samples,
                transfer.pull,
                coding=coding_of(call.keys[plan.items[0]], items[plan.items[0]], plan),
                step=step,
                settled=settled,
                place=call.place,
            )
        elif items[plan.items[0]].ranges is not None:
            message = PullRows(number, parts[0])
        else:
            takes = transfer.takes.compressor if transfer.takes is not None and plan.is_alone else ""
            message = Pull(number, parts, takes)
        payload: tuple[Span, ...] = ()
        if isinstance(message, PullRows) or (transfer.push and transfer.how != ABSENT):
            payload = self._payload(call, plan)
        nbytes = 0  # a pull takes no credit: the push that it waits for may be behind it
        if payload and transfer.push:
            nbytes = sum([size for _, size in plan.ranges]) if plan.is_alone else plan.nbytes
        send = Send(self._servers.peer_of(plan.partition), message, payload)
        pushed = plan.slice_ids if transfer.push else ()
        answered = partial(self._answered, call, plan)
        self._outbox.add(Entry(send, answered, nbytes, transfer.priority, pushed, plan, call))

    def _send_batch(self, call: InFlight, plan: MessagePlan, clock: int) -> None:
        """Queues a message that names its batch, which is made when it leaves."""
        transfer = call.transfer
        assert transfer is not None
        peer = self._servers.peer_of(plan.partition)
        if plan.declared_to != peer:
            self.declare(plan, transfer.priority)
        call.clock = clock
        self._asker.last_request += 1
        entry = Entry(
            None,
            partial(self._answered, call, plan),
            plan.nbytes if transfer.push and transfer.how != ABSENT else 0,
            transfer.priority,
            plan.slice_ids if transfer.push else (),
            plan,
            call,
            peer,
            self._asker.last_request,
            self._batch_message,
        )
        self._outbox.add(entry, None if call.owner is None else call.begun)

    def _batch_message(self, entry: Entry) -> Send:
        """Make a message that names its batch."""
        call, plan = entry.call, entry.topic
        transfer = call.transfer
        if not transfer.push:
            return Send(entry.peer, PullBatch(entry.request, plan.batch, call.clock))
        step, settled = call.steps
        message = PushBatch(
            entry.request,
            plan.batch,
            call.clock,
            transfer.how,
            transfer.samples,
            transfer.pull,
            step=step,
            settled=settled,
            place=call.place,
        )
        return Send(entry.peer, message, () if transfer.how == ABSENT else self._payload(call, plan))

    def _payload(self, call: InFlight, plan: MessagePlan) -> tuple[Span, ...]:
        """The bytes of the call's sources that a message brings."""
        listed = call.listed
        if listed is not None and call.plan is not None:
            whole, sources = call.plan.wholes.get(plan), listed.sources
            if whole is not None and sources is not None:
                return (Span(whole.gathered(sources), 0, plan.nbytes),)
        transfer = call.transfer
        return plan.payload_of(call.items(), None if transfer is None else transfer.whole)

    def declare(self, plan: MessagePlan, priority: int) -> None:
        """Tells the server what is in the batch, ahead of the message that names it."""
        server = self._servers.peer_of(plan.partition)
        batch = self._plans.declare(plan, server)
        message = DeclareBatch(self._asker.number(), batch, plan.slice_ids)
        entry = Entry(Send(server, message), lambda event: None, priority=priority, topic=plan.partition)
        self._outbox.add(entry)

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
            self.settle(call)
        elif error is not None:
            self._calls.complete(call, error=error)

    def _copy_values(self, call: InFlight, plan: MessagePlan, values: Values | Uncounted, event: Received) -> None:
        """Notes the versions, and copies the values to where the call wants them. Once the call is completed, that
        memory is the program's again."""
        if call.taken is None:
            call.taken = []
        call.taken.append((plan, values.versions))
        if call.state is COMPLETED:
            return
        listed = call.listed
        if listed is not None and call.plan is not None:
            whole, targets = call.plan.wholes.get(plan), listed.targets
            if whole is not None and targets is not None:
                self._emit(whole.scatter(event.payload, targets))
                return
        items = call.items()
        self._emit(Copy(event.payload, tuple([items[item].target for item in plan.items]), plan.rows))

    # ── the end of a transfer ──

    def settle(self, call: InFlight) -> None:
        """All messages are answered: the windows move on, the keys' next calls start, and the call is completed.

        A push that no server took gives its clock back.
        """
        pulling, call.pulling = call.pulling, ()
        if call.transfer is not None and call.transfer.push:
            settle_pushes(call.windows, call.error, call.is_untaken, pulling)
        elif pulling:
            end_pulls(call.windows, pulling)
        if call.is_reading:
            end_reads(call.windows)
            call.is_reading = False
        call.withdraw = None  # no cycle stays behind that keeps the program's memory
        if call.plan is None or len(call.windows) > 1 or len(call.keys) == 1:  # no call queues for a key in a group
            for key in call.keys:
                if key.queue:
                    self._wake(key)
        if call.state is not COMPLETED:
            versions = versions_of(call.taken or (), len(call.keys))
            self._calls.complete(call, versions if call.counts else requests.UncountedVersions(versions), call.error)
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
            if isinstance(earlier.request, requests.Transfer) and _uses(earlier, copies):
                text = "the caller stopped waiting; its pushes are still on their way"
                outcome: Outcome = "unknown" if earlier.may_have_happened else "not_sent"
                self._calls.abandon(earlier, RequestTimeout(text, outcome=outcome))
        for push in self._pushes.open():
            if push.listed is not None and _uses(push, copies):
                for entry in push.entries:  # what was gathered is sent value by value from now on
                    entry.replace_payload(entry.topic.payload_of(push.items()))
        self._outbox.replace_sources(copies)
        self._calls.complete(call)


def _uses(call: InFlight, sources: Mapping[int, Any]) -> bool:
    """Whether a call uses some of these sources, by their identity."""
    return any(id(item.source) in sources for item in call.items())
