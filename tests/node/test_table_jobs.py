"""The jobs of a server on a part of a table, against dicts of rows in float64."""

from __future__ import annotations

import math
from copy import deepcopy
from random import Random
from typing import Any

import numpy as np
import pytest

from kvd.core.machine import (
    Apply,
    Contribution,
    Create,
    Export,
    Extent,
    FirstBytes,
    JobDone,
    Load,
    LoadRows,
    ReadPart,
    ReadRows,
    ReadStored,
    Span,
    TableVersion,
)
from kvd.errors import KvdError, NotAllowed, ProtocolError
from kvd.node.jobs.runner import JobRunner, view
from kvd.optimizer import LAMB, SGD, Adagrad, Adam
from kvd.protocol.messages import ADD
from kvd.protocol.specs import ANY_ROW, Initial, KeySpec, TableSpec
from kvd.tables.parts import parts_of

WIDTH = 3
ROWS = 40
QUARTERS = Initial("Constant", (0.25,))
Given = tuple[dict[int, list[float]], int]  # the rows that one worker pushes, and its samples


def spec_of(initial: Initial = QUARTERS, rows: int = ROWS, parts: int = 1) -> KeySpec:
    return KeySpec("float64", (WIDTH,), 4096, "", TableSpec(rows, initial, parts))


class Part:
    """Part 1 of table "t" in a runner."""

    def __init__(self, runner: JobRunner | None = None, spec: KeySpec | None = None) -> None:
        self.runner = JobRunner() if runner is None else runner
        made = self.runner.run(Create(1, (FirstBytes("t", 1, "float64", Span(None, 0, 0), spec or spec_of()),)))
        assert made.error is None, made.error
        (self.version,) = made.result

    def apply(self, *payloads: bytes, samples: tuple[int, ...] = (), merge: str = "sum", optimizer: Any = None) -> Any:
        """The error; None if there is a new version."""
        contributions = tuple(
            Contribution(rank, 1, Span(payload, 8, len(payload) - 8), samples[rank] if samples else 1, ADD)
            for rank, payload in enumerate(bytes(8) + payload for payload in payloads)
        )
        layout = (Extent("t", 1, 0, 0),)
        done = self.runner.run(Apply(2, 9, layout, "float64", 0, self.version, contributions, False, merge, optimizer))
        if done.error is None:
            self.version = done.result
        return done.error

    def push(self, *given: Given, merge: str = "sum", optimizer: Any = None) -> None:
        samples = tuple(number for _, number in given)
        error = self.apply(*[payload_of(rows) for rows, _ in given], samples=samples, merge=merge, optimizer=optimizer)
        assert error is None, error

    def read(self, ids: list[int], version: TableVersion | None = None) -> list[list[float]]:
        done = self.read_job(ids, self.version if version is None else version)
        assert done.error is None, done.error
        assert done.result.nbytes == len(ids) * WIDTH * 8
        found: list[list[float]] = view(done.result, np.dtype(np.float64)).reshape(-1, WIDTH).tolist()
        return found

    def read_job(self, ids: list[int], version: TableVersion) -> Any:
        done = self.read_jobs([ids], version)
        if done.error is not None:
            return done
        (rows,) = done.result
        return JobDone(3, None, rows) if isinstance(rows, KvdError) else JobDone(3, rows)

    def read_jobs(self, lists: list[list[int]], version: TableVersion) -> JobDone:
        packed = [np.array(ids, np.int64).tobytes() for ids in lists]
        return self.runner.run(ReadRows(3, "t", 1, version, tuple([Span(ids, 0, len(ids)) for ids in packed])))


def payload_of(rows: dict[int, list[float]]) -> bytes:
    ids = sorted(rows)
    values = np.array([rows[row] for row in ids], np.float64)
    return np.array(ids, np.int64).tobytes() + values.tobytes()


class Model:
    """Rows and what an optimizer keeps of them, by id, as the formulas say."""

    def __init__(self) -> None:
        self.rows: dict[int, list[float]] = {}
        self.state: dict[int, list[list[float]]] = {}
        self.step = 0

    def row(self, row: int) -> list[float]:
        return self.rows.get(row, [0.25] * WIDTH)

    def push(self, given: list[Given], merge: str, optimizer: Any) -> None:
        self.step += optimizer is not None
        weights = [number if merge == "weighted" else 1 for _, number in given]
        divisor = {"sum": 1, "mean": len(given), "weighted": sum(weights)}[merge]
        for row in sorted({row for rows, _ in given for row in rows}):
            if merge == "weighted" and not any(number for rows, number in given if row in rows):
                continue  # without samples nothing is said of it
            total = [
                math.fsum(
                    weight * rows[row][j] for (rows, _), weight in zip(given, weights, strict=True) if row in rows
                )
                / divisor
                for j in range(WIDTH)
            ]
            self.rows[row] = total if optimizer is None else self.updated(row, total, optimizer)

    def updated(self, row: int, gradient: list[float], rule: Any) -> list[float]:
        first, second = self.state.setdefault(row, [[0.0] * WIDTH, [0.0] * WIDTH])
        made = []
        for j, (w, g) in enumerate(zip(self.row(row), gradient, strict=True)):
            if isinstance(rule, SGD):
                first[j] = rule.momentum * first[j] + g + rule.wd * w
                made.append(w - 0.5 * first[j])
            elif isinstance(rule, Adagrad):
                first[j] += g * g
                made.append(w - 0.5 * g / (math.sqrt(first[j]) + rule.epsilon))
            else:
                first[j] = rule.beta1 * first[j] + (1 - rule.beta1) * g
                second[j] = rule.beta2 * second[j] + (1 - rule.beta2) * g * g
                mean, variance = first[j] / (1 - rule.beta1**self.step), second[j] / (1 - rule.beta2**self.step)
                made.append(w - 0.5 * mean / (math.sqrt(variance) + rule.epsilon))
        return made

    def reset(self) -> None:
        self.state, self.step = {}, 0


OPTIMIZERS = [None, SGD(0.5, momentum=0.9, wd=0.125), Adagrad(0.5), Adam(0.5)]


@pytest.mark.parametrize("merge", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_rounds_equal_the_model_and_earlier_versions_can_be_read(optimizer: Any, merge: str) -> None:
    """Three workers, of which some push nothing, and one at times without samples; the state is reset on the way."""
    random = Random(merge + repr(optimizer))
    part, model = Part(), Model()
    versions = [(part.version, deepcopy(model))]
    for number in range(40):
        given = [
            (
                {row: [random.gauss(0, 1) for _ in range(WIDTH)] for row in random.sample(range(ROWS), count)},
                random.choice([0, 1, 5]) if rank else 2,
            )
            for rank, count in enumerate(random.choices([0, 1, 7, ROWS], k=3))
        ]
        if number == 25:
            part.runner.reset([("t", 1)])
            model.reset()
        part.push(*given, merge=merge, optimizer=optimizer)
        model.push(given, merge, optimizer)
        versions.append((part.version, deepcopy(model)))
        for version, then in versions[-3:]:
            ids = random.sample(range(ROWS), random.choice([1, ROWS]))
            expected = [then.row(row) for row in ids]
            np.testing.assert_allclose(part.read(ids, version), expected, rtol=1e-9, atol=1e-12)
    assert (part.version.number, part.version.rows) == (40, len(model.rows))
    assert part.version.nbytes >= len(model.rows) * WIDTH * 8
    error = part.read_job([1], versions[-4][0]).error
    assert isinstance(error, NotAllowed)
    assert "version 37 of table 't' is not kept" in str(error)


def test_a_version_that_is_to_come_cannot_be_read() -> None:
    part = Part()
    assert isinstance(part.read_job([1], TableVersion(1, 0, 0)).error, NotAllowed)


def test_rows_that_were_read_stay_as_they_were() -> None:
    part = Part()
    done = part.read_job([1, 2], part.version)
    part.push(({1: [1.0] * WIDTH}, 1))
    assert view(done.result, np.dtype(np.float64)).tolist() == [0.25] * 2 * WIDTH


def test_the_memory_of_a_push_belongs_to_its_sender_when_it_was_applied() -> None:
    part = Part()
    payload = bytearray(payload_of({1: [1.0] * WIDTH, 2: [2.0] * WIDTH}))
    before = part.version
    layout, given = (Extent("t", 1, 0, 0),), (Contribution(0, 1, Span(payload, 0, len(payload)), 1, ADD),)
    done = part.runner.run(Apply(2, 9, layout, "float64", 0, before, given, False, "sum", None))
    payload[:] = b"\xab" * len(payload)
    assert part.read([1, 2], done.result) == [[1.0] * WIDTH, [2.0] * WIDTH]
    assert part.read([1, 2], before) == [[0.25] * WIDTH] * 2


# ── what is wrong with a push ──


def raw(ids: list[int]) -> bytes:
    return np.array(ids, np.int64).tobytes() + np.ones((len(ids), WIDTH)).tobytes()


BAD: list[tuple[bytes, type[KvdError], str]] = [
    (raw([1])[:-1], ProtocolError, "31 bytes are no rows of table 't'"),
    (raw([2, 1]), ProtocolError, "not in ascending order"),
    (raw([1, 1]), ProtocolError, "not in ascending order"),
    (raw([-1, 3]), NotAllowed, "table 't' has no row -1: it has 40"),
    (raw([3, ROWS]), NotAllowed, "table 't' has no row 40: it has 40"),
]


@pytest.mark.parametrize(("payload", "kind", "text"), BAD)
def test_one_bad_push_of_a_round_changes_nothing(payload: bytes, kind: type[KvdError], text: str) -> None:
    part = Part()
    part.push(({1: [1.0] * WIDTH}, 1), optimizer=SGD(0.5, momentum=0.5))
    before, rows = part.version, part.read(list(range(ROWS)))
    error = part.apply(raw([1, 5]), payload, optimizer=SGD(0.5, momentum=0.5))
    assert isinstance(error, kind)
    assert text in str(error)
    assert part.version == before
    assert part.read(list(range(ROWS))) == rows
    part.push(({1: [1.0] * WIDTH}, 1), optimizer=SGD(0.5, momentum=0.5))
    assert part.version.number == 2
    assert part.read([1, 5]) == [[0.25 - 0.5 - 0.75] * WIDTH, [0.25] * WIDTH]
    assert part.read([1], before) == [[-0.25] * WIDTH]


def test_rows_of_another_part_are_refused() -> None:
    """Nobody could read them here, and a snapshot would have some rows twice."""
    part = Part(spec=spec_of(parts=4))
    rows = np.arange(ROWS)
    own, others = rows[parts_of(rows, 4) == 1].tolist(), rows[parts_of(rows, 4) != 1].tolist()
    assert part.apply(raw(own)) is None
    before = part.version
    for wrong in (others, sorted([*own, others[0]])):
        error = part.apply(raw(own), raw(wrong))
        assert isinstance(error, ProtocolError)
        assert f"row {others[0]} of table 't' is in part {int(parts_of(rows, 4)[others[0]])}, not in 1" in str(error)
    assert part.version == before
    assert part.version.rows == len(own)


def test_a_copy_of_a_part_refuses_rows_of_another_one() -> None:
    spec = spec_of(parts=4)
    part = Part(spec=spec)
    own = np.flatnonzero(parts_of(np.arange(ROWS), 4) == 1).tolist()
    assert part.apply(raw(own)) is None
    copy, position = JobRunner(), 0
    while position is not None:
        piece, position = part.runner.run(ReadPart(3, "t", 1, position, 1 << 20)).result
        assert copy.run(LoadRows(4, "t", 1, spec, piece)).error is None
    first = FirstBytes("t", 1, "float64", Span(None, 0, 0), spec, is_copied=True)
    (part.version,) = copy.run(Create(5, (first,))).result
    part.runner = copy
    assert isinstance(part.apply(raw([row for row in range(ROWS) if row not in own])), ProtocolError)
    assert part.apply(raw(own)) is None


def test_an_optimizer_that_updates_no_single_rows_changes_nothing() -> None:
    part = Part()
    assert isinstance(part.apply(raw([1]), optimizer=LAMB(0.5)), NotAllowed)
    assert part.version.number == 0
    assert part.read([1]) == [[0.25] * WIDTH]


@pytest.mark.parametrize("ids", [[-1], [ROWS], [0, 1 << 62]])
def test_rows_that_there_are_not_cannot_be_read(ids: list[int]) -> None:
    part = Part()
    error = part.read_job(ids, part.version).error
    assert isinstance(error, NotAllowed)
    assert "table 't' has no row" in str(error)


def test_a_table_without_a_bound_takes_any_id() -> None:
    part = Part(spec=spec_of(rows=ANY_ROW))
    largest = (1 << 63) - 1
    part.push(({0: [1.0] * WIDTH, largest: [2.0] * WIDTH}, 1))
    assert part.read([largest, 5, 0]) == [[2.0] * WIDTH, [0.25] * WIDTH, [1.0] * WIDTH]
    assert isinstance(part.apply(raw([-(1 << 63)])), NotAllowed)


def test_a_nan_stays_in_its_row() -> None:
    part = Part()
    part.push(({1: [math.nan, math.inf, 1.0], 2: [1.0] * WIDTH}, 1), ({2: [1.0] * WIDTH}, 1), optimizer=Adagrad(0.5))
    assert np.isfinite(part.read([2, 3])).all()
    assert np.isnan(part.read([1])[0][0])


# ── parts come and go ──


def test_a_spec_of_no_table_is_refused() -> None:
    first = FirstBytes("t", 0, "float64", Span(None, 0, 0), spec_of(Initial("Ones")))
    runner = JobRunner()
    assert isinstance(runner.run(Create(1, (first,))).error, ProtocolError)
    assert runner.slices == set()


def test_rows_that_one_cannot_have_do_not_keep_the_others_from_theirs() -> None:
    part = Part()
    part.push(({1: [1.0] * WIDTH, 4: [2.0] * WIDTH}, 1), optimizer=None)
    first, wrong, last = part.read_jobs([[4, 1], [1, 1 << 40], []], part.version).result
    assert view(first, np.dtype(np.float64)).tolist() == [2.0] * WIDTH + [1.0] * WIDTH
    assert isinstance(wrong, NotAllowed)
    assert last.nbytes == 0


def test_what_was_forgotten_is_not_there_and_the_others_are() -> None:
    part = Part()
    other = FirstBytes("t", 0, "float64", Span(None, 0, 0), spec_of())
    assert part.runner.run(Create(1, (other,))).error is None
    part.runner.forget([("t", 1)])
    assert part.runner.slices == {("t", 0)}
    for error in (part.apply(raw([1])), part.apply(), part.read_job([1], part.version).error):
        assert isinstance(error, NotAllowed)
        assert "part 1 of table 't' is not here any more" in str(error)
    payload = np.array([1], np.int64).tobytes()
    done = part.runner.run(ReadRows(3, "t", 0, TableVersion(0, 0, 0), (Span(payload, 0, 8),)))
    assert view(done.result[0], np.dtype(np.float64)).tolist() == [0.25] * WIDTH


def test_a_table_that_is_made_again_has_no_rows_and_no_state() -> None:
    part = Part()
    for _ in range(2):
        part.push(({1: [1.0] * WIDTH}, 1), optimizer=SGD(0.5, momentum=0.9))
    again = Part(part.runner)
    assert (again.version.number, again.version.rows) == (0, 0)
    assert again.read([1]) == [[0.25] * WIDTH]
    again.push(({1: [1.0] * WIDTH}, 1), optimizer=SGD(0.5, momentum=0.9))
    assert again.read([1]) == [[-0.25] * WIDTH]


def test_a_name_is_that_of_a_table_or_of_a_value() -> None:
    part = Part()
    part.push(({1: [1.0] * WIDTH}, 1))
    (value,) = part.runner.run(Create(1, (FirstBytes("t", 1, "uint8", Span(b"ab", 0, 2)),))).result
    assert value.tolist() == [97, 98]
    assert part.runner.slices == {("t", 1)}
    assert part.read_job([1], part.version).error is not None
    assert Part(part.runner).read([1]) == [[0.25] * WIDTH]


def test_the_state_of_a_table_is_its_rows() -> None:
    part = Part()
    part.push(({1: [1.0] * WIDTH, 7: [2.0] * WIDTH}, 1), optimizer=Adagrad(0.5))
    assert isinstance(part.runner.run(Export(3, "t", 1)).error, NotAllowed)
    assert isinstance(part.runner.run(Load(3, "t", 1, 1, (), Span(b"", 0, 0))).error, ProtocolError)
    page = part.runner.run(ReadStored(4, "t", 1, 0, 1 << 20)).result
    other = Part(part.runner)
    stored = other.runner.run(Load(5, "t", 1, 0, (), page)).result
    assert (stored.number, stored.rows) == (1, 2)


def test_what_is_no_state_and_no_piece_of_a_table_changes_nothing() -> None:
    part = Part()
    part.push(({1: [1.0] * WIDTH}, 1), optimizer=Adagrad(0.5))
    rows = part.read([1, 2])
    assert isinstance(part.runner.run(Export(3, "t", 1)).error, NotAllowed)
    assert isinstance(part.runner.run(Load(3, "t", 1, 1, (), Span(None, 0, 0))).error, ProtocolError)
    assert part.read([1, 2]) == rows
