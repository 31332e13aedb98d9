"""A daemon that crashes leaves no core dump, whatever the limit of its parent."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from kvd.config import child_environment
from kvd.testing.cluster import wait_until

ROOT = Path(__file__).resolve().parents[2]


def as_large_as_possible() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def test_a_daemon_that_crashes_leaves_no_core_dump(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    daemon = subprocess.Popen(
        [sys.executable, "-m", "kvd_cli.main", "scheduler", "--bind", "tcp://127.0.0.1:0", "--num-workers", "1",
         "--num-servers", "1", "--ready-file", str(ready)],
        env=child_environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}"}),
        stderr=subprocess.DEVNULL, cwd=tmp_path, preexec_fn=as_large_as_possible,
    )  # fmt: skip
    try:
        wait_until(ready.exists, "the scheduler is ready")
        soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_CORE)
        assert soft == (0 if hard == 0 else 1)
        assert hard == resource.getrlimit(resource.RLIMIT_CORE)[1]
        daemon.send_signal(signal.SIGABRT)
        end = os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        assert (end.si_status, end.si_code) == (signal.SIGABRT, os.CLD_KILLED)  # not CLD_DUMPED
        assert os.listdir(tmp_path) == ["ready"]
    finally:
        daemon.kill()
        daemon.wait(30)
