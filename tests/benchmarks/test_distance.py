"""How quickly one core reads what another has just written."""

from __future__ import annotations

import os

import pytest

from benchmarks import distance


@pytest.fixture
def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def test_one_core_reads_what_another_has_written(cores: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if len(cores) < 2:
        pytest.skip("there is one core")
    monkeypatch.setattr(distance, "PATIENCE_S", 60.0)
    monkeypatch.setattr(distance, "BLOCKS", 3)
    found = distance.between(*cores[:2])
    assert found is not None
    assert found > 0
    assert sorted(os.sched_getaffinity(0)) == cores


def test_a_core_that_does_not_answer_has_no_distance(cores: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "PATIENCE_S", 0.0)
    assert distance.between(cores[0], max(cores) + 100_000) is None  # its program cannot begin
    assert sorted(os.sched_getaffinity(0)) == cores


def test_more_cores_than_two_have_no_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    for usable in ({0}, {0, 1, 2}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, usable=usable: usable)
        assert distance.gb_s() is None
