"""Kept verdicts on pushes of batches: which pushes they admit, and that every push is answered and counted as if each
were admitted anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core.machine import Effect, LinkPeer, Received, Send, Tick
from kvd.core.principals import KeyRole, Principal
from kvd.core.server import batches, pending
from kvd.core.server.batches import BatchTable
from kvd.core.server.groups import FusedGroup
from kvd.core.server.keys import KeyTable
from kvd.core.server.push import Pushes
from kvd.core.server.verdicts import MAX_VERDICTS, Regime, Verdicts
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    ANY_CLOCK,
    ASSIGN,
    Attach,
    Capture,
    CaptureDone,
    CaptureWhen,
    Epoch,
    HeartbeatAck,
    PathKind,
    PullBatch,
    PushBatch,
    ReadSlices,
    SetOptimizer,
    SliceId,
)
from tests.core.fakes import NodePeer, cluster, from_scheduler, member, of, padded_bytes, said, worker_id
from tests.core.server_harness import Harness, kinds, together

KEYS = ("a", "b")
BYTES = [b"\1", b"\2"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The request numbers of the pushes that were taken by a kept verdict."""
    taken: list[int] = []
    take = Pushes.take

    def noting(pushes: Pushes, group: Any, verdict: Any, sender: int, push: Any, *more: Any) -> bool:
        is_taken = take(pushes, group, verdict, sender, push, *more)
        taken.extend([push.request] if is_taken else [])
        return is_taken

    monkeypatch.setattr(Pushes, "take", noting)
    return taken


def a_peer(number: int) -> Any:
    return NodePeer(number)


def push(run: Harness, rank: int, clock: int, **more: Any) -> list[Effect]:
    return run.push_batch(rank, clock, *BYTES, **more)


# ── what it takes ──


def test_from_the_second_round_on_pushes_are_taken_by_a_verdict(taken: list[int]) -> None:
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


def test_no_verdict_on_asynchronous_pushes_is_kept(taken: list[int]) -> None:
    run = together(*KEYS, settings=cluster()._replace(mode="async"))
    push(run, 0, 2)
    push(run, 0, 3)
    assert taken == []


def test_two_rounds_ahead_are_taken_by_a_verdict(taken: list[int]) -> None:
    run = together(*KEYS, small=1 << 10)
    assert push(run, 0, 2, request=50) == push(run, 0, 3, request=51) == []
    assert len(said(push(run, 1, 2, request=52))) == len(said(push(run, 1, 3, request=53))) == 2
    assert taken == [50, 51, 52, 53]


def test_a_heartbeat_changes_no_regime_and_a_view_does(taken: list[int]) -> None:
    run = together(*KEYS)
    run.step(from_scheduler(HeartbeatAck(()), (1, run.epoch)))
    push(run, 0, 2, request=50)
    run.look()
    push(run, 1, 2, request=51)
    assert taken == [50]


def a_group(run: Harness) -> tuple[FusedGroup, Regime, set[int], Verdicts]:
    """The group of both keys, and verdicts on pushes to it."""
    regime, leaving = Regime(), set[int]()
    return run.machine.table.slices["a", 0].group, regime, leaving, Verdicts(regime, KeyTable(), BatchTable(), leaving)


def test_the_number_of_verdicts_has_a_limit() -> None:
    group, _, _, verdicts = a_group(together(*KEYS))
    for sender in range(1, 2 * MAX_VERDICTS):
        verdicts.keep(group, sender, a_peer(7), 0)
        assert len(group.verdicts) <= MAX_VERDICTS


def test_a_verdict_is_about_one_connection_one_regime_and_one_optimizer() -> None:
    group, regime, leaving, verdicts = a_group(together(*KEYS))

    def found(sender: int = 7, peer: int = 7) -> bool:
        return verdicts.find(a_peer(peer), sender, 0, group) is not None

    assert not found()
    verdicts.keep(group, 7, a_peer(7), 0)
    assert found()
    assert not found(peer=8)
    assert not found(sender=8)
    leaving.add(group.partition)
    assert not found()
    leaving.clear()
    assert found()
    regime.change()
    assert not found()
    verdicts.keep(group, 7, a_peer(7), 0)
    assert found()
    group.renew(SGD(1.0), 1)
    assert not found()


def test_a_batch_that_is_forgotten_takes_its_verdict_along(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    monkeypatch.setattr(batches, "MAX_SLICE_IDS", 3)
    run = together(*KEYS)
    run.declare(0, 2, *KEYS)
    assert kinds(push(run, 0, 2)) == ["NotYet"]
    assert taken == []


# ── with verdicts and without ──


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


def pulls_of_versions(run: Harness) -> Any:
    """The newest one, the one before, one that is not kept, any, and one that is to come."""
    asked = [[run.pull_batch(rank, clock) for rank in range(2)] for clock in (2, 1, 0, ANY_CLOCK, 3)]
    return [asked, push(run, 0, 3), push(run, 1, 3)]


def a_pull_repeated(run: Harness) -> Any:
    """It waits, and is asked again, also over another connection; and once more when it was answered."""

    def ask(**where: Any) -> list[Effect]:
        return run.say(0, PullBatch(60, 1, 3), **where)

    return [ask(), ask(), ask(peer=a_peer(77)), push(run, 0, 3), push(run, 1, 3), ask()]


def a_pull_under_the_number_of_a_push(run: Harness) -> Any:
    return [push(run, 0, 3, request=60), run.say(0, PullBatch(60, 1, 2)), push(run, 1, 3)]


def pulls_that_wait_for_the_dead(run: Harness) -> Any:
    lost = run.look(member("worker", 1, "dead", last_seen_s=3.0))
    pushed = push(run, 0, 3)
    return [lost, pushed, push(run, 0, 4), run.pull_batch(0, 3), run.pull_batch(0, 2)]


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
    pulls_of_versions,
    a_pull_repeated,
    a_pull_under_the_number_of_a_push,
    pulls_that_wait_for_the_dead,
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
@pytest.mark.parametrize("small", [-1, 1 << 10])
def test_what_is_odd_goes_as_without_a_verdict(odd: Callable[[Harness], Any], small: int, taken: list[int]) -> None:
    with_verdicts = both(odd, small=small)
    assert len(taken) >= 2  # those of the second round
    del taken[:]
    assert with_verdicts == both(odd, small=small, keeps_verdicts=False)
    assert taken == []


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
def test_what_is_odd_goes_as_without_a_verdict_if_pushes_come_as_frames(odd: Callable[[Harness], Any]) -> None:
    assert both(odd, small=1 << 10, by_frames=True) == both(odd, small=1 << 10, keeps_verdicts=False)


def test_pushes_that_come_as_frames_take_no_step() -> None:
    run = together(*KEYS, small=1 << 10, by_frames=True)
    for clock in (2, 3, 4):
        assert push(run, 0, clock, pull=True) == []
        assert {message.versions for message in said(push(run, 1, clock, pull=True))} == {(clock,)}
        assert kinds(run.pull_batch(0, clock)) == ["Values"]
        assert run.pull_batch(1, clock + 1) == []
    assert (run.pushed, run.pulled) == (6, 6)


def both(odd: Callable[[Harness], Any], **how: Any) -> Any:
    """What a server does that has served a second round, by verdicts if it keeps them; and the values at the end."""
    run = together(*KEYS, **how)
    served = [push(run, rank, 2) for rank in range(2)]
    answered = odd(run)
    return [served, answered, [run.value(key) for key in KEYS], run.explain()]


def test_a_number_that_is_used_twice_waits_once() -> None:
    """No worker of ours does it: one request for the pushes of two batches."""
    run = together(*KEYS, small=1 << 10)
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
    while run.jobs:
        run.finish(run.jobs[0])
    assert run.explain()["requests_waiting"] == 0


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_round_that_has_its_quorum_waits_for_a_moment(quorum: int) -> None:
    settings = cluster(3, quorum=quorum, quorum_grace_s=0.5)

    def some_come(run: Harness) -> Any:
        pushed = [push(run, 2, 2)]
        for run.now in (5.0, 10.0):  # it looks, and the round was complete
            run.step(Tick())
        pushed += [push(run, rank, 3) for rank in range(2)]
        return pushed, run.machine.next_deadline()

    answers = [both(some_come, settings=settings, workers=3, keeps_verdicts=keeps) for keeps in (True, False)]
    assert answers[0] == answers[1]


def test_a_peer_with_too_many_open_requests_is_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MAX_PENDING", 0)
    answers = [both(too_many_wait, keeps_verdicts=keeps) for keeps in (True, False)]
    assert answers[0] == answers[1]
