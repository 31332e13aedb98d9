"""How a batch is split: MXNet's golden table, and largest remainder."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import ConfigError, InputMismatch
from kvd.parallel import DataDesc
from kvd.parallel.group.split import common_batch_size, split_batch_axis


def counts(batch_size: int, workload: Any, rule: Any) -> list[int]:
    slices = split_batch_axis(batch_size, workload, rule)
    assert slices[0].start == 0
    assert slices[-1].stop == batch_size
    assert all(left.stop == right.start for left, right in itertools.pairwise(slices))
    return [part.stop - part.start for part in slices]


@pytest.mark.parametrize(
    ("batch_size", "workload", "expected"),
    [
        (5, [1, 1], [2, 3]),
        (7, [1, 1], [4, 3]),
        (10, [1] * 4, [2, 2, 2, 4]),
        (13, [1] * 9, [1] * 8 + [5]),
        (10, [1, 3], [2, 8]),
        (8, [1], [8]),
        (9, [1, 1, 1], [3, 3, 3]),
    ],
)
def test_mxnet(batch_size: int, workload: Any, expected: list[int]) -> None:
    assert counts(batch_size, workload, "mxnet") == expected


@pytest.mark.parametrize(
    ("batch_size", "devices"),
    [(6, 4), (8, 5), (9, 6), (10, 6), (11, 7), (12, 7), (18, 7), (12, 8), (13, 8), (14, 8), (21, 8), (28, 8), (1, 2)],
)
def test_mxnet_fails_where_mxnet_fails(batch_size: int, devices: int) -> None:
    with pytest.raises(ValueError, match=r"Too many slices. Some splits are empty"):
        split_batch_axis(batch_size, [1] * devices, "mxnet")
    if batch_size >= devices:
        assert max(counts(batch_size, [1] * devices, "even")) - min(counts(batch_size, [1] * devices, "even")) <= 1


@pytest.mark.parametrize("devices", range(1, 9))
def test_mxnet_fails_nowhere_else(devices: int) -> None:
    """The table of the errors is complete for equal devices up to 8 and batches up to 64."""
    failing = {
        (6, 4), (8, 5), (9, 6), (10, 6), (11, 7), (12, 7), (18, 7), (12, 8), (13, 8), (14, 8), (21, 8), (28, 8),
    }  # fmt: skip
    for batch_size in range(devices, 65):
        try:
            split_batch_axis(batch_size, [1] * devices, "mxnet")
        except InputMismatch:
            assert (batch_size, devices) in failing
        else:
            assert (batch_size, devices) not in failing


@pytest.mark.parametrize(
    ("batch_size", "workload", "expected"),
    [
        (5, [1, 1], [3, 2]),
        (10, [1] * 4, [3, 3, 2, 2]),
        (13, [1] * 9, [2, 2, 2, 2, 1, 1, 1, 1, 1]),
        (10, [1, 3], [3, 7]),  # shares 2.5 and 7.5: the first of equal remainders
        (10, [3, 1], [8, 2]),
        (8, [1] * 5, [2, 2, 2, 1, 1]),
        (7, [0.5, 0.25, 0.25], [3, 2, 2]),
    ],
)
def test_even(batch_size: int, workload: Any, expected: list[int]) -> None:
    assert counts(batch_size, workload, "even") == expected


@given(st.integers(1, 12), st.data())
def test_even_is_within_one_of_the_share(devices: int, data: Any) -> None:
    workload = data.draw(st.lists(st.integers(1, 9), min_size=devices, max_size=devices))
    batch_size = data.draw(st.integers(sum(workload), 500))  # every share is at least 1
    for count, weight in zip(counts(batch_size, workload, "even"), workload, strict=True):
        assert abs(count - weight * batch_size / sum(workload)) < 1


@pytest.mark.parametrize(("batch_size", "workload", "empty"), [(2, [1, 1, 1], "2"), (0, [1], "0"), (5, [1, 100], "0")])
def test_even_leaves_no_device_empty(batch_size: int, workload: Any, empty: str) -> None:
    with pytest.raises(InputMismatch, match=f"leave nothing for device {empty} .*fewer devices or a larger batch"):
        split_batch_axis(batch_size, workload)


@pytest.mark.parametrize("workload", [[], [0], [1, -1], [1, float("nan")], [float("inf"), 1]])
def test_bad_workloads(workload: Any) -> None:
    with pytest.raises(ConfigError, match="workload must be positive"):
        split_batch_axis(4, workload)


def test_bad_rule() -> None:
    with pytest.raises(ConfigError, match="neither"):
        split_batch_axis(4, [1], "scala")  # type: ignore[arg-type]


def test_common_batch_size() -> None:
    data, states = DataDesc("data", (3, 8), layout="TN"), DataDesc("states", (5,), layout="C")
    assert common_batch_size([data, states, DataDesc("label", (8,))]) == 8
    with pytest.raises(InputMismatch, match="disagree on the batch: data has 8, label has 7"):
        common_batch_size([data, states, DataDesc("label", (7,))])
    with pytest.raises(InputMismatch, match="no batch axis N in the layout of states"):
        common_batch_size([states])
