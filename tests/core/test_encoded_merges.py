"""Merged values that are encoded: which rounds, who gets the bytes, and what workers do with the answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.compression import Compressor, Int8, OneBit, PowerSGD, TwoBit, to_wire
from kvd.core import requests
from kvd.core.machine import Copy, Received
from kvd.core.server.memory_use import ENCODED_COPIES
from kvd.errors import ProtocolError
from kvd.optimizer import SGD
from kvd.optimizer import to_wire as optimizer_to_wire
from kvd.protocol.messages import (
    ANY_CLOCK,
    NO_RANK,
    Coding,
    Epoch,
    ErrorCode,
    MemberState,
    MergedForm,
    Part,
    Pull,
    Push,
    Refused,
    SetOptimizer,
    Uncounted,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import SLICE, of
from tests.core.replica_harness import A, B, Cluster
from tests.core.worker_harness import Harness

ALONE = [(rank, NO_RANK, NO_RANK) for rank in range(3)]
FED_BACK, PLAIN = MergedForm.FED_BACK, MergedForm.PLAIN
HALF = TwoBit(0.5)  # two workers sum up to 1
FIRST = (np.array([0.5, 0.5, -0.5, 0.5], np.float32), np.array([0.5, 0, -0.5, -0.5], np.float32))
SENT, VALUE = bytes([0b11_00_10_00]), [1, 0, -1, 0]


def pushed(run: Cluster, clock: int, codings: Any, *, pull: bool = False, key: str = "w", **more: Any) -> list[Any]:
    """Both workers push FIRST; what worker 0 is told at last: the message and its payload."""
    for rank in (1, 0):
        run.push(rank, clock, FIRST[rank], key=key, coding=codings[rank], pull=pull, **more)
    return list(run.answers[-1][1:])


def coding(compressor: Compressor = HALF, merged: MergedForm = FED_BACK) -> Coding:
    return Coding(to_wire(compressor), "float32", 4, merged)


def ready(**settings: Any) -> Cluster:
    run = Cluster(ALONE, **settings)
    run.create("w", np.zeros(4, np.float32))
    return run


def pulled(run: Cluster, clock: int, takes: str, rank: int = 0) -> tuple[Any, bytes]:
    run.say(rank, Pull(run.request(), (Part("w", 0, clock),), takes))
    _, message, payload = run.answers[-1]
    assert isinstance(message, Values)
    return message, payload


def test_who_asks_for_it_gets_the_bytes_and_others_what_they_decode_into() -> None:
    run = ready()
    for rank in (0, 1):
        run.push(rank, 1, FIRST[rank], coding=coding(), pull=rank == 0, request=50 + rank)
    answer, payload = next((message, payload) for rank, message, payload in run.answers if isinstance(message, Values))
    assert (answer, payload) == (Values(50, (1,), Coding(to_wire(TwoBit(1.0)), "float32", 4)), SENT)
    for takes in ("", "int8"):
        answer, payload = pulled(run, 1, takes)
        assert answer.coding is None
        assert np.frombuffer(payload, np.float32).tolist() == VALUE
    for clock in (1, ANY_CLOCK):
        answer, payload = pulled(run, clock, "2bit", rank=1)
        assert (answer.coding, payload) == (Coding(to_wire(TwoBit(1.0)), "float32", 4), SENT)


def test_a_push_that_comes_again_is_answered_with_the_same_bytes_while_its_version_is_kept() -> None:
    run = ready()
    first = pushed(run, 1, [coding(), coding()], pull=True)
    pushed(run, 2, [coding(), coding()])
    for _ in range(2):
        run.push(0, 1, FIRST[0], coding=coding(), pull=True, request=first[0].request)
        assert list(run.answers[-1][1:]) == first
    pushed(run, 3, [coding(), coding()])
    assert sorted(run.nodes[0].table.slices["w", 0].encoded) == [2, 3]


@pytest.mark.parametrize(
    "codings",
    [
        [coding(), None],
        [coding(), coding(merged=PLAIN)],
        [coding(), coding(merged=MergedForm.ENCODED)],
        [coding(), coding(TwoBit(0.25))],
        [coding(), coding(Int8())],
        [coding(OneBit())] * 2,
        [coding(PowerSGD())] * 2,
        [coding(TwoBit(2.0**126))] * 2,
        [Coding("float16", "float32", 4, FED_BACK)] * 2,
    ],
)
def test_rounds_that_are_not_encoded(codings: list[Coding | None]) -> None:
    run = ready()
    answer, payload = pushed(run, 1, codings, pull=True)
    assert answer.coding is None
    assert np.frombuffer(payload, np.float32).tolist() == (FIRST[0] + FIRST[1]).tolist()


def test_nothing_is_encoded_with_an_optimizer_or_in_asynchronous_training() -> None:
    run = ready()
    for rank in (0, 1):
        run.say(rank, SetOptimizer(run.request(), optimizer_to_wire(SGD(1.0))))
    answer, payload = pushed(run, 1, [coding(), coding()], pull=True)
    assert answer.coding is None
    assert np.frombuffer(payload, np.float32).tolist() == (-FIRST[0] - FIRST[1]).tolist()
    run = ready(mode="async")
    answer, payload = pushed(run, 1, [coding(), coding()], pull=True)
    assert answer.coding is None
    assert np.frombuffer(payload, np.float32).tolist() == FIRST[0].tolist()


def test_the_mean_is_encoded_with_what_the_workers_use() -> None:
    run = ready(merge="mean")
    answer, payload = pushed(run, 1, [coding(), coding()], pull=True)
    assert (answer.coding.method, payload) == (to_wire(HALF), SENT)


def test_a_pull_of_several_slices_is_answered_plain() -> None:
    run = ready()
    run.create("v", np.zeros(4, np.float32))
    for key in ("w", "v"):
        pushed(run, 1, [coding(), coding()], key=key)
    run.say(0, Pull(run.request(), (Part("w", 0, 1), Part("v", 0, 1)), "2bit"))
    _, message, payload = run.answers[-1]
    assert message.coding is None
    assert np.frombuffer(payload, np.float32).tolist() == 2 * VALUE


def test_slices_that_are_fused_are_sent_as_they_are() -> None:
    run = ready()
    run.create("v", np.zeros(4, np.float32))
    for key in ("w", "v"):
        pushed(run, 1, [coding(), coding()], key=key)
    for rank in (0, 1):
        run.declare(rank, "w", "v")
        run.push_batch(rank, 2, FIRST[rank], FIRST[rank])
    assert len(run.nodes[0].table.groups) == 1
    answer, payload = pulled(run, 1, "2bit")
    assert answer.coding is None
    assert np.frombuffer(payload, np.float32).tolist() == VALUE
    answer, payload = pulled(run, 2, "2bit")
    left_over = FIRST[0] + FIRST[1] - np.array(VALUE, np.float32)
    assert np.frombuffer(payload, np.float32).tolist() == (FIRST[0] + FIRST[1] + left_over).tolist()


def test_a_server_that_takes_over_answers_with_the_same_bytes_and_goes_on_with_what_was_left_over() -> None:
    run, alone = Cluster([(A, B, NO_RANK), *ALONE[1:]]), ready()
    run.create("w", np.zeros(4, np.float32))
    for clock in (1, 2):
        answer, payload = pushed(run, clock, [coding(), coding()], pull=True)
        pushed(alone, clock, [coding(), coding()])
    run.kill(A)
    run.look([(B, NO_RANK, NO_RANK), *ALONE[1:]])
    run.push(0, 2, FIRST[0], coding=coding(), pull=True, request=answer.request, at=B)
    assert run.answers[-1][1:] == (answer, payload)
    for clock in (3, 4):
        expected = pushed(alone, clock, [coding(), coding()], pull=True)
        found = pushed(run, clock, [coding(), coding()], pull=True, at=B)
        assert (found[0].coding, found[1]) == (expected[0].coding, expected[1])


def test_a_push_that_does_not_count_is_answered_with_the_plain_value() -> None:
    """The rounds go on without worker 0, which is lost, and comes with a push for a round that is over."""
    run = ready()
    pushed(run, 1, [coding(), coding()])
    run.workers[0] = run.workers[0]._replace(state=MemberState.LOST)
    run.look()
    run.push(1, 2, FIRST[1], coding=coding())
    run.push(0, 2, FIRST[0], coding=coding(), pull=True)
    rank, answer, payload = run.answers[-1]
    assert (rank, type(answer)) == (0, Uncounted)
    value = run.value(0)
    assert run.nodes[0].table.slices["w", 0].encoded[2]
    assert np.frombuffer(payload, np.float32).tolist() == value.tolist()


# ── the worker ──


def worker() -> tuple[Harness, int]:
    """It pulls two keys, of which the first may come encoded."""
    harness = Harness()
    specs = [KeySpec("float32", (size,), SLICE) for size in (4, 1)]
    for key, spec in zip("wv", specs, strict=True):
        harness.know(key, spec=spec)
    items = tuple([requests.Item(key, None, None, bytearray(16)) for key in "wv"])
    takes = requests.TakenForm("2bit", lambda spec: spec.shape == (4,))
    return harness, harness.call(requests.Transfer(items, push=False, pull=True, takes=takes))


def test_a_worker_asks_for_the_slices_of_such_keys_one_by_one() -> None:
    harness, call = worker()
    messages = [(message.parts[0].key, message.takes) for message in harness.waiting(Pull)]
    assert messages == [("w", "2bit"), ("v", "")]
    send = harness.take(Pull)
    message = Values(send.message.request, (1,), coding())  # type: ignore[union-attr]
    event = Received(send.peer, int(send.peer), Epoch(1, 1), message, "decoded", 16)
    (copy,) = of(Copy, harness.step(event))
    assert (copy.source, [row.nbytes for row in copy.rows]) == ("decoded", [16])
    harness.values(Pull, (1,), bytes(4))
    assert harness.result(call) == [requests.Versions(1, 1)] * 2


@pytest.mark.parametrize("what", ["dtype", "fault", "unasked"])
def test_an_encoded_answer_that_does_not_fit_is_a_protocol_error(what: str) -> None:
    harness, call = worker()
    if what == "unasked":
        harness.take(Pull)
    send = harness.take(Pull)
    said = coding()._replace(wanted="float16" if what == "dtype" else "float32")
    message = Values(send.message.request, (1,), said)  # type: ignore[union-attr]
    nbytes = 4 if what == "unasked" else 16
    fault = "it is too short" if what == "fault" else ""
    peer: Any = send.peer
    effects = harness.step(Received(peer, int(peer), Epoch(1, 1), message, "decoded", nbytes, fault=fault))
    assert of(Copy, effects) == []
    assert isinstance(harness.error(call), ProtocolError)


def test_what_a_push_says_of_its_bytes() -> None:
    harness = Harness()
    spec = KeySpec("float32", (4,), SLICE)
    harness.know("w", spec=spec)
    encoded = requests.Encoded(to_wire(HALF), ((0, 1),), FED_BACK)
    item = requests.Item("w", spec, b"\1", bytearray(16), encoded)
    harness.call(requests.Transfer((item,), push=True, pull=True, some_encoded=True))
    (push,) = harness.waiting(Push)
    assert push.coding == coding()


def test_what_is_encoded_takes_memory_and_without_it_the_push_is_refused() -> None:
    """Two versions in their other form, and what is left over: twice the bytes of all keys more."""
    for has_room in (True, False):
        use = ready().nodes[A].machine._pushes._memory
        most = 16 * (use._copies_with(None) + ENCODED_COPIES)
        run = ready(memory=(most if has_room else most - 1, 1 << 20, 1 << 20))
        run.push(0, 1, FIRST[0], coding=coding())
        told = run.answers[-1][1]
        if has_room:
            assert not isinstance(told, Refused)
            continue
        assert isinstance(told, Refused)
        assert (told.error, told.key) == (ErrorCode.NOT_ALLOWED, "w")
        assert "has no memory to encode what is merged of key 'w' and others: it would take it to 0 MiB" in told.text
        assert "or compress with pull='plain'" in told.text
        for rank in (0, 1):
            run.push(rank, 1, FIRST[rank], coding=coding(merged=PLAIN))
        assert np.frombuffer(pulled(run, 1, "")[1], np.float32).tolist() == (FIRST[0] + FIRST[1]).tolist()
