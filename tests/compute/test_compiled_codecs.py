"""The compiled loops of compressors: the bits of those of NumPy, whatever they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvd.compression import TwoBit
from kvd.compute.codecs import codec_of, encode_fed_back, encode_merged
from kvd.compute.codecs.magnitudes import mean, mean_from
from kvd.compute.compiled import Loop, warm_up_codecs
from tests.compute.compiled_harness import needs_numba

Floats = np.ndarray[Any, np.dtype[np.float32]]
SIZES = [1, 3, 8, 1023, 1024, 1025, 4097, 32768, 33801, 100_003]


def normal(size: int) -> Floats:
    return np.random.default_rng(size).normal(size=size).astype(np.float32)


def with_bad(size: int) -> Floats:
    values = normal(size)
    values[:: max(1, size // 3)] = np.resize(
        np.array([np.nan, np.inf, -np.inf], np.float32), values[:: max(1, size // 3)].size
    )
    return values


CASES: dict[str, Callable[[int], Floats]] = {
    "normal": normal,
    "not finite": with_bad,
    "huge": lambda size: normal(size) * np.float32(5e37),
    "tiny": lambda size: normal(size) * np.float32(1e-42),
    "zeros": lambda size: np.zeros(size, np.float32),
    "like the threshold": lambda size: np.resize(np.array([0.5, -0.5, 0.25, -0.0], np.float32), size),
}


def rounds(values: Floats, threshold: float | None) -> list[bytes]:
    """Three pushes and a merge with what they leave over."""
    codec = codec_of(TwoBit(threshold))
    out, residual, found = np.zeros(codec.max_nbytes(values.size), np.uint8), np.zeros_like(values), []
    for _ in range(3):
        nbytes = encode_fed_back(codec, values, residual, out, 0)
        found += [out[:nbytes].tobytes(), residual.tobytes()]
    merged, value = values.copy(), np.empty_like(values)
    nbytes = encode_merged(codec, merged, residual, out, value, 0)
    return [*found, out[:nbytes].tobytes(), merged.tobytes(), value.tobytes()]


@needs_numba
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_the_bits_are_those_of_numpy(case: str, threshold: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm_up_codecs()
    for size in SIZES:
        values = CASES[case](size)
        compiled = rounds(values, threshold)
        with monkeypatch.context() as patched:
            patched.setattr(Loop, "ready", lambda *_: None)
            assert rounds(values, threshold) == compiled, size


@pytest.mark.parametrize("case", CASES)
def test_the_mean_magnitude_is_that_of_float64(case: str) -> None:
    for size in SIZES:
        values = CASES[case](size)
        magnitudes = np.abs(values[np.isfinite(values)].astype(np.float64))
        np.testing.assert_allclose(mean(values), magnitudes.mean() if magnitudes.size else 0, rtol=3e-6, atol=1e-45)
        least = np.float32(0.7) * mean(values)
        chosen = magnitudes[magnitudes >= least] if least > 0 else magnitudes
        np.testing.assert_allclose(mean_from(values, least), chosen.mean() if chosen.size else 0, rtol=3e-6, atol=1e-45)
