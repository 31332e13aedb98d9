"""How many descriptors a daemon takes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from kvd.config import child_environment
from kvd.node.daemon.process_limits import MOST
from kvd.testing.cluster import wait_until

ROOT = Path(__file__).resolve().parents[2]


def few() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))


def limit_of(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


def test_a_daemon_takes_what_it_may_have(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    daemon = subprocess.Popen(
        [sys.executable, "-m", "kvd_cli.main", "scheduler", "--bind", "tcp://127.0.0.1:0", "--num-workers", "1",
         "--num-servers", "1", "--ready-file", str(ready)],
        env=child_environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}"}),
        stderr=subprocess.DEVNULL,
        preexec_fn=few,
    )  # fmt: skip
    try:
        wait_until(ready.exists, "the scheduler is ready")
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert limit_of(daemon.pid) == (MOST if hard == resource.RLIM_INFINITY else min(hard, MOST))
    finally:
        daemon.terminate()
        daemon.wait(30)


def test_a_program_keeps_its_limit() -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    done = subprocess.run(
        [sys.executable, "-m", "kvd_cli.main", "worker", "--", sys.executable, "-c", code],
        env=child_environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}"}),
        capture_output=True, text=True, timeout=60, check=True, preexec_fn=few,
    )  # fmt: skip
    assert done.stdout == "256\n"


def test_a_program_without_any_left_knows_it() -> None:
    code = (
        "import os, resource\n"
        "from kvd.node.daemon.facts import ProcessFacts\n"
        "facts = ProcessFacts(lambda: 0.0, {})\n"
        "facts.report()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "try:\n"
        "    while True:\n"
        "        os.dup(0)\n"
        "except OSError:\n"
        "    found = facts.report()\n"
        "print(found['files_open'], found['files_limit'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("64 64\n", "")
