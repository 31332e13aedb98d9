"""The benchmark of the cost of being able to heal makes both loops, and prints a table."""

from __future__ import annotations

import pytest

from benchmarks import healing_cost


def test_it_prints_both_loops_and_their_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert healing_cost.main(["--turns", "1", "--steps", "3"]) == 0
    output = capsys.readouterr().out
    assert "kv.steps" in output
    assert "optimizer.steps, 4 BatchNorm layers" in output
    assert "difference" in output
