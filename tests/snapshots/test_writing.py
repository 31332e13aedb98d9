"""A part is hashed while it is written, and all of it arrives on the disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.errors import SnapshotError
from kvd.snapshots import hashing
from kvd.snapshots.folder import PIECES_AT_ONCE, Buffer, NewFolder
from kvd.snapshots.hashing import SMALLEST_BYTES, digest_of
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.writer import SnapshotWriter
from tests.snapshots.snapshot_harness import ORIGIN, write

WAIT_S = 30
VALUE = np.arange(SMALLEST_BYTES // 4, dtype=np.float32)


def take(path: Path) -> None:
    """One part, large enough for a thread."""
    writer = SnapshotWriter(path, ORIGIN)
    writer.add("large", VALUE, 1, 0, {})
    writer.finish()


def check(path: Path) -> None:
    snapshot = StoredSnapshot.open(path)
    snapshot.verify()
    np.testing.assert_array_equal(snapshot.value(snapshot.manifest.keys[0]), VALUE)


def test_it_is_hashed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two waits until the other one has begun."""
    hashes, writes = threading.Event(), threading.Event()
    to_disk = NewFolder.write

    def hash_it(content: Sequence[Buffer]) -> str:
        hashes.set()
        assert writes.wait(WAIT_S)
        return digest_of(content)

    def write_it(folder: NewFolder, name: str, *content: Buffer) -> None:
        writes.set()
        assert hashes.wait(WAIT_S)
        to_disk(folder, name, *content)

    monkeypatch.setattr(hashing, "digest_of", hash_it)
    monkeypatch.setattr(NewFolder, "write", write_it)
    take(tmp_path / "taken")
    check(tmp_path / "taken")


def test_a_write_that_fails_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(NewFolder, "write", fail)
    with pytest.raises(SnapshotError, match="No space left on device: the snapshot cannot be written there"):
        take(tmp_path / "taken")
    assert not [thread for thread in threading.enumerate() if thread.name == "kvd-snapshot-hash"]


def test_without_a_thread_it_is_hashed_nevertheless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        take(tmp_path / "taken")
    check(tmp_path / "taken")


def test_many_small_tensors_lie_in_one_part(tmp_path: Path) -> None:
    count = 2 * PIECES_AT_ONCE + 3
    writer = SnapshotWriter(tmp_path / "taken", ORIGIN)
    for number in range(count):
        writer.add(f"key {number}", np.full(number % 4, number, np.float32), 1, 0, {})
    content = writer.finish()
    assert len(content.parts) == 1
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    snapshot.verify()
    for number, key in enumerate(snapshot.manifest.keys):
        assert snapshot.value(key).tolist() == [number] * (number % 4)


@pytest.mark.parametrize("most", [1, 7, 4099])
def test_a_disk_that_takes_a_little_at_a_time_gets_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    writev = os.writev

    def a_little(file: int, content: Sequence[Buffer]) -> int:
        return writev(file, [b"".join(content)[:most]])

    content: list[Buffer] = [b"", b"abc", memoryview(bytes(range(200))), b"", b"x" * 5000, b""]
    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", a_little)
        folder = NewFolder(tmp_path / "taken")
        folder.write("part", *content)
        folder.publish()
    assert (tmp_path / "taken" / "part").read_bytes() == b"".join(content)


def test_the_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    write(tmp_path / "small parts")
    take(tmp_path / "a large one")
    for path in tmp_path.iterdir():
        for part in StoredSnapshot.open(path).manifest.parts:
            assert sha256((path / part.file).read_bytes()).hexdigest() == part.sha256
