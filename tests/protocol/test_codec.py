"""Messages to bytes and back: every message, at its limits, and one beyond them."""

from __future__ import annotations

import struct
from dataclasses import fields
from enum import Enum
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.errors import ProtocolError
from kvd.protocol.codec import (
    _BUILDERS,
    MAX_HEADER_BYTES,
    _builder_of_numbers,
    decode,
    encode,
)
from kvd.protocol.envelope import VERSION, Decoded
from kvd.protocol.messages import (
    BIGGEST,
    MAX_PARTS,
    MOST_COUNTED,
    Delete,
    Departure,
    Done,
    Enter,
    Epoch,
    ErrorCode,
    HeartbeatAck,
    Init,
    Join,
    KeyId,
    KeyInfo,
    Leave,
    Limit,
    Lookup,
    Made,
    MemberState,
    NewKey,
    NewSlice,
    NodeName,
    NotYet,
    NotYetReason,
    Part,
    Publish,
    Pull,
    Push,
    PushBatch,
    Quiet,
    Refused,
    SetOptimizer,
    Settings,
    State,
    StatusQuery,
    Taken,
    View,
    Welcome,
)
from kvd.protocol.specs import MAX_KEY_NBYTES, KeySpec
from tests.protocol.strategies import KINDS, messages_of, numbers

VIEW = Epoch(3, 9)
SETTINGS = Settings("sync", "sum", -1, 2, 4096, 2, 1, 64)

# ── round trips ──


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_message_comes_back_as_it_was(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    sender = data.draw(numbers(Limit(0, BIGGEST)))
    view = Epoch(data.draw(numbers(Limit(0, BIGGEST))), data.draw(numbers(Limit(0, BIGGEST))))
    run = data.draw(numbers(Limit(0, BIGGEST)))
    header = encode(message, sender, view, run)
    decoded: Decoded = decode(header)
    assert type(decoded.message) is kind
    assert decoded.message == message
    assert (decoded.sender, decoded.epoch, decoded.run) == (sender, view, run)
    assert isinstance(decoded.epoch, Epoch)
    assert decode(memoryview(header)) == decoded
    assert encode(decoded.message, sender, view, run) == header


def test_every_message_has_a_number_of_its_own() -> None:
    assert len({kind.KIND for kind in KINDS}) == len(KINDS)


def test_named_tuples_come_back_as_named_tuples() -> None:
    message = decode(encode(Pull(1, (Part("w", 2, 3),)), 7, VIEW)).message
    assert isinstance(message, Pull)
    assert message.parts[0].slice_index == 2


# ── limits, and one beyond ──


def fields_of(message: Any) -> list[Any]:
    body: list[Any] = msgpack.unpackb(encode(message, 7, VIEW))
    return body


def packed(body: object) -> bytes:
    return bytes(msgpack.packb(body))


def accepts(body: object) -> bool:
    try:
        decode(packed(body))
    except ProtocolError:
        return False
    return True


def changed(message: Any, position: int, value: object) -> list[Any]:
    body = fields_of(message)
    body[6 + position] = value
    return body


JOIN = Join(1, "worker", "node", "tcp://h:1", "host", 12, -1, SETTINGS)
PUSH = Push(1, (Part("w", 0, 1),), 0, 1, False)
REFUSED = Refused(1, ErrorCode.NOT_ALLOWED, "t")
MEMBERS = View(SETTINGS, (), ())
INIT = Init(1, (KeySpec("int8", (), 4096),), (NewSlice("w", 0, 0),))
PUBLISH = Publish(1, INIT.specs, (NewKey("w", 0),))
LOOKUP = Lookup(1, ("w",), True)
DELETE = Delete(1, (KeyId("w", 0),))
KEY_INFO = KeyInfo(1, (Made(INIT.specs[0], 0),), (0,))
# What takes the place of a value of each type without being one. 1.0 and True equal 1, and are no whole numbers.
JUNK: list[Any] = [None, True, 1.5, b"x", {}, {"a": 1}, [], [[]], "", "x", 1, -5]
REST, PLAIN = [4096, "", None, False], ["", None, False]  # of a spec


@pytest.mark.parametrize(
    ("message", "position", "good", "bad"),
    [
        (Done(1), 0, [0, BIGGEST], [-1, BIGGEST + 1, 1 << 63]),
        (JOIN, 6, [-1, BIGGEST], [-2, BIGGEST + 1]),
        (Enter(1, "b", 0), 1, ["x", "x" * 200, "é" * 200], ["", "x" * 201]),
        (JOIN, 2, ["", "x" * 128], ["x" * 129]),
        (JOIN, 3, ["", "x" * 108], ["x" * 109]),
        (REFUSED, 2, ["", "x" * 1000], ["x" * 1001]),
        (PUSH, 2, [0, 2], [-1, 3]),
        (PUSH, 1, [[["w", 0, -1, 0]], [["w", 0, 1, 0]] * MAX_PARTS], [[], [["w", 0, 1, 0]] * (MAX_PARTS + 1)]),
        (PUSH, 1, [[["x" * 200, BIGGEST, *[MOST_COUNTED] * 2]]], [[["x" * 201, 0, 1, 0]], [["w", -1, 1, 0]]]),
        (PUSH, 1, [[["w", 0, 1, 0]]],
         [[["w", 0, -2, 0]], [["w", 0, MOST_COUNTED + 1, 0]], [["w", BIGGEST + 1, 1, 0]], [["w", 0, 1, -1]],
          [["w", 0, 1, MOST_COUNTED + 1]], [["w", 0, 1, True]], [["w", 0, 1]], [["w", 0, 1, 0, 1]], [["w", True, 1, 0]],
          [["w", 0, 1.0, 0]], [["", 0, 1, 0]], [b"w"], ["w010"]]),
        (KEY_INFO, 1, [[[["int8", [], *REST], 0], [["int8", [1] * 32, 16 << 20, *PLAIN], BIGGEST]], []],
         [[[["int8", [1] * 33, *REST], 0]], [[["int8", [], 4032, *PLAIN], 0]], [[["int8", [], 4097, *PLAIN], 0]],
          [[["int8", [], (16 << 20) + 64, *PLAIN], 0]], [[["int8", [], *REST], -1]], [[["int8", [], *REST]]]]),
        (KEY_INFO, 1, [[[["int8", [MAX_KEY_NBYTES], *REST], 0]]], [[[["int8", [MAX_KEY_NBYTES + 1], *REST], 0]],
         [[["int16", [], *REST], 0]], [[["", [], *REST], 0]], [[["int8", [-1], *REST], 0]]]),
        (KEY_INFO, 1, [[[["float64", [0, MAX_KEY_NBYTES], *REST], 0]]], [[[["float64", [MAX_KEY_NBYTES], *REST], 0]],
         [[["int8", [MAX_KEY_NBYTES] * 32, *REST], 0]], [[["int8", 3, *REST], 0]], [[["float32", [2, 3]], 0]]]),
        (DELETE, 1, [[["w", 0]] * MAX_PARTS], [[], [["w", 0]] * (MAX_PARTS + 1), [["", 0]], [["w", -1]], [["w"]]]),
        (KEY_INFO, 2, [[-1], [MAX_PARTS], [0] * MAX_PARTS], [[], [-2], [MAX_PARTS + 1], [0] * (MAX_PARTS + 1), ["w"]]),
        (INIT, 2, [[["w", 0, 0]] * MAX_PARTS], [[], [["w", 0, 0]] * (MAX_PARTS + 1), [["w", 0]], [["", 0, 0]],
                                                [["w", -1, 0]], [["w", 0, -1]], [["w", 0, 0, 0]], ["w"]]),
        (PUBLISH, 2, [[["w", 0]] * MAX_PARTS], [[], [["w", 0]] * (MAX_PARTS + 1), [["", 0]], [["w", -1]], [["w"]]]),
        (LOOKUP, 1, [["w"] * MAX_PARTS, ["x" * 200]], [[], ["w"] * (MAX_PARTS + 1), [""], ["x" * 201], "w", [1]]),
        (REFUSED, 7, [[], [0] * MAX_PARTS], [[0] * (MAX_PARTS + 1), [-1], ["w"], 1]),
        (State(1, 1, ()), 2, [[], [["m", "float32"]] * 16], [[["m", "float32"]] * 17, [["m"]], [["m", 3]], ["mf"]]),
        (HeartbeatAck(()), 0, [[], [["worker", 1, 0.5]] * 64], [[["worker", 1, 0.5]] * 65, [["", 1, 0.5]]]),
        (View(SETTINGS, (), ()), 2, [[], [0] * 4096], [[0] * 4097, [-1]]),
        (View(SETTINGS, (), ()), 0, [[*SETTINGS]], [[*SETTINGS, 0], "x" * 8, [*SETTINGS[:5], 1 << 17, 1, 8]]),
    ],
)  # fmt: skip
def test_values_within_a_limit_are_accepted_and_values_beyond_it_refused(
    message: Any, position: int, good: list[Any], bad: list[Any]
) -> None:
    assert [value for value in good if not accepts(changed(message, position, value))] == []
    assert [value for value in bad if accepts(changed(message, position, value))] == []


@pytest.mark.parametrize(
    ("message", "position", "kind"),
    [
        (Refused(1, ErrorCode.NOT_ALLOWED, "t"), 1, ErrorCode),
        (Refused(1, ErrorCode.NOT_ALLOWED, "t"), 4, Taken),
        (NotYet(1, NotYetReason.BUSY, "t"), 1, NotYetReason),
        (Leave(1, Departure.LEFT), 1, Departure),
    ],
)
def test_an_enum_travels_as_its_value_and_nothing_else_is_one(message: Any, position: int, kind: type[Enum]) -> None:
    for member in kind:
        again = decode(packed(changed(message, position, member.value))).message
        assert getattr(again, fields(message)[position].name) is member
    for value in (*JUNK, 99, "angry", str(kind)):
        assert accepts(changed(message, position, value)) == any(
            type(value) is type(member.value) and value == member.value for member in kind
        )


@pytest.mark.parametrize("predecessor", [None, *MemberState])
def test_an_enum_may_be_absent_where_the_field_says_so(predecessor: MemberState | None) -> None:
    again = decode(packed(changed(Welcome(1, 0, None), 2, predecessor and predecessor.value))).message
    assert isinstance(again, Welcome)
    assert again.predecessor is predecessor


@pytest.mark.parametrize("value", ["", "alive", 1, False, []])
def test_what_is_neither_absent_nor_a_member_of_the_enum_is_refused(value: object) -> None:
    assert not accepts(changed(Welcome(1, 0, None), 2, value))


REAL = HeartbeatAck((Quiet("worker", 1, 0.5),))


@pytest.mark.parametrize(
    ("message", "position", "accepted"),
    [
        (Done(1), 0, [1]),
        (Enter(1, "b", 0), 1, ["x"]),
        (REFUSED, 2, ["", "x"]),
        (PUSH, 4, [True]),
        (PUSH, 1, []),
        (HeartbeatAck(()), 0, [[]]),
        (KEY_INFO, 1, [[]]),
        (View(SETTINGS, (), ()), 0, []),
        (REFUSED, 6, [1.5, 1, -5]),
        (REFUSED, 1, [1]),
        (Leave(1, Departure.LEFT), 1, []),
        (MEMBERS, 1, [[]]),
        (Welcome(1, 0, None), 2, [None]),
        (SetOptimizer(1, None), 1, JUNK),
    ],
)
def test_a_field_accepts_only_its_own_type(message: Any, position: int, accepted: list[Any]) -> None:
    taken = [value for value in JUNK if accepts(changed(message, position, value))]
    assert [(type(value), value) for value in taken] == [(type(value), value) for value in accepted]


NO_FLAGS: list[Any] = [0, 1, None, "x", "", 1.0, [], {}, b"\x01"]
FLAGS = [(kind, field.name) for kind in KINDS for field in fields(kind) if get_type_hints(kind)[field.name] is bool]


def test_the_flags_of_pushes_are_among_those_tested() -> None:
    assert {(Push, "pull"), (Push, "probe"), (PushBatch, "pull"), (PushBatch, "probe")} <= set(FLAGS)


@pytest.mark.parametrize(("kind", "name"), FLAGS, ids=[f"{kind.__name__}.{name}" for kind, name in FLAGS])
@given(data=st.data())
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_flag_is_true_or_false_and_nothing_else(kind: type[Any], name: str, data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    position = [field.name for field in fields(kind)].index(name)
    for flag in (True, False):
        assert getattr(decode(packed(changed(message, position, flag))).message, name) is flag
    for value in NO_FLAGS:
        with pytest.raises(ProtocolError, match="expected true or false"):
            decode(packed(changed(message, position, value)))


def test_the_push_of_a_batch_is_decoded_without_a_call_per_number() -> None:
    assert _BUILDERS[PushBatch.KIND].__qualname__.startswith(_builder_of_numbers.__name__)
    assert not _BUILDERS[Push.KIND].__qualname__.startswith(_builder_of_numbers.__name__)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_only_finite_numbers_are_accepted(value: float) -> None:
    assert not accepts(changed(REFUSED, 6, value))
    assert not accepts(changed(REAL, 0, [["worker", 1, value]]))


def test_a_whole_number_stands_for_a_real_one() -> None:
    message = decode(packed(changed(REFUSED, 6, 2))).message
    assert isinstance(message, Refused)
    assert type(message.last_seen_s) is float


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
@pytest.mark.parametrize("difference", [-1, 1])
@given(data=st.data())
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_message_with_a_field_more_or_less_is_refused(kind: type[Any], difference: int, data: st.DataObject) -> None:
    body = fields_of(data.draw(messages_of(kind)))
    with pytest.raises(ProtocolError):
        decode(packed(body[:-1] if difference < 0 else [*body, 0]))


# ── the envelope ──


@pytest.mark.parametrize("version", [0, VERSION + 1, -1, True, 1.0, "1", None, [1], 1 << 63])
def test_another_version_is_named_in_the_error(version: object) -> None:
    with pytest.raises(ProtocolError, match=rf"speaks {VERSION}: run the same kvd version"):
        decode(packed([version, *fields_of(Done(1))[1:]]))


@pytest.mark.parametrize("position", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("value", [-1, BIGGEST + 1, True, 1.0, None, "1", b"1", [], {}])
def test_kind_sender_and_epoch_are_whole_numbers(position: int, value: object) -> None:
    body = fields_of(Done(1))
    body[position] = value
    with pytest.raises(ProtocolError, match="whole numbers"):
        decode(packed(body))


@pytest.mark.parametrize("kind", [0, 20, 19, 31, 47, 59, 255, BIGGEST])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"no message has kind {kind}$"):
        decode(packed([VERSION, kind, 7, 3, 9, 1]))


@pytest.mark.parametrize("body", [[], [1, 2, 3, 4], {}, "x", 5, None, {"a": 1}, True, b"abc", 1.5])
def test_a_header_is_a_list_of_at_least_five_entries(body: object) -> None:
    with pytest.raises(ProtocolError, match="a header is a msgpack list"):
        decode(packed(body))


def test_a_header_may_be_64_kib_long_and_no_longer() -> None:
    length = MAX_HEADER_BYTES - len(encode(SetOptimizer(1, "x" * 60000), 7, VIEW)) + 60000
    header = encode(SetOptimizer(1, "x" * length), 7, VIEW)
    assert len(header) == MAX_HEADER_BYTES
    assert decode(header).message == SetOptimizer(1, "x" * length)
    with pytest.raises(ProtocolError, match="a SetOptimizer of 65537 bytes is over the limit"):
        encode(SetOptimizer(1, "x" * (length + 1)), 7, VIEW)
    with pytest.raises(ProtocolError, match="a header of 65537 bytes is over the limit"):
        decode(header + b"x")


def test_a_refusal_that_is_too_long_is_cut_when_it_is_sent() -> None:
    missing = tuple(NodeName("worker", rank) for rank in range(5000))
    names = ", ".join(f"worker {rank}" for rank in range(5000))
    sent = Refused(1, ErrorCode.BARRIER_BROKEN, f"barrier '\U0010ffff' waits for {names}", nodes=missing)
    message = decode(encode(sent, 7, VIEW)).message
    assert isinstance(message, Refused)
    assert message.text == sent.text[:997] + "..."
    assert message.nodes == missing[:4096]


def test_the_largest_push_of_a_worker_fits_into_a_header() -> None:
    parts = tuple(Part(f"layer{index:04}.weight", index, 1 << 20) for index in range(MAX_PARTS))
    assert decode(encode(Push(1, parts, 0, 1, True), 7, VIEW)).message == Push(1, parts, 0, 1, True)


@pytest.mark.parametrize("header", [
    b"",
    b"\xc1",  # never used in msgpack
    encode(StatusQuery(1), 7, VIEW)[:-1],  # truncated
    encode(StatusQuery(1), 7, VIEW) + b"\x00",  # something after it
    b"\xdd\xff\xff\xff\xff",  # a list of 4 G entries
    b"\xdb\xff\xff\xff\xff",  # a text of 4 GB
    b"\xdf\xff\xff\xff\xff",  # a map of 4 G entries
    b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GB
    b"\x91" * 3000 + b"\xc0",  # nested deeper than the unpacker goes
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
])  # fmt: skip
def test_bytes_that_are_not_a_header_are_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(header)


def _with_field(raw: bytes) -> bytes:
    """A Refused whose text is replaced by raw msgpack."""
    return bytes([0x9E, VERSION, 17, 7, 3, 9, 0, 1, 4]) + raw + b"\xa0\x00\x90\x00\x90"


@pytest.mark.parametrize("raw", [
    b"\xa3\xed\xa0\x80",  # a lone surrogate
    b"\xa1\xff",  # no UTF-8
    b"\xa2\xc0\x80",  # an overlong NUL
    b"\xd4\x01\x00",  # an extension type
    b"\xc7\x00\x05",  # an empty extension
    b"\xd6\xff" + struct.pack(">I", 1),  # a timestamp
    b"\x81\x01\x02",  # a map with a number as its key
    b"\x81\x90\xc0",  # a map with a list as its key
    *[b"\x91" * depth + b"\xc0" for depth in (10, 400, 500, 900, 1000, 1010)],
])  # fmt: skip
def test_a_field_of_another_msgpack_type_is_refused(raw: bytes) -> None:
    assert isinstance(decode(_with_field(b"\xa1t")).message, Refused)
    with pytest.raises(ProtocolError):
        decode(_with_field(raw))


@pytest.mark.parametrize("depth", [400, 900, 1010])
@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 5, 6])
def test_deep_nesting_anywhere_is_a_protocol_error(position: int, depth: int) -> None:
    pieces = [bytes([number]) for number in (VERSION, 8, 7, 3, 9, 2, 1)]
    pieces[position] = b"\x91" * depth + b"\xc0"
    with pytest.raises(ProtocolError):
        decode(b"\x97" + b"".join(pieces))
