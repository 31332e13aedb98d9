"""The codecs: bytes worked out by hand, what any value becomes, error feedback, and garbage."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvd.compression import (
    BF16,
    FP8,
    FP16,
    Compressor,
    Dithering,
    Int8,
    OneBit,
    RandomK,
    Signs,
    TopK,
    TwoBit,
    known_compressors,
)
from kvd.compute.codecs import codec_of, encode, encode_fed_back, with_momentum
from kvd.compute.quiet import quietly
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
    (TwoBit(), floats(4, -2, 1, 0, -8), "0000c040 c0 80", [6, 0, 0, 0, -6]),  # from 0.7 · 15/5 on
    (TwoBit(), floats(0, 0, -0.0, 0, 0), "00000000 00 00", [0, 0, 0, 0, 0]),
    (OneBit(0), floats(1, -1, 0, 0.1, -0.1, 2, -2, 0, 5), "94 80", [1, -1, -1, 1, -1, 1, -1, -1, 1]),
    (OneBit(0.5), floats(0.5, 0.6), "40", [-1, 1]),
    (
        Int8(8),
        floats(127, -127, 64, 1, 0, 0.5, 1.5, 2.5, -254),  # halves go to the even number
        "0000803f 00000040 7f 81 40 01 00 00 02 02 81",
        [127, -127, 64, 1, 0, 0, 2, 2, -254],
    ),
    (
        FP8(8),
        floats(448, -448, 1, 17, 19, 2**-6, 2**-9, 2**-10, -896),
        "0000803f 00000040 7e fe 38 58 5a 08 01 00 fe",
        [448, -448, 1, 16, 20, 2**-6, 2**-9, 0, -896],
    ),
    (FP8(8), floats(448, 1.5 * 2**-10, 3 * 2**-10, 5 * 2**-10), "0000803f 7e 01 02 02", [448, 2**-9, 2**-8, 2**-8]),
    (
        Signs(),
        floats(1, -2, 0, -0.5, *[0] * 28),
        "00000050 0000e03d",
        [0.109375, -0.109375, 0.109375, -0.109375, *[0.109375] * 28],
    ),
    (Signs(scaling=False), floats(-3, 5, *[0] * 30, -1), "00000080 00000080 0000803f", [-1, 1, *[1] * 30, -1]),
    (TopK(2), floats(1, -3, 2, 3, -0.5), "01000000 000040c0 03000000 00004040", [0, -3, 0, 3, 0]),
    (TopK(1), floats(1, -3, 2, 3, 3), "01000000 000040c0", [0, -3, 0, 0, 0]),  # the first of equal ones
    (TopK(0.5), floats(1, -3), "01000000 000040c0", [0, -3]),
    (Dithering(2), floats(2, -1, 0, 1, -2), "00000040 29 01 a0", [2, -1, 0, 1, -2]),
    (Dithering(1), floats(1, -1, 0, 1, -1), "0000803f 71 c0", [1, -1, 0, 1, -1]),
    (Dithering(127), floats(127, -1, 0), "0000fe42 7f 81 00", [127, -1, 0]),
    (Dithering(3, partition="natural"), floats(4, -2, 1, 0), "00008040 3a 10", [4, -2, 1, 0]),
    (Dithering(5, normalize="l2"), floats(3, -4), "0000a040 3c", [3, -4]),
    (Dithering(), floats(0, 0, 0), "00000000 00 00", [0, 0, 0]),
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


def test_momentum_by_hand() -> None:
    """BytePS's example: mu = 0.9 and gradients of 1."""
    momentum = floats(0, 0)
    results = [with_momentum(floats(1, value), momentum, 0.9).tolist() for value in (NAN, 1, INF, 0)]
    np.testing.assert_allclose([first for first, _ in results], [1.9, 2.71, 3.439, 4.0951], rtol=1e-6)
    np.testing.assert_allclose([second for _, second in results], [NAN, 1.9, INF, 0], rtol=1e-6)


# ── what is not finite ──

SPECIAL: list[tuple[Compressor, list[float]]] = [
    (FP16(), [NAN, INF, -INF, INF, 1]),
    (BF16(), [NAN, INF, -INF, 99840, 1]),
    (TwoBit(1), [0, 1, -1, 1, 1]),
    (TwoBit(), [0, 1e5, -1e5, 1e5, 0]),
    (OneBit(0), [-1, 1, -1, 1, 1]),
    (Int8(), [NAN, NAN, NAN, 1e5, 0]),
    (FP8(), [NAN, NAN, NAN, 1e5, float(np.float32(1e5 / 448)) * 2**-8]),
    (Signs(), [50000.5, 50000.5, -50000.5, 50000.5, 50000.5]),
    (TopK(3), [NAN, INF, -INF, 0, 0]),
    (TopK(4), [NAN, INF, -INF, 1e5, 0]),
    (Dithering(1, seed=4), [0, 1e5, -1e5, 1e5, 0]),
    (Dithering(1, partition="natural", seed=4), [0, 1e5, -1e5, 1e5, 0]),
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


def test_what_is_not_finite_is_sent_if_it_is_drawn() -> None:
    values, seen = floats(NAN, INF, -INF, 1e5, 1), set()
    for nonce in range(20):
        residual = np.zeros(5, np.float32)
        result = decoded(RandomK(3), encoded(RandomK(3), values, residual, nonce=nonce), 5)
        sent = np.isnan(result) | (result != 0)
        np.testing.assert_array_equal(result, np.where(sent, values, 0))
        np.testing.assert_array_equal(residual, np.where(sent | ~np.isfinite(values), 0, values))
        seen |= set(np.flatnonzero(sent).tolist())
    assert seen == {0, 1, 2, 3, 4}


# ── any values ──


def everything() -> list[Compressor]:
    return [cls() for cls in known_compressors().values()]


SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 1000, 65535, 65536, 65537, 200_001]


@pytest.mark.parametrize("compressor", [TwoBit(0.5), OneBit(), FP16(), BF16()], ids=repr)
def test_tiles_and_sizes_do_not_matter(compressor: Compressor) -> None:
    """A prefix of the values becomes a prefix of what all of them become."""
    values = np.random.default_rng(3).normal(size=SIZES[-1]).astype(np.float32)
    whole = decoded(compressor, encoded(compressor, values), values.size)
    for size in SIZES:
        part = decoded(compressor, encoded(compressor, values[:size]), size)
        np.testing.assert_array_equal(part, whole[:size])


def changed(compressor: Compressor, size: int, nonce: int = 0) -> tuple[Any, Any]:
    """Normal values of very different blocks, and what becomes of them, both in float64."""
    random = np.random.default_rng(size)
    values = (random.normal(size=size) * np.repeat(10.0 ** random.integers(-6, 6, size // 100 + 1), 100)[:size]).astype(
        np.float32
    )
    return values.astype(np.float64), decoded(compressor, encoded(compressor, values, nonce=nonce), size).astype(float)


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_rounded_to_their_own_scales(size: int) -> None:
    for block in (8, 256, 1000):
        for top, step in ((127, 0.5), (448, 2.0**-4)):
            values, result = changed(Int8(block) if top == 127 else FP8(block), size)
            for start in range(0, size, max(block, size // 50 // block * block)):
                part, got = values[start : start + block], result[start : start + block]
                scale = np.abs(part).max(initial=0) / top
                error = np.abs(got - part)
                bound = step * scale if top == 127 else np.maximum(np.abs(part) * step, scale * 2.0**-10)
                assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("size", SIZES)
def test_signs_have_the_mean_magnitude(size: int) -> None:
    values, result = changed(Signs(), size)
    mean = np.abs(values).mean() if size else 0
    np.testing.assert_allclose(result, np.where(values < 0, -mean, mean), rtol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [0.01, 0.4, 1, 50])
def test_the_largest_are_sent(size: int, k: float) -> None:
    values, result = changed(TopK(k), size)
    count = min(max(int(k * size), 1) if k < 1 else int(k), size)
    largest = np.argsort(-np.abs(values), kind="stable")[:count]
    expected = np.zeros(size)
    expected[largest] = values[largest]
    np.testing.assert_array_equal(result, expected)


SAMPLED = {"large": 1000.0, "small": 0.001, "zero": 0.0, "as the others": 1.0}


@pytest.mark.parametrize("factor", SAMPLED.values(), ids=SAMPLED.keys())
@pytest.mark.parametrize("k", [0.001, 0.1, 0.45])
def test_what_the_sample_of_topk_says_does_not_matter(factor: float, k: float) -> None:
    """Every 25th of 100 000 elements is in the sample. Many elements are equal, and some are NaN."""
    values = np.rint(np.random.default_rng(4).normal(size=100_000) * 50).astype(np.float32)
    values[::25] *= np.float32(factor)
    values[[7, 50, 99_999]] = NAN
    order = np.where(np.isnan(values), INF, np.abs(values))
    places = np.sort(np.argsort(-order, kind="stable")[: int(k * values.size)])
    data = np.frombuffer(encoded(TopK(k), values), np.uint32).reshape(-1, 2)
    np.testing.assert_array_equal(data[:, 0], places)
    np.testing.assert_array_equal(data[:, 1], values[places].view(np.uint32))


@pytest.mark.parametrize("ties", [1.0, 0.0])
def test_of_equal_ones_the_first_are_sent(ties: float) -> None:
    values = np.full(100_000, ties, np.float32)
    values[70_000] = -2
    result = decoded(TopK(11), encoded(TopK(11), values), values.size)
    assert result[70_000] == -2
    np.testing.assert_array_equal(np.flatnonzero(result), [*range(10), 70_000] if ties else [70_000])


@pytest.mark.parametrize("size", SIZES)
def test_some_are_drawn(size: int) -> None:
    values, result = changed(RandomK(0.1, seed=3), size, nonce=1)
    (sent,) = np.nonzero(result)
    np.testing.assert_array_equal(result[sent], values[sent])
    if size >= 1000:  # with replacement: 1 − e^(−0.1) of them
        assert 0.08 < sent.size / size < 0.11
        assert abs(sent.mean() / size - 0.5) < 0.1
        np.testing.assert_array_equal(result, changed(RandomK(0.1, seed=3), size, nonce=1)[1])
        for other in (changed(RandomK(0.1, seed=3), size, nonce=2), changed(RandomK(0.1, seed=4), size, nonce=1)):
            assert np.intersect1d(np.nonzero(other[1]), sent).size < 0.3 * sent.size


WAYS = [
    Dithering(1),
    Dithering(7),
    Dithering(127),
    Dithering(4, "natural"),
    Dithering(31, "natural", "l2"),
    Dithering(7, normalize="l2"),
]


@pytest.mark.parametrize("compressor", WAYS, ids=repr)
def test_dithering_takes_one_of_the_two_nearest_levels(compressor: Dithering) -> None:
    k = compressor.k
    levels = np.array(
        [0, *(2.0 ** np.arange(1 - k, 1) if compressor.partition == "natural" else np.arange(1, k + 1) / k)]
    )
    for size in (1, 5, 1000, 70_001):
        values = np.random.default_rng(size).normal(size=size).astype(np.float32).astype(float)
        result = decoded(compressor, encoded(compressor, values.astype(np.float32)), size)
        scale = np.abs(values).max() if compressor.normalize == "max" else np.sqrt((values**2).sum())
        place = np.clip(np.searchsorted(levels, np.abs(values) / scale * (1 - 1e-6), "right") - 1, 0, k - 1)
        below, above = np.sign(values) * scale * levels[place], np.sign(values) * scale * levels[place + 1]
        assert (np.isclose(result, below, rtol=1e-5, atol=0) | np.isclose(result, above, rtol=1e-5)).all()


@pytest.mark.parametrize("compressor", WAYS, ids=repr)
def test_dithering_is_right_in_the_mean(compressor: Dithering) -> None:
    """100 times 1000 elements of each of three magnitudes: the mean is within five standard deviations."""
    values = np.tile(floats(0.3, -0.06, 0.9, 1), 1000)
    values[-1] = 3
    results = [decoded(compressor, encoded(compressor, values, nonce=nonce), values.size) for nonce in range(100)]
    mean, spread = np.mean(results, axis=0, dtype=float), np.std(results, axis=0, dtype=float)
    for place in range(3):
        deviation = np.sqrt((spread[place:-4:4] ** 2).mean() / 100 / 999)
        assert abs(mean[place:-4:4].mean() - values[place]) <= 5 * deviation + 1e-6
    assert len({result.tobytes() for result in results}) > 90


def by_rule(compressor: Compressor, values: Any) -> Any:
    """The published rules, in float64."""
    if isinstance(compressor, TwoBit):
        assert compressor.threshold is not None
        return np.sign(values) * compressor.threshold * (np.abs(values) >= compressor.threshold)
    if isinstance(compressor, OneBit):
        return np.where(values > compressor.threshold, 1.0, -1.0)
    if isinstance(compressor, FP16):
        return values.astype(np.float16).astype(np.float64)
    if isinstance(compressor, Int8):
        return np.rint(values * 64) / 64  # where 127 / 64 is the largest
    assert isinstance(compressor, BF16)
    bits = values.astype(np.float32).view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("compressor", [TwoBit(0.25), OneBit(0.0), OneBit(0.5), FP16(), BF16(), Int8(1003)], ids=repr)
def test_error_feedback_over_100_rounds(compressor: Compressor) -> None:
    """Multiples of 1/256 keep float32 exact, so that both take the same side of every threshold."""
    random = np.random.default_rng(11)
    size = 1003
    residual, model, sent, given = np.zeros(size, np.float32), np.zeros(size), np.zeros(size), np.zeros(size)
    for _ in range(100):
        gradient = random.integers(-160, 161, size) / 256
        gradient[0] = 127 / 64  # the largest, in all rounds
        result = decoded(compressor, encoded(compressor, gradient.astype(np.float32), residual), size)
        expected = by_rule(compressor, gradient + model)
        model = gradient + model - expected
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(residual, model)
        sent += result
        given += gradient
    np.testing.assert_array_equal(sent + residual, given)  # nothing is lost


def rule_of_scaled(compressor: Compressor, values: Any) -> Any:
    """The published rules, in float64."""
    if isinstance(compressor, Signs):
        return np.where(values < 0, -1, 1) * np.abs(values).mean()
    if isinstance(compressor, TwoBit):
        large = np.abs(values) >= 0.7 * np.abs(values).mean()
        return np.where(large, np.sign(values) * np.abs(values)[large].mean(), 0)
    assert isinstance(compressor, TopK)
    return np.where(np.abs(values) >= np.sort(np.abs(values))[-int(compressor.k)], values, 0)


@pytest.mark.parametrize("compressor", [Signs(), TwoBit(), TopK(50)], ids=repr)
def test_error_feedback_with_scales_over_100_rounds(compressor: Compressor) -> None:
    random = np.random.default_rng(12)
    residual, model = np.zeros(1000, np.float32), np.zeros(1000)
    for _ in range(100):
        gradient = random.normal(size=1000).astype(np.float32)
        result = decoded(compressor, encoded(compressor, gradient, residual), 1000)
        expected = rule_of_scaled(compressor, gradient + model)
        model = gradient + model - expected
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(residual, model, atol=1e-4)


@pytest.mark.parametrize("compressor", everything(), ids=repr)
def test_nothing_is_lost_in_100_rounds(compressor: Compressor) -> None:
    random = np.random.default_rng(13)
    residual, missing = np.zeros(1003, np.float32), np.zeros(1003)
    for round_ in range(100):
        gradient = random.normal(size=1003).astype(np.float32)
        missing += gradient
        missing -= decoded(compressor, encoded(compressor, gradient, residual, nonce=round_), 1003)
    np.testing.assert_allclose(residual, missing, atol=1e-3)


# ── garbage ──


@pytest.mark.parametrize(
    "indices",
    [[0, 5], [1, 0], [2, 2], [2**32 - 1, 0], [4, 2**31]],
    ids=["past the end", "falling", "twice", "-1", "huge"],
)
def test_indices_are_checked(indices: list[int]) -> None:
    data = b"".join(index.to_bytes(4, "little") + bytes(4) for index in indices)
    for compressor in (TopK(2), RandomK(2)):
        with pytest.raises(ProtocolError, match="the indices of elements grow and stay below 5"):
            codec_of(compressor).check(np.frombuffer(data, np.uint8), 5)
        with pytest.raises(ProtocolError, match="of 5 elements at most 2 are sent, with 8 bytes each, not 12 bytes"):
            codec_of(compressor).check(np.zeros(12, np.uint8), 5)


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
                quietly(codec.decode, data, np.empty(size, np.float32))
                accepted += 1
    assert accepted
