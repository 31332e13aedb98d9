"""``kvd doctor`` looks at a real job in which one program hangs and another one is stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result

from kvd.testing.cluster import wait_until
from tests.cli.conftest import DEADLINE_S, Spawn

HUNG, STOPPED = 1, 2
PROGRAM = """
import os, sys
import numpy as np
import kvd
from kvd.testing.cluster import wait_until
with kvd.create("dist_sync") as kv:
    kv.init("w", np.zeros(8, np.float32))
    for step in kv.steps(10, ["w"]):
        if step == 5:
            print("pid", kv.rank, os.getpid(), flush=True)
            wait_until(lambda: kv.rank == 0 or os.path.exists("end"), "the test has seen enough", 300.0)
        kv.pushpull("w", np.ones(8, np.float32))
"""


def test_hung_and_stopped_workers_are_found(spawn: Spawn, kvd: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    said, errors = tmp_path / "stdout", tmp_path / "stderr"
    with said.open("w") as out, errors.open("w") as err:
        job = spawn("launch", "-n", "3", "-s", "1", "--", sys.executable, "train.py", stdout=out, stderr=err)

    def pids() -> dict[int, int]:
        assert job.poll() is None, errors.read_text()
        return {int(rank): int(pid) for rank, pid in re.findall(r"pid (\d) (\d+)\n", said.read_text())}

    wait_until(lambda: len(pids()) == 3, "all have come to the step", DEADLINE_S)
    os.kill(pids()[STOPPED], signal.SIGSTOP)
    try:
        where = re.search(r"KVD_SCHEDULER=(\S+) KVD_JOB=(\S+) KVD_KEYFILE=(\S+)", errors.read_text())
        place = ["-S", where[1], "--job", where[2], "--keyfile", where[3]] if where else ["--insecure"]

        def report() -> Any:
            return json.loads(kvd("doctor", "-o", "json", "--timeout", "20s", *place).stdout)

        advice: list[str] = []

        def is_found() -> bool:
            found = report()
            advice[:] = found["advice"]
            is_stalled = any(line.startswith("stalled") for line in advice)
            assert not (is_stalled and found["healthy"])
            return is_stalled and any(member["is_silent"] for member in found["members"] if member["rank"] == STOPPED)

        wait_until(is_found, "the doctor finds both", DEADLINE_S)
    finally:
        os.kill(pids()[STOPPED], signal.SIGCONT)
    [line] = [line for line in advice if line.startswith("stalled")]
    assert re.search(r"round 6 of key 'w' has waited for \d+ s for worker 1 .*process", line), line
    for rank in (HUNG, STOPPED):
        assert f"worker {rank} (node worker-{rank}, process {pids()[rank]} on host" in line
    assert f"kill -CONT {pids()[STOPPED]}" in line
    (tmp_path / "end").touch()
    assert job.wait(DEADLINE_S) == 0, errors.read_text()
