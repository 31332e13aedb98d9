"""Small pushes take no credit and are staged without an answer: control asks for them with probes."""

from __future__ import annotations

from kvd.core import requests
from kvd.core.outbox import RETRY_SOON_S
from kvd.errors import RequestTimeout
from kvd.protocol.messages import Command, CommandResult, Done, NotYet, NotYetReason, PushBatch, Staged
from tests.core.fakes import one, server_id
from tests.core.worker_harness import ready


def test_control_probes_small_pushes_and_waits_until_they_are_staged() -> None:
    harness = ready("a", "b", batches=True, small=100)
    for _ in range(2):
        harness.push("a", "b")
    harness.declared()
    assert [message.probe for message in harness.waiting(PushBatch)] == [False, False]
    sent = [harness.take(PushBatch) for _ in range(2)]
    call = harness.call(requests.Control((Command(0, "x"),), staged_first=True))
    assert [message.probe for message in harness.waiting(PushBatch)] == [True, True]
    harness.push("a", "b")  # beyond the window: it is sent only later, and control waits for it too
    probes = [harness.take(PushBatch) for _ in range(2)]
    assert [probe.payload for probe in probes] == [(), ()]
    harness.reply(probes[0], Staged)
    harness.reply(probes[1], Staged)
    assert not harness.waiting(Command)
    harness.reply(sent[0], Done)
    assert [message.probe for message in harness.waiting(PushBatch)] == [False, True]  # the third, and its probe
    harness.reply(harness.take(PushBatch), Staged)
    assert len(harness.waiting(Command)) == 1
    harness.say(server_id(0), CommandResult(one(harness.waiting(Command)).request))
    assert len(harness.result(call)) == 1
    harness.sent.clear()
    harness.reply(sent[1], Done)
    harness.push("a", "b")
    assert [message.probe for message in harness.waiting(PushBatch)] == [False]  # no call waits any more


def test_small_pushes_are_not_probed_after_the_waiting_control_timed_out() -> None:
    harness = ready("a", "b", batches=True, small=100)
    harness.push("a", "b")
    call = harness.call(requests.Control((Command(0, "x"),), staged_first=True), timeout_s=1.0)
    harness.wait(1.0)
    assert isinstance(harness.error(call), RequestTimeout)
    harness.sent.clear()
    harness.push("a", "b")
    assert [message.probe for message in harness.waiting(PushBatch)] == [False]


def test_a_small_push_that_was_postponed_is_probed_again() -> None:
    """Its probe was refused too. When it is sent again it is staged without an answer, so it needs another probe."""
    harness = ready("a", "b", batches=True, small=100)
    harness.push("a", "b")
    harness.declared()
    push = harness.take(PushBatch)
    harness.call(requests.Control((Command(0, "x"),), staged_first=True))
    harness.take(PushBatch)
    harness.reply(push, lambda request: NotYet(request, NotYetReason.OUT_OF_TURN, "because"))
    harness.wait(RETRY_SOON_S)
    assert [message.probe for message in harness.waiting(PushBatch)] == [False, True]
    harness.reply(harness.take(PushBatch), Staged)
    assert len(harness.waiting(Command)) == 1
