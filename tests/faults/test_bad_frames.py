"""Frames that are no message: the sender is told, the daemon lives, and the workers go on with the right sums."""

from __future__ import annotations

import logging
import random

import msgpack
import pytest

import kvd
from kvd.protocol.codec import encode
from kvd.protocol.envelope import VERSION
from kvd.protocol.messages import (
    ErrorCode,
    Heartbeat,
    Part,
    Pull,
    Push,
    Refused,
    SetOptimizer,
    StatusQuery,
    StatusReport,
)
from kvd.protocol.specs import KeySpec
from kvd.testing.cluster import LocalCluster
from tests.core.fakes import init_of
from tests.faults.bad_input_harness import NO_VIEW, STRANGER, RawPeer, addresses, busy, is_alive

HEADER = encode(StatusQuery(7), STRANGER, NO_VIEW)
GARBAGE: dict[str, tuple[tuple[bytes, ...], str]] = {
    "nothing": ((b"",), "header"),
    "noise": ((b"\x00\xff garbage \xfe" * 20,), "header"),
    "truncated": ((HEADER[:-1],), "header"),
    "with more behind it": ((HEADER + b"\x00",), "header"),
    "a map": ((msgpack.packb({"kind": 1}),), "list"),
    "too short": ((msgpack.packb([VERSION, 8]),), "list"),
    "another version": ((msgpack.packb([VERSION + 1, 8, 1, 0, 0, 0, 7]),), "run the same kvd version on every node"),
    "no such kind": ((msgpack.packb([VERSION, 4000, 1, 0, 0, 0, 7]),), "no message has kind 4000"),
    "a negative number": ((msgpack.packb([VERSION, 8, 1, 0, 0, 0, -7]),), "whole number"),
    "a field too many": ((msgpack.packb([VERSION, 8, 1, 0, 0, 0, 7, 7]),), "entries"),
    "an oversized header": ((b"\xc6" + (100_000).to_bytes(4, "big") + bytes(100_000),), "over the limit"),
    "deeply nested": ((b"\x91" * 60_000,), "header"),
    "three frames": ((HEADER, b"payload", b"more"), "too many frames"),
    "a thousand frames": ((HEADER,) * 1000, "too many frames"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_refused_with_a_text(cluster: LocalCluster, stores: list[kvd.KVStore], what: str) -> None:
    frames, text = GARBAGE[what]
    with busy(stores):
        for address in addresses(cluster):
            with RawPeer(address) as raw:
                raw.send(*frames)
                refused = raw.answer()
                assert isinstance(refused, Refused)
                assert refused.error is ErrorCode.PROTOCOL_ERROR
                assert text in refused.text
                assert isinstance(raw.answers(StatusQuery(9)), StatusReport)  # the connection is still good


def test_the_log_gets_one_line_of_many(
    cluster: LocalCluster, stores: list[kvd.KVStore], caplog: pytest.LogCaptureFixture
) -> None:
    with LocalCluster(1, 1) as fresh, caplog.at_level(logging.WARNING, logger="kvd.node"):
        for address in addresses(fresh):
            with RawPeer(address) as raw:
                for _ in range(500):
                    raw.send(b"garbage")
                for _ in range(500):
                    assert isinstance(raw.answer(), Refused)
    lines = [record for record in caplog.records if "invalid frame" in record.getMessage()]
    assert len(lines) == 2


def test_random_bytes_and_changed_messages(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    rng = random.Random(7)
    spec = KeySpec("float32", (3000,), 1 << 20)
    real = [
        encode(message, STRANGER, NO_VIEW)
        for message in (
            Push(3, (Part("w", 0, 1),), 0, 1, True),
            Pull(4, (Part("w", 0, -1),)),
            init_of(5, "x", spec, 0),
            Heartbeat("worker", 0),
            SetOptimizer(6, {"name": "SGD", "learning_rate": 0.1}),
        )
    ]
    with busy(stores):
        for address in addresses(cluster):
            with RawPeer(address) as raw:
                for _ in range(300):
                    header = bytearray(rng.choice(real))
                    for _ in range(rng.randrange(1, 4)):
                        header[rng.randrange(5, len(header))] = rng.randrange(256)
                    if SetOptimizer.KIND in header[:3] and b"SGD" in header:
                        header = bytearray(rng.randbytes(rng.randrange(1, 80)))
                    raw.send(bytes(header), *([rng.randbytes(rng.randrange(200))] if rng.random() < 0.5 else []))
            assert is_alive(address)
