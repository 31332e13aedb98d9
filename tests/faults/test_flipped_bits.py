"""A bit of a backup's memory flips while a job trains: it is found, the copy is made anew, and is a true one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.faults.replicated_job import Training

FLIPPER = """
from pathlib import Path
from kvd.node.jobs import JobRunner
flag, apply = Path({flag!r}), JobRunner._apply
def flipping(runner, job):
    made = apply(runner, job)
    if job.is_merged and flag.exists():
        flag.rename(flag.with_suffix(".done"))
        made[2] ^= 4
    return made
JobRunner._apply = flipping
"""


def reports(job: Training) -> list[dict[str, Any]]:
    """What each server says."""
    with job.cluster.observer() as observer:
        return [server for server in observer.status()["servers"] if "error" not in server]


def test_a_flipped_bit_of_a_backup_is_found_and_mended(tmp_path: Path) -> None:
    flag = tmp_path / "flip"
    with Training(tmp_path, server_prelude=FLIPPER.format(flag=str(flag))) as job:
        job.crew.wait_for_steps(10)
        flag.touch()
        job.crew.wait_until(lambda: any(report["slices_that_differed"] for report in reports(job)), "it is found")
        job.wait_until_even()
        finders = [report for report in reports(job) if report["slices_that_differed"]]
        assert len(finders) == 1
        backup = finders[0]["last_difference"]["backup"]
        assert backup == f"server {1 - finders[0]['rank']}"
        assert f"{backup} has no true copy of partition" in job.server(finders[0]["rank"]).log.read_text()
        job.kill("server", finders[0]["rank"])  # the copy leads now
        job.crew.wait_for_steps(10)
        job.restart("server", finders[0]["rank"])
        job.wait_until_even()
        job.finish()
