"""Files of optimizer states: what is said of a path that is wrong, and what happens to a file that was there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvd
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster


@pytest.fixture(scope="module", params=["local", "dist_sync"])
def kv(request: pytest.FixtureRequest) -> Iterator[kvd.KVStore]:
    with LocalCluster(1, 2) as cluster:
        store = cluster.store() if request.param == "dist_sync" else kvd.create("local")
        store.init("w", np.zeros(6, np.float32))
        store.set_optimizer(SGD(0.1, momentum=0.9))
        store.pushpull("w", np.ones(6, np.float32))
        yield store


def test_the_path_that_is_wrong_is_named(kv: kvd.KVStore, tmp_path: Path) -> None:
    missing = tmp_path / "no such folder" / "states"
    with pytest.raises(FileNotFoundError, match="cannot be saved there, choose a file") as caught:
        kv.save_optimizer_states(missing)
    assert (caught.value.filename, ".part" in str(caught.value)) == (str(missing), False)
    with pytest.raises(IsADirectoryError, match="cannot be saved there") as folder:
        kv.save_optimizer_states(tmp_path)
    assert (folder.value.filename, ".part" in str(folder.value)) == (str(tmp_path), False)
    with pytest.raises(FileNotFoundError, match="name a file that was saved") as lost:
        kv.load_optimizer_states(missing)
    assert lost.value.filename == str(missing)
    with pytest.raises(IsADirectoryError, match="name a file that was saved"):
        kv.load_optimizer_states(str(tmp_path))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        kv.save_optimizer_states(tmp_path / "file" / "states")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_pipe_is_not_replaced(kv: kvd.KVStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        kv.save_optimizer_states(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_file_that_was_there_keeps_its_mode(kv: kvd.KVStore, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "states"
    path.write_bytes(b"old")
    path.chmod(mode)
    kv.save_optimizer_states(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    kv.load_optimizer_states(path)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(kv: kvd.KVStore, tmp_path: Path, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real", tmp_path / "link"
    if there:
        real.write_bytes(b"old")
    link.symlink_to("elsewhere/real")
    kv.save_optimizer_states(link)
    assert link.is_symlink()
    assert real.is_file()
    assert not real.is_symlink()
    kv.load_optimizer_states(real)
    assert [entry.name for entry in real.parent.iterdir()] == ["real"]


def test_a_new_file_is_private_and_may_have_a_long_name(kv: kvd.KVStore, tmp_path: Path) -> None:
    for name in ("states", "ω" * 120):
        kv.save_optimizer_states(tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        kv.load_optimizer_states(os.fsencode(tmp_path / name))
