"""A job of `kvd launch` that runs until it is told to end, and its processes as the kernel shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvd.testing.cluster import wait_until

DEADLINE_S = 60.0

WORKER = """
import os, sys
import numpy as np
import kvd
from kvd.testing.cluster import wait_until
kv = kvd.create("dist_sync")
kv.init("w", np.zeros(100_000, np.float32))
kv.pushpull("w", np.ones(100_000, np.float32))
print("trained", flush=True)
wait_until(lambda: os.path.exists(sys.argv[1]), "the job may end", 300.0)
kv.close()
"""

FAKE_SSH = """#!/bin/sh
for command; do :; done
SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$command"
"""


class RunningJob:
    """Two workers and a server that have trained and wait.

    Attributes:
        variables: those that the launcher says to look at the job with.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self._folder = folder
        self._errors = folder / "stderr"
        self._said = folder / "stdout"
        wait_until(self._trains, "the workers have trained", DEADLINE_S)
        said = re.search(r"look at the job with: (.*) kvd status", self._errors.read_text())
        assert said is not None
        self.variables = dict(re.findall(r"(KVD_\w+)=(\S+)", said[1]))

    def _trains(self) -> bool:
        assert self.process.poll() is None, self._errors.read_text()
        return self._said.read_text().count("trained") == 2

    def processes(self) -> list[int]:
        """The launcher and all that it started."""
        found = [self.process.pid]
        for pid in found:
            found += [int(child) for task in _tasks(pid) for child in (task / "children").read_text().split()]
        return found

    def end(self) -> str:
        """Let the workers end; what the job has said."""
        (self._folder / "end").touch()
        assert self.process.wait(DEADLINE_S) == 0, self._errors.read_text()
        return self._said.read_text() + self._errors.read_text()


def running_job(folder: Path, *flags: str, hosts: bool = False) -> Iterator[RunningJob]:
    """A job whose output goes to files in the folder; killed if it still runs at the end."""
    (folder / "ssh").write_text(FAKE_SSH)
    (folder / "ssh").chmod(0o755)
    (folder / "worker.py").write_text(WORKER)
    where = ["--hosts", "a,b", "--ssh", str(folder / "ssh")] if hosts else []
    command = ["launch", "-n", "2", "-s", "1", *where, *flags, "--", sys.executable, str(folder / "worker.py")]
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvd_cli.main", *command, str(folder / "end")],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, env=_environment(),
        )  # fmt: skip
    try:
        yield RunningJob(process, folder)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(DEADLINE_S)


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'cli'}"}


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []  # it has ended
