"""Small calls whose bytes the shell sends and takes in itself: which ones may begin, and what ends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core.machine import Send, ServerPeer, Tick
from kvd.core.outbox import QUEUED, SENT, Outbox
from kvd.core.requests import Control, Item, Transfer, Versions
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.machine import WorkerMachine
from kvd.core.worker.transfer_plans import TransferPlans
from kvd.protocol.messages import Epoch, PushBatch, SetOptimizer, Values
from tests.core.fakes import SLICE, of, uint8
from tests.core.small_calls_harness import PUSHPULL, SmallCallSteps
from tests.core.test_worker_calls_in_flight import KEYS, push, repeated, values
from tests.core.worker_harness import Harness, number, ready


class Owner:
    """Counts how often the machine asks for the request."""

    def __init__(self) -> None:
        self.asked = 0

    def request(self) -> Transfer:
        self.asked += 1
        return Transfer((Item("a", uint8(1), "source a", "target a"),), push=True, pull=True)


def in_flight(*keys: str) -> tuple[Harness, SmallCallSteps, list[Send]]:
    harness = repeated()
    steps = harness.small_calls = SmallCallSteps(WorkerMachine.step)
    return harness, steps, [push(harness, key) for key in keys]


def begin(harness: Harness, owner: Owner, key: str = "a", place: int = 0) -> InFlight | None:
    machine = harness.machine
    machine.next_deadline()
    plan = machine.plan_of(key, uint8(1))
    assert plan is not None
    call = InFlight(1000, None, harness.now + 60.0, True, place, harness.now, 30.0, harness.now + 30.0, owner)
    return None if machine.begin(plan, PUSHPULL, call, harness.now) is None else call


def test_calls_begin_and_end_without_a_step() -> None:
    harness, steps, sends = in_flight(*KEYS)
    assert steps.begun == 4
    for send in reversed(sends):
        values(harness, send)
    assert steps.ended == 4
    assert [harness.result(harness._calls - place) for place in range(4)] == [[Versions(3, 3)]] * 4


def test_two_on_one_key() -> None:
    harness, steps, sends = in_flight("a", "b", "b")
    assert steps.begun == 3
    for send in sends:
        values(harness, send)
    assert steps.ended == 3
    assert harness.result(harness._calls) == [Versions(4, 4)]


def test_no_more_than_rounds_may_run_ahead() -> None:
    _, steps, _ = in_flight("b", "b", "b")
    assert steps.begun == 2


def test_none_is_at_another_place_than_those_in_flight() -> None:
    harness, steps, _ = in_flight("a", "b")
    harness.push("c", pull=True, place=8)
    assert steps.begun == 2


def test_a_message_is_made_when_it_has_to_be_sent_again() -> None:
    harness, owner = repeated(), Owner()
    call = begin(harness, owner)
    assert call is not None
    (entry,) = call.entries
    assert entry.state is SENT
    assert owner.asked == 0
    (again,) = [send for send in of(Send, harness.wait(2.5)) if isinstance(send.message, PushBatch)]
    assert isinstance(again.message, PushBatch)
    assert (again.message.request, again.message.clock) == (entry.request, 3)
    assert [span.buffer for span in again.payload] == ["source a"]
    assert owner.asked == 1


def test_a_call_that_waits_for_credit_leaves_as_a_message() -> None:
    harness, owner = ready("a", "b", batches=True, small=0, credit=1), Owner()
    for clock in (1, 2):
        push(harness, "a")
        harness.values(type(harness.sent[0].message), (clock,), b"x")
    harness.push("b", pull=True)
    ahead = harness.sent[-1]
    call = begin(harness, owner)
    assert call is not None
    (entry,) = call.entries
    assert entry.state is QUEUED
    sends = of(Send, harness.say(ahead.peer, Values(number(ahead), (1,)), b"x"))
    assert [number(send) for send in sends] == [entry.request]
    assert owner.asked == 1


def wait_for_all_to_be_staged(harness: Harness) -> None:
    push(harness, "b")
    harness.call(Control((SetOptimizer(0, None),), staged_first=True))


def queue_behind_another(harness: Harness) -> None:
    harness.push("a", pull=True)
    harness.push("a", pull=True)
    harness.push("a", pull=True)


def be_late(harness: Harness) -> None:
    harness.machine.next_deadline()
    harness.now += 5.0


@pytest.mark.parametrize(
    "happens",
    [queue_behind_another, wait_for_all_to_be_staged, lambda harness: harness.machine._plans.clear()],
    ids=["queued", "probed", "forgotten"],
)
def test_a_call_that_must_wait_does_not_begin(happens: Callable[[Harness], object]) -> None:
    harness, owner = repeated(), Owner()
    machine = harness.machine
    plan = machine.plan_of("a", uint8(1))
    assert plan is not None
    happens(harness)
    machine.next_deadline()
    call = InFlight(1000, None, 60.0, True, 0, harness.now, 30.0, 30.0, owner)
    before = len(machine.calls_by_number)
    assert machine.begin(plan, PUSHPULL, call, harness.now) is None
    assert len(machine.calls_by_number) == before


def forget_alone(plans: TransferPlans) -> None:
    """A shell that has kept a plan is not told."""
    plans._plans.clear()


def test_a_plan_that_is_forgotten_in_secret_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferPlans, "clear", forget_alone)
    with pytest.raises(AssertionError):
        test_a_call_that_must_wait_does_not_begin(lambda harness: harness.machine._plans.clear())


def test_a_call_does_not_begin_before_what_is_due() -> None:
    harness = repeated()
    be_late(harness)
    machine = harness.machine
    plan = machine.plan_of("a", uint8(1))
    assert plan is not None
    call = InFlight(1000, None, 90.0, True, 0, harness.now, 30.0, 60.0, Owner())
    assert machine.begin(plan, PUSHPULL, call, harness.now) is None
    harness.step(Tick())
    assert machine.begin(plan, PUSHPULL, call, harness.now) is not None


def test_only_values_of_one_slice_are_small() -> None:
    harness = repeated()
    harness.know("large", spec=uint8(SLICE + 8))
    for _ in range(2):
        harness.push("large", spec=uint8(SLICE + 8), pull=True)
        harness.settle()
    assert harness.machine.plan_of("large", uint8(SLICE + 8)) is None
    assert harness.machine.plan_of("nothing", uint8(1)) is None


def test_a_call_that_is_over_takes_no_answer() -> None:
    """Once its caller was told of the timeout, its memory is the program's again."""
    harness, owner = repeated(), Owner()
    call = begin(harness, owner)
    assert call is not None
    (entry,) = call.entries
    harness.wait(100.0)
    assert harness.done[1000].error is not None
    harness.machine.next_deadline()
    assert harness.machine.answered(entry.peer, Epoch(1, 1), entry.request, 1, harness.now) is None


@pytest.mark.parametrize(
    "ends",
    [
        lambda machine, send: machine.answered(ServerPeer(7), Epoch(1, 1), number(send), 1, 0.0),
        lambda machine, send: machine.answered(send.peer, Epoch(1, 9), number(send), 1, 0.0),
        lambda machine, send: machine.answered(send.peer, Epoch(1, 1), number(send), 2, 0.0),
        lambda machine, send: machine.answered(send.peer, Epoch(1, 1), number(send) + 1, 1, 0.0),
        lambda machine, send: machine.answered(send.peer, Epoch(1, 1), number(send), 1, 2.5),
    ],
    ids=["of somebody else", "of a newer view", "of another size", "to nothing", "when something is due"],
)
def test_other_answers_end_nothing(ends: Callable[[WorkerMachine, Send], InFlight | None]) -> None:
    harness, _, sends = in_flight("a", "b")
    harness.machine.next_deadline()
    assert ends(harness.machine, sends[1]) is None
    harness.say(sends[1].peer, Values(number(sends[1]), (3,)), b"x")
    assert harness.result(harness._calls) == [Versions(3, 3)]


def test_the_answer_to_another_call_is_for_a_step() -> None:
    harness = repeated()
    send = push(harness, "a")
    harness.machine.next_deadline()
    assert harness.machine.answered(send.peer, Epoch(1, 1), number(send), 1, harness.now) is None


def test_calls_that_end_beside_an_open_one_leave_no_deadlines_behind() -> None:
    session: Any = None
    book = CallBook(session, Outbox(1 << 20), lambda effect: None)
    book.enter(InFlight(1, None, 60.0, True, ends_at=30.0))
    for later in range(2, 2000):
        call = InFlight(later, None, 60.0, True, ends_at=30.0 + later)
        book.enter(call)
        book.close(call)
    assert len(book.deadlines) < 200
    assert book.next_deadline() == 30.0
