"""``-o FILE`` when FILE exists already, as a file or as something else."""

from __future__ import annotations

import io
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import ConfigError
from kvd_cli.outfile import Sink, write_file
from kvd_cli.values import read_array, write_array

VALUE = np.arange(300_000, dtype=np.float32)  # more than a pipe holds


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_array(pipe, VALUE)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join(20)
    np.testing.assert_array_equal(np.load(io.BytesIO(received[0])), VALUE)


def test_a_link_to_a_pipe_is_written_through(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    write_array(tmp_path / "link", VALUE)
    reader.join(20)
    assert len(received[0]) > VALUE.nbytes
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old.npy").write_bytes(b"old")
    (tmp_path / "link").symlink_to("folder/old.npy")
    before = (folder / "old.npy").stat().st_ino
    write_array(tmp_path / "link", VALUE)
    assert (tmp_path / "link").is_symlink()
    np.testing.assert_array_equal(read_array(folder / "old.npy"), VALUE)
    assert (folder / "old.npy").stat().st_ino != before, "in one step, not over the old content"
    assert os.listdir(folder) == ["old.npy"]


def test_a_dangling_link_creates_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new.npy")
    write_array(tmp_path / "link", VALUE)
    assert (tmp_path / "link").is_symlink()
    np.testing.assert_array_equal(read_array(tmp_path / "new.npy"), VALUE)


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "w.npy"
    file.write_bytes(b"")
    file.chmod(mode)
    write_array(file, VALUE)
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_array(tmp_path / "w.npy", VALUE)
    assert (tmp_path / "w.npy").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("name", ["folder", "loop", "file/w.npy", "nowhere/w.npy"])
def test_a_file_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        write_array(tmp_path / name, VALUE)


def test_the_old_file_stays_when_the_new_one_fails(tmp_path: Path) -> None:
    def fail(sink: Sink) -> None:
        sink.write(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "w.npy").write_bytes(b"old")
    with pytest.raises(ConfigError, match="No space left"):
        write_file(tmp_path / "w.npy", fail)
    assert (tmp_path / "w.npy").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["w.npy"]
