"""Folders with snapshots: the newest one that can be used, and how many stay."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.errors import SnapshotError
from kvd.snapshots import manifest
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.shelf import check_is_newest, keep_newest, newest_at, newest_of, set_aside, snapshots_in
from kvd.snapshots.writer import SnapshotWriter
from tests.snapshots.snapshot_harness import ORIGIN, content


def take(path: Path, steps: int, job: str = "train", lineage: str = "1f") -> Path:
    writer = SnapshotWriter(path, replace(ORIGIN, steps=steps, job=job, lineage=lineage))
    writer.add("int8", *content()["int8"])
    writer.finish()
    return path


def damage(path: Path, file: str = "part-00000.safetensors") -> None:
    data = bytearray((path / file).read_bytes())
    data[-1] ^= 1
    (path / file).write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three snapshots of one job, and what a killed process has left."""
    for steps in (100, 1000, 300):
        take(tmp_path / f"step-{steps}", steps)
    (tmp_path / ".step-2000.0123abcd.part").mkdir()
    (tmp_path / ".step-2000.0123abcd.part" / "part-00000.safetensors").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "log.txt").touch()
    return tmp_path


def test_snapshots_are_ordered_by_their_steps(folder: Path) -> None:
    assert [found.path.name for found in snapshots_in(folder)] == ["step-100", "step-300", "step-1000"]
    assert snapshots_in(folder / "notes") == snapshots_in(folder / "none") == []
    with pytest.raises(SnapshotError, match="Not a directory: the folder with the snapshots cannot be read"):
        snapshots_in(folder / "log.txt")


@pytest.mark.parametrize("file", ["part-00000.safetensors", manifest.FILE])
def test_a_damaged_one_is_refused_or_the_one_before_is_taken(
    folder: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder / "step-1000", file)
    for path in (folder, folder / "step-1000"):
        with pytest.raises(SnapshotError, match="damaged") as caught:
            newest_at(path, missing_ok=True, or_older=False)
        assert caught.value.path == str(folder / "step-1000" / file)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvd"):
            found = newest_at(path, missing_ok=False, or_older=True)
        assert found is not None
        assert found.path == folder / "step-300"
        assert str(folder / "step-1000" / file) in caplog.text
        assert f"restoring {folder / 'step-300'}, the one before" in caplog.text
    for steps in (100, 300):
        damage(folder / f"step-{steps}")
    with pytest.raises(SnapshotError, match="damaged") as caught:
        newest_at(folder, missing_ok=True, or_older=True)
    assert "step-1000" in caught.value.path


def test_half_of_one_is_the_newest(folder: Path) -> None:
    """A copy that was cut off: the name says which it is, or else it may be any."""
    (folder / "step-1000" / manifest.FILE).unlink()
    with pytest.raises(SnapshotError, match="not finished"):
        newest_of(snapshots_in(folder), "train", or_older=False)
    (folder / "step-1000").rename(folder / "copy")
    with pytest.raises(SnapshotError, match="not finished"):
        newest_of(snapshots_in(folder), "train", or_older=False)


def test_a_newer_kvd_s_is_refused_though_there_are_earlier_ones(folder: Path) -> None:
    file = folder / "step-1000" / manifest.FILE
    file.write_text(file.read_text().replace('"version": 1', '"version": 4'))
    with pytest.raises(SnapshotError, match="written by a newer kvd"):
        newest_at(folder, missing_ok=False, or_older=True)


def test_only_those_of_the_job(folder: Path) -> None:
    take(folder / "other", 5000, "other")
    newest = newest_of(snapshots_in(folder), "train", or_older=False)
    assert newest is not None
    assert newest.path.name == "step-1000"
    with pytest.raises(SnapshotError, match="has snapshots of job 'other', and none of this one, which is 'mine'"):
        newest_of(snapshots_in(folder), "mine", or_older=True)
    with pytest.raises(SnapshotError, match="of several jobs"):
        newest_at(folder, missing_ok=False, or_older=False)
    assert newest_of([], "mine", or_older=True) is None
    found = newest_at(folder / "other", missing_ok=False, or_older=False)  # by hand
    assert found is not None
    damage(folder / "other")
    with pytest.raises(SnapshotError, match="damaged"):  # those of the other job are no earlier ones
        newest_at(folder / "other", missing_ok=False, or_older=True)


def test_none_is_there(tmp_path: Path) -> None:
    assert newest_at(tmp_path / "none", missing_ok=True, or_older=True) is None
    assert newest_at(tmp_path, missing_ok=True, or_older=False) is None
    with pytest.raises(SnapshotError, match="is no snapshot"):
        newest_at(tmp_path, missing_ok=False, or_older=False)
    (tmp_path / "weights.npz").touch()
    for missing_ok in (True, False):
        with pytest.raises(SnapshotError, match="is no snapshot"):
            newest_at(tmp_path, missing_ok=missing_ok, or_older=True)


# ── how many stay ──


def test_the_oldest_go(folder: Path) -> None:
    take(folder / "other", 5, "other")
    damage(folder / "step-300", manifest.FILE)
    keep_newest(folder, "train", 1)
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert names == ["log.txt", "notes", "other", "step-1000", "step-300"]
    keep_newest(folder, "train", 3)
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == names


def test_later_ones_of_an_earlier_start_are_not_mixed_with_new_ones(folder: Path) -> None:
    take(folder / "other", 5000, "other")
    check_is_newest(folder, "train", "another", 1000)
    check_is_newest(folder, "train", "1f", 0)  # its own
    check_is_newest(folder, "new", "another", 0)
    check_is_newest(folder / "none", "train", "another", 0)
    with pytest.raises(SnapshotError, match="step-1000 is a snapshot of this job after 1000 steps") as caught:
        check_is_newest(folder, "train", "another", 300)
    assert caught.value.path == str(folder / "step-1000")
    damage(folder / "step-1000")
    check_is_newest(folder, "train", "another", 300)


def test_what_is_damaged_makes_room(folder: Path) -> None:
    take(folder / "other", 5000, "other")
    damage(folder / "step-300", manifest.FILE)
    for name in ("step-300", "step-1000", "other", "notes", "log.txt", "none"):
        set_aside(folder / name, "train", "another")
    set_aside(folder / "step-100", "train", "1f")
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert names == ["log.txt", "notes", "other", "step-100"]
    StoredSnapshot.open(folder / "step-100").verify()
