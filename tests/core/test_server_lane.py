"""The server's lane: what it takes, and that every push is answered and counted as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core.machine import Effect, LinkPeer, Received, Send, Tick
from kvd.core.principals import KeyRole, Principal
from kvd.core.server import pending
from kvd.core.server.express import Round
from kvd.core.server.lane import MAX_REMEMBERED, PushLane
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    ASSIGN,
    Attach,
    Capture,
    CaptureDone,
    CaptureWhen,
    Epoch,
    PathKind,
    PushBatch,
    ReadSlices,
    SetOptimizer,
    SliceId,
)
from tests.core.fakes import NodePeer, cluster, member, of, padded_bytes, said, worker_id
from tests.core.server_harness import Harness, together

KEYS = ("a", "b")
BYTES = [b"\1", b"\2"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The request numbers of the pushes that lanes took."""
    taken: list[int] = []
    take = PushLane._take

    def noting(lane: PushLane, usual: Any, event: Received, push: PushBatch) -> bool:
        is_taken = take(lane, usual, event, push)
        taken.extend([push.request] if is_taken else [])
        return is_taken

    monkeypatch.setattr(PushLane, "_take", noting)
    return taken


def a_peer(number: int) -> Any:
    return NodePeer(number)


def push(run: Harness, rank: int, clock: int, **more: Any) -> list[Effect]:
    return run.push_batch(rank, clock, *BYTES, **more)


# ── what it takes ──


def test_from_the_second_round_on_pushes_go_by_the_lane(taken: list[int]) -> None:
    run = together(*KEYS, small=1 << 10)
    for clock in (2, 3, 4):
        assert push(run, 0, clock, pull=True) == []
        effects = push(run, 1, clock, pull=True)
        assert [message.versions for message in said(effects)] == [(clock,), (clock,)]
    assert len(taken) == 6
    assert [len(job.contributions) for job in run.applied] == [2, 2, 2, 2]


def test_a_large_push_is_told_that_it_is_staged(taken: list[int]) -> None:
    run = together(*KEYS, small=0)
    assert [type(send.message).__name__ for send in of(Send, push(run, 0, 2, request=50))] == ["Staged"]
    assert [type(send.message).__name__ for send in of(Send, push(run, 1, 2, request=51))] == ["Done", "Done"]
    assert taken == [50, 51]


def test_asynchronous_pushes_go_the_general_way(taken: list[int]) -> None:
    run = together(*KEYS, settings=cluster()._replace(mode="async"))
    push(run, 0, 2)
    push(run, 0, 3)
    assert taken == []


def test_turned_off_it_takes_nothing(taken: list[int]) -> None:
    run = together(*KEYS, lanes=False)
    push(run, 0, 2)
    assert taken == []


def test_what_is_remembered_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    run = together(*KEYS)
    handler: Any = run.machine._handlers[PushBatch]
    lane: PushLane = handler.__self__
    one = next(iter(lane._usual.values()))
    lane._usual.update({(7, number): one for number in range(MAX_REMEMBERED)})
    push(run, 0, 2, how=ASSIGN)  # by the general way
    assert len(lane._usual) < MAX_REMEMBERED


# ── with the lane and without ──


def probe(run: Harness) -> Any:
    """A push that lies here is asked about, and one that never came."""
    push(run, 0, 3, request=50)
    run.say(0, PushBatch(50, 1, 3, 0, 1, False, True))
    return [run.say(1, PushBatch(51, 1, 3, 0, 1, False, True)), push(run, 1, 3, request=51)]


def broadcast(run: Harness) -> Any:
    return [push(run, 0, 3, how=ASSIGN), push(run, 1, 3, how=ASSIGN), push(run, 0, 4), push(run, 1, 4)]


def broadcast_and_push(run: Harness) -> Any:
    return [push(run, 0, 3, how=ASSIGN), push(run, 1, 3)]


def push_and_broadcast(run: Harness) -> Any:
    return [push(run, 0, 3), push(run, 1, 3, how=ASSIGN)]


def repeated(run: Harness) -> Any:
    return [push(run, 0, 3, request=50), push(run, 0, 3, request=50, peer=a_peer(77)), push(run, 1, 3)]


def repeated_when_it_counts(run: Harness) -> Any:
    return [push(run, 0, 3, request=50), push(run, 1, 3), push(run, 0, 3, request=50)]


def of_an_earlier_number(run: Harness) -> Any:
    """What was given up arrives after what came later."""
    return [push(run, 0, 3, request=50), push(run, 1, 3), push(run, 0, 4, request=49)]


def of_a_number_that_is_open(run: Harness) -> Any:
    """A sender that gives a push the number of a pull that waits."""
    run.say(0, PushBatch(50, 1, 3, 0, 1, True, False), padded_bytes(BYTES))
    waiting = run.pull_batch(1, 4)
    number = run._request
    return [waiting, push(run, 1, 3, request=number), push(run, 1, 3, request=number + 1)]


def ahead(run: Harness) -> Any:
    return [push(run, 0, 3), push(run, 0, 4), push(run, 1, 3), push(run, 1, 4)]


def too_far(run: Harness) -> Any:
    return [push(run, 0, 3), push(run, 0, 4), push(run, 0, 5), push(run, 0, 7)]


def of_another_size(run: Harness) -> Any:
    return [run.push_batch(0, 3, b"\1"), run.push_batch(0, 3), push(run, 1, 3)]


def over_another_connection(run: Harness) -> Any:
    """The link of a worker is gone: `kvd status` says how its messages come now."""
    link = LinkPeer("one")
    welcomed = run.say(0, Attach(1, 0, PathKind.SHARED_MEMORY), peer=link)
    pushed = [push(run, 0, 3, peer=link), push(run, 1, 3), push(run, 0, 4), push(run, 1, 4)]
    return welcomed, pushed


def under_another_key(run: Harness) -> Any:
    """Somebody else speaks in the name of the worker."""
    who = worker_id(0)
    stranger = Principal("stranger", frozenset({KeyRole.WORKER}))
    message = PushBatch(50, 1, 3, 0, 1, False)
    event = Received(a_peer(who), who, Epoch(1, 1), message, padded_bytes(BYTES), 16, principal=stranger)
    return [run.step(event), push(run, 1, 3)]


def one_key_alone(run: Harness) -> Any:
    """The group is parted."""
    return [
        run.push(0, 3, b"\5", key="a"),
        run.push(1, 3, b"\5", key="a"),
        push(run, 0, 3),
        run.push(0, 3, b"\5", key="b"),
        run.push(1, 3, b"\5", key="b"),
    ]


def while_it_is_applied(run: Harness) -> Any:
    run.hold = True
    effects = [push(run, 0, 3), push(run, 1, 3), push(run, 0, 4), push(run, 1, 4)]
    while run.jobs:
        effects.append(run.finish(run.jobs[0]))
    return effects


def another_optimizer(run: Harness) -> Any:
    agreed = [run.say(rank, SetOptimizer(run.request(), to_wire(SGD(1.0)))) for rank in range(2)]
    return [agreed, push(run, 0, 3), push(run, 1, 3)]


def at_odds(run: Harness) -> Any:
    """Worker 0 sets an optimizer, worker 1 pushes on without it."""
    both = [run.say(rank, SetOptimizer(run.request(), to_wire(SGD(1.0)))) for rank in range(2)]
    pushed = [push(run, rank, 3) for rank in range(2)] + [push(run, rank, 4) for rank in range(2)]
    odd = run.say(0, SetOptimizer(run.request(), to_wire(SGD(0.5))))
    return [both, pushed, odd, push(run, 1, 5), push(run, 0, 5), push(run, 1, 6)]


def probe_with_bytes(run: Harness) -> Any:
    """No worker of ours sends such a thing."""
    return [run.say(0, PushBatch(50, 1, 3, 0, 1, False, True), padded_bytes(BYTES)), push(run, 1, 3), push(run, 0, 3)]


def again_under_another_number(run: Harness) -> Any:
    return [push(run, 0, 3, request=50), run.push_batch(0, 3, b"\7", b"\7", request=51), push(run, 1, 3)]


def of_a_number_before_a_refusal(run: Harness) -> Any:
    """A push was refused, and one that its sender had given up before arrives."""
    refused = [push(run, 1, 3), push(run, 0, 3, how=ASSIGN, request=60)]
    return [refused, push(run, 0, 3, request=55), push(run, 0, 3, request=61)]


def parted_by_another_batch(run: Harness) -> Any:
    """Only pushes and pulls of batches have come since the group was seen whole."""
    for rank in range(2):
        run.declare(rank, 2, "b")
    rounds = [push(run, rank, clock) for clock in (3, 4) for rank in range(2)]
    apart = [run.push_batch(rank, 5, b"\5", batch=2) for rank in range(2)]
    return [rounds, apart, push(run, 0, 5), run.push(0, 5, b"\5", key="a"), run.push(1, 5, b"\5", key="a")]


def a_worker_dies_that_has_pushed(run: Harness) -> Any:
    """Its last push counts; those who wait for the next one are told at once."""
    pushed = push(run, 1, 3)
    lost = run.look(member("worker", 1, "dead", last_seen_s=3.0))
    return [pushed, lost, push(run, 0, 3), push(run, 0, 4)]


def a_reader_waits_for_a_step(run: Harness) -> Any:
    """It is known to be over when a worker says so, with its push of a later one."""
    reader, slice_ids = 12_345, tuple(SliceId(key, 0) for key in KEYS)
    asked = run.step(Received(a_peer(reader), reader, Epoch(1, 1), ReadSlices(1, 1, 5, False, slice_ids)))
    pushed = [push(run, rank, 3, step=3, settled=2) for rank in range(2)]
    return [asked, pushed, push(run, 0, 4, step=7, settled=6), push(run, 1, 4, step=7, settled=6)]


def a_worker_dies(run: Harness) -> Any:
    lost = run.look(member("worker", 1, "dead", last_seen_s=3.0))
    return [push(run, 0, 3), lost, push(run, 0, 4), run.explain()]


def captured(run: Harness) -> Any:
    operator = 12_345
    slice_ids = tuple(SliceId(key, 0) for key in KEYS)

    def say(message: Any) -> list[Effect]:
        return run.step(Received(a_peer(operator), operator, Epoch(1, 1), message))

    asked = say(Capture(1, 1, 5, CaptureWhen.COMPLETE, slice_ids))
    pushed = [push(run, rank, 3, step=3, settled=2) for rank in range(2)]
    pushed += [push(run, rank, 4, step=7, settled=6) for rank in range(2)]
    return [asked, pushed, say(CaptureDone(2, 1))]


def the_update_fails(run: Harness) -> Any:
    run.error = NotAllowed("no")
    failed = [push(run, 0, 3), push(run, 1, 3)]
    run.error = None
    return [failed, push(run, 0, 3), push(run, 1, 3)]


def too_many_wait(run: Harness) -> Any:
    return [push(run, 0, 3), push(run, 0, 4), push(run, 1, 3)]


ODD: list[Callable[[Harness], Any]] = [
    probe,
    broadcast,
    broadcast_and_push,
    push_and_broadcast,
    repeated,
    repeated_when_it_counts,
    of_an_earlier_number,
    of_a_number_that_is_open,
    ahead,
    too_far,
    of_another_size,
    over_another_connection,
    under_another_key,
    one_key_alone,
    while_it_is_applied,
    another_optimizer,
    at_odds,
    a_worker_dies,
    probe_with_bytes,
    again_under_another_number,
    of_a_number_before_a_refusal,
    parted_by_another_batch,
    a_worker_dies_that_has_pushed,
    a_reader_waits_for_a_step,
    captured,
    the_update_fails,
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
@pytest.mark.parametrize("small", [-1, 1 << 10])
def test_what_is_odd_goes_as_without_the_lane(odd: Callable[[Harness], Any], small: int, taken: list[int]) -> None:
    by_lanes = [both(odd, small=small, lanes=lanes) for lanes in (True, False)]
    assert by_lanes[0] == by_lanes[1]
    assert len(taken) >= 2  # those of the second round


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
def test_what_is_odd_goes_as_without_the_express_way(
    odd: Callable[[Harness], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Round | None] = []
    hold = PushLane.hold

    def noting(lane: PushLane, *arguments: Any) -> Round | None:
        held.append(hold(lane, *arguments))
        return held[-1]

    monkeypatch.setattr(PushLane, "hold", noting)
    by_express = both(odd, small=1 << 10, express=True)
    assert len(held) - held.count(None) >= 2  # those of the second round
    assert by_express == both(odd, small=1 << 10, lanes=False)


def both(odd: Callable[[Harness], Any], **how: Any) -> Any:
    """What a server does that has served a second round by the lane, if it has one; and the values at the end."""
    run = together(*KEYS, **how)
    served = [push(run, rank, 2) for rank in range(2)]
    answered = odd(run)
    run.step(Tick())  # nothing is held any more
    return [served, answered, [run.value(key) for key in KEYS], run.explain()]


def test_a_number_that_is_used_twice_is_held_once() -> None:
    """No worker of ours does it: one request for the pushes of two batches."""
    run = together(*KEYS, small=1 << 10, express=True)
    for rank in range(2):
        push(run, rank, 2)
    for key in ("c", "d"):
        run.init(key, b"\1")
    for rank in range(2):
        run.declare(rank, 2, "c", "d")
    for clock in (1, 2):
        for rank in range(2):
            run.push_batch(rank, clock, b"\1", b"\1", batch=2)
    run.hold = True
    for batch, clock in ((1, 3), (2, 3)):
        for rank in range(2):
            run.push_batch(rank, clock, *BYTES, batch=batch, request=1000)
    run.step(Tick())
    run.machine.validate()
    while run.jobs:
        run.finish(run.jobs[0])
    assert len(run.machine._waiters.pending) == 0


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_round_that_has_its_quorum_waits_for_a_moment(quorum: int) -> None:
    settings = cluster(3, quorum=quorum, quorum_grace_s=0.5)

    def some_come(run: Harness) -> Any:
        pushed = [push(run, 2, 2)]
        for run.now in (5.0, 10.0):  # it looks, and the round was complete
            run.step(Tick())
        pushed += [push(run, rank, 3) for rank in range(2)]
        return pushed, run.machine._pushes.late.next_deadline()

    answers = [both(some_come, settings=settings, workers=3, lanes=lanes) for lanes in (True, False)]
    assert answers[0] == answers[1]


def test_a_peer_with_too_many_open_requests_is_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MAX_PENDING", 0)
    answers = [both(too_many_wait, lanes=lanes) for lanes in (True, False)]
    assert answers[0] == answers[1]
