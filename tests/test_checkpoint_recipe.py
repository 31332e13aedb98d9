"""The program of docs/checkpoints.md: stopped and started again, it ends with the bits of a run in one go."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import child_environment

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL)[-1]
TIMEOUT_S = 110


def run(folder: Path, steps: int, servers: int) -> list[str]:
    """What the two workers of a job of `kvd launch` print, in the order of their ranks."""
    program = folder / "train.py"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", "2", "-s", str(servers), "--"]
    command = [*launch, sys.executable, str(program), str(folder), str(steps)]
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(re.findall(r"([01]) (\[.*\])", done.stdout))
    assert [rank for rank, _ in lines] == ["0", "1"], done.stdout + done.stderr
    return [values for _, values in lines]


def test_the_recipe_goes_on_where_it_stopped(tmp_path: Path) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    parts.mkdir()
    whole.mkdir()
    first = run(parts, 5, servers=1)
    resumed = run(parts, 10, servers=2)
    at_once = run(whole, 10, servers=1)
    assert len({*resumed, *at_once}) == 1
    assert first[0] == first[1] != resumed[0]
