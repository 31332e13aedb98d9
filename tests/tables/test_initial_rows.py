"""Initial rows: published vectors of the generator, and what the distributions promise."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest

from kvd.errors import ConfigError
from kvd.initializer import Constant, Initializer, Normal, Uniform, Zeros
from kvd.tables.counted_bits import draws
from kvd.tables.initial_rows import InitialRows, _bent

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
MASK = (1 << 64) - 1
TEXT: Any = "1"


def rows_of(initializer: Initializer, ids: list[int], width: int = 3, key: str = "t", dtype: Any = FLOAT64) -> Any:
    out = np.empty((len(ids), width), dtype)
    InitialRows(initializer, key, width, np.dtype(dtype)).fill(np.array(ids, np.int64), out)
    return out


def mixed(number: int) -> int:
    """SplitMix64's finalizer in whole numbers of Python."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def drawn(seed: int, key: str, row: int, number: int) -> int:
    """The draw of a row as the docstring of `kvd.tables.initial_rows` says it."""
    golden = 0x9E3779B97F4A7C15
    named = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    start = mixed((mixed((seed + named) & MASK) + (row + 1) * golden) & MASK)
    return mixed((start + number * golden) & MASK)


def test_the_draws_are_those_of_splitmix64() -> None:
    """Vectors as they are published for the seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = draws(np.array([1234567], np.uint64), np.arange(1, 5, dtype=np.uint64))
    assert found.tolist() == [expected]


@pytest.mark.parametrize("row", [0, 1, 77, (1 << 63) - 1])
def test_uniform_rows_are_those_of_the_definition(row: int) -> None:
    expected = [-2.0 + 5.0 * ((drawn(9, "käse", row, j + 1) >> 11) * 2.0**-53) for j in range(3)]
    assert rows_of(Uniform(-2.0, 3.0, seed=9), [row], key="käse").tolist() == [expected]


def test_normal_rows_are_those_of_the_definition() -> None:
    element = 1
    numbers = [drawn(3, "t", 42, 3 * element + draw) for draw in (1, 2, 3)]
    total = sum((number >> shift) & 0xFFFF for number in numbers for shift in (0, 16, 32, 48))
    r = (total - 12 * 32767.5) / (4 * 65536)
    bent = r * (3.949846138 + r**2 * (0.252408784 + r**2 * (0.076542912 + r**2 * (0.008355968 + r**2 * 0.029899776))))
    assert rows_of(Normal(0.5, seed=3), [42])[0, element] == pytest.approx(0.5 * bent, rel=1e-14)


def test_rows_of_float32_are_those_of_float64_rounded() -> None:
    for rule in (Normal(0.1, seed=1), Uniform(-1, 1, seed=1)):
        assert np.array_equal(rows_of(rule, [5, 6], dtype=FLOAT32), rows_of(rule, [5, 6]).astype(np.float32))


def test_a_row_depends_on_seed_key_and_id_and_not_on_its_neighbours() -> None:
    rule = Normal(1.0, seed=5)
    many = rows_of(rule, list(range(10_000)))
    assert np.array_equal(rows_of(rule, [9_999, 3, 3]), many[[9_999, 3, 3]])
    assert not np.isin(rows_of(rule, [3], key="other"), many[3]).any()
    assert not np.isin(rows_of(Normal(1.0, seed=6), [3]), many[3]).any()
    assert len(np.unique(rows_of(Uniform(0, 1, seed=5), list(range(10_000))))) == 30_000


def test_zeros_and_constants() -> None:
    assert rows_of(Zeros(), [1, 2]).tolist() == [[0] * 3] * 2
    assert rows_of(Constant(1.5), [1]).tolist() == [[1.5] * 3]


def test_normal_is_as_normal_as_its_docstring_says() -> None:
    """By the exact distribution of a sum of twelve uniform numbers, on a grid."""
    grid = 256
    chance = np.ones(1)
    for _ in range(12):
        chance = np.convolve(chance, np.full(grid, 1 / grid))
    sums = (np.arange(chance.size) + 6) / grid
    values = _bent((sums * 65536 - 6).round().astype(np.uint64))
    std = math.sqrt((chance * values**2).sum())
    assert std == pytest.approx(1, abs=1.1e-4)
    assert (chance * values**4).sum() / std**4 == pytest.approx(3.002, abs=5e-4)
    normal = np.array([(1 + math.erf(value / math.sqrt(2))) / 2 for value in values])
    assert np.abs(np.cumsum(chance) - chance / 2 - normal).max() < 2e-5
    assert 8.5 < values.max() < 8.65


def test_drawn_rows_have_the_moments_of_their_distribution() -> None:
    for rule, mean, std in ((Normal(2.0, seed=1), 0, 2), (Uniform(-1, 5, seed=1), 2, 6 / math.sqrt(12))):
        values = rows_of(rule, list(range(1000)), width=100)
        assert values.mean() == pytest.approx(mean, abs=0.04)
        assert values.std() == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: Uniform(2.0, 1.0), "high"),
        (lambda: Uniform(0.0, 1.0, seed=-1), "seed"),
        (lambda: Normal(-0.1), "std"),
        (lambda: Normal(float("nan")), "std"),
        (lambda: Constant(TEXT), "value"),
    ],
)
def test_fields_out_of_range_are_refused_by_name(make: Any, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.setting == setting
