"""Error feedback over 100 rounds, of compressors that draw or have scales by block, against models in float64; and what
is drawn, against the rule in Python's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.compression import FP8, Compressor, Dithering, Int8, RandomK
from tests.compute.test_codecs import decoded, encoded

ROUNDS = 100
MASK = 0xFFFFFFFF


# ── what is drawn ──


def mixed(number: int) -> int:
    """The end of a hash: xor, shift and multiplication, modulo 2³²."""
    number ^= number >> 16
    number = number * 0x7FEB352D & MASK
    number ^= number >> 15
    number = number * 0x846CA68B & MASK
    return number ^ number >> 16


def drawn(seed: int, nonce: int, size: int, count: int) -> list[int]:
    """The elements of ``size`` that are drawn, ascending."""
    step = 0x9E3779B9
    stream = mixed((seed * step + (seed >> 32)) & MASK) ^ mixed((nonce * step + 1) & MASK)
    return sorted({mixed((place * step + stream) & MASK) * size >> 32 for place in range(count)})


def test_bytes_of_randomk_worked_out_by_hand() -> None:
    values = np.array([1, -2, 0.5, 4, 8, -16, 32], np.float32)
    indices = drawn(3, 5, 7, 4)
    assert indices == [2, 4, 5, 6]
    expected = "02000000 0000003f 04000000 00000041 05000000 000080c1 06000000 00000042"
    assert encoded(RandomK(4, seed=3), values, nonce=5).hex() == expected.replace(" ", "")
    assert decoded(RandomK(4, seed=3), bytes.fromhex(expected), 7).tolist() == [0, 0, 0.5, 0, 8, -16, 32]


def test_randomk_feeds_back_what_it_did_not_draw() -> None:
    random, size = np.random.default_rng(5), 701
    residual, model = np.zeros(size, np.float32), np.zeros(size)
    for number in range(ROUNDS):
        gradient = random.integers(-160, 161, size) / 256
        result = decoded(
            RandomK(70, seed=9), encoded(RandomK(70, seed=9), gradient.astype("f4"), residual, number), size
        )
        model += gradient
        expected = np.zeros(size)
        places = drawn(9, number, size, 70)
        expected[places] = model[places]
        model[places] = 0
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(residual, model)


# ── scales by block ──


def by_eighths(values: Any) -> Any:
    """Rounded to e4m3: three bits follow the first one."""
    spacing = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 2.0**-9))), -6) - 3)
    return np.rint(values / spacing) * spacing


@pytest.mark.parametrize(
    ("compressor", "largest", "rule"),
    [
        (Int8(64), 127 / 64, lambda values: np.rint(values * 64) / 64),
        (FP8(64), 448 / 256, lambda values: by_eighths(values * 256) / 256),
    ],
    ids=["int8", "fp8"],
)
def test_blocks_feed_back_what_they_round_off(compressor: Compressor, largest: float, rule: Any) -> None:
    """The largest of each block stays the largest, so that its scale is a power of two, and float32 exact."""
    random, size = np.random.default_rng(6), 1003
    residual, model = np.zeros(size, np.float32), np.zeros(size)
    for _ in range(ROUNDS):
        gradient = random.integers(-160, 161, size) / 256
        gradient[::64] = largest
        result = decoded(compressor, encoded(compressor, gradient.astype(np.float32), residual), size)
        expected = rule(gradient + model)
        model = gradient + model - expected
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(residual, model)
    assert model.any()


# ── levels ──


@pytest.mark.parametrize("compressor", [Dithering(7), Dithering(6, "natural"), Dithering(7, normalize="l2")], ids=repr)
def test_dithering_feeds_back_the_way_to_its_level(compressor: Dithering) -> None:
    """Each element becomes one of the two levels next to it, and the rest is in the next round."""
    random, size, k = np.random.default_rng(7), 300, compressor.k
    steps = 2.0 ** np.arange(1 - k, 1) if compressor.partition == "natural" else np.arange(1, k + 1) / k
    levels = np.array([0, *steps])
    residual, model = np.zeros(size, np.float32), np.zeros(size)
    for number in range(ROUNDS):
        gradient = random.normal(size=size).astype(np.float32)
        result = decoded(compressor, encoded(compressor, gradient, residual, number), size)
        model += gradient
        scale = np.abs(model).max() if compressor.normalize == "max" else np.sqrt((model**2).sum())
        place = np.clip(np.searchsorted(levels, np.abs(model) / scale * (1 - 1e-6), "right") - 1, 0, k - 1)
        below, above = np.sign(model) * scale * levels[place], np.sign(model) * scale * levels[place + 1]
        assert (np.isclose(result, below, rtol=1e-4, atol=1e-5) | np.isclose(result, above, rtol=1e-4)).all()
        model -= result
        np.testing.assert_allclose(residual, model, atol=1e-4)
