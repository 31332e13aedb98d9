"""The programs that the page on migration shows run as jobs, and both workers end with the same loss."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import child_environment
from tests.docs.sources_harness import ROOT

PROGRAMS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/migrating-from-mxnet.md").read_text(), re.DOTALL | re.M)


@pytest.mark.parametrize("program", PROGRAMS, ids=["servers have the optimizer", "workers have it"])
def test_a_program_runs_on_two_workers(program: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", "2", "-s", "1", "--", sys.executable, "train.py"]
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"loss (\d+\.\d+)", done.stdout)
    assert len(losses) == 2, done.stdout
    assert losses[0] == losses[1]
    assert float(losses[0]) < 0.3
