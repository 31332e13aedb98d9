"""What is given back to the system, and when: what nothing has used for a while, and not what a job needs again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvd.transport.limits.process_memory import FEW_LOOKS, LOOK_S, MOST_LOOKS, Heap, ProcessMemory, UnusedMemory

MIB = 1 << 20


class FakeMemory(ProcessMemory):
    """A process whose memory a test takes and frees."""

    def __init__(self) -> None:
        self.other = 30 * MIB
        self.used = 20 * MIB
        self.unused = 0  # that still has its pages
        self.without_pages = 0
        self.given_back = 0

    def resident_bytes(self) -> int:
        return self.other + self.used + self.unused

    def heap(self) -> Heap:
        return Heap(self.used, self.unused + self.without_pages)

    def give_back(self) -> None:
        self.given_back += 1
        self.without_pages, self.unused = self.without_pages + self.unused, 0

    def take(self, nbytes: int) -> None:
        reused = min(self.unused, nbytes)
        self.unused -= reused
        self.without_pages -= min(self.without_pages, nbytes - reused)
        self.used += nbytes

    def free(self, nbytes: int) -> None:
        self.used -= nbytes
        self.unused += nbytes


class Process:
    """A process that is looked at now and then."""

    def __init__(self) -> None:
        self.memory = FakeMemory()
        self.unused = UnusedMemory(self.memory)
        self.unused.start()
        self.now = 0.0

    def looks(self, count: int = 1) -> int:
        """How often memory was given back meanwhile."""
        before = self.memory.given_back
        for _ in range(count):
            self.now += LOOK_S
            self.unused.look(self.now, self.memory.resident_bytes())
        return self.memory.given_back - before


@pytest.fixture
def process() -> Process:
    return Process()


def test_memory_that_nothing_uses_for_a_while_is_given_back_once(process: Process) -> None:
    process.memory.take(100 * MIB)
    assert process.looks(10) == 0
    process.memory.free(100 * MIB)
    assert process.looks(3 * FEW_LOOKS) == 1
    assert process.memory.resident_bytes() == 50 * MIB
    assert process.looks(1000) == 0


def test_a_job_that_needs_its_memory_again_keeps_it(process: Process) -> None:
    for _ in range(1000):
        process.memory.take(100 * MIB)
        assert process.looks() == 0
        process.memory.free(100 * MIB)
        assert process.looks() == 0


def test_a_job_that_is_never_seen_to_use_its_memory_seldom_has_to_get_it_anew(process: Process) -> None:
    times = 0
    for _ in range(MOST_LOOKS * 10):
        process.memory.take(100 * MIB)
        process.memory.free(100 * MIB)
        times += process.looks()
    assert times <= 12


def test_what_the_same_attack_leaves_again_is_noticed(process: Process) -> None:
    """It comes to lie where the first one lay, of which the C library says all the time that it is free."""
    for _ in range(3):
        process.memory.take(100 * MIB)
        assert process.looks(FEW_LOOKS) == 0
        process.memory.free(100 * MIB)
        assert process.looks(2 * MOST_LOOKS) == 1
        assert process.memory.resident_bytes() == 50 * MIB


def test_what_was_given_back_is_not_unused(process: Process) -> None:
    process.memory.take(100 * MIB)
    process.memory.free(100 * MIB)
    assert process.unused.nbytes(process.memory.resident_bytes()) == 100 * MIB
    process.looks(3 * FEW_LOOKS)
    assert process.memory.heap().unused_bytes == 100 * MIB
    assert process.unused.nbytes(process.memory.resident_bytes()) == 0


def test_memory_that_the_c_library_does_not_know_may_come_and_go(process: Process) -> None:
    process.memory.other += 200 * MIB  # shared memory, objects of Python
    process.memory.take(100 * MIB)
    process.memory.free(100 * MIB)
    assert process.looks(3 * FEW_LOOKS) == 1
    process.memory.other -= 200 * MIB
    process.looks(3 * FEW_LOOKS)
    process.memory.take(60 * MIB)
    process.memory.free(60 * MIB)
    assert process.looks(2 * MOST_LOOKS) == 1


def test_little_is_kept(process: Process) -> None:
    process.memory.take(MIB)
    process.memory.free(MIB)
    assert process.looks(100) == 0
    process.memory.take(1000 * MIB)
    process.memory.take(20 * MIB)
    process.memory.free(20 * MIB)
    assert process.looks(100) == 0


def test_after_a_peer_was_cut_off_nobody_waits(process: Process) -> None:
    process.memory.take(100 * MIB)
    process.unused.expect(process.now)
    process.memory.free(70 * MIB)
    assert process.looks() == 1
    process.memory.free(30 * MIB)  # it took libzmq a while
    assert process.looks(2) == 1


FREED = """
from kvd.node.daemon.process_limits import keep_freed_memory, share_one_pool
from kvd.transport.limits.process_memory import ProcessMemory
import threading
{setup}
memory = ProcessMemory()
memory.open()
taken, go, done = [], threading.Event(), threading.Event()
def take():
    taken.extend(bytes([1]) * 40_000 for _ in range(1000))
    done.set()
    go.wait()
thread = threading.Thread(target=take)
thread.start()
done.wait()
before = memory.resident_bytes()
assert memory.heap().used_bytes > 40_000_000
taken.clear()
memory.give_back()
print(before - memory.resident_bytes())
go.set()
"""


@pytest.mark.parametrize("is_one_pool", [False, True])
def test_what_another_thread_took_goes_back_if_it_shares_our_pool(is_one_pool: bool) -> None:
    """Also in a server, which keeps freed memory. From a pool of its own, most of it would stay."""
    setup = "keep_freed_memory()\n" + "assert share_one_pool()\n" * is_one_pool
    program = [sys.executable, "-c", FREED.format(setup=setup)]
    freed = int(subprocess.run(program, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert (freed > 35_000_000) is is_one_pool
