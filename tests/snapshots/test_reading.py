"""A snapshot is read in little memory, and checked before anything of it is used."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvd.errors import SnapshotError
from kvd.snapshots import manifest
from kvd.snapshots.part_memory import PartMemory
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.writer import SnapshotWriter
from tests.snapshots.snapshot_harness import ORIGIN, content, rewritten, write

MB = 1 << 20


def large(path: Path, parts: int) -> None:
    """So many parts of 4 MiB."""
    writer = SnapshotWriter(path, ORIGIN, 4 * MB)
    for number in range(parts):
        writer.add(f"key {number}", np.full(MB, number, np.float32), 1, 0, {})
    writer.finish()


def peak_of(work: Callable[[], Any]) -> int:
    """The most memory that is in use meanwhile, in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_checking_takes_no_memory_for_the_values(tmp_path: Path) -> None:
    large(tmp_path / "taken", 8)
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    assert peak_of(snapshot.verify) < 4 * MB


def test_no_more_than_one_part_is_in_memory_beside_what_is_used(tmp_path: Path) -> None:
    large(tmp_path / "taken", 8)
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    assert peak_of(lambda: [snapshot.value(key).sum() for key in snapshot.manifest.keys]) < 6 * MB


@pytest.mark.parametrize("memory", [None, PartMemory(4 * MB + 200)], ids=["new memory", "used again"])
def test_a_key_of_several_parts_is_in_memory_once(tmp_path: Path, memory: PartMemory | None) -> None:
    writer = SnapshotWriter(tmp_path / "taken", ORIGIN, 4 * MB)
    value = np.arange(8 * MB, dtype=np.float32)
    writer.add("large", value, 1, 0, {})
    writer.finish()
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    found: list[Any] = []
    (key,) = snapshot.manifest.keys
    assert peak_of(lambda: found.append(snapshot.value(key, memory))) < value.nbytes + 6 * MB
    np.testing.assert_array_equal(found[0], value)


def test_the_first_part_that_is_damaged_is_named(tmp_path: Path) -> None:
    large(tmp_path / "taken", 8)
    for number in (6, 3, 7):
        file = tmp_path / "taken" / f"part-{number:05}.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(SnapshotError, match="its checksum is another one") as caught:
        StoredSnapshot.open(tmp_path / "taken").verify()
    assert caught.value.path == str(tmp_path / "taken" / "part-00003.safetensors")


def test_what_changes_after_the_check_is_not_used(tmp_path: Path) -> None:
    large(tmp_path / "taken", 2)
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    snapshot.verify()
    file = tmp_path / "taken" / "part-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    first, last = snapshot.manifest.keys
    assert snapshot.value(first)[0] == 0
    with pytest.raises(SnapshotError, match="its checksum is another one"):
        snapshot.value(last)


def test_nobody_writes_to_what_was_read(tmp_path: Path) -> None:
    write(tmp_path / "taken")
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    for key in snapshot.manifest.keys:
        assert not snapshot.value(key).flags.writeable


# ── the parts ──


def test_other_programs_read_the_parts(tmp_path: Path) -> None:
    write(tmp_path / "taken")
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    for key in snapshot.manifest.keys:
        if len(key.weight) == 1 and key.dtype != "bfloat16":
            arrays = load_file(tmp_path / "taken" / snapshot.manifest.parts[key.weight[0].part].file)
            found = arrays[key.weight[0].tensor]
            assert (found.dtype, found.shape) == (snapshot.value(key).dtype, key.shape)
            assert found.tobytes() == snapshot.value(key).tobytes()


def replaced_part(path: Path, number: int, data: bytes) -> None:
    """A part with other bytes, which the manifest knows."""
    (path / f"part-{number:05}.safetensors").write_bytes(data)

    def change(plain: Any) -> None:
        plain["parts"][number].update(bytes=len(data), sha256=sha256(data).hexdigest())

    rewritten(path, change)


def test_a_part_that_another_program_wrote_is_read(tmp_path: Path) -> None:
    """With metadata, and the tensors in another order."""
    writer = SnapshotWriter(tmp_path / "taken", ORIGIN)
    arrays: dict[str, Any] = {"a": np.ones(6, np.float32), "b": np.arange(3, dtype=np.int8), "c": np.arange(2.0)}
    for name, array in arrays.items():
        writer.add(name, array, 0, 0, {})
    writer.finish()
    other = tmp_path / "other"
    save_file({f"weight|{name}": array for name, array in reversed(arrays.items())}, other, {"by": "another program"})
    replaced_part(tmp_path / "taken", 0, other.read_bytes())
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    snapshot.verify()
    assert {key.key: snapshot.value(key).tolist() for key in snapshot.manifest.keys} == {
        name: array.tolist() for name, array in arrays.items()
    }


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no safetensors"),
        (b"\1\0\0", "no safetensors"),
        (b"\xff" * 16, "no safetensors"),
        ((9).to_bytes(8, "little") + b"{}", "no safetensors"),
        ((2).to_bytes(8, "little") + b"[]", "no safetensors"),
        ((3).to_bytes(8, "little") + b"{,}", "no safetensors"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "no safetensors"),
        ((200000).to_bytes(8, "little") + b"[" * 200000, "no safetensors"),
        (header(w=5), "tensor 'w'"),
        (header(w=tensor(dtype="C64")) + bytes(8), "tensor 'w'"),
        (header(w=tensor(dtype=["F32"])) + bytes(8), "tensor 'w'"),
        (header(w=tensor(shape="2")) + bytes(8), "tensor 'w'"),
        (header(w=tensor(shape=(-2,))) + bytes(8), "tensor 'w'"),
        (header(w=tensor(shape=(2.0,))) + bytes(8), "tensor 'w'"),
        (header(w=tensor(shape=(3,))) + bytes(8), "tensor 'w'"),
        (header(w=tensor(offsets=(0, 8, 9))) + bytes(8), "tensor 'w'"),
        (header(w=tensor(offsets=(-4, 4))) + bytes(8), "tensor 'w'"),
        (header(w=tensor()) + bytes(7), "tensor 'w'"),
        (header(w=tensor(shape=(1 << 70,), offsets=(0, 1 << 72))) + bytes(8), "tensor 'w'"),
    ],
)
def test_a_part_that_is_no_safetensors_file_is_refused_before_anything_is_used(
    tmp_path: Path, data: bytes, text: str
) -> None:
    """The checksum is right, so only somebody else wrote it."""
    write(tmp_path / "taken")
    number = len(list((tmp_path / "taken").glob("part-*"))) - 1
    replaced_part(tmp_path / "taken", number, data)
    with pytest.raises(SnapshotError, match=text) as caught:
        StoredSnapshot.open(tmp_path / "taken").verify()
    assert caught.value.path == str(tmp_path / "taken" / f"part-{number:05}.safetensors")


def test_parts_of_another_snapshot_are_refused_before_anything_is_used(tmp_path: Path) -> None:
    write(tmp_path / "taken")
    plain = json.loads((tmp_path / "taken" / manifest.FILE).read_bytes())
    assert [key["key"] for key in plain["keys"]] == list(content())

    def swap(plain: Any) -> None:
        one, other = plain["keys"][7]["weight"][0], plain["keys"][8]["weight"][0]
        one[:2], other[:2] = other[:2], one[:2]

    rewritten(tmp_path / "taken", swap)
    with pytest.raises(SnapshotError, match="does not have the tensor"):
        StoredSnapshot.open(tmp_path / "taken").verify()


# ── memory that is used again ──


def test_memory_is_used_again_once_it_is_given_back() -> None:
    memory = PartMemory(8)
    one, other = memory.take(1, 5), memory.take(2, 8)
    again = memory.take(1, 3)
    assert (one.size, other.size, again.size) == (5, 8, 3)
    assert not any(map(np.shares_memory, (one, one, other), (other, again, again)))
    memory.give_back([2, 7])
    third = memory.take(3, 8)
    assert np.shares_memory(third, other)
    memory.give_back([1])
    assert {np.shares_memory(memory.take(part, 1), one) for part in (4, 5)} == {True, False}
    assert not np.shares_memory(memory.take(6, 1), third)


def test_a_snapshot_is_read_in_the_memory_of_a_few_parts(tmp_path: Path) -> None:
    large(tmp_path / "taken", 8)
    snapshot = StoredSnapshot.open(tmp_path / "taken")
    memory = PartMemory(max(part.nbytes for part in snapshot.manifest.parts))

    def read_all() -> None:
        for number, key in enumerate(snapshot.manifest.keys):
            assert snapshot.value(key, memory).min() == snapshot.value(key, memory).max() == number
            memory.give_back([number])

    assert peak_of(read_all) < 6 * MB
