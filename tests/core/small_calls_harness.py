"""A shell that begins and ends small calls without a step, as the client library does; and calls without plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from kvd.core.machine import Complete, Copy, Effect, LocalCall, Received
from kvd.core.outbox import SENT
from kvd.core.requests import Transfer, Versions
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.machine import WorkerMachine
from kvd.core.worker.transfer_plans import TransferPlan, TransferPlans
from kvd.protocol.codec import encode
from kvd.protocol.fixed import PUSH_NBYTES, put_push
from kvd.protocol.messages import ADD, Values
from kvd.protocol.specs import KeySpec

PUSHPULL = Transfer((), push=True, pull=True)


class _Owner:
    """What the shell knows of a call."""

    def __init__(self, event: LocalCall) -> None:
        self.event = event

    def request(self) -> Any:
        return self.event.request


class SmallCallSteps:
    """Steps a machine; small calls that it knows begin and end without a step.

    Args:
        step: `WorkerMachine.step`.
        every: of so many calls one is begun here, if it can be; the others are steps.

    Attributes:
        begun, ended: how many calls were, here.
    """

    def __init__(self, step: Callable[[WorkerMachine, Any, float], list[Effect]], every: int = 1) -> None:
        self.begun = self.ended = 0
        self._plans: WeakKeyDictionary[WorkerMachine, dict[tuple[str, KeySpec], TransferPlan]] = WeakKeyDictionary()
        self._step = step
        self._every = every

    def step(self, machine: WorkerMachine, event: Any, now: float) -> list[Effect]:
        effects = None
        machine.next_deadline()
        if isinstance(event, LocalCall) and event.call % self._every == 0 and _is_small(event.request):
            effects = self._begin(machine, event, now)
        elif isinstance(event, Received) and isinstance(event.message, Values):
            effects = self._end(machine, event, now)
        return self._step(machine, event, now) if effects is None else effects

    def _begin(self, machine: WorkerMachine, event: LocalCall, now: float) -> list[Effect] | None:
        number, request, deadline, answer_s = event
        assert isinstance(request, Transfer)
        (item,) = request.items
        if item.spec is None:
            return None
        kept = self._plans.setdefault(machine, {})  # by the shell
        plan = kept.get((item.key, item.spec))
        if plan is None or plan.is_forgotten:
            plan = machine.plan_of(item.key, item.spec)
            if plan is None:
                return None
            kept[item.key, item.spec] = plan
        ends_at = deadline if answer_s is None else min(deadline, now + answer_s)
        call = InFlight(number, None, deadline, True, request.place, now, answer_s, ends_at, _Owner(event))
        entry = machine.begin(plan, PUSHPULL, call, now)
        if entry is None:
            return None
        self.begun += 1
        if entry.state is not SENT:
            return []
        frame, (step, settled) = bytearray(PUSH_NBYTES), call.steps
        batch = plan.messages[0].batch
        sender, epoch, run = machine.incarnation, machine.epoch, machine.run
        put_push(frame, 0, sender, epoch, run, entry.request, batch, call.clock, step, settled, call.place)
        assert frame == encode(entry.send.message, sender, epoch, run), "another header than the message has"
        return [entry.send]

    def _end(self, machine: WorkerMachine, event: Received, now: float) -> list[Effect] | None:
        message = event.message
        assert isinstance(message, Values)
        if event.run != machine.run or message.coding is not None or event.fault or len(message.versions) != 1:
            return None
        call = machine.answered(event.peer, event.epoch, message.request, event.nbytes, now)
        if call is None:
            return None
        self.ended += 1
        version = message.versions[0]
        assert call.plan is not None
        copy = Copy(event.payload, (call.items()[0].target,), call.plan.messages[0].rows)
        return [copy, Complete(call.number, [Versions(version, version)]), *machine.take_effects()]


def _is_small(request: Any) -> bool:
    return (
        isinstance(request, Transfer)
        and request.push
        and request.pull
        and len(request.items) == 1
        and (request.samples, request.priority, request.how) == (1, 0, ADD)
        and not (request.any_version or request.cast or request.some_encoded or request.some_rows)
        and request.takes is None
        and request.sets_out is None
        and request.finds is None
    )


@contextmanager
def without_plans() -> Iterator[None]:
    """Each call is worked out like the first on its keys, and goes through their queues."""
    with pytest.MonkeyPatch.context() as patch:
        for way in ("of_items", "of_key", "of_list"):
            patch.setattr(TransferPlans, way, lambda *arguments: None)
        yield
