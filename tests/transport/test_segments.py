"""The arena: blocks return when nothing refers to them, and a machine without memory gives a reason."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvd.transport.memory.segments import LARGEST_SEGMENT_BYTES, SEALS, SMALLEST_SEGMENT_BYTES, Arena, address_of
from tests.transport.link_harness import punch

MIB = 1 << 20


def taken(arena: Arena, nbytes: int) -> Any:
    block = arena.allocate(nbytes)
    assert block is not None, arena.problem
    return block


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 4097, MIB - 1, 2 * MIB, 5 * MIB])
def test_blocks_are_aligned_writable_and_as_large_as_asked(nbytes: int) -> None:
    arena = Arena(64 * MIB)
    block = taken(arena, nbytes)
    assert (block.shape, block.dtype) == ((nbytes,), np.uint8)
    assert address_of(block) % 64 == 0
    block[:] = 7
    assert int(block.sum(dtype=np.int64)) == 7 * nbytes


VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda block: block[100:200],
    "chain": lambda block: block[64:].view(np.float32).reshape(-1, 4)[3:].T,
    "memoryview": lambda block: memoryview(block)[8:16],
    "array of a memoryview": lambda block: np.frombuffer(memoryview(block)[8:16], np.uint8)[1:],
    "transposed": lambda block: block.reshape(64, -1).T,
    "void": lambda block: block.view("V16")[1:],
    "iterator": lambda block: iter(block.data),
    "torch": lambda block: __import__("torch").from_numpy(block)[5:],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_block_is_not_given_out_again_while_a_view_of_it_is_left(kind: str) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    arena = Arena(16 * MIB)
    block = taken(arena, 4096)
    place = arena.locate(block)
    view = VIEWS[kind](block)
    del block
    gc.collect()
    others = [taken(arena, 4096) for _ in range(64)]
    assert place not in [arena.locate(other) for other in others]
    del view
    gc.collect()
    assert arena.locate(taken(arena, 4096)) == place


def test_blocks_in_use_never_overlap_and_memory_does_not_grow_without_end() -> None:
    chance = random.Random(11)
    arena = Arena(256 * MIB)
    live: list[Any] = []
    for _ in range(4000):
        if live and chance.random() < 0.5:
            live.pop(chance.randrange(len(live)))
        else:
            live.append(taken(arena, chance.choice([1, 100, 5000, 70_000, 600_000])))
        live = live[-60:]
    ranges = sorted((address_of(block), address_of(block) + block.nbytes) for block in live)
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    assert arena.total_bytes <= 128 * MIB


def test_free_segments_are_cut_again_before_more_memory_is_taken() -> None:
    arena = Arena(64 * MIB)
    for nbytes in (100, 3000, 50_000, 700_000):
        blocks = [taken(arena, nbytes) for _ in range(3 * MIB // max(nbytes, 4096))]
        blocks.clear()
    assert arena.total_bytes == SMALLEST_SEGMENT_BYTES


def test_segments_grow_and_large_blocks_get_their_own() -> None:
    arena = Arena(512 * MIB)
    blocks = [taken(arena, 2 * MIB) for _ in range(100)]
    sizes = [arena.segment(number).nbytes for number in range(7)]
    assert sizes[0] == SMALLEST_SEGMENT_BYTES
    assert max(sizes) == LARGEST_SEGMENT_BYTES
    assert len({arena.locate(block) for block in blocks}) == 100
    large = taken(arena, 100 * MIB)
    place = arena.locate(large)
    assert place is not None
    assert place[1] == 0


def test_the_limit_holds_and_is_the_reason() -> None:
    arena = Arena(8 * MIB)
    blocks = [taken(arena, 2 * MIB) for _ in range(4)]
    assert arena.allocate(1) is None
    assert "limit of 8388608 bytes" in arena.problem
    assert arena.total_bytes == 8 * MIB
    del blocks[1]
    assert arena.locate(taken(arena, 100_000)) is not None  # a larger block than needed, as there is no other
    assert Arena(0).allocate(1) is None
    assert not Arena(0).usable


def test_any_view_is_located_and_nothing_else_is() -> None:
    arena = Arena(64 * MIB)
    assert arena.locate(np.zeros(10)) is None
    blocks = [taken(arena, nbytes) for nbytes in (4096, 5 * MIB, 64, 12 * MIB)]
    for block in blocks:
        place = arena.locate(block)
        assert place is not None
        view = block[16:].view(np.int32)[3:]
        assert arena.locate(view) == (place[0], place[1] + 28)
        view.flags.writeable = False
        assert arena.locate(view) == (place[0], place[1] + 28)
    assert arena.locate(np.zeros(10)) is None
    assert Arena(64 * MIB).locate(blocks[0]) is None


def test_several_threads_may_take_and_drop() -> None:
    arena = Arena(64 * MIB)
    wrong: list[int] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        mine: list[Any] = []
        for _ in range(1500):
            block = taken(arena, chance.choice([64, 4096, 20_000]))
            block[:] = number
            mine.append(block)
            if len(mine) > 8:
                dropped = mine.pop(chance.randrange(8))
                if not (dropped == number).all():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    taken(arena, 1)
    assert arena.segment(0).blocks == 1
    assert arena.total_bytes == SMALLEST_SEGMENT_BYTES


def test_no_hole_can_be_punched_into_a_segment_and_its_owner_writes_on() -> None:
    arena = Arena(16 * MIB)
    block = taken(arena, MIB)
    segment = arena.segment(0)
    with pytest.raises(PermissionError):
        segment.map.madvise(mmap.MADV_REMOVE)
    assert not punch(segment.descriptor, 0, segment.nbytes)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.descriptor, segment.nbytes)  # another one to write to
    with pytest.raises(PermissionError):
        os.pwrite(segment.descriptor, b"x", 0)
    assert os.fstat(segment.descriptor).st_blocks * 512 >= segment.nbytes
    block[:] = 7
    assert os.pread(segment.descriptor, 10, 0) == bytes([7]) * 10


def test_segments_are_sealed_allocated_and_closed_on_exec() -> None:
    arena = Arena(16 * MIB)
    taken(arena, 1)
    segment = arena.segment(0)
    seals = fcntl.fcntl(segment.descriptor, fcntl.F_GET_SEALS)
    assert seals == SEALS
    assert os.fstat(segment.descriptor).st_blocks * 512 >= segment.nbytes
    assert not os.get_inheritable(segment.descriptor)
    code = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if n > '2'])"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False, check=False)
    assert "memfd" not in seen.stdout


def memfds() -> tuple[int, int]:
    """How many descriptors of segments this process has, and how many maps."""
    with open("/proc/self/maps") as file:
        maps = sum("memfd:kvd" in line for line in file)
    descriptors = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors += "memfd:kvd" in os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that listed them
            continue
    return descriptors, maps


def test_closing_leaks_nothing_and_blocks_in_use_stay_valid() -> None:
    gc.collect()
    before = memfds()
    arena = Arena(64 * MIB)
    block = taken(arena, 6 * MIB)
    block[:] = 3
    taken(arena, 100)
    arena.close()
    arena.close()
    assert arena.allocate(1) is None
    assert not arena.usable
    assert (block == 3).all()
    del block
    assert memfds() == before


def test_without_memfd_there_is_no_memory_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena(64 * MIB)
    assert not arena.usable
    assert arena.allocate(10) is None
    assert "memfd_create" in arena.problem
    assert arena.locate(np.zeros(3)) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_refused_memory_is_a_reason_and_is_asked_for_again_later(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(descriptor: int, offset: int, nbytes: int) -> None:
        asked.append(nbytes)
        raise OSError(number, os.strerror(number))

    arena = Arena(64 * MIB)
    first = taken(arena, 3 * MIB)
    before = memfds()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        for _ in range(10):
            assert arena.allocate(3 * MIB) is None
        assert os.strerror(number) in arena.problem
        assert len(asked) == 1
    assert memfds() == before
    assert arena.usable
    monkeypatch.setattr(arena, "_retry_at", 0.0)
    assert arena.locate(taken(arena, 3 * MIB)) != arena.locate(first)


def test_a_limit_on_file_sizes_is_a_reason() -> None:
    code = """if True:
        import resource
        from kvd.transport.memory.segments import Arena
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        arena = Arena(1 << 24)
        assert arena.allocate(100) is None
        raise SystemExit(arena.problem)
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert os.strerror(errno.EFBIG) in ran.stderr


def test_free_blocks_side_by_side_become_a_larger_one_before_more_memory_is_taken() -> None:
    arena = Arena(64 * MIB)
    small = [taken(arena, MIB) for _ in range(4)]  # all of the first segment
    used = arena.total_bytes
    assert used == 4 * MIB
    del small[1:3]
    joined = taken(arena, 2 * MIB)
    assert arena.total_bytes == used
    joined[:] = 1
    small[0][:] = small[-1][:] = 2
    assert (joined == 1).all()
    del joined
    back = [taken(arena, 2 * MIB), taken(arena, 3 * MIB)]
    assert arena.total_bytes == 2 * used
    del back, small


def test_what_is_left_of_a_joined_block_is_used() -> None:
    arena = Arena(64 * MIB)
    blocks = [taken(arena, 5 * MIB // 4) for _ in range(3)]  # and a rest of a quarter
    used = arena.total_bytes
    del blocks[1:]
    joined = taken(arena, 11 * MIB // 4)  # of both and the rest
    assert arena.total_bytes == used
    del joined
    first, second = taken(arena, MIB), taken(arena, 7 * MIB // 4)
    assert arena.total_bytes == used
    first[:], second[:], blocks[0][:] = 1, 2, 3
    assert (first == 1).all()
    assert (second == 2).all()


def test_blocks_of_all_sizes_never_overlap_when_they_are_joined() -> None:
    rng = random.Random(7)
    arena = Arena(64 * MIB)
    held: list[tuple[Any, int]] = []
    for number in range(3000):
        if held and rng.random() < 0.5:
            block, value = held.pop(rng.randrange(len(held)))
            assert block[0] == block[-1] == value
            assert block[:: max(1, block.size // 7)].tolist() == [value] * len(block[:: max(1, block.size // 7)])
            del block
        elif sum(block.nbytes for block, _ in held) < 16 * MIB:
            block = arena.allocate(rng.choice([4096, 70_000, MIB // 2, MIB, 3 * MIB]) + rng.randrange(64))
            if block is not None:
                block[:] = number % 251
                held.append((block, number % 251))
                del block
    for block, value in held:
        assert (block == value).all()
