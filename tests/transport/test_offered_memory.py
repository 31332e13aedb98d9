"""Memory and other descriptors that a peer offers over a link: what is not allocated memory is refused and closed."""

from __future__ import annotations

import array
import fcntl
import gc
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvd.transport.links.frames import MESSAGE, REFERENCE, SEGMENT, prefix_of
from kvd.transport.memory.offered import MapBudget
from kvd.transport.memory.segments import SEALS
from tests.transport.link_harness import MIB, End, Raw, punch, raw_pair, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SPARSE_BYTES = 3 << 30


def memory(nbytes: int, *, allocated: bool = True, hole: bool = False, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("kvd-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    if allocated:
        os.posix_fallocate(descriptor, 0, nbytes)
    if hole:
        assert punch(descriptor, nbytes // 2, mmap.PAGESIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def offer(raw: Raw, descriptors: list[int], frame: bytes) -> None:
    """Sends the descriptors with a frame, and closes them here."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    raw.socket.sendmsg([frame], [rights])
    for descriptor in descriptors:
        os.close(descriptor)


def segment(nbytes: int, number: int = 0) -> bytes:
    return prefix_of(SEGMENT, 0, 0, 0, number, nbytes)


@contextmanager
def greeted() -> Iterator[tuple[Raw, End]]:
    with raw_pair() as (raw, end):
        raw.hello()
        yield raw, end


def refused(raw: Raw, end: End) -> str:
    """Waits until the link has ended for what was offered; returns the reason."""
    until(lambda: end.link.has_ended, end)
    assert raw.is_cut_off()
    (reason,) = end.garbage
    return reason


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"nbytes": SPARSE_BYTES, "allocated": False}, f"only 0 of {SPARSE_BYTES} bytes"),
        ({"nbytes": 8 * MIB, "hole": True}, f"only {8 * MIB - mmap.PAGESIZE} of {8 * MIB} bytes"),
        ({"nbytes": 8 * MIB, "seals": 0}, "is not sealed"),
        *(({"nbytes": 8 * MIB, "seals": SEALS & ~seal}, "is not sealed") for seal in (2, 4, 16)),
    ],
)
def test_memory_that_is_not_allocated_for_good_is_refused(how: dict[str, int], reason: str) -> None:
    with greeted() as (raw, end):
        descriptor = memory(**how)  # type: ignore[arg-type]
        before = os.fstat(descriptor).st_blocks
        offer(raw, [os.dup(descriptor)], segment(how["nbytes"]))
        raw.socket.sendall(prefix_of(REFERENCE, 0, 1, 4096, 0, 0) + b"h")
        assert reason in refused(raw, end)
        assert os.fstat(descriptor).st_blocks == before, "something has allocated it"
        assert end.messages == []
        os.close(descriptor)


def test_allocated_memory_is_taken_and_stays_allocated() -> None:
    with greeted() as (raw, end):
        descriptor = memory(8 * MIB)
        offer(raw, [os.dup(descriptor)], segment(8 * MIB))
        raw.socket.sendall(prefix_of(REFERENCE, 0, 1, 4096, 0, 4 * MIB) + b"h")
        until(lambda: end.messages, end)
        assert not punch(descriptor, 0, 8 * MIB)
        assert end.bodies() == [bytes(4096)]
        os.close(descriptor)


# ── what else can be sent ──


def a_stranger_of_every_kind(folder: Path) -> dict[str, Callable[[], int]]:
    def end_of_pipe() -> int:
        reading, writing = os.pipe()
        os.close(reading)
        return writing

    def a_file() -> int:
        descriptor = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(descriptor, 0, 8192)
        return descriptor

    def in_shared_memory() -> int:
        descriptor = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE, 0o600)
        os.posix_fallocate(descriptor, 0, 8192)
        return descriptor

    def a_path_alone() -> int:
        descriptor = memory(8192)
        path = os.open(f"/proc/self/fd/{descriptor}", os.O_PATH)
        os.close(descriptor)
        return path

    def an_epoll() -> int:
        with select.epoll() as epoll:
            return os.dup(epoll.fileno())

    return {
        "directory": lambda: os.open(folder, os.O_RDONLY),
        "pipe": end_of_pipe,
        "socket": lambda: socket.socket().detach(),
        "unix socket": lambda: socket.socket(socket.AF_UNIX).detach(),
        "/dev/zero": lambda: os.open("/dev/zero", os.O_RDWR),
        "/dev/null": lambda: os.open(os.devnull, os.O_RDWR),
        "file": a_file,
        "file in shared memory": in_shared_memory,
        "path alone": a_path_alone,
        "epoll": an_epoll,
        "eventfd": lambda: os.eventfd(0),
        "pidfd": lambda: os.pidfd_open(os.getpid()),
        "memory that cannot be sealed": lambda: os.memfd_create("kvd-test", os.MFD_CLOEXEC),
    }


@pytest.mark.parametrize("kind", a_stranger_of_every_kind(Path()))
def test_what_is_no_memory_is_refused_and_closed(kind: str, tmp_path: Path) -> None:
    with greeted() as (raw, end):
        offer(raw, [a_stranger_of_every_kind(tmp_path)[kind]()], segment(8192))
        assert "segment 0 " in refused(raw, end)


@pytest.mark.parametrize("count", [1, 2, 3, 64, 253])
def test_descriptors_without_a_segment_are_refused_and_closed(count: int) -> None:
    with greeted() as (raw, end):
        offer(raw, [os.dup(0) for _ in range(count)], prefix_of(MESSAGE, 0, 1) + b"h")
        assert "descriptors arrived without a frame" in refused(raw, end)


@pytest.mark.parametrize("count", [2, 64])
def test_a_segment_has_one_descriptor(count: int) -> None:
    with greeted() as (raw, end):
        offer(raw, [memory(8192) for _ in range(count)], segment(8192))
        assert "descriptors arrived without a frame" in refused(raw, end)


def test_a_refused_descriptor_that_is_slow_to_close_delays_nobody() -> None:
    """Closing a socket may wait until its data has arrived; closing a file, for whoever serves the file."""
    listener = socket.create_server(("127.0.0.1", 0))
    slow = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    slow.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            slow.send(bytes(1 << 16))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
    with greeted() as (raw, end):
        offer(raw, [slow.detach()], segment(8192))
        assert "segment 0 " in refused(raw, end)
    other.close()  # its data is lost, and nobody waits for it any more
    listener.close()


# ── how much ──


def test_what_is_mapped_has_a_limit_and_is_given_back() -> None:
    with greeted() as (raw, end):
        end.budget.limit_bytes = 20 * MIB
        descriptor = memory(8 * MIB)  # the same one counts each time
        for number in range(2):
            offer(raw, [os.dup(descriptor)], segment(8 * MIB, number))
        raw.socket.sendall(prefix_of(REFERENCE, 0, 1, 4096, 1, 0) + b"h")
        until(lambda: end.messages, end)
        offer(raw, [descriptor], segment(8 * MIB, 2))
        until(lambda: end.link.has_ended, end)
        assert f"no more than {20 * MIB} bytes" in end.garbage[0]
        gc.collect()
        assert end.budget.take(12 * MIB)  # one map is in use
        assert not end.budget.take(1 * MIB)
        end.messages.clear()
        gc.collect()
        assert end.budget.take(8 * MIB)


def test_a_budget() -> None:
    budget = MapBudget(10)
    assert [budget.take(nbytes) for nbytes in (4, 7, 6, 1)] == [True, False, True, False]
    budget.give_back(4)
    assert [budget.take(nbytes) for nbytes in (5, 4)] == [False, True]
    assert MapBudget().limit_bytes > MIB
