"""The program of the page on rare exchanges, run as it is written, through the death of a worker."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import child_environment
from tests.docs.sources_harness import ROOT

PAGE = (ROOT / "docs" / "local-sgd.md").read_text(encoding="utf-8")
TIMEOUT_S = 280
STEP = "for step in optimizer.steps(STEPS):\n"
DIE = """
    import os, pathlib, signal
    if kv.rank == 1 and step == 130 and not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if kv.rank == 1 and not pathlib.Path("first").exists() and pathlib.Path("died").exists():
        pathlib.Path("first").write_text(str(step))
"""


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_program_learns_though_a_worker_is_killed(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n# diloco.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    [command] = re.findall(r"^kvd launch .* python diloco.py$", PAGE, re.MULTILINE)
    assert STEP in program
    (tmp_path / "diloco.py").write_text(program.replace(STEP, STEP + DIE))
    words = {"kvd": [sys.executable, "-m", "kvd_cli.main"], "python": [sys.executable]}
    done = subprocess.run(
        [part for word in shlex.split(command) for part in words.get(word, [word])],
        cwd=tmp_path,
        env=child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "first").read_text() == "100"  # it begins its round again
    results = dict(re.findall(r"worker (\d): accuracy (.*)", done.stdout))
    assert results.keys() == {"0", "1", "2"}
    assert len(set(results.values())) == 1, results
    assert float(results["0"].partition(",")[0]) > 0.9
