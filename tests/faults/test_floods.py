"""Peers that are let in, and then send more than they read: no daemon ends, and the workers go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvd
from kvd.protocol.messages import StatusQuery
from kvd.testing.cluster import LocalCluster, ProcessNode
from tests.faults.bad_input_harness import addresses, busy, is_alive
from tests.faults.raw_zmtp import PING, RawZmtp, command

TIMES = 5
QUESTIONS = 100  # in a block, with a heartbeat behind them
BLOCKS = 40  # in one write
WRITES = 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Its daemons are processes: libzmq aborts a process, not a thread. They let in everyone."""
    with LocalCluster(2, 2, processes=True, path="tcp", insecure=True) as cluster:
        yield cluster


@pytest.mark.parametrize("heartbeats", [False, True])
def test_a_peer_that_asks_without_end_and_reads_nothing(
    cluster: LocalCluster, stores: list[kvd.KVStore], heartbeats: bool
) -> None:
    with busy(stores):
        for address in addresses(cluster):
            for _ in range(TIMES):
                with RawZmtp(address) as raw:
                    block = raw.frame_of(StatusQuery(1)) * QUESTIONS + (command(PING) if heartbeats else b"")
                    raw.socket.settimeout(1.0)  # a daemon may stop reading for a while
                    for _ in range(WRITES):
                        try:
                            if not raw.send(block * BLOCKS):
                                break
                        except TimeoutError:
                            break
            assert is_alive(address, insecure=True)
    for node in (cluster.scheduler, *cluster.servers):
        assert isinstance(node, ProcessNode)
        assert node.process.poll() is None, node.log.read_text()[-2000:]
