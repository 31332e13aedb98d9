"""A file that is replaced while no descriptor is left, and its mishaps."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvd.node.storage.atomic_file import write_atomically
from kvd.node.storage.swapped_file import SwappedFile
from kvd.testing.cluster import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "record"


@pytest.fixture
def file(path: Path) -> Iterator[SwappedFile]:
    before = len(os.listdir("/proc/self/fd"))
    path.parent.mkdir()
    file = SwappedFile(path)
    yield file
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert [name for name in os.listdir(path.parent) if name.endswith(".spare")] == []


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No file, socket or pipe can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def others(path: Path) -> list[str]:
    return sorted(set(os.listdir(path.parent)) - {path.name})


def test_it_is_written_while_no_descriptor_is_left(file: SwappedFile, path: Path) -> None:
    file.write(b"first")
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            write_atomically(path, lambda out: out.write(b"ordinary"))
        for number in range(20):
            file.write(b"%d" % number * (20 - number))
    assert path.read_bytes() == b"19"
    assert len(others(path)) == 1


def test_a_write_that_finds_no_descriptor_leaves_the_old_content_and_the_next_one_works(
    file: SwappedFile, path: Path
) -> None:
    path.write_bytes(b"of an earlier process")
    with no_descriptors():
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                file.write(b"new")
    assert path.read_bytes() == b"of an earlier process"
    file.write(b"new")
    assert path.read_bytes() == b"new"


def test_a_failed_write_leaves_the_old_content(file: SwappedFile, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write(b"first")
    file.write(b"second, which is longer")

    def full(descriptor: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            file.write(b"third")
    assert path.read_bytes() == b"second, which is longer"
    file.write(b"fourth")
    assert path.read_bytes() == b"fourth"


def test_a_writer_that_is_killed_leaves_a_whole_file_and_its_successor_removes_what_waits(
    file: SwappedFile, path: Path
) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from kvd.node.storage.swapped_file import SwappedFile
        file = SwappedFile(Path(sys.argv[1]))
        for number in range(1_000_000):
            file.write(b"[%s]" % b",".join([b"%d" % number] * 20_000))
            if number == 3:
                print("ready", flush=True)
    """
    command = [sys.executable, "-c", code, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(5):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            writer.kill()
        assert len(set(json.loads(path.read_bytes()))) == 1
        assert len(others(path)) in (1, 2)
    file.write(b"own")
    assert len(others(path)) == 1


@pytest.mark.parametrize("mishap", ["file", "all", "folder", "replaced", "no links"])
def test_it_goes_on_after_somebody_took_files_away(
    mishap: str, file: SwappedFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (b"first", b"second"):
        file.write(content)
    if mishap == "file":
        path.unlink()
    elif mishap in ("all", "folder"):
        for name in os.listdir(path.parent):
            (path.parent / name).unlink()
        if mishap == "folder":
            path.parent.rmdir()
            path.parent.mkdir()
    elif mishap == "replaced":
        write_atomically(path, lambda out: out.write(b"of somebody else"))
    elif mishap == "no links":
        monkeypatch.setattr(os, "link", _no_links)
    for content in (b"third", b"fourth", b"fifth"):
        file.write(content)
        assert path.read_bytes() == content
        assert len(others(path)) == 1


def _no_links(*_: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_two_under_one_name_never_mix_their_contents(file: SwappedFile, path: Path) -> None:
    """Somebody may start two schedulers with one state_dir: the file is then that of one or the other."""
    other = SwappedFile(path)
    contents = {letter * 100_000 for letter in (b"a", b"b")}
    ends = threading.Event()

    def write_on() -> None:
        while not ends.is_set():
            try:
                other.write(b"b" * 100_000)
            except OSError:  # its file was swept away as a leftover, this once
                continue

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        wait_until(path.exists, "the other one has written")
        for _ in range(100):
            try:
                file.write(b"a" * 100_000)
            except OSError:
                continue
            assert path.read_bytes() in contents
    finally:
        ends.set()
        thread.join(30)
        other.close()
    assert path.read_bytes() in contents


def test_modes_and_symbolic_links(file: SwappedFile, path: Path, tmp_path: Path) -> None:
    file.write(b"first")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    file.write(b"second")
    file.write(b"third")
    assert path.stat().st_mode & 0o777 == 0o640
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")
    file.write(b"fourth")
    assert path.is_symlink()
    assert (path.parent / "elsewhere").read_bytes() == b"fourth"


def test_closing_does_not_wait_for_a_write_that_hangs(
    path: Path, file: SwappedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    sync = os.fsync

    def slow_sync(descriptor: int) -> None:
        hangs.set()
        goes_on.wait(30)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_sync)
    writer = threading.Thread(target=file.write, args=[b"content"])
    writer.start()
    assert hangs.wait(30)
    file.close()
    goes_on.set()
    writer.join(30)
    assert path.read_bytes() == b"content"
    assert others(path) == []
