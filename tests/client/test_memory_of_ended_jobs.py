"""What a server keeps of jobs that are over, and of keys that were deleted: bytes go at once, without a collection."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest

import kvd
from kvd.testing.cluster import LocalCluster, ProcessNode

NO_COLLECTION = "import gc\ngc.disable()\n"
"""Python collects cycles by the number of objects. A server that relied on it would keep gigabytes of few objects."""

MIB = 1 << 20
VALUE_BYTES = 4 * MIB
KEPT_JOBS = 8  # that are over and can still be read: kvd.core.scheduler.runs.table.MAX_KEPT
MORE = 3 * KEPT_JOBS
TOLERANCE_BYTES = 8 * VALUE_BYTES  # of 2 * MORE * VALUE_BYTES that come and go: a version, and the one before


def anonymous_bytes(node: object) -> int:
    assert isinstance(node, ProcessNode)
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


def job(cluster: LocalCluster, number: int) -> None:
    """A job that makes a key, changes it twice, and ends."""
    own = {"run": secrets.token_hex(8), "node_id": f"worker-{number}"}
    with kvd.create("dist_sync", **{**cluster.settings, "scheduler": cluster.address, **own}) as store:
        value = np.full(VALUE_BYTES // 4, 1, np.float32)
        store.init("w", value)
        for expected in (1.0, 1.0):
            assert store.pushpull("w", value)[-1] == expected


@pytest.mark.parametrize("is_insecure", [False, True], ids=["sealed", "plain"])
def test_memory_of_a_server_is_bounded_however_many_jobs_have_ended(is_insecure: bool) -> None:
    with LocalCluster(
        processes=True, path="tcp", tcp_links="always", insecure=is_insecure, server_prelude=NO_COLLECTION
    ) as cluster:
        for number in range(KEPT_JOBS + 4):
            job(cluster, number)
        before = [anonymous_bytes(node) for node in (cluster.scheduler, cluster.servers[0])]
        for number in range(MORE):
            job(cluster, KEPT_JOBS + 4 + number)
        after = [anonymous_bytes(node) for node in (cluster.scheduler, cluster.servers[0])]
        assert after[0] - before[0] < 4 * MIB, "the scheduler grows"
        assert after[1] - before[1] < TOLERANCE_BYTES, "the server grows"


def test_memory_of_deleted_keys_is_given_back_at_once() -> None:
    with LocalCluster(processes=True, server_prelude=NO_COLLECTION, shared_memory="off") as cluster:
        store = cluster.store()
        value = np.full(VALUE_BYTES // 4, 1, np.float32)

        def come_and_go(count: int) -> int:
            for number in range(count):
                store.init(f"key {number}", value)
                assert store.pushpull(f"key {number}", value)[-1] == 1.0
                store.delete(f"key {number}")
            return anonymous_bytes(cluster.servers[0])

        before = come_and_go(4)
        assert come_and_go(MORE) - before < TOLERANCE_BYTES
