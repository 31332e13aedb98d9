"""A bit of a backup's memory flips: it is found, and another copy is made, and is a true one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import kvd
from kvd.testing.cluster import LocalCluster, ProcessNode, wait_until

FLIPPER = """
from pathlib import Path
from kvd.node.jobs.runner import JobRunner
flag, apply = Path({flag!r}), JobRunner._apply
def flipping(runner, job):
    made = apply(runner, job)
    if job.is_merged and flag.exists():
        flag.rename(flag.with_suffix(".done"))
        made[2] ^= 4
    return made
JobRunner._apply = flipping
"""


SHAPE = (1000,)


def log_of(server: object) -> str:
    assert isinstance(server, ProcessNode)
    return server.log.read_text()


def sent(server: object) -> int:
    """How many copies of partitions a server has begun to send."""
    return log_of(server).count("is sent partition")


def test_a_flipped_bit_of_a_backup_is_found_and_mended(tmp_path: Path) -> None:
    """Server 1 holds a copy that is wrong, is sent another one, and leads with it when server 0 is killed."""
    flag = tmp_path / "flip"
    prelude = FLIPPER.format(flag=str(flag))
    with LocalCluster(1, 2, processes=True, server_prelude=prelude, replicas=2) as cluster, cluster.observer() as watch:
        kv = cluster.store()
        kv.set_optimizer(kvd.optimizer.SGD(0.5, momentum=0.5))
        kv.init("w", np.zeros(SHAPE, np.float32))
        before = [sent(server) for server in cluster.servers]  # one that came late was sent its copies
        flag.touch()
        kv.push("w", np.ones(SHAPE, np.float32))

        def found() -> list[dict[str, Any]]:
            # A server that is too busy to answer is shown without it.
            return [server for server in watch.status()["servers"] if server.get("slices_that_differed")]

        (finder,) = wait_until(found, "it is found")
        rank = finder["rank"]
        assert finder["last_difference"]["backup"] == f"server {1 - rank}"
        assert "slice 0 of key 'w'" in finder["last_difference"]["text"]
        leader = cluster.servers[rank]
        assert f"server {1 - rank} has no true copy of partition" in log_of(leader)
        wait_until(lambda: sent(leader) > before[rank], "the copy is taken away")
        wait_until(lambda: all(entry["backup"] for entry in watch.status()["partitions"]), "there is another copy")
        cluster.kill_server(rank)
        kv.push("w", np.ones(SHAPE, np.float32))
        np.testing.assert_array_equal(kv.pull("w"), np.full(SHAPE, -0.5 - 0.5 * 1.5, np.float32))
