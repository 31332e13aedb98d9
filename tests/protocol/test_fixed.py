"""Headers of one length: the same messages as in any other form, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import ProtocolError
from kvd.protocol import fixed
from kvd.protocol.codec import decode, encode
from kvd.protocol.envelope import VERSION, Decoded
from kvd.protocol.messages import ADD, ASSIGN, BIGGEST, MOST_COUNTED, Coding, Done, Epoch, PushBatch, Values

NUMBER = st.integers(0, BIGGEST)
COUNT = st.integers(0, MOST_COUNTED)
EPOCH = st.builds(Epoch, NUMBER, NUMBER)


def plain_header(kind: int, sender: int, epoch: Epoch, run: int, *fields: Any) -> bytes:
    """The header as msgpack writes it by itself, with each number as short as it can be."""
    header: bytes = msgpack.packb([VERSION, kind, sender, *epoch, run, *fields])
    return header


@given(NUMBER, EPOCH, NUMBER, NUMBER, NUMBER, COUNT, NUMBER, st.booleans(), COUNT, COUNT, COUNT)
def test_a_push_is_the_same_in_both_forms(
    sender: int,
    epoch: Epoch,
    run: int,
    request: int,
    batch: int,
    clock: int,
    samples: int,
    pull: bool,
    step: int,
    settled: int,
    place: int,
) -> None:
    push = PushBatch(request, batch, clock, ADD, samples, pull, False, step, settled, place)
    header = encode(push, sender, epoch, run)
    assert len(header) == fixed.PUSH_NBYTES
    told = Decoded(sender, epoch, push, run)
    assert fixed.read_push(header) == decode(header) == told
    shortest = plain_header(
        45, sender, epoch, run, request, batch, clock, ADD, samples, pull, False, step, settled, place
    )
    assert msgpack.unpackb(shortest) == msgpack.unpackb(header)
    assert decode(shortest) == told
    if samples == 1 and pull:
        frame = bytearray(4) + bytes(fixed.PUSH_NBYTES)
        fixed.put_push(frame, 4, sender, epoch, run, request, batch, clock, step, settled, place)
        assert frame[4:] == header


@given(NUMBER, EPOCH, NUMBER, NUMBER, NUMBER)
def test_an_answer_is_the_same_in_both_forms(sender: int, epoch: Epoch, run: int, request: int, version: int) -> None:
    header = encode(Values(request, (version,)), sender, epoch, run)
    assert len(header) == fixed.VALUES_NBYTES
    assert decode(header) == Decoded(sender, epoch, Values(request, (version,)), run)
    assert msgpack.unpackb(header) == [VERSION, 43, sender, *epoch, run, request, [version], None]
    head = bytearray(fixed.VALUES_HEAD_NBYTES)
    fixed.put_values_head(head, 0, sender, epoch, run, request)
    assert header[: len(head)] == head
    assert fixed.version_of(header + b"the payload", len(head)) == version
    assert fixed.read_values(header) == (epoch, run, request, version)


@given(NUMBER, EPOCH, NUMBER, NUMBER)
def test_a_done_is_the_same_in_both_forms(sender: int, epoch: Epoch, run: int, request: int) -> None:
    header = fixed.done_header(sender, epoch, run, request)
    assert len(header) == fixed.DONE_NBYTES
    assert decode(header) == Decoded(sender, epoch, Done(request), run)
    assert msgpack.unpackb(header) == msgpack.unpackb(encode(Done(request), sender, epoch, run))


@pytest.mark.parametrize(
    "push",
    [
        PushBatch(1, 2, 3, ASSIGN, 1, True),
        PushBatch(1, 2, 3, ADD, 1, True, True),
    ],
)
def test_other_pushes_are_written_in_the_other_form(push: PushBatch) -> None:
    header = encode(push, 1, Epoch(2, 3), 4)
    assert len(header) != fixed.PUSH_NBYTES
    assert decode(header).message == push


@pytest.mark.parametrize("values", [Values(1, (2, 3)), Values(1, (2,), Coding("float64", "float32", 3))])
def test_other_answers_are_written_in_the_other_form(values: Values) -> None:
    header = encode(values, 1, Epoch(2, 3), 4)
    assert decode(header).message == values
    assert fixed.write_values(values, 1, Epoch(2, 3), 4) is None


def test_numbers_that_are_too_large_are_refused() -> None:
    push = PushBatch(1, 2, 3, ADD, 1, True)
    header = bytearray(encode(push, 1, Epoch(2, 3), 4))
    places = [at for at in range(len(header) - 8) if header[at] == 0xCF]
    assert len(places) == 11
    for at in places:
        odd = header.copy()
        odd[at + 1] = 0xFF
        assert fixed.read_push(bytes(odd)) is None
        with pytest.raises(ProtocolError, match="whole number"):
            decode(bytes(odd))


@given(st.integers(0, fixed.PUSH_NBYTES - 1), st.integers(0, 255))
def test_a_changed_byte_gives_what_the_general_way_gives(at: int, byte: int) -> None:
    header = bytearray(encode(PushBatch(1, 2, 3, ADD, 5, True, False, 6, 7, 8), 9, Epoch(10, 11), 12))
    header[at] = byte
    push = fixed.read_push(bytes(header))
    if push is not None:
        body = msgpack.unpackb(bytes(header))
        assert [VERSION, 45, push.sender, *push.epoch, push.run] == body[:6]
        assert push.message == PushBatch(*body[6:])


@given(st.integers(fixed.PUSH_HEAD_NBYTES, fixed.PUSH_NBYTES - 1), st.integers(0, 255), st.booleans())
def test_the_numbers_alone_are_those_of_the_message(at: int, byte: int, pull: bool) -> None:
    """Or there are none, where the general way finds something that is no plain push, or nothing."""
    header = bytearray(encode(PushBatch(1, 2, 3, ADD, 1, pull, False, 6, 7, 8), 9, Epoch(10, 11), 12))
    header[at] = byte
    numbers = fixed.numbers_of(bytes(header[fixed.PUSH_HEAD_NBYTES :]) + b"the payload")
    push = fixed.read_push(bytes(header))
    assert numbers == (None if push is None else fixed.push_numbers(push.message))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "push",
    [PushBatch(1, 2, 3, ADD, 5, True), PushBatch(1, 2, 3, ASSIGN, 1, True), PushBatch(1, 2, 3, ADD, 1, True, True)],
)
def test_only_one_sample_that_is_added_is_told_by_numbers(push: PushBatch) -> None:
    assert fixed.push_numbers(push) is None


@given(st.integers(0, fixed.VALUES_NBYTES - 1), st.integers(0, 255))
def test_a_changed_byte_of_an_answer_gives_what_the_general_way_gives(at: int, byte: int) -> None:
    header = bytearray(encode(Values(7, (3,)), 9, Epoch(10, 11), 12))
    header[at] = byte
    answer = fixed.read_values(bytes(header))
    if answer is not None:
        decoded = decode(bytes(header))
        assert type(decoded.message) is Values
        assert answer == (decoded.epoch, decoded.run, decoded.message.request, *decoded.message.versions)
