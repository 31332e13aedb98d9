"""Pushes and pulls: a call becomes messages, one per full slice, many small ones together; answers become copies."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvd import errors
from kvd.core import requests
from kvd.core.machine import Copy, Received, Span
from kvd.core.session import SchedulerSession
from kvd.core.worker.calls import Call, WorkerSettings
from kvd.core.worker.key_queue import KeyQueue
from kvd.core.worker.keys import MessagePlan, WorkerKey, plan_messages
from kvd.core.worker.outbox import Entry
from kvd.errors import KvdError, NodeLost, NotAllowed
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    DeclareBatch,
    Done,
    Part,
    Pull,
    PullBatch,
    Push,
    PushBatch,
    Refused,
    Taken,
    Values,
)

MAX_PLANS = 256


class Transfers(KeyQueue):
    """The data side of a worker."""

    def __init__(self, settings: WorkerSettings, session: SchedulerSession) -> None:
        super().__init__(settings, session)
        self._last_batch = 0

    def _transfer_error(self, call: Call, transfer: requests.Transfer) -> KvdError | None:
        if transfer.push and self._observer:
            return NotAllowed("an observer does not push: join as a worker")
        if transfer.push and self._left_rounds:
            return NotAllowed("this worker has left the rounds (join or close): it pushes no more")
        if transfer.push and len(set(call.keys)) < len(call.keys):
            names = [key.name for key in call.keys]
            twice = next(name for name in names if names.count(name) > 1)
            return NotAllowed(f"key {twice!r} is pushed twice in one call: add the values first", key=twice)
        for key, item in zip(call.keys, transfer.items, strict=True):
            spec = item.spec
            if spec is None or spec is key.fits:
                continue
            assert key.spec is not None
            try:
                key.spec.check_same(spec, key.name)
            except (errors.ShapeMismatch, errors.DtypeMismatch) as error:
                return error
            key.fits = spec
        return None

    def _transfer(self, call: Call, transfer: requests.Transfer) -> None:
        """Gives every item its clock, and puts the messages of the call into the outbox."""
        call.result = [None] * len(transfer.items)
        newest = self._observer or self._left_rounds or transfer.any_version
        exact = transfer.pull and self.view.settings.mode != "async"
        if transfer.push:
            for key in call.keys:
                key.clock += 1
                key.open_pushes += 1
        if transfer.push or not newest:
            clocks = [key.clock for key in call.keys]
            if exact:
                call.pulls = list(zip(call.keys, clocks, strict=True))
                for key, clock in call.pulls:
                    key.pulling.append(clock)
        else:
            clocks = [ANY_CLOCK] * len(call.keys)
        plans = self._plans_of(call.keys)
        call.remaining = call.messages = len(plans)
        call.unsettled = len(plans) if transfer.push else 0
        shared = clocks[0] if clocks and clocks.count(clocks[0]) == len(clocks) else None
        for plan in plans:
            if shared is None or not self._is_batch(plan, transfer):
                self._send_parts(call, transfer, plan, clocks)
            else:
                self._send_batch(call, transfer, plan, shared)
        if not plans:
            self._complete(call, call.result)

    def _plans_of(self, keys: list[WorkerKey]) -> list[MessagePlan]:
        """How a call on these keys is cut: worked out once, and kept for the next call on the same keys."""
        names = tuple(keys)
        plans = self._plans.get(names)
        if plans is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plans = self._plans[names] = plan_messages(keys, self.view.settings.slice_bytes)
        return plans

    def _is_batch(self, plan: MessagePlan, transfer: requests.Transfer) -> bool:
        """Whether the plan goes as a batch: at its second use, or at once if it is a push of many slices, which the
        server can treat as one as long as they have come equally far."""
        plan.uses += 1
        return self._batches and (plan.uses > 1 or (transfer.push and len(plan.slice_ids) > 1))

    def _send_parts(self, call: Call, transfer: requests.Transfer, plan: MessagePlan, clocks: list[int]) -> None:
        parts = tuple(
            [Part(key, index, clocks[item]) for (key, index), item in zip(plan.slice_ids, plan.items, strict=True)]
        )
        if transfer.push:
            self._put(call, transfer, plan, Push(self._number(), parts, transfer.how, transfer.samples, transfer.pull))
        else:
            self._put(call, transfer, plan, Pull(self._number(), parts))

    def _send_batch(self, call: Call, transfer: requests.Transfer, plan: MessagePlan, clock: int) -> None:
        if plan.declared_to != self._servers.get(plan.server):
            self._declare(plan, transfer.priority)
        if transfer.push:
            message = PushBatch(self._number(), plan.batch, clock, transfer.how, transfer.samples, transfer.pull)
            self._put(call, transfer, plan, message)
        else:
            self._put(call, transfer, plan, PullBatch(self._number(), plan.batch, clock))

    def _declare(self, plan: MessagePlan, priority: int) -> None:
        """Tells the server what is in the batch, ahead of the message that names it."""
        server: Any = self._servers.get(plan.server)
        if plan.batch == 0:
            self._last_batch += 1
            plan.batch = self._last_batch
        plan.declared_to = server or 0
        message = DeclareBatch(self._number(), plan.batch, plan.slice_ids)
        self._post(None, Entry(server, message, lambda entry, event: self._settled(None, entry), priority=priority))

    def _put(
        self, call: Call, transfer: requests.Transfer, plan: MessagePlan, message: Push | Pull | PushBatch | PullBatch
    ) -> None:
        payload: tuple[Span, ...] = ()
        if transfer.push and transfer.how != ABSENT:
            items = transfer.items
            payload = tuple(
                [
                    Span(items[item].source, offset, nbytes)
                    for item, (offset, nbytes) in zip(plan.items, plan.ranges, strict=True)
                ]
            )
        server: Any = self._servers.get(plan.server)
        self._post(
            call,
            Entry(
                server,
                message,
                partial(self._transfer_answered, call, transfer, plan),
                payload,
                plan.nbytes if payload else 0,
                transfer.priority,
                plan.slice_ids if transfer.push else (),
                plan,
            ),
        )

    def _transfer_answered(
        self, call: Call, transfer: requests.Transfer, plan: MessagePlan, entry: Entry, event: Received
    ) -> None:
        """An answer to one message of a transfer."""
        message = event.message
        error: KvdError | None = None
        if (
            isinstance(message, Values)
            and event.nbytes == plan.nbytes
            and len(message.versions) in (1, len(plan.slice_ids))
        ):
            self._copy_values(call, transfer, plan, message, event)
        elif isinstance(message, Refused):
            error = self._error_of(event)
            if isinstance(error, NodeLost) and transfer.push and message.nodes and message.nodes[0].role == "worker":
                self._lost_a_fellow(call, entry, error)
                return
            call.is_taken_in_part |= message.taken is not Taken.NOTHING
        elif not isinstance(message, Done) or transfer.pull:
            error = errors.ProtocolError(f"the server answered with a {type(message).__name__} that does not fit")
        self._settled(call, entry)
        call.remaining -= 1
        if error is not None:
            call.error = call.error or error
            call.refused += 1
            if transfer.push and call.refused == 1:
                for key in call.keys:
                    key.failing_pushes += 1
        if transfer.push:
            call.unsettled -= 1
            self._check_staged()
        if call.remaining == 0:
            self._release_pulls(call)
            if transfer.push:
                self._push_settled(call)
            self._complete(call, call.result, call.error)
        elif error is not None:
            self._complete(call, error=error)
        if transfer.push:
            self._check_unsettled(call)

    def _lost_a_fellow(self, call: Call, entry: Entry, error: NodeLost) -> None:
        """A worker of the round is dead. The push stays staged: it may come back. Only the waiting ends."""
        self._outbox.staged(entry, self._now)
        self._complete(call, error=error)
        self._check_staged()

    def _copy_values(
        self, call: Call, transfer: requests.Transfer, plan: MessagePlan, values: Values, event: Received
    ) -> None:
        """Copies what was pulled to where the call wants it. After the deadline the memory is the program's again."""
        result = call.result
        if len(values.versions) == 1:
            version = values.versions[0]
            seen_now = requests.Versions(version, version)
            for item in plan.items:
                seen = result[item]
                if seen is None:
                    result[item] = seen_now
                elif seen != seen_now:
                    result[item] = requests.Versions(min(seen.oldest, version), max(seen.newest, version))
        else:
            for item, version in zip(plan.items, values.versions, strict=True):
                oldest, newest = result[item] or (version, version)
                result[item] = requests.Versions(min(oldest, version), max(newest, version))
        if not call.completed:
            items = transfer.items
            targets = tuple([items[item].target for item in plan.items])
            self._out.append(Copy(event.payload, targets, plan.rows))

    def _release_pulls(self, call: Call) -> None:
        """What the call pulled is here, or not wanted any more: the rounds may go on."""
        released, call.pulls = call.pulls, []
        for key, clock in released:
            key.pulling.remove(clock)
        if not call.pushes:
            for key, _ in released:
                self._out_of_queue(key)

    def _push_settled(self, call: Call) -> None:
        """All messages of a push are answered: the window moves on. A push that nobody took gives its clock back."""
        assert isinstance(call.request, requests.Transfer)
        nobody_took_it = call.refused == call.messages and not call.is_taken_in_part
        for key in call.keys:
            key.open_pushes -= 1
            if call.refused:
                key.failing_pushes -= 1
                if nobody_took_it and key.open_pushes == 0:
                    key.clock -= 1
                else:
                    key.broken = call.error
        for key in call.keys:
            if key.queue:
                self._out_of_queue(key)
