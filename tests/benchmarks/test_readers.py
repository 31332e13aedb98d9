"""The benchmark of readers runs, and both kinds of steps are measured."""

from __future__ import annotations

from benchmarks.readers import measure


def test_steps_with_and_without_readers_are_measured() -> None:
    figures = measure(megabytes=0.1, readers=1, interval_s=0.01, turns=1, turn_s=0.5)
    assert list(figures) == ["without", "with"]
    for found in figures.values():
        assert min(found.times_s) > 0
        assert found.row("name")[:2] == ["name", str(len(found.times_s))]
