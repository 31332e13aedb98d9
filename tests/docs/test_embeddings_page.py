"""The program of the page on embeddings and samplers, as it is written, and with a worker that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import child_environment
from kvd.testing.cluster import wait_until
from tests.docs.sources_harness import ROOT

PAGE = (ROOT / "docs" / "embeddings-and-samplers.md").read_text(encoding="utf-8")
TIMEOUT_S = 110
FIRST_LINE = "    optimizer.zero_grad()\n"
PAUSE = """
    import os, pathlib
    from kvd.testing.cluster import wait_until
    if step == 30:
        pathlib.Path(f"at-{kv.rank}.part").write_text(str(os.getpid()))
        pathlib.Path(f"at-{kv.rank}.part").rename(f"at-{kv.rank}")
        wait_until(pathlib.Path("go").exists, "the test goes on", 300)
"""


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "recommend.py").write_text(program)
    [command] = re.findall(r"^```sh\nkvd (.*?) -- python recommend.py$", PAGE, re.MULTILINE)
    return subprocess.Popen(
        [sys.executable, "-m", "kvd_cli.main", *command.split(), "--", sys.executable, "recommend.py"],
        env=child_environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"}),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(300)
def test_the_digest_is_the_same_though_a_worker_is_killed(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(# recommend.py\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert FIRST_LINE in program
    folder = tmp_path / "killed"
    undisturbed = start(program, tmp_path / "undisturbed")
    killed = start(program.replace(FIRST_LINE, PAUSE + FIRST_LINE), folder)
    try:
        both = [folder / f"at-{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in both), "both workers are in step 30", TIMEOUT_S)
        os.kill(int(both[1].read_text()), signal.SIGKILL)
        (folder / "go").touch()
        said, wanted = (job.communicate(timeout=TIMEOUT_S)[0] for job in (killed, undisturbed))
    finally:
        for job in (killed, undisturbed):
            job.terminate()
            job.communicate(timeout=30)
    assert (killed.returncode, undisturbed.returncode) == (0, 0), said + wanted
    assert "restart 1 of 3" in said
    results = re.findall(r"right (\d\.\d+) digest (\w+)", said + wanted)
    assert len(results) == 4, said + wanted
    assert len(set(results)) == 1
    assert float(results[0][0]) > 0.8
