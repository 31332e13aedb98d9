"""Kept verdicts on pushes of rows: which pushes they admit, and that all is answered and counted as if each push were
admitted anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.core.machine import Effect, LinkPeer, Received
from kvd.core.principals import KeyRole, Principal
from kvd.core.server.push import Pushes
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    ANY_CLOCK,
    ASSIGN,
    Attach,
    Capture,
    CaptureDone,
    CaptureWhen,
    Delete,
    Epoch,
    KeyId,
    Part,
    PathKind,
    PullRows,
    Push,
    ReadSlices,
    SetOptimizer,
    SliceId,
)
from tests.core.fake_tables import packed_ids, pushed, table
from tests.core.fakes import NodePeer, cluster, member, worker_id
from tests.core.server_harness import Harness, kinds
from tests.core.tables_harness import pull_rows, push_rows

SOME = range(3)


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


def with_two_tables(**how: Any) -> Harness:
    harness = Harness(how.pop("settings", cluster(2)), **how)
    for key in ("t", "u"):
        harness.init(key, b"", table())
    return harness


def push(run: Harness, rank: int, clock: int, ids: Sequence[int] = SOME, **more: Any) -> list[Effect]:
    return push_rows(run, rank, clock, ids, **more)


def a_step(run: Harness, clock: int) -> list[list[Effect]]:
    """Both workers push, and pull what comes of it."""
    told = [push(run, rank, clock) for rank in range(2)]
    return told + [pull_rows(run, rank, clock, [1, 2]) for rank in range(2)]


# ── what it takes ──


def test_from_the_second_step_on_pushes_are_taken_by_a_verdict(taken: list[int]) -> None:
    run = with_two_tables(small=1 << 10)
    for clock in (1, 2, 3):
        assert push(run, 0, clock) == []
        assert pull_rows(run, 0, clock, [1, 2], request=100 + clock) == []
        assert kinds(push(run, 1, clock)) == ["Done", "Done", "Values"]
    assert kinds(pull_rows(run, 1, 3, [1])) == ["Values"]
    assert len(taken) == 4  # of two steps
    assert [len(job.contributions) for job in run.applied] == [2, 2, 2]


def test_a_large_push_is_told_that_it_is_staged(taken: list[int]) -> None:
    run = with_two_tables(small=0)
    a_step(run, 1)
    assert kinds(push(run, 0, 2, request=50)) == ["Staged"]
    assert kinds(push(run, 1, 2, request=51)) == ["Done", "Done"]
    assert taken[-2:] == [50, 51]


def test_tables_in_turn_are_remembered_both(taken: list[int]) -> None:
    run = with_two_tables()
    for clock in (1, 2):
        for key in ("t", "u"):
            for rank in range(2):
                push(run, rank, clock, key=key)
    assert len(taken) == 4


def test_no_verdict_on_asynchronous_pushes_is_kept(taken: list[int]) -> None:
    run = with_two_tables(settings=cluster(2)._replace(mode="async"))
    push(run, 0, 1)
    push(run, 0, 2)
    assert taken == []


# ── with verdicts and without ──


def a_peer(number: int) -> Any:
    return NodePeer(number)


def rows_of_another_size(run: Harness) -> Any:
    return [run.push(0, 3, b"\1" * 9, key="t"), run.push(0, 3, key="t"), push(run, 0, 3), push(run, 1, 3)]


def pulls_of_versions_that_are_there(run: Harness) -> Any:
    """The newest one, the one before, and one that is not kept."""
    return [[pull_rows(run, rank, clock, [3, 1]) for rank in range(2)] for clock in (2, 1, 0)]


def no_rows(run: Harness) -> Any:
    return [push(run, 0, 3, []), push(run, 1, 3, []), pull_rows(run, 0, 3, [])]


def assigned(run: Harness) -> Any:
    return [push(run, 0, 3, how=ASSIGN), push(run, 1, 3)]


def pushed_and_pulled(run: Harness) -> Any:
    return [push(run, 0, 3, pull=True), push(run, 0, 3), push(run, 1, 3)]


def probe(run: Harness) -> Any:
    """A push that lies here is asked about, and one that never came."""
    part = (Part("t", 0, 3),)
    push(run, 0, 3, request=50)
    asked = [run.say(0, Push(50, part, 0, 1, False, True)), run.say(1, Push(51, part, 0, 1, False, True))]
    return [asked, push(run, 1, 3, request=51)]


def repeated(run: Harness) -> Any:
    return [push(run, 0, 3, request=50), push(run, 0, 3, request=50, peer=a_peer(77)), push(run, 1, 3)]


def repeated_when_it_counts(run: Harness) -> Any:
    return [push(run, 0, 3, request=50), push(run, 1, 3), push(run, 0, 3, request=50)]


def a_pull_repeated(run: Harness) -> Any:
    asked = [pull_rows(run, 0, 3, [1], request=60), pull_rows(run, 0, 3, [1], request=60)]
    return [asked, push(run, 0, 3), push(run, 1, 3), pull_rows(run, 0, 3, [1], request=60)]


def of_an_earlier_number(run: Harness) -> Any:
    """What was given up arrives after what came later."""
    return [push(run, 0, 3, request=50), push(run, 1, 3), push(run, 0, 4, request=49)]


def ahead(run: Harness) -> Any:
    pulls = [pull_rows(run, 0, clock, [1]) for clock in (2, 3, 4)]
    return [push(run, 0, 3), push(run, 0, 4), pulls, push(run, 1, 3), push(run, 1, 4)]


def too_far(run: Harness) -> Any:
    return [push(run, 0, 3), push(run, 0, 4), push(run, 0, 5), push(run, 0, 7)]


def over_another_connection(run: Harness) -> Any:
    """The link of a worker is gone: `kvd status` says how its messages come now."""
    link = LinkPeer("one")
    welcomed = run.say(0, Attach(1, 0, PathKind.SHARED_MEMORY), peer=link)
    told = [push(run, 0, 3, peer=link), push(run, 1, 3), push(run, 0, 4), push(run, 1, 4)]
    return welcomed, told


def over_a_connection_that_it_does_not_know(run: Harness) -> Any:
    return [push(run, 0, 3, peer=a_peer(77)), push(run, 1, 3), push(run, 0, 4), push(run, 1, 4)]


def under_another_key(run: Harness) -> Any:
    """Somebody else speaks in the name of the worker."""
    who = worker_id(0)
    stranger = Principal("stranger", frozenset({KeyRole.WORKER}))
    message = Push(50, (Part("t", 0, 3),), 0, 1, False)
    event = Received(a_peer(who), who, Epoch(1, 1), message, pushed(SOME), 48, principal=stranger)
    return [run.step(event), push(run, 1, 3)]


def two_parts(run: Harness) -> Any:
    message = Push(50, (Part("t", 0, 3), Part("u", 0, 1)), 0, 1, False)
    return [run.say(0, message, pushed(SOME)), push(run, 0, 3), push(run, 1, 3)]


def of_another_creation(run: Harness) -> Any:
    late = [
        run.say(0, Push(50, (Part("t", 0, 3, 7),), 0, 1, False), pushed(SOME)),
        run.say(0, PullRows(51, Part("t", 0, 3, 7)), packed_ids([1])),
    ]
    return [late, push(run, 0, 3), push(run, 1, 3)]


def made_again(run: Harness) -> Any:
    """The table is deleted, and another one has its name."""
    for rank in range(2):
        run.say(rank, Delete(run.request(), (KeyId("t", 0),)))
    late = [push(run, 0, 3), pull_rows(run, 0, 3, [1])]
    run.init("t", b"", table())
    return [late, push(run, 0, 1), push(run, 1, 1)]


def cannot_be_decoded(run: Harness) -> Any:
    who = worker_id(0)
    message = Push(50, (Part("t", 0, 3),), 0, 1, False)
    event = Received(a_peer(who), who, Epoch(1, 1), message, pushed(SOME), 48, fault="no")
    return [run.step(event), push(run, 0, 3), push(run, 1, 3)]


def pulls_of_no_ids(run: Harness) -> Any:
    odd = [
        run.say(0, PullRows(50, Part("t", 0, 3)), b"\1" * 9),
        run.say(0, PullRows(51, Part("t", 0, ANY_CLOCK)), packed_ids([1])),
    ]
    return [odd, push(run, 0, 3), push(run, 1, 3)]


def while_it_is_applied(run: Harness) -> Any:
    run.hold = True
    effects = [push(run, 0, 3), push(run, 1, 3), pull_rows(run, 0, 3, [1]), push(run, 0, 4), push(run, 1, 4)]
    while run.jobs:
        effects.append(run.finish(run.jobs[0]))
    return effects


def another_optimizer(run: Harness) -> Any:
    agreed = [run.say(rank, SetOptimizer(run.request(), to_wire(SGD(1.0)))) for rank in range(2)]
    return [agreed, push(run, 0, 3), push(run, 1, 3)]


def at_odds(run: Harness) -> Any:
    """Worker 0 sets an optimizer, worker 1 pushes on without it."""
    both = [run.say(rank, SetOptimizer(run.request(), to_wire(SGD(1.0)))) for rank in range(2)]
    told = [push(run, rank, 3) for rank in range(2)] + [push(run, rank, 4) for rank in range(2)]
    odd = run.say(0, SetOptimizer(run.request(), to_wire(SGD(0.5))))
    return [both, told, odd, push(run, 1, 5), push(run, 1, 6), push(run, 0, 5), pull_rows(run, 1, 6, [1])]


def a_worker_dies(run: Harness) -> Any:
    lost = run.look(member("worker", 1, "dead", last_seen_s=3.0))
    return [push(run, 0, 3), lost, push(run, 0, 4), pull_rows(run, 0, 4, [1]), run.explain()]


def a_worker_dies_that_has_pushed(run: Harness) -> Any:
    """Its last push counts; those who wait for the next one are told at once."""
    told = push(run, 1, 3)
    lost = run.look(member("worker", 1, "dead", last_seen_s=3.0))
    return [told, lost, push(run, 0, 3), push(run, 0, 4), pull_rows(run, 0, 4, [1])]


def a_reader_waits_for_a_step(run: Harness) -> Any:
    """It is known to be over when a worker says so, with its push of a later one."""
    run.init("w", b"\1")
    reader = 12_345
    event = Received(a_peer(reader), reader, Epoch(1, 1), ReadSlices(1, 1, 5, False, (SliceId("w", 0),)))
    asked = run.step(event)
    told = [push(run, rank, 3, step=3, settled=2) for rank in range(2)]
    return [asked, told, push(run, 0, 4, step=7, settled=6), push(run, 1, 4, step=7, settled=6)]


def captured(run: Harness) -> Any:
    operator = 12_345

    def say(message: Any) -> list[Effect]:
        return run.step(Received(a_peer(operator), operator, Epoch(1, 1), message))

    asked = say(Capture(1, 1, 5, CaptureWhen.COMPLETE, (SliceId("t", 0),)))
    told = [push(run, rank, 3, step=3, settled=2) for rank in range(2)]
    told += [push(run, rank, 4, step=7, settled=6) for rank in range(2)]
    return [asked, told, say(CaptureDone(2, 1))]


def the_update_fails(run: Harness) -> Any:
    run.error = NotAllowed("no")
    failed = [push(run, 0, 3), push(run, 1, 3)]
    run.error = None
    return [failed, push(run, 0, 3), push(run, 1, 3)]


ODD: list[Callable[[Harness], Any]] = [
    pulls_of_versions_that_are_there,
    rows_of_another_size,
    no_rows,
    assigned,
    pushed_and_pulled,
    probe,
    repeated,
    repeated_when_it_counts,
    a_pull_repeated,
    of_an_earlier_number,
    ahead,
    too_far,
    over_another_connection,
    over_a_connection_that_it_does_not_know,
    under_another_key,
    two_parts,
    of_another_creation,
    made_again,
    cannot_be_decoded,
    pulls_of_no_ids,
    while_it_is_applied,
    another_optimizer,
    at_odds,
    a_worker_dies,
    a_worker_dies_that_has_pushed,
    a_reader_waits_for_a_step,
    captured,
    the_update_fails,
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
@pytest.mark.parametrize("small", [-1, 1 << 10])
def test_what_is_odd_goes_as_without_a_verdict(odd: Callable[[Harness], Any], small: int, taken: list[int]) -> None:
    with_verdicts = both(odd, small=small)
    assert len(taken) >= 2  # those of the second step
    del taken[:]
    assert with_verdicts == both(odd, small=small, keeps_verdicts=False)
    assert taken == []


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_round_that_has_its_quorum_waits_for_a_moment(quorum: int) -> None:
    def some_come(run: Harness) -> Any:
        return [push(run, 2, 3), push(run, 0, 3), push(run, 1, 3)]

    settings = cluster(3, quorum=quorum, quorum_grace_s=0.5)
    answers = [both(some_come, settings=settings, workers=3, keeps_verdicts=keeps) for keeps in (True, False)]
    assert answers[0] == answers[1]


def both(odd: Callable[[Harness], Any], **how: Any) -> Any:
    """What a server does that has served a second step, by verdicts if it keeps them; and the version at the end."""
    run = with_two_tables(**how)
    served = [a_step(run, clock) for clock in (1, 2)]
    found = odd(run)
    table_ = run.machine.table.slices.get(("t", 0))
    return [served, found, None if table_ is None else table_.log.version, run.explain()]
