"""Snapshots one after the other: what has not changed lies in parts that are linked, not written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.snapshots.folder import NewFolder
from kvd.snapshots.layout import MOST_EXTRA, KeyMark, Layout
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.series import SnapshotSeries
from kvd.snapshots.writer import KeyContent
from tests.snapshots.snapshot_harness import ORIGIN

KEYS = [f"key {number:02}" for number in range(12)]
PART_BYTES = 4000  # four values


class Store:
    """Keys with clocks, whose values follow from them."""

    def __init__(self) -> None:
        self.clocks = dict.fromkeys(KEYS, 0)
        self.salt = 0  # of values that change though their clocks do not
        self.series = SnapshotSeries(PART_BYTES)

    def change(self, *names: str) -> None:
        for name in names:
            self.clocks[name] += 1

    def content(self, name: str) -> KeyContent:
        seed = [KEYS.index(name), self.clocks[name], self.salt]
        value = np.random.default_rng(seed).standard_normal((10, 25)).astype(np.float32)
        return KeyContent(name, value, self.clocks[name], self.clocks[name], {"momentum": value.ravel()[:250] * 2})

    def take(self, path: Path) -> None:
        marks = {name: KeyMark(1000, clock) for name, clock in self.clocks.items()}
        taken = self.series.begin(path, ORIGIN, marks)
        for group in taken.groups:
            taken.add_group([self.content(name) for name in group])
        taken.finish()

    def check(self, path: Path) -> None:
        snapshot = StoredSnapshot.open(path)
        snapshot.verify()
        assert {key.key for key in snapshot.manifest.keys} == self.clocks.keys()
        for key in snapshot.manifest.keys:
            content = self.content(key.key)
            assert key.clock == content.clock
            assert snapshot.value(key).tobytes() == content.value.tobytes()
            assert snapshot.state(key)["momentum"].tobytes() == content.state["momentum"].tobytes()


def shared(one: Path, other: Path) -> int:
    """How many bytes of parts both snapshots have in common."""

    def parts(path: Path) -> dict[int, int]:
        return {file.stat().st_ino: file.stat().st_size for file in path.glob("part-*")}

    common = parts(one).keys() & parts(other).keys()
    return sum(parts(one)[inode] for inode in common)


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("part-*"))


def test_what_has_not_changed_is_linked(tmp_path: Path) -> None:
    store = Store()
    store.take(tmp_path / "1")
    store.change("key 04")
    store.take(tmp_path / "2")
    store.check(tmp_path / "2")
    assert shared(tmp_path / "1", tmp_path / "2") > 0.6 * size(tmp_path / "1")  # two of three groups
    store.change("key 04")
    store.take(tmp_path / "3")
    store.check(tmp_path / "3")
    assert shared(tmp_path / "2", tmp_path / "3") > 0.9 * size(tmp_path / "1")  # by now it lies alone
    store.change(*KEYS)
    store.take(tmp_path / "4")
    store.check(tmp_path / "4")
    assert shared(tmp_path / "3", tmp_path / "4") == 0


def test_an_earlier_one_can_be_deleted(tmp_path: Path) -> None:
    store = Store()
    for number in range(4):
        store.change("key 00")
        store.take(tmp_path / str(number))
        if number:
            shutil.rmtree(tmp_path / str(number - 1))
        store.check(tmp_path / str(number))
    shutil.rmtree(tmp_path / "3")
    store.take(tmp_path / "after all are gone")
    store.check(tmp_path / "after all are gone")


def test_a_value_that_changed_without_its_clock_is_written(tmp_path: Path) -> None:
    """A state that was loaded, for example."""
    store = Store()
    store.take(tmp_path / "1")
    store.salt = 1
    store.take(tmp_path / "2")
    store.check(tmp_path / "2")
    assert shared(tmp_path / "1", tmp_path / "2") == 0


def test_keys_come_and_go(tmp_path: Path) -> None:
    store = Store()
    gone = store.clocks.pop("key 07")
    store.take(tmp_path / "1")
    store.clocks["key 07"] = gone
    del store.clocks["key 01"]
    store.take(tmp_path / "2")
    store.check(tmp_path / "2")
    assert shared(tmp_path / "1", tmp_path / "2") > 0.5 * size(tmp_path / "1")


def test_elsewhere_and_where_there_are_no_links_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    (tmp_path / "other").mkdir()
    store.take(tmp_path / "1")
    store.take(tmp_path / "other" / "2")
    assert shared(tmp_path / "1", tmp_path / "other" / "2") == 0

    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    store.take(tmp_path / "other" / "3")
    store.check(tmp_path / "other" / "3")
    assert shared(tmp_path / "other" / "2", tmp_path / "other" / "3") == 0


def test_a_part_that_was_cut_off_is_not_linked(tmp_path: Path) -> None:
    store = Store()
    store.take(tmp_path / "1")
    part = tmp_path / "1" / "part-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    store.take(tmp_path / "2")
    store.check(tmp_path / "2")
    assert 0 < shared(tmp_path / "1", tmp_path / "2") < size(tmp_path / "2")


def test_a_snapshot_that_failed_is_not_linked_to(tmp_path: Path) -> None:
    store = Store()
    store.take(tmp_path / "1")
    (tmp_path / "2").mkdir()
    failed = store.series.begin(tmp_path / "2", ORIGIN, {name: KeyMark(1000, 5) for name in KEYS})
    failed.abort()
    store.take(tmp_path / "3")
    store.check(tmp_path / "3")
    assert shared(tmp_path / "1", tmp_path / "3") == size(tmp_path / "1")


# ── the groups ──


def marks(clocks: dict[str, int], nbytes: int = 40) -> dict[str, KeyMark]:
    return {name: KeyMark(nbytes, clock) for name, clock in clocks.items()}


def test_keys_that_rest_gather() -> None:
    layout = Layout(100)
    clocks = dict.fromkeys("abcdef", 0)

    def take(*changed: str) -> list[str]:
        for name in changed:
            clocks[name] += 1
        groups = layout.next(marks(clocks))
        layout.taken(groups, marks(clocks))
        assert sorted(name for group in groups for name in group) == sorted(clocks)
        return ["".join(group) for group in groups]

    assert take() == ["ab", "cd", "ef"]
    assert take("a") == ["cd", "ef", "b", "a"]
    assert take("a") == ["cd", "ef", "b", "a"]
    assert take("a", "b") == ["cd", "ef", "ab"]
    assert take(*"abcdef") == ["ab", "cd", "ef"]
    clocks["large"] = 0
    assert Layout(10).next(marks(clocks, 11)) == [(name,) for name in sorted(clocks)]
    assert Layout(10).next({}) == []


def test_groups_that_have_become_too_many_are_made_anew() -> None:
    layout = Layout(1000)
    clocks = {f"{number:03}": 0 for number in range(100)}
    most = 0
    for name in clocks:
        groups = layout.next(marks(clocks, 10))
        layout.taken(groups, marks(clocks, 10))
        most = max(most, len(groups))
        clocks[name] += 1
    assert 2 < most <= MOST_EXTRA + 2


# ── what is written ──


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that are written, not linked."""
    found: list[str] = []
    write = NewFolder.write

    def noted(folder: NewFolder, name: str, *content: Any) -> None:
        if name.startswith("part-"):
            found.append(name)
        write(folder, name, *content)

    monkeypatch.setattr(NewFolder, "write", noted)
    return found


def test_what_rests_is_not_written_at_all(tmp_path: Path, written: list[str]) -> None:
    store = Store()
    store.take(tmp_path / "1")
    written.clear()
    store.take(tmp_path / "2")
    assert written == []
    store.change("key 04")
    store.take(tmp_path / "3")
    store.check(tmp_path / "3")
    assert len(written) < len(list((tmp_path / "3").glob("part-*")))


def test_what_is_the_same_after_all_takes_no_room(tmp_path: Path, written: list[str]) -> None:
    """Keys that were pushed, and did not move."""
    store = Store()
    store.take(tmp_path / "1")
    marks = {name: KeyMark(1000, 5) for name in KEYS}
    taken = store.series.begin(tmp_path / "2", ORIGIN, marks)
    for group in taken.groups:
        taken.add_group([store.content(name) for name in group])
    taken.finish()
    store.check(tmp_path / "2")
    assert shared(tmp_path / "1", tmp_path / "2") == size(tmp_path / "1")
    assert sorted(path.name for path in (tmp_path / "2").iterdir()) == sorted(
        path.name for path in (tmp_path / "1").iterdir()
    )
