"""A barrier broke: what programs that are started again, or try again, find."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvd.errors import BarrierBroken
from kvd.testing.cluster import LocalCluster

QUICK: dict[str, Any] = {"heartbeat_interval_s": 0.1, "worker_timeout_s": 1.0, "server_timeout_s": 30.0}
PROGRAM = """
import sys, time, kvd
with kvd.create("dist_sync") as kv:
    kv.barrier("begun")
    print("begun", flush=True)
    if sys.argv[1] == "dies":
        time.sleep(600)  # until it is killed
    kv.barrier("done")
    print("done", flush=True)
"""


@contextmanager
def programs(cluster: LocalCluster, words: dict[int, str], **settings: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The program as the workers with these numbers; none of them is left behind."""
    started = [cluster.script(PROGRAM, number, word, **settings) for number, word in words.items()]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_programs_that_are_started_again_after_a_barrier_broke_meet() -> None:
    patient = {**QUICK, "worker_timeout_s": 8.0}  # one of the two that are started again may come that much later
    with LocalCluster(2, 1, **patient) as cluster:
        with programs(cluster, {0: "waits", 1: "dies"}) as (waits, dies):
            assert [first_line(waits), first_line(dies)] == [b"begun", b"begun"]
            dies.kill()
            output, _ = waits.communicate(timeout=60)
            assert waits.returncode == 1
            assert re.search(rb"BarrierBroken: barrier 'done' cannot be reached: worker \d died before it", output)
        for settings in ({}, {"run": "the next program"}):
            with programs(cluster, {0: "waits", 1: "waits"}, **settings) as again:
                for process in again:
                    output, _ = process.communicate(timeout=60)
                    assert (process.returncode, output.split()) == (0, [b"begun", b"done"]), output.decode()


def test_a_survivor_that_tries_again_meets_the_successor() -> None:
    with LocalCluster(2, 1, **QUICK) as cluster:
        with programs(cluster, {1: "dies"}) as (dies,):
            survivor = cluster.store(node_id="worker-0")
            survivor.barrier("begun")
            assert first_line(dies) == b"begun"
            dies.kill()
            with pytest.raises(BarrierBroken) as caught:
                survivor.barrier("done")
            assert caught.value.missing == ("worker 1",)
        with programs(cluster, {1: "waits"}) as (successor,):
            assert first_line(successor) == b"begun"
            survivor.barrier("done")
            survivor.close()
            output, _ = successor.communicate(timeout=60)
            assert (successor.returncode, output.split()) == (0, [b"done"]), output.decode()
