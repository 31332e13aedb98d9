"""Notes at barriers: what one worker says, all who pass the barrier can know."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import SCHEDULER, CallerPeer, Persisted, Send, Unsaved
from kvd.core.scheduler.barriers import barriers as module
from kvd.core.scheduler.barriers.barriers import Barriers, Entrant, Note, Verdict
from kvd.core.scheduler.runs.record import Record
from kvd.errors import BarrierBroken, NotAllowed
from kvd.protocol.messages import Done, Enter, ErrorCode, Listen, NodeName, Refused, Said, Say
from tests.core.fakes import OPEN, of, one, said, server_id, worker_id
from tests.core.scheduler_harness import Harness
from tests.core.worker_harness import Harness as Worker
from tests.core.worker_harness import ready

PEER = CallerPeer(b"peer")


def released(barriers: Barriers, generation: int, *ranks: int) -> None:
    for rank in ranks:
        assert barriers.enter("b", generation, Entrant(rank, 100 + rank, PEER, 10 + generation)) is None
    assert len(barriers.settle(ranks, [])) == 1


# ── the barriers ──


def test_a_note_is_known_once_its_generation_is_released() -> None:
    barriers = Barriers()
    assert barriers.said("b", 0) == Note(False, "")
    assert barriers.say("b", 0, 0, "one") is True
    assert barriers.say("b", 0, 0, "one") is False
    assert barriers.said("b", 0) == Note(False, "one")
    assert barriers.say("b", 0, 0, "two") is True
    released(barriers, 0, 0, 1)
    assert barriers.said("b", 0) == Note(True, "two")
    assert barriers.say("b", 0, 0, "late") is False
    assert barriers.said("b", 0) == Note(True, "two")
    assert barriers.said("b", 1) == Note(False, "")


def test_a_note_is_of_one_generation_and_the_latest_is_kept() -> None:
    barriers = Barriers()
    barriers.say("b", 0, 0, "zero")
    released(barriers, 0, 0)
    released(barriers, 1, 0)
    assert [barriers.said("b", generation) for generation in range(3)] == [Note(True, "")] * 2 + [Note(False, "")]
    barriers.say("b", 2, 0, "two")
    released(barriers, 2, 0)
    assert [barriers.said("b", generation) for generation in range(4)] == [
        *[Note(True, "")] * 2,
        Note(True, "two"),
        Note(False, ""),
    ]


def test_a_note_outlives_a_break_and_a_record() -> None:
    barriers = Barriers()
    barriers.say("b", 0, 0, "zero")
    barriers.enter("b", 0, Entrant(0, 100, PEER, 5))
    barriers.settle([0, 1], [1])  # it breaks
    again = Barriers(json.loads(json.dumps(barriers.record())))
    released(again, 0, 0, 1)
    assert Barriers(again.record()).said("b", 0).text == "zero"


def test_a_scheduler_without_its_record_knows_no_earlier_notes() -> None:
    barriers = Barriers()
    assert barriers.say("b", 3, 0, "three") is True  # the earlier generations were released by its predecessor
    assert barriers.said("b", 2).text == ""
    released(barriers, 3, 0)
    assert barriers.said("b", 3).text == "three"


def test_a_note_needs_room_for_its_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 1)
    barriers = Barriers()
    barriers.enter("b", 0, Entrant(0, 100, PEER, 5))
    assert "no more can be opened" in str(barriers.say("c", 0, 0, "note"))


# ── the scheduler ──


def two_workers() -> Harness:
    harness = Harness()
    harness.worker(0)
    harness.worker(1)
    return harness


def test_a_note_is_saved_before_it_is_acknowledged() -> None:
    harness = two_workers()
    harness.hold = True
    effects = harness.say(worker_id(0), Say(7, "b", 0, "note"))
    assert said(effects) == []
    unsaved = one(of(Unsaved, effects))
    assert Done(7) in said(harness.step(Persisted(unsaved.token)))
    again = Harness(saved=harness.machine.record(), generation=2)
    again.say(worker_id(0), Enter(8, "b", 0))
    again.say(worker_id(1), Enter(8, "b", 0))
    assert Said(9, True, "note") in said(again.say(worker_id(1), Listen(9, "b", 0)))


def test_a_worker_listens_before_and_after_the_release() -> None:
    harness = two_workers()
    assert Said(5, False, "") in said(harness.say(worker_id(1), Listen(5, "b", 0)))
    assert Done(6) in said(harness.say(worker_id(0), Say(6, "b", 0, "note")))
    assert Done(6) in said(harness.say(worker_id(0), Say(6, "b", 0, "note")))  # a copy
    harness.say(worker_id(0), Enter(7, "b", 0))
    assert Said(7, False, "note") in said(harness.say(worker_id(1), Listen(7, "b", 0)))
    harness.say(worker_id(1), Enter(8, "b", 0))
    assert Said(9, True, "note") in said(harness.say(worker_id(1), Listen(9, "b", 0)))


@pytest.mark.parametrize("message", [Say(3, "b", 0, "note"), Listen(3, "b", 0)])
def test_only_workers_meet(message: Any) -> None:
    harness = two_workers()
    harness.join("server", server_id(0), "s", settings=OPEN)
    refused = one([each for each in said(harness.say(server_id(0), message)) if isinstance(each, Refused)])
    assert (refused.error, refused.text) == (ErrorCode.NOT_ALLOWED, "only workers meet at barriers")


def test_the_record_of_an_earlier_kvd_has_no_notes() -> None:
    harness = two_workers()
    harness.say(worker_id(0), Say(6, "b", 0, "note"))
    plain = json.loads(json.dumps(harness.disk))
    assert Record.from_plain(plain).barriers.record() == [["b", 0, [], "note", ""]]
    plain["barriers"] = [["b", 4, []]]
    assert Record.from_plain(plain).barriers.record() == [["b", 4, [], "", ""]]
    plain["barriers"] = [["b", 4, [], "only one"]]
    with pytest.raises(ValueError, match=r"barrier|entries|note|5|fields"):
        Record.from_plain(plain)


# ── the worker ──


def test_a_worker_speaks_before_it_enters_and_listens_after_it() -> None:
    worker = ready()
    call = worker.call(requests.Barrier("b", says="note", listens=True))
    send = worker.take(Say)
    assert (send.peer, send.message) == (SCHEDULER, Say(request_of(send), "b", 0, "note"))
    assert worker.waiting(Enter) == []
    worker.reply(send, Done)
    worker.reply(worker.take(Enter), Done)
    assert call not in worker.done
    heard(worker, "note")
    assert worker.result(call) == "note"
    second = worker.call(requests.Barrier("b"))
    assert one(worker.waiting(Enter)).generation == 1
    worker.reply(worker.take(Enter), Done)
    assert worker.result(second) is None


def test_a_worker_asks_what_was_said_without_passing() -> None:
    worker = ready()
    for said_there, result in ((None, None), ("note", "note"), ("", "")):
        call = worker.call(requests.SaidAt("b"))
        heard(worker, said_there)
        assert worker.result(call) == result
    worker.call(requests.Barrier("b", passed=True))
    call = worker.call(requests.SaidAt("b"))
    assert one(worker.waiting(Listen)).generation == 1


def test_a_worker_leaves_a_note_where_nobody_meets() -> None:
    worker = ready()
    call = worker.call(requests.Tell("b", "note"))
    assert one(worker.waiting(Say)) == Say(one(worker.waiting(Say)).request, "b", 0, "note")
    worker.reply(worker.take(Say), Done)
    assert worker.result(call) is None
    assert worker.waiting(Enter) == []
    call = worker.call(requests.Tell("b", "refused"))
    worker.refuse(Say, ErrorCode.NOT_ALLOWED)
    assert isinstance(worker.error(call), NotAllowed)
    for note in ("", "note"):
        call = worker.call(requests.ToldAt("b"))
        send = worker.take(Listen)
        worker.say(send.peer, Said(request_of(send), False, note))
        assert worker.result(call) == note


def test_a_note_or_a_barrier_that_is_refused_fails_the_call() -> None:
    worker = ready()
    call = worker.call(requests.Barrier("b", says="note"))
    worker.refuse(Say, ErrorCode.NOT_ALLOWED)
    assert isinstance(worker.error(call), NotAllowed)
    call = worker.call(requests.Barrier("b", says="note", listens=True))
    worker.reply(worker.take(Say), Done)
    worker.refuse(Enter, ErrorCode.BARRIER_BROKEN, nodes=(NodeName("worker", 1),))
    assert isinstance(worker.error(call), BarrierBroken)
    worker.call(requests.Barrier("b", says="another"))
    assert one(worker.waiting(Say)).generation == 0


def request_of(send: Send) -> int:
    message: Any = send.message
    return int(message.request)


def heard(worker: Worker, note: str | None) -> None:
    send = worker.take(Listen)
    worker.say(send.peer, Said(request_of(send), note is not None, note or ""))


def test_a_verdict_needs_no_note() -> None:
    barriers = Barriers()
    released(barriers, 0, 0)
    assert barriers.enter("b", 0, Entrant(0, 100, PEER, 99)) == Verdict(())
    assert barriers.said("b", 0) == Note(True, "")
