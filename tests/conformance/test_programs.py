"""Programs like the public tests of MXNet and BytePS, written by us after their documentation.

They run as jobs of `kvd launch`, with kvd imported in place of the other library. Compression and row-sparse keys are
left out: kvd has none.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import child_environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 110

#: Name of the program and its arguments → how many workers and servers; 0 workers: without a cluster.
JOBS: dict[str, tuple[int, int]] = {
    "dist_sync_kvstore.py": (4, 2),
    "dist_sync_kvstore.py dist_device_sync": (2, 1),
    "dist_async_kvstore.py": (3, 2),
    "dist_async_kvstore.py dist_device_async": (2, 1),
    "kvstore_local.py local": (0, 0),
    "kvstore_local.py device": (0, 0),
    "kvstore_local.py local_allreduce_device": (0, 0),
    "kvstore_custom.py teststore": (0, 0),
    "kvstore_custom.py local": (0, 0),
    "kvstore_custom.py byteps": (3, 2),
    "kvstore_custom.py dist_device_sync": (2, 2),
    "byteps_push_pull.py": (3, 2),
}


def test_each_program_has_a_job() -> None:
    assert {job.split()[0] for job in JOBS} == {path.name for path in SCRIPTS.glob("*.py")}


@pytest.mark.parametrize("job", JOBS)
def test_a_program_runs_to_its_end(job: str) -> None:
    name, *arguments = job.split()
    workers, servers = JOBS[job]
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    if workers:
        launch = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", str(workers), "-s", str(servers), "--"]
        command = launch + command
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = re.findall(r"worker (\d+) of (\d+) is done", done.stdout)
    expected = [(str(rank), str(max(workers, 1))) for rank in range(max(workers, 1))]
    assert sorted(ended) == expected, done.stdout + done.stderr
