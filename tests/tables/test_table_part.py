"""Parts of tables as servers keep them, against sums in a loop; compiled loops against NumPy."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.compute import halves
from kvd.compute.compiled import warm_up
from kvd.errors import NotAllowed, ProtocolError
from kvd.initializer import Constant
from kvd.optimizer import SGD, Adagrad, Adam, Optimizer
from kvd.tables import row_index, table
from kvd.tables.contributions import Contributed, merged_rows
from kvd.tables.description import RowSparse
from kvd.tables.part import TablePart
from kvd.tables.row_values import Rows
from tests.compute.compiled_harness import needs_numba, numbers, only_compiled, only_numpy
from tests.compute.test_custom_optimizers import Failing

WIDTH = 3
FLOAT = np.dtype(np.float32)
LAST = (1 << 63) - 1
MODES: Any = ["sum", "mean", "weighted"]
IDS = st.lists(st.integers(0, 9) | st.sampled_from([1 << 40, LAST]), max_size=12)


def contributed(ids: Any, seed: int, samples: int, width: int = WIDTH) -> Contributed:
    rows = np.random.default_rng(seed).standard_normal((len(ids), width)).astype(FLOAT)
    return Contributed(Rows(np.array(ids, np.int64), rows), samples)


def by_hand(given: list[Contributed], mode: str) -> dict[int, Any]:
    """Row by row, in the order of the contributions."""
    counted = [each for each in given if mode != "weighted" or each.samples > 0]
    total: dict[int, Any] = {}
    for each in counted:
        own: dict[int, Any] = {}
        for id_, row in zip(each.rows.ids.tolist(), each.rows.rows, strict=True):
            own[id_] = own[id_] + row if id_ in own else row
        for id_, row in own.items():
            weighed = row * FLOAT.type(each.samples) if mode == "weighted" else row
            total[id_] = total[id_] + weighed if id_ in total else weighed
    weight = sum(each.samples for each in counted)
    divisor = {"sum": 1, "mean": len(counted), "weighted": weight}[mode]
    return {id_: row / FLOAT.type(divisor) for id_, row in sorted(total.items())}


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(IDS, st.integers(0, 3)), max_size=5), st.sampled_from(MODES), st.integers(0, 99))
def test_merged_rows_are_sums_in_the_order_of_the_list(pushed: Any, mode: Any, seed: int) -> None:
    given = [contributed(ids, seed + number, samples) for number, (ids, samples) in enumerate(pushed)]
    expected = by_hand(given, mode)
    merged = merged_rows(given, mode, WIDTH, FLOAT)
    assert merged.ids.tolist() == list(expected)
    assert [row.tobytes() for row in merged.rows()] == [row.tobytes() for row in expected.values()]


def test_minus_zero_of_one_worker_stays_minus_zero() -> None:
    given = [Contributed(Rows(np.array([2]), np.array([[-0.0]], FLOAT)), 1), contributed([1], 0, 1, width=1)]
    assert np.signbit(merged_rows(given, "mean", 1, FLOAT).rows()[1, 0])


def new_part(width: int = WIDTH) -> TablePart:
    return TablePart(RowSparse(row_shape=(width,), initializer=Constant(0.5)), "t")


def read(part: TablePart, version: int, ids: Any) -> Any:
    found = part.read(version, np.array(ids, np.int64), lambda nbytes: np.empty(nbytes, np.uint8))
    return found.view(FLOAT).reshape(len(ids), -1)


@pytest.mark.parametrize("optimizer", [None, SGD(1.0)])
def test_versions_before_the_last_two_updates_are_read_as_they_were(optimizer: Optimizer | None) -> None:
    part = new_part()
    asked = [LAST, 3, 0, 1, 2, 3]  # in any order, also several times
    seen = [read(part, 0, asked)]
    for number, ids in enumerate(([3, 1], [0, 3], [LAST], [2, 0])):
        part.update(optimizer, [contributed(ids, number, 1), contributed(ids[:1], number + 10, 1)], "sum")
        seen.append(read(part, number + 1, asked))
    assert not (seen[4] == seen[3]).all()
    for version in (2, 3, 4):
        assert read(part, version, asked).tobytes() == seen[version].tobytes()
    for version in (1, 5):
        with pytest.raises(NotAllowed, match="not kept any more"):
            read(part, version, asked)


def test_an_update_that_fails_leaves_all_versions() -> None:
    part = new_part()
    for number in range(3):
        part.update(SGD(1.0), [contributed([1, 2, 3], number, 1)], "sum")
    seen = [read(part, version, [1, 2, 3]) for version in (1, 2, 3)]
    thirteen = Contributed(Rows(np.array([1, 2, 3]), np.full((3, WIDTH), 13, FLOAT)), 1)
    with pytest.raises(ZeroDivisionError):
        part.update(Failing(0.1), [thirteen], "sum")
    assert part.version == 3
    for version, rows in zip((1, 2, 3), seen, strict=True):
        assert read(part, version, [1, 2, 3]).tobytes() == rows.tobytes()


def test_what_was_put_aside_does_not_change_with_the_memory_of_the_push() -> None:
    part = new_part()
    payload = np.concatenate((np.array([1, 4]).view(np.uint8), np.ones((2, WIDTH), FLOAT).view(np.uint8).reshape(-1)))
    part.update(SGD(1.0), [part.pushed(payload, 1)], "sum")
    payload[:] = 0
    assert read(part, 0, [1, 4])[:, 0].tolist() == [0.5, 0.5]
    assert read(part, 1, [1, 4])[:, 0].tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("payload", "error", "text"),
    [
        (np.zeros(8 + 4 * WIDTH + 1, np.uint8), ProtocolError, "no rows"),
        (np.zeros(2 * (8 + 4 * WIDTH), np.uint8), ProtocolError, "not in ascending order"),
        (np.full(8 + 4 * WIDTH, 255, np.uint8), NotAllowed, "has no row -1"),
    ],
)
def test_a_push_of_something_else_is_refused(payload: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        new_part().pushed(payload, 1)


def without_payloads(rows: Any) -> bytes:
    """The bits, but for those of NaNs, of which nothing is promised."""
    return bytes(np.where(np.isnan(rows), FLOAT.type(7), rows).tobytes())


def bits_of_rounds(rule: Optimizer, mode: Any, workers: int) -> bytes:
    """Some rounds with rows of one worker, of several and of none before them; every version that is kept."""
    part, random = new_part(17), np.random.default_rng(workers)
    found = b""
    for number in range(4):
        given = []
        for _ in range(workers):
            ids = np.unique(np.append(random.integers(0, 300, 40), [LAST - number]))
            rows = numbers(random, len(ids) * 17, "float32").reshape(-1, 17)
            rows.flags.writeable = False
            given.append(Contributed(Rows(ids, rows), int(random.integers(0, 3))))
        part.update(rule, given, mode)
        found += without_payloads(merged_rows(given, mode, 17, FLOAT).rows())
        for version in range(max(0, number - 1), number + 2):
            some = read(part, version, [*range(300), LAST, LAST - 3])
            found += without_payloads(some)
    return found


@needs_numba
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("rule", [Adagrad(0.1, wd=0.01), Adam(0.1), SGD(0.1, momentum=0.9), SGD(0.1)], ids=repr)
def test_compiled_loops_give_the_same_bits(rule: Optimizer, mode: Any, workers: int) -> None:
    with only_numpy():
        by_numpy = bits_of_rounds(rule, mode, workers)
    assert warm_up(rule, of_rows=True)
    with only_compiled():
        assert bits_of_rounds(rule, mode, workers) == by_numpy


def test_large_updates_and_reads_on_two_processors_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = bits_of_rounds(Adagrad(0.1), "mean", 2)
    started: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    for module in (halves, row_index, table):
        monkeypatch.setattr(module, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(halves, "processors", lambda: 2)
    monkeypatch.setattr(threading.Thread, "start", noted)
    assert bits_of_rounds(Adagrad(0.1), "mean", 2) == alone
    assert "kvd-half" in started


def test_the_memory_of_what_is_forgotten_is_used_again_unless_far_too_large() -> None:
    part = new_part(1000)
    for number in range(6):
        part.update(SGD(1.0), [contributed(range(200), number, 1, width=1000)], "sum")
        if number == 3:
            full = part.nbytes
    assert part.nbytes == full
    for number in range(4):
        part.update(SGD(1.0), [contributed([number], number, 1, width=1000)], "sum")
    assert part.nbytes < full - 2 * 190 * 1000 * FLOAT.itemsize
    assert read(part, part.version - 2, [2, 3]).tobytes() != read(part, part.version, [2, 3]).tobytes()
