"""Workers with an optimizer of their own are killed at named moments, and end with the bits of an undisturbed run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvd.testing.cluster import LocalCluster
from tests.client import healing_program as program
from tests.faults.programs import finish

WORKERS = 3
SETTINGS: dict[str, Any] = {"on_worker_loss": "wait", "worker_timeout_s": 30.0, "request_timeout_s": 60.0}
CODE = "from tests.client.healing_program import main; main()"
PATIENCE_S = 240.0


def undisturbed(total: int) -> str:
    """The digest, by a calculation in one process: contributions are added in the order of the ranks."""
    weights = program.first_weights()
    momentum = {key: np.zeros_like(array) for key, array in weights.items()}
    for step in range(total):
        for key in program.SIZES:
            merged = program.gradient(key, weights[key], 0, step)
            for rank in range(1, WORKERS):
                merged = merged + program.gradient(key, weights[key], rank, step)
            program.update(weights[key], momentum[key], merged)
    return program.digest_of(weights, momentum)


def supervise(cluster: LocalCluster, total: int, deaths: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the program in all workers, starts those again that kill themselves, and returns their results."""
    marks = cluster.folder / "deaths"
    marks.mkdir()

    def start(number: int) -> subprocess.Popen[bytes]:
        return cluster.script(CODE, number, str(total), str(marks), *deaths)

    running = [start(number) for number in range(WORKERS)]
    until = time.monotonic() + PATIENCE_S
    try:
        while any(process.poll() is None for process in running) or any(each.returncode == -9 for each in running):
            for number, process in enumerate(running):
                if process.poll() == -9:
                    assert process.stdout is not None
                    process.stdout.close()
                    running[number] = start(number)
            assert time.monotonic() < until, f"not done: {sorted(path.name for path in marks.iterdir())}"
            time.sleep(0.02)
        results = [finish(process) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert len(list(marks.iterdir())) == len(deaths), "a death did not happen"
    return results


def check(results: Sequence[dict[str, Any]], total: int) -> None:
    assert {result["digest"] for result in results} == {undisturbed(total)}
    assert all(result["made"] == sorted(set(result["made"])) for result in results)


def test_each_moment_of_death() -> None:
    total = 18
    deaths = [
        *("1:1:before", "2:3:half", "0:4:sent", "1:6:over", "2:8:updated", "0:9:updated"),
        *("0:10:half", "2:10:half"),  # two in one step
        *("0:12:before", "1:*:serving"),  # the donor, too
        *("2:14:before", "2:*:receiving", "2:*:received"),  # the newcomer again
        *("1:17:updated", "2:18:end"),
    ]
    with LocalCluster(WORKERS, 2, processes=True, **SETTINGS) as cluster:
        check(supervise(cluster, total, deaths), total)
