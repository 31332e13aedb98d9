"""The comparison of JAX steps measures every system, and prints a table."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks import jax_step


@pytest.mark.skipif(find_spec("optax") is None, reason="JAX is not installed: pip install jax optax")
def test_it_prints_each_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert jax_step.main(["--turns", "1", "--steps", "2", "--only", "small"]) == 0
    output = capsys.readouterr().out
    assert "small: layers of (64, 128, 10), batch 64" in output
    for title in jax_step.SYSTEMS.values():
        assert title in output
