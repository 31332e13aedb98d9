"""The worker: requests that are refused, or cannot be taken yet."""

from __future__ import annotations

import pytest

from kvd.core import requests
from kvd.core.machine import Copy
from kvd.core.outbox import RETRY_SOON_S
from kvd.errors import (
    ConfigError,
    KeyNotFound,
    NotAllowed,
    ProtocolError,
    RemoteError,
)
from kvd.protocol.messages import (
    Attach,
    Done,
    ErrorCode,
    NotYet,
    NotYetReason,
    Pull,
    Push,
    Refused,
    Taken,
    Values,
)
from tests.core.fakes import SLICE, of, server_id, uint8
from tests.core.worker_harness import Harness, ready


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.NOT_ALLOWED, NotAllowed),
        (ErrorCode.KEY_NOT_FOUND, KeyNotFound),
        (ErrorCode.PROTOCOL_ERROR, ProtocolError),
        (ErrorCode.CONFIG_ERROR, ConfigError),
        (ErrorCode.REMOTE_ERROR, RemoteError),
    ],
)
def test_refusals_become_errors(code: ErrorCode, kind: type[Exception]) -> None:
    harness = ready()
    call = harness.pull("w")
    harness.refuse(Pull, code)
    error = harness.error(call)
    assert type(error) is kind
    assert str(error) == "because"


def test_a_push_that_no_server_took_gives_its_clock_back() -> None:
    harness = ready()
    call = harness.push("w")
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    harness.push("w")
    assert harness.clocks() == [("w", 0, 1)]


def test_after_a_push_that_was_taken_in_part_pushes_fail_until_rewind() -> None:
    harness = Harness(servers=2)
    spec = uint8(2 * SLICE)
    harness.know("w", spec=spec)
    call = harness.push("w", spec=spec)
    harness.settle()
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    error = harness.error(harness.push("w", spec=spec))
    assert isinstance(error, NotAllowed)
    assert "call rewind" in str(error)
    harness.result(harness.call(requests.Rewind(0)))
    harness.push("w", spec=spec)
    assert [clock for _, _, clock in harness.clocks()] == [1, 1]


@pytest.mark.parametrize("kind", ["short", "count", "done"])
def test_an_answer_that_does_not_fit_the_request_is_a_protocol_error(kind: str) -> None:
    harness = ready()
    call = harness.pull("w")
    if kind == "short":
        effects = harness.values(Pull, (0,), b"")
        assert of(Copy, effects) == []
    elif kind == "count":
        harness.values(Pull, (0, 0), b"a", b"b")
    else:
        harness.reply(harness.take(Pull), Done)
    assert isinstance(harness.error(call), ProtocolError)


def test_answers_to_unknown_requests_and_from_other_nodes_are_ignored() -> None:
    harness = ready()
    call = harness.pull("w")
    send = harness.take(Pull)
    request = send.message.request  # type: ignore[union-attr]
    harness.say(server_id(7), Values(request, (0,)), b"a")
    harness.say(server_id(0), Values(request + 99, (0,)), b"a")
    harness.say(server_id(0), Refused(0, ErrorCode.PROTOCOL_ERROR, "what?"))
    assert call not in harness.done


@pytest.mark.parametrize("reason", [each for each in NotYetReason if each is not NotYetReason.ELSEWHERE])
def test_a_push_that_can_never_be_taken_is_retried_soon_and_given_up_in_the_end(reason: NotYetReason) -> None:
    harness = ready()
    call = harness.push("w", timeout_s=3000.0)
    for _ in range(500):
        if call in harness.done:
            break
        harness.postpone(Push, reason, next_clock=7)
        harness.wait(1.0)
    assert isinstance(harness.error(call), NotAllowed)


def test_a_worker_attaches_again_to_a_server_that_does_not_know_it() -> None:
    harness = ready()
    harness.attach = False
    call = harness.push("w")
    harness.postpone(Push, NotYetReason.NOT_ATTACHED)
    assert len(harness.waiting(Attach)) == 1
    harness.reply(harness.take(Attach), Done)
    harness.wait(0.1)
    harness.settle()
    assert harness.result(call) == [None]


def test_the_first_error_completes_the_call_and_the_other_messages_still_settle() -> None:
    harness = Harness(servers=2)
    spec = uint8(2 * SLICE)
    harness.know("w", spec=spec)
    call = harness.push("w", spec=spec)
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    flush = harness.call(requests.Flush())
    assert flush not in harness.done
    harness.settle()
    assert harness.result(flush) is None


def test_several_refusals_lead_to_one_attach() -> None:
    harness = ready()
    harness.attach = False
    for _ in range(2):
        harness.push("w")
    for _ in range(2):
        harness.postpone(Push, NotYetReason.NOT_ATTACHED)
    assert len(harness.waiting(Attach)) == 1
    harness.refuse(Attach, ErrorCode.NOT_ALLOWED)
    assert not harness.waiting(Attach)


# ── what cannot be taken yet ──


@pytest.mark.parametrize("reason", [NotYetReason.UPDATING, NotYetReason.BUSY, NotYetReason.OUT_OF_TURN])
def test_a_request_that_cannot_be_taken_yet_is_sent_again_soon(reason: NotYetReason) -> None:
    harness = ready()
    call = harness.push("w")
    before = harness.waiting(Push)
    harness.postpone(Push, reason, key="w")
    harness.wait(RETRY_SOON_S)
    assert harness.waiting(Push) == before
    harness.settle()
    assert harness.result(call) == [None]


@pytest.mark.parametrize("reason", [NotYetReason.UPDATING, NotYetReason.BUSY])
def test_a_push_behind_one_that_was_taken_in_part_is_sent_again_if_it_may_be_taken_later(reason: NotYetReason) -> None:
    harness = ready()
    harness.push("w")
    second = harness.push("w")
    harness.refuse(Push, ErrorCode.NOT_ALLOWED, key="w", taken=Taken.PART)
    harness.postpone(Push, reason, key="w")
    harness.wait(RETRY_SOON_S)
    harness.settle()
    assert harness.result(second) == [None]


def test_a_push_behind_one_that_was_taken_in_part_is_given_up_at_once() -> None:
    """The server waits for a clock that never comes."""
    harness = ready()
    harness.push("w")
    second = harness.push("w")
    first, behind = harness.take(Push), harness.take(Push)
    refused = Refused(first.message.request, ErrorCode.NOT_ALLOWED, "because", "w", Taken.PART)  # type: ignore[union-attr]
    harness.say(first.peer, refused)
    harness.say(behind.peer, NotYet(behind.message.request, NotYetReason.OUT_OF_TURN, "because", "w", 1))  # type: ignore[union-attr]
    assert isinstance(harness.error(second), NotAllowed)
    harness.wait(60)
    assert not harness.waiting(Push)
