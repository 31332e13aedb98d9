"""`topk` of what servers merge: most elements are 0, or the same."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.compression import TopK
from kvd.compute.codecs import codec_of, encode

SIZE = 100_000


def places_of(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> list[int]:
    """Which 1000 elements are sent."""
    codec = codec_of(TopK(0.01))
    out = np.empty(codec.max_nbytes(values.size), np.uint8)
    nbytes = encode(codec, values, out, 0)
    places: list[int] = out[:nbytes].view(np.uint32).reshape(-1, 2)[:, 0].tolist()
    return places


@pytest.mark.parametrize("rest", [0.0, 1e-8, -0.0])
@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 1040, 2000])
def test_of_those_that_are_the_same_the_first_are_sent(count: int, rest: float) -> None:
    random = np.random.default_rng(count)
    values = np.full(SIZE, rest, np.float32)
    values[random.choice(SIZE, count, replace=False)] = random.normal(size=count)
    order = np.argsort(-np.abs(values), kind="stable")
    assert places_of(values) == sorted(order[:1000].tolist())
