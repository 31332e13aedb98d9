"""What a server's job makes of a round whose merged gradient is encoded: by hand, and for every compressor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvd.compression import Compressor, from_wire, known_compressors, to_wire
from kvd.compression.rules import OneBit, PowerSGD, Signs, TwoBit
from kvd.compute.codecs import codec_of
from kvd.compute.tensors import named_dtype
from kvd.core.machine import (
    Apply,
    Contribution,
    Create,
    EncodedValue,
    Encoding,
    Export,
    Extent,
    FirstBytes,
    JobDone,
    Load,
    Span,
)
from kvd.errors import ConfigError
from kvd.node.jobs.runner import JobRunner
from kvd.optimizer import SGD
from kvd.protocol.messages import ADD, ASSIGN, MergedCoding

Array = np.ndarray[Any, Any]
SIZE = 700
NAMES = [name for name in known_compressors() if name != "powersgd"]


class Server:
    """A slice of a server and its jobs; version by version."""

    def __init__(self, dtype: str = "float32", size: int = SIZE) -> None:
        self.dtype, self.size, self.nbytes = dtype, size, size * named_dtype(dtype).itemsize
        self.runner = JobRunner()
        self.layout = (Extent("w", 0, 0, self.nbytes),)
        zeros = Span(bytes(self.nbytes), 0, self.nbytes)
        self.current = self.runner.run(Create(1, (FirstBytes("w", 0, dtype, zeros),))).result[0]
        self.version = 0

    def apply(
        self, given: Sequence[Any], method: Any, *, feeds_back: bool = True, how: int = ADD, **fields: Any
    ) -> JobDone:
        spans = [Span(data := np.ascontiguousarray(each).tobytes(), 0, len(data)) for each in given]
        contributions = tuple(Contribution(rank, 1, span, 1, how) for rank, span in enumerate(spans))
        whole: dict[str, Any] = {"assign": how == ASSIGN, "merge": "sum", "optimizer": None} | fields
        job = Apply(
            2,
            1,
            self.layout,
            self.dtype,
            self.nbytes,
            self.current,
            contributions,
            encoding=None if method is None else Encoding(MergedCoding(method, feeds_back), self.version + 1),
            **whole,
        )
        done = self.runner.run(job)
        assert done.error is None, done.error
        self.version += 1
        made = done.result[0] if isinstance(done.result, tuple) else done.result
        self.current = made
        return done

    @property
    def value(self) -> Array:
        return np.asarray(self.current.view(named_dtype(self.dtype)))

    @property
    def state(self) -> dict[str, bytes]:
        _, slots, spans = self.runner.run(Export(3, "w", 0)).result
        return {name: bytes(span.buffer) for (name, _), span in zip(slots, spans, strict=True)}

    @property
    def left_over(self) -> Array:
        return np.frombuffer(self.state["residual"], np.float32)


def decoded(encoded: EncodedValue, size: int) -> Array:
    method, (buffer, offset, nbytes) = encoded
    data, out = np.asarray(buffer)[offset : offset + nbytes], np.empty(size, np.float32)
    codec = codec_of(from_wire(method))
    codec.check(data, size)
    codec.decode(data, out)
    return out


def floats(*values: float) -> Array:
    return np.array(values, np.float32)


def gradient(seed: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(seed).normal(size=SIZE).astype(named_dtype(dtype))


def test_two_rounds_by_hand() -> None:
    """Two workers, so the threshold of 0.5 is 1. First the sums are 1, 0.5, -1, 0, then 0, 0.5, -0.5, 0.5."""
    server, method = Server(size=4), to_wire(TwoBit(1.0))
    first = server.apply([floats(0.5, 0.5, -0.5, 0.5), floats(0.5, 0, -0.5, -0.5)], method)
    assert server.value.tolist() == [1, 0, -1, 0]
    assert first.result[2] == EncodedValue(method, first.result[2].span)
    assert bytes(first.result[2].span.buffer) == bytes([0b11_00_10_00])
    assert server.left_over.tolist() == [0, 0.5, 0, 0]
    server.apply([floats(0.5, 0.5, -0.5, 0), floats(-0.5, 0, 0, 0.5)], method)
    assert server.value.tolist() == [0, 1, 0, 0]
    assert server.left_over.tolist() == [0, 0, -0.5, 0.5]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_values_are_what_the_bytes_decode_into_and_nothing_is_lost(name: str, dtype: str) -> None:
    """Six rounds that are encoded, and one that is not: in all, what was pushed, as a sum in float64 says."""
    server, method = Server(dtype), to_wire(known_compressors()[name]())
    total, pushed = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(7):
        given = [gradient(2 * step + rank, dtype) for rank in (0, 1)]
        done = server.apply(given, method if step < 6 else None)
        if step < 6:
            assert server.value.tobytes() == decoded(done.result[2], SIZE).astype(named_dtype(dtype)).tobytes()
        total += server.value.astype(np.float64)
        pushed += np.add(*given).astype(np.float64)  # sums of halves are rounded as they always are
    assert server.state == {}
    rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 2.0**-20)
    np.testing.assert_allclose(total, pushed, rtol=0, atol=64 * rounding)


@pytest.mark.parametrize("name", NAMES)
def test_without_feedback_nothing_is_left_over_and_nothing_of_before_is_lost(name: str) -> None:
    server, method = Server(), to_wire(known_compressors()[name]())
    server.apply([gradient(1)], method)
    before = server.left_over
    expected, fed = Server(), gradient(2) + before
    server.apply([gradient(2)], method, feeds_back=False)
    expected.version = 1
    expected.apply([fed], method, feeds_back=False)
    assert server.value.tobytes() == expected.value.tobytes()
    assert server.state == expected.state == {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_replica_that_is_sent_what_was_merged_has_the_same_bits(name: str, dtype: str) -> None:
    """Also one that was sent the slice after some rounds; plain rounds are held by their value."""
    leader, backup, method = Server(dtype), Server(dtype), to_wire(known_compressors()[name]())
    for step in range(8):
        given = [gradient(2 * step + rank, dtype) for rank in (0, 1)]
        done = leader.apply(given, None if step == 4 else method, keeps_merged=step != 4)
        if step == 4:
            backup.apply([leader.value], None, is_final=True)
        else:
            _, merged, encoded = done.result
            wide = np.float32 if dtype == "float16" else named_dtype(dtype)
            held = backup.apply([merged.buffer.view(wide)], method, is_merged=True).result[2]
            assert decoded(held, SIZE).tobytes() == decoded(encoded, SIZE).tobytes()
        assert (backup.value.tobytes(), backup.state) == (leader.value.tobytes(), leader.state)
        if step == 2:
            state = leader.state["residual"]
            backup = Server(dtype)
            backup.current, backup.version = leader.current.copy(), leader.version
            load = Load(4, "w", 0, 0, (("residual", "float32"),), Span(state, 0, len(state)))
            assert backup.runner.run(load).error is None


def test_what_is_drawn_at_random_differs_from_round_to_round() -> None:
    server, method = Server(), to_wire(known_compressors()["randomk"]())
    found = []
    for _ in range(2):
        server.apply([np.ones(SIZE, np.float32)], method, feeds_back=False)
        found.append(np.flatnonzero(server.value).tolist())
    assert found[0] != found[1]


def test_an_optimizer_and_a_broadcast_drop_what_was_left_over() -> None:
    method = to_wire(TwoBit())
    for how, optimizer in ((ADD, SGD(1.0)), (ASSIGN, None)):
        server = Server()
        server.apply([gradient(1)], method)
        weight = server.value.copy()
        assert np.any(server.left_over)
        server.apply([gradient(2)], None, how=how, optimizer=optimizer)
        assert server.state == {}
        expected = gradient(2) if how == ASSIGN else weight - gradient(2)
        np.testing.assert_allclose(server.value, expected, rtol=1e-6, atol=1e-6)


def test_a_compressor_that_encodes_no_slices_of_servers_leaves_the_value_plain() -> None:
    server = Server()
    server.apply([gradient(1)], to_wire(TwoBit()))
    before = server.value.astype(np.float64)
    done = server.apply([gradient(2)], to_wire(PowerSGD()))
    assert done.result[2] is None
    assert server.state == {}
    np.testing.assert_allclose(before + server.value, gradient(1).astype(np.float64) + gradient(2), atol=1e-5)


@pytest.mark.parametrize(
    ("pushed", "count", "merged"),
    [
        (TwoBit(0.5), 1, TwoBit(0.5)),
        (TwoBit(0.5), 3, TwoBit(1.5)),
        (TwoBit(), 3, TwoBit()),
        (OneBit(), 1, OneBit()),
        (OneBit(), 2, None),
        (Signs(), 2, Signs()),
        (Signs(scaling=False), 1, Signs(scaling=False)),
        (Signs(scaling=False), 2, None),
        (PowerSGD(), 1, None),
    ],
)
def test_what_a_sum_is_encoded_with(pushed: Compressor, count: int, merged: Compressor | None) -> None:
    assert pushed.of_merged(count) == merged


def test_a_threshold_that_float32_cannot_say() -> None:
    with pytest.raises(ConfigError, match="threshold"):
        TwoBit(2.0**126).of_merged(3)
