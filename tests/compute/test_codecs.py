"""The codecs: bytes worked out by hand, what any value becomes, error feedback, and garbage."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvd.compression import BF16, FP16, Compressor, OneBit, TwoBit, known_compressors
from kvd.compute.codecs import codec_of, encode, encode_fed_back
from kvd.errors import ProtocolError

Floats = NDArray[np.float32]
NAN, INF = np.nan, np.inf


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def encoded(compressor: Compressor, values: Floats, residual: Floats | None = None, nonce: int = 0) -> bytes:
    codec = codec_of(compressor)
    out = np.full(codec.max_nbytes(values.size), 0xAA, np.uint8)
    if residual is None:
        nbytes = encode(codec, values, out, nonce)
    else:
        nbytes = encode_fed_back(codec, values, residual, out, nonce)
    return out[:nbytes].tobytes()


def decoded(compressor: Compressor, data: bytes, size: int) -> Floats:
    codec, array = codec_of(compressor), np.frombuffer(data, np.uint8)
    codec.check(array, size)
    out = np.full(size, 77, np.float32)
    codec.decode(array, out)
    return out


# ── bytes worked out by hand ──

GOLDEN: list[tuple[Compressor, Floats, str, list[float]]] = [
    (FP16(), floats(1, -2, 0.1, 65504), "003c 00c0 662e ff7b", [1, -2, 0.0999755859375, 65504]),
    (BF16(), floats(1, -2, 0.1, 1e38), "803f 00c0 cd3d 967e", [1, -2, 0.10009765625, 9.969209968386869e37]),
    (TwoBit(0.5), floats(0.6, -0.7, 0.1, 0.5, -0.5), "e3 80", [0.5, -0.5, 0, 0.5, -0.5]),
    (TwoBit(2), floats(2, 1.9, -1.9, -2, 3), "c2 c0", [2, 0, 0, -2, 2]),
    (OneBit(0), floats(1, -1, 0, 0.1, -0.1, 2, -2, 0, 5), "94 80", [1, -1, -1, 1, -1, 1, -1, -1, 1]),
    (OneBit(0.5), floats(0.5, 0.6), "40", [-1, 1]),
]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: repr(case[0]))
def test_bytes_worked_out_by_hand(case: tuple[Compressor, Floats, str, list[float]]) -> None:
    compressor, values, data, result = case
    assert encoded(compressor, values).hex() == data.replace(" ", "")
    assert decoded(compressor, bytes.fromhex(data), values.size).tolist() == result


def test_what_mxnets_rule_leaves_over() -> None:
    residual = floats(0, 0, 0, 0)
    assert encoded(TwoBit(0.5), floats(0.6, -0.7, 0.1, 0.5), residual) == b"\xe3"
    np.testing.assert_allclose(residual, [0.1, -0.2, 0.1, 0], atol=1e-7)
    residual = np.zeros(8, np.float32)
    assert encoded(OneBit(0), floats(1, -1, 0, 0.1, -0.1, 2, -2, 0), residual) == b"\x94"
    np.testing.assert_allclose(residual, [0, 0, 1, -0.9, 0.9, 1, -1, 1], atol=1e-7)


# ── what is not finite ──

SPECIAL: list[tuple[Compressor, list[float]]] = [
    (FP16(), [NAN, INF, -INF, INF, 1]),
    (BF16(), [NAN, INF, -INF, 99840, 1]),
    (TwoBit(1), [0, 1, -1, 1, 1]),
    (OneBit(0), [-1, 1, -1, 1, 1]),
]


@pytest.mark.parametrize("case", SPECIAL, ids=lambda case: repr(case[0]))
def test_what_becomes_of_nan_and_infinity(case: tuple[Compressor, list[float]]) -> None:
    compressor, result = case
    values = floats(NAN, INF, -INF, 1e5, 1)
    np.testing.assert_array_equal(decoded(compressor, encoded(compressor, values), 5), result)
    residual = np.zeros(5, np.float32)
    np.testing.assert_array_equal(decoded(compressor, encoded(compressor, values, residual), 5), result)
    assert residual[:3].tolist() == [0, 0, 0]  # it is sent once
    assert np.isfinite(residual).all()


# ── any values ──


def everything() -> list[Compressor]:
    return [cls() for cls in known_compressors().values()]


SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 1000, 65535, 65536, 65537, 200_001]


@pytest.mark.parametrize("compressor", everything(), ids=repr)
def test_tiles_and_sizes_do_not_matter(compressor: Compressor) -> None:
    """A prefix of the values becomes a prefix of what all of them become."""
    values = np.random.default_rng(3).normal(size=SIZES[-1]).astype(np.float32)
    whole = decoded(compressor, encoded(compressor, values), values.size)
    for size in SIZES:
        part = decoded(compressor, encoded(compressor, values[:size]), size)
        np.testing.assert_array_equal(part, whole[:size])


def by_rule(compressor: Compressor, values: Any) -> Any:
    """The published rules, in float64."""
    if isinstance(compressor, TwoBit):
        return np.sign(values) * compressor.threshold * (np.abs(values) >= compressor.threshold)
    if isinstance(compressor, OneBit):
        return np.where(values > compressor.threshold, 1.0, -1.0)
    if isinstance(compressor, FP16):
        return values.astype(np.float16).astype(np.float64)
    assert isinstance(compressor, BF16)
    bits = values.astype(np.float32).view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("compressor", [TwoBit(0.25), OneBit(0.0), OneBit(0.5), FP16(), BF16()], ids=repr)
def test_error_feedback_over_100_rounds(compressor: Compressor) -> None:
    """Multiples of 1/64 keep float32 exact, so that both take the same side of every threshold."""
    random = np.random.default_rng(11)
    size = 1003
    residual, model, sent, given = np.zeros(size, np.float32), np.zeros(size), np.zeros(size), np.zeros(size)
    for _ in range(100):
        gradient = random.integers(-40, 41, size) / 64
        result = decoded(compressor, encoded(compressor, gradient.astype(np.float32), residual), size)
        expected = by_rule(compressor, gradient + model)
        model = gradient + model - expected
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(residual, model)
        sent += result
        given += gradient
    np.testing.assert_array_equal(sent + residual, given)  # nothing is lost


# ── garbage ──


@pytest.mark.parametrize("compressor", everything(), ids=repr)
def test_garbage_is_refused_or_decoded(compressor: Compressor) -> None:
    random = np.random.default_rng(5)
    codec = codec_of(compressor)
    accepted = 0
    for size in (0, 1, 5, 64, 1000):
        for nbytes in {0, 1, 7, codec.max_nbytes(size), codec.max_nbytes(size) + 1, 4 * size}:
            data = random.integers(0, 256, nbytes, np.uint8)
            with suppress(ProtocolError):
                codec.check(data, size)
                codec.decode(data, np.empty(size, np.float32))
                accepted += 1
    assert accepted
