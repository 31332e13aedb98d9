"""What small updates are made of: quiet arithmetic, scratch tiles that are kept, and rules that are remembered."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvd.compute.merge import merge
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.quiet import quietly
from kvd.compute.scratch import Scratch
from kvd.optimizer import SGD, Adam


def test_overflow_and_nan_pass_without_a_warning_and_without_a_trace() -> None:
    before = np.geterr()
    huge = np.full(3, 3e38, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rule in (None, SGD(1e300), Adam(1e300)):
            out = np.empty(3, np.float32)
            apply_update(rule, SliceState(), huge, [huge, huge], out, "sum")
            assert not np.isfinite(out).any()
        halves = np.empty(3, np.float16)
        merge([np.full(3, 60000, np.float16)] * 2, halves, "sum")
        with pytest.raises(RuntimeWarning):
            np.multiply(huge, huge)
    assert np.geterr() == before


def test_threads_calculate_quietly_side_by_side() -> None:
    seen: list[Any] = []
    barrier = threading.Barrier(3)

    def look() -> Any:
        barrier.wait(10)
        return np.geterr()

    threads = [threading.Thread(target=lambda: seen.append(quietly(look))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [dict.fromkeys(("divide", "over", "under", "invalid"), "ignore")] * 3


def sizes_of(arrays: Sequence[Scratch]) -> list[int]:
    return [scratch.gradient.size for scratch in arrays]


def test_scratch_is_shared_between_sizes_and_does_not_pile_up() -> None:
    dtype = np.dtype(np.complex64)  # which nothing else asks for
    large = Scratch.of_thread(dtype, 5000)
    small = [Scratch.of_thread(dtype, size) for size in range(300)]
    assert sizes_of(small) == list(range(300))
    assert all(np.shares_memory(scratch.first, large.first) for scratch in small if scratch.first.size)
    assert Scratch.of_thread(dtype, 7) is Scratch.of_thread(dtype, 7)
    larger = Scratch.of_thread(dtype, 6000)
    assert np.shares_memory(Scratch.of_thread(dtype, 5000).first, larger.first)
    assert not np.shares_memory(larger.first, large.first)


def test_rules_do_not_pile_up_and_are_never_mixed_up() -> None:
    from kvd.compute import optimizers

    one = np.ones(1, np.float32)
    for index in range(optimizers._MANY_RULES + 100):
        out = np.empty(1, np.float32)
        apply_update(SGD(float(index)), SliceState(), one, [one], out, "sum")
        assert out.tolist() == [1 - index]
    assert 0 < len(optimizers._rules) <= optimizers._MANY_RULES
