"""Peers that are let in, and make a daemon keep more and more: its memory stays bounded, and the workers go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvd
from kvd.protocol.messages import ANY_CLOCK, Part, Pull
from kvd.testing.cluster import LocalCluster, ProcessNode, engine_of, wait_until
from tests.faults.bad_input_harness import busy, is_alive
from tests.faults.raw_zmtp import RawZmtp, frame

MIB = 1 << 20
LIMIT_BYTES = 256 * MIB
SPARE_BYTES = 64 * MIB
KEPT_BYTES = 16 * MIB  # the workers use some, and not always the same
KEYS = 64
KEY_BYTES = 256 << 10
ATTACK_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Its daemons are processes, so that their memory can be measured, and have no keys, so that anybody is inside."""
    with LocalCluster(2, 1, processes=True, path="tcp", insecure=True, memory_limit_bytes=LIMIT_BYTES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def stores(cluster: LocalCluster) -> list[kvd.KVStore]:
    stores = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in range(2)])
    names = ["w", *[f"k{number}" for number in range(KEYS)]]
    values = [np.zeros(3000, np.float32), *[np.zeros(KEY_BYTES // 4, np.float32)] * KEYS]
    for handle in [store.init_async(names, values) for store in stores]:
        handle.wait()
    return stores


class Memory:
    """The memory of a process, in bytes."""

    def __init__(self, node: object) -> None:
        assert isinstance(node, ProcessNode)
        self._folder = Path(f"/proc/{node.process.pid}")
        (self._folder / "clear_refs").write_text("5")  # resets the peak
        self.before = self.now

    def _field(self, name: str) -> int:
        line = next(line for line in (self._folder / "status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10

    @property
    def now(self) -> int:
        return self._field("VmRSS")

    @property
    def peak(self) -> int:
        return self._field("VmHWM")


def sends_until_cut_off(raw: RawZmtp, block: bytes) -> None:
    """Sends the same again and again, and reads nothing."""
    until = time.monotonic() + ATTACK_LIMIT_S
    while raw.send(block):
        assert time.monotonic() < until, "nobody cut the peer off"


def check_is_over(memory: Memory) -> None:
    assert memory.peak - memory.before < LIMIT_BYTES + SPARE_BYTES, f"{memory.peak - memory.before >> 20} MiB"
    back = f"its memory is back at {memory.before >> 20} MiB"
    wait_until(lambda: memory.now - memory.before < KEPT_BYTES, back, ATTACK_LIMIT_S)


@pytest.mark.parametrize("size", [0, 100, MIB])
@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_message_without_end(cluster: LocalCluster, stores: list[kvd.KVStore], role: str, size: int) -> None:
    node = cluster.scheduler if role == "scheduler" else cluster.servers[0]
    with busy(stores):
        memory = Memory(node)
        with RawZmtp(node.address) as raw:
            part = frame(bytes(size), more=True)
            sends_until_cut_off(raw, part * max(1, MIB // len(part)))
        check_is_over(memory)
        assert is_alive(node.address, insecure=True)


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_peer_that_leaves_before_it_is_cut_off(cluster: LocalCluster, stores: list[kvd.KVStore], role: str) -> None:
    """It leaves free memory behind, in the pool of libzmq's thread if that has one."""
    node = cluster.scheduler if role == "scheduler" else cluster.servers[0]
    with busy(stores):
        memory = Memory(node)
        with RawZmtp(node.address) as raw:
            assert raw.send(frame(b"", more=True) * (2 * MIB))
            wait_until(lambda: memory.now - memory.before > 100 * MIB, "it takes 64 bytes for each frame")
        check_is_over(memory)
        assert is_alive(node.address, insecure=True)


def test_many_peers_with_a_message_without_end(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    node = cluster.servers[0]
    block = frame(bytes(MIB), more=True)
    with busy(stores):
        memory = Memory(node)
        peers = [RawZmtp(node.address) for _ in range(20)]
        until = time.monotonic() + ATTACK_LIMIT_S
        while len(peers) > 5:  # those that are left may keep what they have
            peers = [peer for peer in peers if peer.send(block)]
            assert time.monotonic() < until, f"{len(peers)} peers were not cut off"
        for peer in peers:
            peer.close()
        check_is_over(memory)
        assert is_alive(node.address, insecure=True)


def test_answers_that_nobody_reads(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    node = cluster.servers[0]
    parts = tuple(Part(f"k{number}", 0, ANY_CLOCK) for number in range(KEYS))
    with busy(stores):
        memory = Memory(node)
        with RawZmtp(node.address, engine_of(stores[0]).machine.run) as raw:
            request = 0
            until = time.monotonic() + ATTACK_LIMIT_S
            while raw.send(raw.frame_of(Pull(request, parts))):
                request += 1
                assert time.monotonic() < until, "nobody cut the peer off"
                time.sleep(0.01)  # time itself: the pace of the attack
        check_is_over(memory)
        assert is_alive(node.address, insecure=True)
