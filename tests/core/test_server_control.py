"""The server: optimizers, their state, and commands."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import (
    Apply,
    CallerPeer,
    Export,
    JobDone,
    Load,
    LogEntry,
    Received,
    ResetState,
    Run,
    Send,
    Span,
)
from kvd.core.server.command_answers import CommandAnswers
from kvd.errors import NotAllowed
from kvd.optimizer import LARS, SGD, Adam, to_wire
from kvd.protocol.messages import (
    Command,
    CommandResult,
    Done,
    Epoch,
    ErrorCode,
    FetchState,
    NotYetReason,
    OptimizerIs,
    OptimizerQuery,
    Refused,
    SetOptimizer,
    State,
    StoreState,
    UpdateOptimizer,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import SLICE, NodePeer, cluster, init_of, member, of, one, said, worker_id
from tests.core.server_harness import Harness, kinds, not_yet, refusal

ONE = bytes(4)
SPEC = KeySpec("float32", (1,), SLICE)


def ready(settings: Any = None, optimizer: Any = None, **more: Any) -> Harness:
    harness = Harness(settings, **more)
    harness.init("w", ONE, SPEC)
    if optimizer is not None:
        assert said(harness.say(0, SetOptimizer(50, to_wire(optimizer)))) == [Done(50)]
    return harness


def rates(harness: Harness) -> list[Any]:
    return [None if apply.optimizer is None else apply.optimizer.learning_rate for apply in harness.applied]  # type: ignore[attr-defined]


def rounds(harness: Harness, clock: int) -> None:
    for rank in (0, 1):
        harness.push(rank, clock, ONE)


def test_an_optimizer_applies_to_later_rounds_and_to_later_keys() -> None:
    harness = ready()
    rounds(harness, 1)
    effects = harness.say(0, SetOptimizer(50, to_wire(SGD(0.5))))
    assert (said(effects), of(ResetState, effects)) == ([Done(50)], [ResetState((("w", 0),))])
    rounds(harness, 2)
    harness.init("v", ONE, SPEC)
    for rank in (0, 1):
        harness.push(rank, 1, ONE, key="v")
    assert rates(harness) == [None, 0.5, 0.5]
    assert harness.explain()["optimizer"] == to_wire(SGD(0.5))
    assert said(harness.say(1, OptimizerQuery(51))) == [OptimizerIs(51, to_wire(SGD(0.5)))]


def test_the_same_optimizer_again_changes_nothing() -> None:
    harness = ready(optimizer=SGD(0.5))
    harness.say(0, UpdateOptimizer(51, {"learning_rate": 0.25}))
    effects = harness.say(1, SetOptimizer(52, to_wire(SGD(0.5))))
    assert (said(effects), of(ResetState, effects)) == ([Done(52)], [])
    rounds(harness, 1)
    assert rates(harness) == [0.25]
    effects = harness.say(1, SetOptimizer(53, to_wire(Adam(0.5))))
    assert len(of(ResetState, effects)) == 1
    assert len(of(ResetState, harness.say(1, SetOptimizer(54, None)))) == 1
    for request, optimizer in ((55, to_wire(Adam(0.5))), (56, None)):
        effects = harness.say(0, SetOptimizer(request, optimizer))
        assert (said(effects), of(ResetState, effects)) == ([Done(request)], [])
    rounds(harness, 2)
    assert rates(harness)[1] is None


@pytest.mark.parametrize("wire", [5, ["SGD"], ["os.system", {}], ["SGD", {"learning_rate": -1}], {"a": 1}])
def test_an_invalid_optimizer_is_refused(wire: Any) -> None:
    harness = ready()
    assert refusal(harness.say(0, SetOptimizer(50, wire))).error is ErrorCode.PROTOCOL_ERROR
    assert said(harness.say(1, OptimizerQuery(51))) == [OptimizerIs(51, None)]


def test_a_change_takes_effect_from_the_sender_s_next_clock_on() -> None:
    harness = ready(optimizer=SGD(0.5))
    harness.push(0, 1, ONE)
    assert said(harness.say(0, UpdateOptimizer(51, {"learning_rate": 0.25}))) == [Done(51)]
    assert said(harness.say(0, UpdateOptimizer(51, {"learning_rate": 0.25}))) == [Done(51)]  # asked again
    harness.push(1, 1, ONE)
    rounds(harness, 2)
    assert rates(harness) == [0.5, 0.25]


def test_changes_take_effect_slice_by_slice() -> None:
    harness = ready(optimizer=SGD(0.5))
    harness.init("v", ONE, SPEC)
    harness.push(0, 1, ONE, key="v")
    harness.say(0, UpdateOptimizer(51, {"learning_rate": 0.25}))
    rounds(harness, 1)
    harness.push(1, 1, ONE, key="v")
    assert [(apply.layout[0].key, rate) for apply, rate in zip(harness.applied, rates(harness), strict=True)] == [
        ("w", 0.25),
        ("v", 0.5),
    ]


def test_changes_of_two_workers_keep_the_order_in_which_they_were_allowed() -> None:
    harness = ready(optimizer=SGD(0.5))
    harness.push(0, 1, ONE)
    harness.say(0, UpdateOptimizer(51, {"momentum": 0.5}))  # from round 2 on
    harness.say(1, UpdateOptimizer(52, {"nesterov": True}))  # of a worker at round 1; needs the momentum
    harness.push(1, 1, ONE)
    rounds(harness, 2)
    assert [apply.optimizer for apply in harness.applied] == [SGD(0.5), SGD(0.5, momentum=0.5, nesterov=True)]


def test_in_async_mode_a_change_takes_effect_at_once() -> None:
    harness = ready(cluster(mode="async"), SGD(0.5))
    harness.say(0, UpdateOptimizer(51, {"learning_rate": 0.25}))
    harness.push(1, 1, ONE)
    assert rates(harness) == [0.25]


@pytest.mark.parametrize(
    "message",
    [
        SetOptimizer(51, to_wire(SGD(9.0))),
        SetOptimizer(51, to_wire(SGD(9.0)), loaded=True),
        UpdateOptimizer(51, {"learning_rate": 9.0}),
        StoreState(51, "w", 0, 1, (("momentum", "float32"),)),
        FetchState(51, "w", 0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_only_a_worker_that_has_attached_changes_or_fetches_the_optimizer(message: Any) -> None:
    harness = ready(optimizer=SGD(0.5))
    effects = harness.step(Received(CallerPeer(b"stranger"), 77, Epoch(0, 0), message, b"12345678", 8))
    assert not_yet(effects).reason is NotYetReason.NOT_ATTACHED
    rounds(harness, 1)
    assert rates(harness) == [0.5]
    assert harness.explain()["optimizer"] == to_wire(SGD(0.5))


@pytest.mark.parametrize(
    ("optimizer", "changes", "error"),
    [
        (None, {"learning_rate": 0.1}, ErrorCode.NOT_ALLOWED),
        (SGD(0.5), {"speed": 1}, ErrorCode.CONFIG_ERROR),
        (SGD(0.5), {"nesterov": True}, ErrorCode.CONFIG_ERROR),
        (SGD(0.5), 5, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_invalid_changes_are_refused(optimizer: Any, changes: Any, error: ErrorCode) -> None:
    harness = ready(optimizer=optimizer)
    assert refusal(harness.say(0, UpdateOptimizer(51, changes))).error is error


def test_integers_are_not_optimized() -> None:
    harness = ready(optimizer=SGD(0.5))
    harness.init("n", b"\0")
    refused = refusal(harness.push(0, 1, b"\1", key="n"))
    assert (refused.error, refused.key) == (ErrorCode.NOT_ALLOWED, "n")
    assert "optimizers update float keys only" in refused.text
    assert kinds(harness.push(0, 1, b"\1", key="n", how=1)) == ["Staged"]  # an assignment is no update


def test_a_slice_that_never_had_an_optimizer_keeps_none() -> None:
    harness = ready()
    rounds(harness, 1)
    assert rates(harness) == [None]


# ── its state ──


def test_the_state_of_a_slice_goes_out_and_in() -> None:
    harness = ready()
    effects = harness.say(0, FetchState(60, "w", 0))
    send = one([send for send in of(Send, effects) if isinstance(send.message, State)])
    assert send.message == State(60, 7, (("momentum", "float32"),))
    assert send.payload == (Span(b"momentum", 0, 8),)
    effects = harness.say(0, StoreState(61, "w", 0, 7, (("momentum", "float32"),)), b"momentum")
    load = one(of(Load, effects))
    assert (load.step, load.slots, load.source) == (7, (("momentum", "float32"),), Span(b"momentum", 0, 8))
    assert said(effects) == [Done(61)]


def test_state_that_comes_again_does_not_undo_the_updates_since() -> None:
    harness = ready()
    old, new = StoreState(61, "w", 0, 7, ()), StoreState(62, "w", 0, 8, ())
    assert len(of(Load, harness.say(0, old))) == 1
    for late in (old, old):
        effects = harness.say(0, late)
        assert (said(effects), of(Load, effects)) == ([Done(61)], [])
    assert len(of(Load, harness.say(0, new))) == 1
    assert of(Load, harness.say(0, old)) == []
    assert len(of(Load, harness.say(1, old))) == 1  # another worker counts its requests itself


@pytest.mark.parametrize("message", [FetchState(60, "w", 1), StoreState(60, "v", 0, 7, ())])
def test_the_state_of_an_unknown_slice_is_refused(message: Any) -> None:
    assert refusal(ready().say(0, message)).error is ErrorCode.KEY_NOT_FOUND


@pytest.mark.parametrize("message", [FetchState(60, "w", 0), StoreState(60, "w", 0, 7, ())])
def test_state_that_cannot_be_fetched_or_stored(message: Any) -> None:
    harness = ready()
    harness.error = NotAllowed("too short")
    assert refusal(harness.say(0, message)).text == "too short"


def test_state_that_could_not_be_taken_is_taken_when_it_comes_again() -> None:
    harness = ready()
    message = StoreState(60, "w", 0, 7, ())
    harness.error = NotAllowed("no memory")
    refusal(harness.say(0, message))
    harness.error = None
    assert len(of(Load, harness.say(0, message))) == 1


@pytest.mark.parametrize(("message", "kind"), [(FetchState(60, "w", 0), Export), (StoreState(60, "w", 0, 7, ()), Load)])
def test_one_job_of_a_slice_at_a_time(message: Any, kind: Any) -> None:
    harness = ready()
    harness.hold = True
    harness.push(0, 1, ONE)
    apply = one(of(Apply, harness.push(1, 1, ONE)))
    assert of(kind, harness.say(0, message)) == []
    job = one(of(kind, harness.finish(apply)))
    for rank in (0, 1):
        assert of(Apply, harness.push(rank, 2, ONE)) == []
    assert len(of(Apply, harness.finish(job))) == 1


# ── commands ──


def test_a_command_is_run_once_and_answered_as_often_as_it_is_asked() -> None:
    harness = ready()
    harness.hold = True
    run = one(of(Run, harness.say(0, Command(70, "ping"), b"body")))
    assert (run.head, run.body) == ("ping", Span(b"body", 0, 4))
    assert harness.say(0, Command(70, "ping"), b"body") == []
    effects = harness.finish(run)
    peer: Any = NodePeer(worker_id(0))
    assert effects == [Send(peer, CommandResult(70), (Span(b"answer", 0, 6),))]
    again = harness.say(0, Command(70, "ping"), b"body", peer=CallerPeer(b"elsewhere"))
    assert again == [Send(CallerPeer(b"elsewhere"), CommandResult(70), (Span(b"answer", 0, 6),))]
    assert len(of(Run, harness.say(0, Command(71, "ping"), b"body"))) == 1
    assert len(of(Run, harness.say(1, Command(70, "ping"), b"body"))) == 1  # of another sender


def test_a_command_that_fails_is_answered_with_its_error_every_time() -> None:
    harness = ready()
    harness.error = NotAllowed("no controller", key="x")
    for _ in range(2):
        refused = refusal(harness.say(0, Command(70, "nothing")))
        assert (refused.request, refused.error, refused.text, refused.key) == (
            70,
            ErrorCode.NOT_ALLOWED,
            "no controller",
            "x",
        )


def test_a_command_that_ends_after_its_sender_was_replaced() -> None:
    harness = ready()
    harness.hold = True
    run = one(of(Run, harness.say(1, Command(70, "ping"))))
    assert len(of(LogEntry, harness.look(member("worker", 1, life=1)))) == 1
    assert kinds(harness.step(JobDone(run.job, b"late"))) == ["CommandResult"]


def test_the_bodies_of_commands_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.command_answers.MAX_RUNNING_BYTES", 10)
    harness = ready()
    harness.hold = True
    run = one(of(Run, harness.say(0, Command(70, "ping"), bytes(20))))  # one is taken, whatever its size
    assert not_yet(harness.say(1, Command(70, "ping"), bytes(5))).reason is NotYetReason.BUSY
    assert harness.say(0, Command(70, "ping"), bytes(20)) == []  # it is running
    harness.finish(run)
    assert len(of(Run, harness.say(1, Command(70, "ping"), bytes(5)))) == 1
    assert len(of(Run, harness.say(1, Command(71, "ping"), bytes(5)))) == 1
    assert not_yet(harness.say(1, Command(72, "ping"), bytes(5))).reason is NotYetReason.BUSY


def test_a_result_that_is_not_kept_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.command_answers.MAX_REMEMBERED_BYTES", 8)
    harness = ready()
    for request in (70, 71):
        assert kinds(harness.say(0, Command(request, "ping"), b"body")) == ["CommandResult"]
    assert "not kept" in refusal(harness.say(0, Command(70, "ping"), b"body")).text
    assert kinds(harness.say(0, Command(71, "ping"), b"body")) == ["CommandResult"]


def test_the_answers_remembered_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.command_answers.MAX_REMEMBERED", 2)
    monkeypatch.setattr("kvd.core.server.command_answers.MAX_SENDERS", 2)
    answers = CommandAnswers()
    for request in (1, 2, 3):
        assert answers.start(7, request)
        answers.finish(7, request, f"answer {request}")
    assert [answers.find(7, request) for request in (1, 2, 3)] == [None, "answer 2", "answer 3"]
    assert answers.start(8, 1)
    assert not answers.start(7, 3)
    assert answers.start(9, 1)  # 8 has been silent for longest
    answers.finish(8, 1, "lost")
    assert (answers.find(8, 1), answers.find(7, 3)) == (None, "answer 3")
    answers.drop_sender(7)
    assert answers.find(7, 3) is None
    assert isinstance(Refused(1, ErrorCode.REMOTE_ERROR, "y"), Refused)


# ── how often ──


def sets(harness: Harness, rank: int, request: int, optimizer: Any, now: float) -> Any:
    who = worker_id(rank)
    peer: Any = NodePeer(who)
    message = SetOptimizer(request, to_wire(optimizer))
    (answer,) = said(harness.step(Received(peer, who, Epoch(1, 1), message), now), peer)
    return answer


def test_a_new_optimizer_for_many_slices_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one worker could keep the server from all others, of other jobs too."""
    monkeypatch.setattr("kvd.core.server.pace.QUICK_SLICES", 0)
    monkeypatch.setattr("kvd.core.server.pace.PAUSE_PER_SLICE_S", 1.0)
    harness = ready()  # with one slice
    assert sets(harness, 0, 50, SGD(0.5), 10.0) == Done(50)
    assert sets(harness, 0, 51, SGD(0.25), 10.9).reason is NotYetReason.BUSY
    assert sets(harness, 0, 50, SGD(0.5), 10.9) == Done(50)  # asked again
    assert sets(harness, 0, 52, SGD(0.5), 10.9) == Done(52)  # nothing changes
    assert sets(harness, 1, 50, SGD(0.5), 10.9) == Done(50)  # what the other one has set
    assert sets(harness, 0, 51, SGD(0.25), 11.1) == Done(51)
    assert said(harness.say(0, OptimizerQuery(60)))[0].optimizer == to_wire(SGD(0.25))


def test_workers_at_odds_pause_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.pace.QUICK_SLICES", 0)
    monkeypatch.setattr("kvd.core.server.pace.PAUSE_PER_SLICE_S", 1.0)
    harness = ready()
    assert sets(harness, 0, 50, SGD(0.5), 10.0) == Done(50)
    assert sets(harness, 1, 50, Adam(0.5), 11.1).error is ErrorCode.NOT_ALLOWED
    assert sets(harness, 1, 51, Adam(0.25), 11.2).reason is NotYetReason.BUSY
    assert sets(harness, 1, 52, SGD(0.5), 11.3).reason is NotYetReason.BUSY
    assert sets(harness, 1, 52, SGD(0.5), 12.2) == Done(52)


def test_optimizers_of_few_slices_may_change_at_any_time() -> None:
    harness = ready()
    for number in range(60, 70):
        assert sets(harness, 0, number, SGD(1 / number), 10.0) == Done(number)


def test_a_key_of_several_slices_is_not_made_when_an_optimizer_for_whole_keys_is_set_meanwhile() -> None:
    harness = Harness(cluster(1), workers=1)
    spec = KeySpec("float32", (2 * SLICE // 4,), SLICE)
    harness.hold = True  # the slice is under way
    harness.say(0, init_of(1, "large", spec, 0), bytes(SLICE))
    harness.say(0, SetOptimizer(50, to_wire(LARS(0.5))))
    (job,) = harness.jobs
    refused = refusal(harness.finish(job))
    assert "LARS takes the norm of a whole value, but key 'large'" in refused.text
    assert not harness.machine.table.slices
