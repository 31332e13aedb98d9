"""Snapshots on disk: what was written is read, and nothing else is."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvd.errors import SnapshotError
from kvd.snapshots import manifest
from kvd.snapshots.manifest import Manifest
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.writer import ProgramContent, SnapshotWriter, is_written
from tests.snapshots.snapshot_harness import ORIGIN, PART_BYTES, content, rewritten, write

ROOT = Path(__file__).resolve().parents[2]
HEADER_BYTES = 2000  # of a part, at most, here
CLOCKS = {key: clock for key, (_, clock, _, _) in content().items()}


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def read_all(path: Path) -> None:
    snapshot = StoredSnapshot.open(path)
    snapshot.verify()
    for key in snapshot.manifest.keys:
        snapshot.value(key)
        snapshot.state(key)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "taken")
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    snapshot.verify()
    assert snapshot.manifest.origin == ORIGIN
    assert [key.key for key in snapshot.manifest.keys] == list(content())
    for key in snapshot.manifest.keys:
        value, clock, updates, state = content()[key.key]
        assert (key.clock, key.updates) == (clock, updates)
        found = snapshot.value(key)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.tobytes() == value.tobytes()
        slots = snapshot.state(key)
        assert slots.keys() == state.keys()
        for slot, array in slots.items():
            assert array.dtype == state[slot].dtype
            assert array.tobytes() == state[slot].tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_parts_are_safetensors_of_bounded_size(tmp_path: Path) -> None:
    write(tmp_path / "taken")
    parts = sorted((tmp_path / "taken").glob("part-*"))
    assert len(parts) > 8
    assert max(part.stat().st_size for part in parts) <= PART_BYTES + HEADER_BYTES
    arrays = load_file(tmp_path / "taken" / "part-00000.safetensors")
    assert list(arrays) == ["weight 0|large"]
    np.testing.assert_array_equal(arrays["weight 0|large"], content()["large"][0].ravel()[: PART_BYTES // 4])


@pytest.mark.parametrize("flip", [1, 0x20, 0x80])
def test_a_flipped_byte_anywhere_is_refused(tmp_path: Path, flip: int) -> None:
    write(tmp_path / "taken")
    rng = np.random.default_rng(flip)
    for file in files(tmp_path / "taken"):
        good = file.read_bytes()
        places = [0, 7, 9, *map(int, rng.integers(len(good), size=5)), len(good) - 1]
        for place in places:
            bad = bytearray(good)
            bad[place] ^= flip
            if file.name == manifest.FILE and same_json(bytes(bad), good):
                continue
            file.write_bytes(bad)
            with pytest.raises(SnapshotError, match=r"damaged|newer|no snapshot") as caught:
                read_all(tmp_path / "taken")
            assert caught.value.path == str(file)
        file.write_bytes(good)
    read_all(tmp_path / "taken")


def same_json(one: bytes, other: bytes) -> bool:
    """White space in place of white space, an escape in upper case: the content is the same."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_a_truncated_or_missing_file_is_refused_and_named(tmp_path: Path) -> None:
    write(tmp_path / "taken")
    for file in files(tmp_path / "taken"):
        good = file.read_bytes()
        for length in (0, 1, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:length])
            with pytest.raises(SnapshotError, match="earlier snapshot") as caught:
                read_all(tmp_path / "taken")
            assert caught.value.path == str(file)
        file.write_bytes(good + b"\0")
        with pytest.raises(SnapshotError, match="earlier snapshot"):
            read_all(tmp_path / "taken")
        file.unlink()
        with pytest.raises(SnapshotError, match=r"is missing, and belongs|was not finished"):
            read_all(tmp_path / "taken")
        file.write_bytes(good)


def test_what_is_no_snapshot(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "weights.npz").write_bytes(b"PK")
    (tmp_path / "file").write_text("hello")
    for name, text in (("none", "is not there"), ("foreign", "is no snapshot"), ("file", "is no snapshot")):
        with pytest.raises(SnapshotError, match=text) as caught:
            StoredSnapshot.open(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
    (tmp_path / "foreign" / manifest.FILE).write_text('{"format": "of another program", "version": 1}')
    with pytest.raises(SnapshotError, match="does not have the format"):
        StoredSnapshot.open(tmp_path / "foreign")


def test_a_newer_version_says_so(tmp_path: Path) -> None:
    write(tmp_path / "taken")
    rewritten(tmp_path / "taken", lambda plain: plain.update(version=4, keys="in another form"))
    with pytest.raises(SnapshotError, match="newer kvd: it has version 4"):
        StoredSnapshot.open(tmp_path / "taken")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plain: plain["keys"][0].update(merge="avg"), "key 'large' of float32 has no merge 'avg'"),
        (lambda plain: plain["keys"][0].update(merge=3), "merge is missing, or no str"),
        (lambda plain: plain["keys"][1].update(merge="weighted"), "of int64 has no merge 'weighted'"),
        (lambda plain: plain["parts"][0].update(file="../part-00000.safetensors"), "file is"),
        (lambda plain: plain["parts"][0].update(bytes=-1), "bytes is -1"),
        (lambda plain: plain["parts"][0].update(bytes=1 << 40), "larger than any part"),
        (lambda plain: plain["keys"][0].update(shape=[1 << 50, 1 << 50]), "larger than any key"),
        (lambda plain: plain["keys"][0].update(shape=[3]), "not the size of the key"),
        (lambda plain: plain["keys"][0].update(dtype="object"), "no key is"),
        (lambda plain: plain["keys"][0].update(key="k" * 201), "no key is"),
        (lambda plain: plain["keys"][0]["weight"].append([999, "x", 0]), "not listed"),
        (lambda plain: plain["keys"][0]["weight"].append([1]), "no piece"),
        (lambda plain: plain["keys"][0].update(state={"momentum": 3}), "dtype is missing"),
        (lambda plain: plain["keys"].append(plain["keys"][0]), "lists a key twice"),
        (lambda plain: plain["keys"].pop(), "another number of keys"),
        (lambda plain: plain.update(optimizer=["os.system", {}]), "no optimizer is called"),
        (lambda plain: plain.pop("steps"), "steps is missing"),
        (lambda plain: plain.update(steps=True), "steps is missing, or no int"),
        (lambda plain: plain.update(keys={}), "keys is missing, or no list"),
    ],
)
def test_a_manifest_that_no_kvd_writes(tmp_path: Path, change: Any, text: str) -> None:
    write(tmp_path / "taken")
    rewritten(tmp_path / "taken", change)
    with pytest.raises(SnapshotError, match=text):
        read_all(tmp_path / "taken")


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    """The manifest and the parts are each whole, but are not of one snapshot."""
    write(tmp_path / "taken")

    def swap(plain: Any) -> None:
        one, other = plain["keys"][7]["weight"][0], plain["keys"][8]["weight"][0]
        one[:2], other[:2] = other[:2], one[:2]

    rewritten(tmp_path / "taken", swap)
    with pytest.raises(SnapshotError, match="does not have the tensor"):
        read_all(tmp_path / "taken")


def test_a_key_has_its_own_merge_only_if_the_manifest_says_so(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path / "taken", ORIGIN)
    writer.add("mean", np.zeros(2), 1, 0, {}, "mean")
    writer.add("plain", np.zeros(2), 1, 0, {})
    writer.finish()
    plain = json.loads((tmp_path / "taken" / manifest.FILE).read_bytes())
    assert ["merge" in key for key in plain["keys"]] == [True, False]  # as in manifests from before there were merges
    assert [key.merge for key in StoredSnapshot.open(tmp_path / "taken").manifest.keys] == ["mean", ""]


@pytest.mark.parametrize("part_bytes", [PART_BYTES, 100])
def test_the_state_of_a_program(tmp_path: Path, part_bytes: int) -> None:
    state = np.arange(250, dtype=np.uint8)
    writer = SnapshotWriter(tmp_path / "taken", ORIGIN, part_bytes)
    writer.add("w", np.ones(3), 1, 0, {}, gradients=True)
    writer.add_program(ProgramContent({}, b"layout", state))
    writer.finish()
    found = StoredSnapshot.open(tmp_path / "taken")
    found.verify()
    program = found.program()
    assert program is not None
    assert program[0] == b"layout"
    np.testing.assert_array_equal(program[1], state)
    assert [key.gradients for key in found.manifest.keys] == [True]
    last = sorted((tmp_path / "taken").glob("part-*"))[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"x")
    with pytest.raises(SnapshotError, match=last.name):
        found.verify()


def test_the_manifest_goes_through_json() -> None:
    empty = Manifest(ORIGIN, (), ())
    assert Manifest.from_json(empty.to_json()) == empty


# ── writing ──


def test_a_half_written_one_has_no_name_and_is_removed_by_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        SnapshotWriter(tmp_path / "taken", ORIGIN)  # and then the process is killed
        assert not (tmp_path / "taken").exists()
        (left,) = tmp_path.iterdir()
        with pytest.raises(SnapshotError):
            StoredSnapshot.open(left)
    other = tmp_path / ".taken.other"
    other.mkdir()
    write(tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".taken.other", "taken"]


def test_an_abort_removes_what_was_written(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path / "taken", ORIGIN, PART_BYTES)
    writer.add("large", *content()["large"])
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_the_same_snapshot_is_there_already(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    assert not is_written(path, ORIGIN, CLOCKS)
    path.mkdir()  # an empty folder is nothing
    assert not is_written(path, ORIGIN, CLOCKS)
    write(path)
    assert is_written(path, ORIGIN, CLOCKS)
    for clocks in ({**CLOCKS, "empty": 8}, {"empty": 7}):
        with pytest.raises(SnapshotError, match="is there already: a snapshot of job 'train' after 7 steps"):
            is_written(path, ORIGIN, clocks)
    (path / "part-00001.safetensors").unlink()
    with pytest.raises(SnapshotError, match="is missing"):
        is_written(path, ORIGIN, CLOCKS)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_what_is_no_snapshot_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "taken"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
        (path / "mine").touch()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(SnapshotError, match="is no snapshot: choose another name"):
        is_written(path, ORIGIN, CLOCKS)


def test_a_name_that_was_taken_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    writer = SnapshotWriter(path, ORIGIN, PART_BYTES)
    path.mkdir()
    (path / "mine").touch()
    with pytest.raises(SnapshotError, match="not empty"):
        writer.finish()
    writer.abort()
    assert [file.name for file in path.iterdir()] == ["mine"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_parent_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="No such file or directory: the snapshot cannot be written"):
        SnapshotWriter(tmp_path / "no" / "taken", ORIGIN)


NO_ROOM = """
import resource, sys
from pathlib import Path
from kvd.errors import SnapshotError
from kvd.snapshots.writer import SnapshotWriter
from tests.snapshots.snapshot_harness import ORIGIN, content
writer = SnapshotWriter(Path(sys.argv[1]), ORIGIN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
try:
    writer.add("large", *content()["large"])
    writer.finish()
except SnapshotError as error:
    print(error.path, type(error.__cause__).__name__, error)
    writer.abort()
"""


def test_a_disk_without_room_is_said_and_nothing_stays(tmp_path: Path) -> None:
    """The kernel refuses the write, as it does on a full disk, under another number."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    path = tmp_path / "taken"
    command = [
        sys.executable,
        "-B",
        "-c",
        NO_ROOM,
        str(path),
    ]  # a module compiled now would stay cut off
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"{path} OSError {path}: File too large: the snapshot cannot be written there")
    assert list(tmp_path.iterdir()) == []
