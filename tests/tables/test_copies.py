"""Parts of tables that are sent in pieces: the copy goes on as the original does, to the bit."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

import kvd
from kvd.errors import ProtocolError
from kvd.optimizer import Optimizer
from kvd.tables.contributions import Contributed
from kvd.tables.copies import PartReader, PartWriter, checksum_of
from kvd.tables.part import TablePart
from kvd.tables.row_values import Rows
from kvd.tables.table import Table

Array = np.ndarray[Any, Any]

WIDTH = 3
OPTIMIZERS = [None, kvd.optimizer.SGD(0.1), kvd.optimizer.Adam(0.01), kvd.optimizer.RowWiseAdagrad(0.1)]


def description(dtype: str = "float32") -> kvd.RowSparse:
    return kvd.RowSparse(row_shape=(WIDTH,), dtype=dtype, initializer=kvd.initializer.Normal(0.1, seed=3))


def memory(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)


def push(part: TablePart, optimizer: Optimizer | None, seed: int, most: int = 30) -> None:
    drawn = np.random.default_rng(seed)
    ids = np.sort(drawn.choice(1000, drawn.integers(0, most), replace=False)).astype(np.int64)
    rows = drawn.standard_normal((len(ids), WIDTH)).astype(part.description.numpy_dtype)
    part.update(optimizer, [Contributed(Rows(ids, rows), 1)], "sum")


def trained(optimizer: Optimizer | None, updates: int, dtype: str = "float32") -> TablePart:
    part = TablePart(description(dtype), "t")
    for seed in range(updates):
        push(part, optimizer, seed)
    return part


def pieces_of(part: TablePart, most_nbytes: int) -> list[Array]:
    reader, pieces, position = PartReader(part), [], 0
    while True:
        piece, following = reader.piece(position, most_nbytes, memory)
        pieces.append(piece)
        if following is None:
            return pieces
        position = following


def copied(part: TablePart, most_nbytes: int) -> TablePart:
    writer = PartWriter(part.description, "t")
    for piece in pieces_of(part, most_nbytes):
        writer.add(piece)
        writer.add(piece)  # a message may come twice
    return writer.part()


def everything(part: TablePart, version: int) -> bytes:
    return part.read(version, np.arange(1000), memory).tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("most_nbytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("updates", [0, 1, 2, 9])
def test_a_copy_goes_on_as_the_original_does(optimizer: Optimizer | None, most_nbytes: int, updates: int) -> None:
    part = trained(optimizer, updates)
    other = copied(part, most_nbytes)
    assert (other.version, len(other.table), other.table.step) == (part.version, len(part.table), part.table.step)
    for seed in range(100, 103):
        for back in range(min(part.version, 2) + 1):
            assert everything(other, other.version - back) == everything(part, part.version - back)
        assert checksum_of(other) == checksum_of(part)
        push(part, optimizer, seed)
        push(other, optimizer, seed)


KEEPINGS: list[dict[str, Any]] = [
    {"admit_after": 2},
    {"ttl_updates": 3, "track_updates": True},
    {"admit_after": 2, "max_rows": 9, "track_updates": True},
    {"track_updates": True},
]


@pytest.mark.parametrize("keeping", KEEPINGS, ids=str)
@pytest.mark.parametrize("most_nbytes", [1, 1 << 20])
@pytest.mark.parametrize("updates", [0, 1, 9])
def test_a_copy_keeps_the_rows_that_the_original_keeps(keeping: dict[str, Any], most_nbytes: int, updates: int) -> None:
    kept = kvd.RowSparse(row_shape=(WIDTH,), initializer=kvd.initializer.Normal(0.1, seed=3), **keeping)
    part = TablePart(kept, "t", Table(kept, "t", 2))
    optimizer = OPTIMIZERS[2]
    for seed in range(updates):
        push(part, optimizer, seed, most=80)
    writer = PartWriter(kept, "t", 2)
    for piece in pieces_of(part, most_nbytes):
        writer.add(piece)
        writer.add(piece)
    other = writer.part()
    for seed in range(100, 106):
        for back in range(min(part.version, 2) + 1):
            assert everything(other, other.version - back) == everything(part, part.version - back)
        assert checksum_of(other) == checksum_of(part)
        mine, theirs = part.table.keeping_state(), other.table.keeping_state()
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
        push(part, optimizer, seed, most=80)
        push(other, optimizer, seed, most=80)


@pytest.mark.parametrize("name", ["number", "ids", "last", "young_ids", "evicted_at", "missing"])
def test_numbers_that_cannot_be_those_of_the_rows(name: str) -> None:
    kept = kvd.RowSparse(row_shape=(WIDTH,), admit_after=2, max_rows=9, track_updates=True)
    part = TablePart(kept, "t")
    for seed in range(9):
        push(part, None, seed, most=300)
    state = part.table.keeping_state()
    if name == "missing":
        del state["last"]
    elif name in ("last", "number"):
        state[name] = state[name][1:]
    else:
        state[name] = state[name][::-1]
    assert not part.table.restore_keeping(state)
    assert part.table.restore_keeping(part.table.keeping_state())
    assert not TablePart(description(), "t").table.restore_keeping(state)


def test_the_checksum_shows_that_other_rows_will_be_kept() -> None:
    kept = kvd.RowSparse(row_shape=(WIDTH,), ttl_updates=5)
    part, other = TablePart(kept, "t"), TablePart(kept, "t")
    for ids in ([1], [2]):
        for each in (part, other):
            each.update(None, [Contributed(Rows(np.array(ids), np.ones((1, WIDTH), np.float32)), 1)], "sum")
    assert checksum_of(other) == checksum_of(part)
    state = other.table.keeping_state()
    state["last"] = state["last"][::-1].copy()
    assert other.table.restore_keeping(state)
    assert checksum_of(other) != checksum_of(part)


def test_pieces_have_the_size_that_was_asked_for() -> None:
    part = trained(OPTIMIZERS[2], 9, "float64")
    sizes = [piece.nbytes for piece in pieces_of(part, 1000)]
    assert len(sizes) > 10
    assert max(sizes) <= 1000 + 200  # with the head
    assert everything(copied(part, 1000), 9) == everything(part, 9)


@pytest.mark.parametrize("what", ["a weight", "a slot", "a row more", "the number of updates"])
def test_the_checksum_shows_a_difference(what: str) -> None:
    optimizer = OPTIMIZERS[3]
    part = trained(optimizer, 9)
    other = copied(part, 100)
    ids = other.table.ids_by_place()
    rows, states = other.table.rows_at(slice(0, len(ids)))
    made = Table(description(), "t")
    made.step = other.table.step
    for array in (rows,) if what == "a weight" else (states,) if what == "a slot" else ():
        array.reshape(-1).view(np.int32)[5] ^= 1
    (name,) = other.table.slot_widths
    made.load(ids, rows, {name: states})
    if what == "a row more":
        made.load(np.array([5000]), rows[:1], {name: states[:1]})
    version = other.version + (what == "the number of updates")
    assert checksum_of(TablePart(description(), "t", made, other.put_aside, version)) != checksum_of(part)


def test_the_checksum_does_not_depend_on_where_rows_lie() -> None:
    part = trained(OPTIMIZERS[2], 9)
    ids = part.table.ids_by_place()[::-1].copy()
    rows, *slots = [array[::-1].copy() for array in part.table.rows_at(slice(0, len(ids)))]
    made = Table(description(), "t")
    made.step = part.table.step
    made.load(ids, rows, dict(zip(part.table.slot_widths, slots, strict=True)))
    assert checksum_of(TablePart(description(), "t", made, (), part.version)) == checksum_of(part)


def test_all_rows_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of many times what one checksum reads: after some updates every row was looked at."""
    monkeypatch.setattr("kvd.tables.copies.CHECKED_NBYTES", 400)
    part = trained(None, 20)
    read = sum([checksum_of(part)[1] for part.version in range(200)])
    assert read / 200 < 8 * len(part.table) + 1200
    flipped = copied(part, 1 << 20)
    found = []
    for version in range(200):
        part.version = flipped.version = version
        found.append(checksum_of(part) == checksum_of(flipped))
    assert all(found)
    rows = flipped.table.rows_at(slice(0, 1))[0] + 1
    flipped.table.assign(flipped.table.ids_by_place()[:1], rows)
    for version in range(200):
        part.version = flipped.version = version
        found.append(checksum_of(part) == checksum_of(flipped))
    assert not all(found)


# ── what is wrong with pieces ──


def head_of(piece: Array) -> tuple[list[Any], Array]:
    length = int(piece[:8].view(np.int64)[0])
    return msgpack.unpackb(piece[8 : 8 + length].tobytes()), piece[(8 + length + 7) & ~7 :]


def with_head(head: Any, body: Array) -> Array:
    packed = msgpack.packb(head)
    padding = b"\0" * (-len(packed) % 8)
    return np.concatenate([np.frombuffer(np.int64(len(packed)).tobytes() + packed + padding, np.uint8), body])


def test_pieces_that_are_missing_or_of_another_version() -> None:
    part = trained(OPTIMIZERS[1], 5)
    pieces = pieces_of(part, 100)
    writer = PartWriter(part.description, "t")
    with pytest.raises(ProtocolError, match="are missing"):
        writer.part()
    writer.add(pieces[0])
    with pytest.raises(ProtocolError, match="begins at row"):
        writer.add(pieces[2])
    push(part, OPTIMIZERS[1], 77)
    with pytest.raises(ProtocolError, match="of another version"):
        writer.add(pieces_of(part, 100)[1])
    with pytest.raises(ProtocolError, match="are missing"):
        writer.part()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, -1),
        (0, "x"),
        (2, []),
        (2, [1, 2, 3, 4]),
        (2, [-5, 1]),
        (3, [["m", -1]]),
        (3, 7),
        (4, 5),
        (4, ["a", "b", "c"]),
        (5, -1),
        (6, 10**6),
        (6, -1),
    ],
)
def test_heads_that_say_what_cannot_be(place: int, value: Any) -> None:
    head, body = head_of(pieces_of(trained(OPTIMIZERS[2], 5), 1 << 20)[-1])
    head[place] = value
    with pytest.raises(ProtocolError):
        PartWriter(description(), "t").add(with_head(head, body))


@pytest.mark.parametrize("piece", [b"", b"1234567", bytes(8), b"\xff" * 100, bytes([200]) + bytes(7), bytes(range(64))])
def test_garbage(piece: bytes) -> None:
    with pytest.raises(ProtocolError, match="is none"):
        PartWriter(description(), "t").add(np.frombuffer(piece, np.uint8))


def test_rows_twice_below_zero_or_cut_short() -> None:
    part = TablePart(description(), "t")
    push(part, None, 1)
    part = TablePart(description(), "t", part.table, (), 1)
    piece = pieces_of(part, 1 << 20)[0]
    head, body = head_of(piece)
    for first in (-1, int(body[8:16].view(np.int64)[0])):
        wrong = body.copy()
        wrong[:8].view(np.int64)[0] = first
        with pytest.raises(ProtocolError, match="names a row twice, or one below 0"):
            PartWriter(description(), "t").add(with_head(head, wrong))
    with pytest.raises(ProtocolError, match="bytes for"):
        PartWriter(description(), "t").add(piece[:-8])
    half, both = PartWriter(description(), "t"), list(head)
    both[2] = [2 * head[2][0]]
    half.add(with_head(both, body))
    both[5] = head[6]
    with pytest.raises(ProtocolError, match="rows of a piece before"):
        half.add(with_head(both, body))
