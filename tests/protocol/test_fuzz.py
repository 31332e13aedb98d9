"""Any bytes decode, or raise ProtocolError and nothing else."""

from __future__ import annotations

from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.errors import ProtocolError
from kvd.protocol.codec import decode, encode
from kvd.protocol.envelope import VERSION
from kvd.protocol.messages import (
    ClockQuery,
    Delete,
    Done,
    Drop,
    Epoch,
    ErrorCode,
    Given,
    HeartbeatAck,
    Hold,
    Init,
    Install,
    Join,
    KeyEntry,
    KeyId,
    KeyInfo,
    KeyList,
    LaterChange,
    Lookup,
    Made,
    Member,
    MemberState,
    NewKey,
    NewSlice,
    NodeName,
    NotYet,
    NotYetReason,
    OptimizerUse,
    Origin,
    Outdated,
    Part,
    Publish,
    Push,
    Quiet,
    RankProgress,
    Refused,
    Settings,
    SliceId,
    SliceImage,
    State,
    Taken,
    UpdateOptimizer,
    Values,
    View,
)
from kvd.protocol.specs import KeySpec
from tests.protocol.strategies import KINDS, any_message

VIEW = Epoch(3, 9)
SETTINGS = Settings("sync", "sum", -1, 2, 4096, 2, 1, 64)
SPEC = KeySpec("float32", (2, 3), 4096)
SAMPLES: list[Any] = [
    Join(1, "worker", "node", "tcp://h:1", "höst", 12, -1, SETTINGS),
    View(SETTINGS, (Member("server", 0, "n", 77, "tcp://h:1", MemberState.ACTIVE, "", 0.0),), (0,) * 64),
    HeartbeatAck((Quiet("worker", 1, 0.5),)),
    Done(1 << 40),
    Refused(1, ErrorCode.NODE_LOST, "text", "w", Taken.PART, (NodeName("worker", 1),), 1.5),
    NotYet(1, NotYetReason.OUT_OF_TURN, "text", "w", 3),
    Init(1, (SPEC,), (NewSlice("w", 0, 0), NewSlice("v", 1, 0))),
    Publish(1, (SPEC, KeySpec("int8", (), 4096)), (NewKey("w", 0), NewKey("v", 1))),
    Lookup(1, ("w", "v"), True),
    KeyInfo(1, (Made(SPEC, 3),), (0, -1, 0)),
    Outdated(1, 4),
    Delete(1, (KeyId("w", 0), KeyId("v", 7))),
    Drop(1, (KeyId("w", 0),)),
    ClockQuery(9, "key"),
    Push(300, tuple(Part("w", index, 5) for index in range(20)), 0, 32, True),
    Values(3, (1, 2, 3)),
    State(3, 4, (("momentum", "float32"),)),
    UpdateOptimizer(3, {"learning_rate": 0.5, "nested": [1, {"a": None}]}),
    Install(
        3,
        0,
        (SPEC,),
        (None, {"name": "sgd"}),
        (
            SliceImage(
                "w",
                0,
                1,
                0,
                Origin(77, 2, 78, 4),
                OptimizerUse(1, 2, (LaterChange(7, {"learning_rate": 0.5}),), 5, (("momentum", "float32"),)),
                6,
                9,
                8,
                True,
                (RankProgress(0, 6, 0, 0, 2, 3, 1, 4),),
                ((0, 5), (7, 9)),
                (13, 6),
            ),
        ),
    ),
    Hold(4, 1, (SliceId("w", 0, 1),), 3, (Given(0, 3, 32, 0, 7, 2),), True, {"name": "sgd"}, 2),
    KeyList(3, (KeyEntry("w", "float32", (2, 3), 1, 24, 7, True),), False),
]


def arguments_of(header: bytes) -> tuple[Any, int, Epoch, int]:
    sender, view, message, run = decode(header)
    return message, sender, view, run


def outcome(header: bytes) -> bool:
    """Whether the header decodes; if it does, the message is one that goes out as it came in."""
    try:
        decoded = decode(header)
    except ProtocolError:
        return False
    assert type(decoded.message) in KINDS
    again = encode(decoded.message, decoded.sender, decoded.epoch, decoded.run)
    assert encode(*arguments_of(again)) == again  # bytes, since NaN in plain data is not equal to itself
    return True


def damaged(header: bytes, random: Random) -> bytes:
    data = bytearray(header)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(data))
        match random.randrange(5):
            case 0:
                data[place] = random.randrange(256)
            case 1:
                data[place] ^= 1 << random.randrange(8)
            case 2:
                data[place:place] = random.randbytes(random.randint(1, 6))
            case 3:
                data[place] = random.choice(b"\xc0\xc1\xc2\xc7\xca\xcb\xcf\xd3\xd6\xd9\xdb\xdc\xdd\xde\xdf\x90\x80\xa0")
            case _:
                del data[place + 1 :]
    return bytes(data)


def anything(random: Random, depth: int = 0) -> object:
    choice = random.randrange(12 if depth < 3 else 9)
    if choice < 3:
        return random.choice([0, 1, -1, 64, 4096, (1 << 62) - 1, 1 << 62, (1 << 64) - 1, -(1 << 63)])
    simple: list[object] = [None, True, 0.5, float("nan"), random.randbytes(5), "x" * random.choice([0, 1, 64, 201])]
    if choice < 9:
        return simple[choice - 3]
    inner = [anything(random, depth + 1) for _ in range(random.randrange(5))]
    return inner if choice < 11 else {str(position): entry for position, entry in enumerate(inner)}


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_decode_or_raise_protocol_error(seed: int) -> None:
    random = Random(seed)
    for _ in range(1200):
        outcome(random.randbytes(random.randrange(200)))
        outcome(bytes([0x90 + random.randrange(16), VERSION]) + random.randbytes(random.randrange(60)))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_damaged_headers_decode_or_raise_protocol_error(message: Any) -> None:
    header = encode(message, 7, VIEW)
    assert outcome(header)
    random = Random(5)
    outcomes = {outcome(damaged(header, random)) for _ in range(1500)}
    assert False in outcomes  # the damage is damage


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_truncation_is_refused(message: Any) -> None:
    header = encode(message, 7, VIEW)
    assert not any(outcome(header[:length]) for length in range(len(header)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_a_valid_envelope_around_random_fields_decodes_or_raises_protocol_error(kind: type[Any]) -> None:
    random = Random(kind.KIND)
    for _ in range(150):
        values = [anything(random) for _ in range(random.randrange(10))]
        outcome(msgpack.packb([VERSION, kind.KIND, 7, 3, 9, *values]))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_header_with_one_random_field_decodes_or_raises_protocol_error(message: Any) -> None:
    body = msgpack.unpackb(encode(message, 7, VIEW))
    random = Random(11)
    for _ in range(500):
        other = list(body)
        other[random.randrange(len(other))] = anything(random)
        outcome(msgpack.packb(other))


@given(st.binary(max_size=400))
@settings(max_examples=500, deadline=None)
def test_generated_bytes_decode_or_raise_protocol_error(header: bytes) -> None:
    outcome(header)


@given(any_message, st.integers(0, 1 << 16), st.binary(max_size=4))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_generated_damage_decodes_or_raises_protocol_error(message: Any, place: int, piece: bytes) -> None:
    header = encode(message, 7, VIEW)
    cut = place % len(header)
    outcome(header[:cut] + piece + header[cut + len(piece) :])
