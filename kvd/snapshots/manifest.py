"""The manifest of a snapshot: what it holds and where. JSON, with a checksum of its own.

::

    {"format": "kvd-snapshot", "version": 1, "sha256": of the rest,
     "job", "type", "lineage", "steps", "one_step", "num_workers", "optimizer": [name, {…}] or null,
     "num_keys", "keys": [{"key", "dtype", "shape", "clock", "updates", "weight": [piece, …],
                           "state": {slot: {"dtype", "pieces": [piece, …]}}, "merge": if it has its own,
                           "gradients": true if workers keep the weight: "weight" is that of worker 0,
                           "table": if it is one: {"rows": or -1, "initializer": [name, [number, …], seed],
                                                   "keeping": {…}, "num_rows", "ids": [piece, …]}}],
     "parts": [{"file", "bytes", "sha256"}],
     "program": {"layout": [piece, …], "state": [piece, …]} if workers keep weights: the other state of worker 0}

A piece is [number of the part, name of the tensor in it, elements]; the pieces of an array, in order, are the array.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple, TypeVar

from kvd.errors import ProtocolError
from kvd.optimizer import Optimizer, from_wire, to_wire
from kvd.protocol.messages import BIGGEST
from kvd.protocol.specs import (
    DTYPES,
    MAX_DIMENSIONS,
    MAX_KEY_CHARS,
    MAX_KEY_NBYTES,
    MERGES,
    MIN_SLICE_BYTES,
    Initial,
    Keeping,
    KeySpec,
    TableSpec,
    merge_error,
)
from kvd.tables.wire import table_of_spec

FILE = "manifest.json"
FORMAT = "kvd-snapshot"
VERSION = 3
WITHOUT_PROGRAM = 2  # the version of a manifest without the state of a program, which an older kvd can read
WITHOUT_TABLES = 1  # the same of one that has no tables either
MAX_BYTES = 256 << 20  # of a manifest: some hundred thousand keys
MAX_PART_BYTES = 1 << 30
MAX_SLOT_CHARS = 64
STATE_DTYPES = ("float32", "float64")

_PART = re.compile(r"part-\d{5,9}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


class NewerVersion(ValueError):
    """The manifest was written by a kvd that this one does not know."""


class Piece(NamedTuple):
    """A part of an array: a tensor of so many elements in a part of the snapshot."""

    part: int
    tensor: str
    elements: int


class Slot(NamedTuple):
    """One array of a key's optimizer state, such as the momentum or the float32 master."""

    dtype: str
    pieces: tuple[Piece, ...]


class StoredTable(NamedTuple):
    """Table properties of a stored key.

    Attributes:
        spec: as in the spec of the key; its parts are those of one server.
        num_rows: how many rows were stored.
        ids: of them, ascending.
    """

    spec: TableSpec
    num_rows: int
    ids: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One key.

    Attributes:
        clock: how many rounds (asynchronous stores: pushes) its value had taken.
        updates: how many updates the optimizer had made.
        merge: its own merge; "", also in manifests that do not say: that of the cluster.
        table: None: it is no table. The shape of a table is that of a row; weight and state are those of all rows.
        gradients: see `kvd.protocol.specs.KeySpec`. The weight is that of worker 0.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    clock: int
    updates: int
    weight: tuple[Piece, ...]
    state: Mapping[str, Slot]
    merge: str = ""
    table: StoredTable | None = None
    gradients: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of the value; for a table, in all its rows."""
        return prod(self.shape) * (1 if self.table is None else self.table.num_rows)

    def pieces(self) -> list[tuple[tuple[Piece, ...], str]]:
        """Pieces of each array, with its dtype, as they lie in parts."""
        ids = [] if self.table is None else [(self.table.ids, "int64")]
        return [*ids, (self.weight, self.dtype), *[(slot.pieces, slot.dtype) for slot in self.state.values()]]


class StoredProgram(NamedTuple):
    """The state of a program that updates the weights itself, without the weights, which are those of the keys.

    Attributes:
        layout: bytes that say what the state consists of.
        state: its bytes.
    """

    layout: tuple[Piece, ...]
    state: tuple[Piece, ...]

    def pieces(self) -> list[tuple[tuple[Piece, ...], str]]:
        """As those of `StoredKey`."""
        return [(self.layout, "uint8"), (self.state, "uint8")]


class StoredPart(NamedTuple):
    """A file beside the manifest."""

    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a snapshot.

    Attributes:
        job: the name of the job; "" for a store without a cluster.
        type: the type of the store.
        lineage: of the run that wrote it: no other run has the same.
        steps: how many steps of its loops the program had made.
        optimizer: with the hyperparameters that it had then.
        one_step: whether all keys are of the same step of the training. Manifests that do not say so are.
    """

    job: str
    type: str
    lineage: str
    steps: int
    num_workers: int
    optimizer: Optimizer | None
    one_step: bool = True


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of it."""

    origin: Origin
    keys: tuple[StoredKey, ...]
    parts: tuple[StoredPart, ...]
    program: StoredProgram | None = None

    def pieces(self) -> list[tuple[tuple[Piece, ...], str]]:
        """Those of all arrays, and their dtypes."""
        of_program = [] if self.program is None else self.program.pieces()
        return [*[entry for key in self.keys for entry in key.pieces()], *of_program]

    @property
    def _version(self) -> int:
        if self.program is not None:
            return VERSION
        return WITHOUT_PROGRAM if any(key.table for key in self.keys) else WITHOUT_TABLES

    def to_json(self) -> bytes:
        origin = self.origin
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": self._version,
            "job": origin.job,
            "type": origin.type,
            "lineage": origin.lineage,
            "steps": origin.steps,
            "one_step": origin.one_step,
            "num_workers": origin.num_workers,
            "optimizer": None if origin.optimizer is None else to_wire(origin.optimizer),
            "num_keys": len(self.keys),
            "keys": [_key_to_plain(key) for key in self.keys],
            "parts": [{"file": part.file, "bytes": part.nbytes, "sha256": part.sha256} for part in self.parts],
        }
        if self.program is not None:
            content["program"] = {
                name: [list(piece) for piece in pieces] for name, pieces in self.program._asdict().items()
            }
        return json.dumps({**content, "sha256": _checksum(content)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Return the manifest that `to_json` wrote.

        Raises:
            NewerVersion: a later kvd wrote it.
            ValueError: it is none, or damaged; the text says what is wrong.
        """
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"it does not have the format {FORMAT}")
        version = _whole(content, "version")
        if version > VERSION:
            raise NewerVersion(f"it has version {version} of the format, and this kvd reads up to version {VERSION}")
        if content.pop("sha256", None) != _checksum(content):
            raise ValueError("its checksum does not match its content")
        keys = tuple(_key_from_plain(each) for each in _list(content, "keys"))
        parts = tuple(
            StoredPart(_text(each, "file", _PART), _whole(each, "bytes"), _text(each, "sha256", _DIGEST))
            for each in _list(content, "parts")
        )
        if any(part.nbytes > MAX_PART_BYTES for part in parts):
            raise ValueError("a part is larger than any part")
        if len(keys) != _whole(content, "num_keys") or len({key.key for key in keys}) != len(keys):
            raise ValueError("it lists a key twice, or another number of keys than it says")
        program = None
        if "program" in content:
            plain = _field(content, "program", dict)
            program = StoredProgram(_pieces(plain, "layout"), _pieces(plain, "state"))
        _check_pieces(keys)
        found = cls(_origin_from_plain(content), keys, parts, program)
        if any(piece.part >= len(parts) for pieces, _ in found.pieces() for piece in pieces):
            raise ValueError("an array lies in a part that is not listed")
        return found


# ── plain data ──


def _checksum(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _key_to_plain(key: StoredKey) -> dict[str, Any]:
    plain = {
        "key": key.key,
        "dtype": key.dtype,
        "shape": list(key.shape),
        "clock": key.clock,
        "updates": key.updates,
        "weight": [list(piece) for piece in key.weight],
        "state": {
            name: {"dtype": slot.dtype, "pieces": [list(piece) for piece in slot.pieces]}
            for name, slot in key.state.items()
        },
    }
    if key.merge:
        plain["merge"] = key.merge
    if key.gradients:
        plain["gradients"] = True
    if key.table is not None:
        plain["table"] = _table_to_plain(key.table)
    return plain


def _table_to_plain(table: StoredTable) -> dict[str, Any]:
    spec = table.spec
    return {
        "rows": spec.rows,
        "initializer": [spec.initial.name, list(spec.initial.numbers), spec.initial.seed],
        "keeping": spec.keeping._asdict(),
        "num_rows": table.num_rows,
        "ids": [list(piece) for piece in table.ids],
    }


def _table_from_plain(plain: Any, dtype: str, shape: tuple[int, ...]) -> StoredTable:
    rows, initial, keeping = _field(plain, "rows", int), _list(plain, "initializer"), _field(plain, "keeping", dict)
    try:
        name, numbers, seed = initial
        known = Initial(str(name), tuple(map(float, numbers)), int(seed))
        spec = TableSpec(rows, known, 1, Keeping(**keeping))
        table_of_spec(KeySpec(dtype, shape, MIN_SLICE_BYTES, "", spec))
    except (TypeError, ValueError, ProtocolError) as error:
        raise ValueError(f"there is no such table: {error}") from None
    return StoredTable(spec, _whole(plain, "num_rows"), _pieces(plain, "ids"))


def _key_from_plain(plain: Any) -> StoredKey:
    shape = tuple(_whole({"shape": side}, "shape") for side in _list(plain, "shape"))
    dtype, name = _text(plain, "dtype"), _text(plain, "key")
    if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS or not 0 < len(name) <= MAX_KEY_CHARS:
        raise ValueError(f"no key is {name[:80]!r} with dtype {dtype[:40]!r} and {len(shape)} dimensions")
    if prod(shape) * DTYPES[dtype].itemsize > MAX_KEY_NBYTES:
        raise ValueError(f"key {name!r} is larger than any key")
    merge = _text(plain, "merge") if "merge" in plain else ""
    if merge and (merge not in MERGES or merge_error(name, dtype, merge)):
        raise ValueError(f"key {name!r} of {dtype} has no merge {merge[:40]!r}")
    slots = plain.get("state")
    if not isinstance(slots, dict):
        raise ValueError(f"key {name!r} has no state")
    state = {}
    for slot, entry in slots.items():
        if len(slot) > MAX_SLOT_CHARS or _text(entry, "dtype") not in STATE_DTYPES:
            raise ValueError(f"{slot[:80]!r} of key {name!r} is not an array of a state")
        state[slot] = Slot(entry["dtype"], _pieces(entry, "pieces"))
    clock, updates = _whole(plain, "clock"), _whole(plain, "updates")
    table = _table_from_plain(plain["table"], dtype, shape) if "table" in plain else None
    gradients = _field(plain, "gradients", bool) if "gradients" in plain else False
    return StoredKey(name, dtype, shape, clock, updates, _pieces(plain, "weight"), state, merge, table, gradients)


def _origin_from_plain(content: Mapping[str, Any]) -> Origin:
    try:
        optimizer = None if content.get("optimizer") is None else from_wire(content["optimizer"])
    except ProtocolError as error:
        raise ValueError(str(error)) from None
    return Origin(
        _text(content, "job"),
        _text(content, "type"),
        _text(content, "lineage"),
        _whole(content, "steps"),
        _whole(content, "num_workers"),
        optimizer,
        _field(content, "one_step", bool) if "one_step" in content else True,
    )


def _pieces(plain: Any, name: str) -> tuple[Piece, ...]:
    pieces = []
    for entry in _list(plain, name):
        if not isinstance(entry, list) or len(entry) != 3:
            raise ValueError(f"{name} has an entry that is no piece")
        fields = dict(zip(Piece._fields, entry, strict=True))
        pieces.append(Piece(_whole(fields, "part"), _text(fields, "tensor"), _whole(fields, "elements")))
    return tuple(pieces)


def _check_pieces(keys: Sequence[StoredKey]) -> None:
    """Raise ValueError unless each array has as many elements as its key."""
    for key in keys:
        for slot in key.state.values():
            _check_size(key, slot.pieces, None if key.table else key.elements)
        _check_size(key, key.weight, key.elements)
        if key.table is not None:
            _check_size(key, key.table.ids, key.table.num_rows)


def _check_size(key: StoredKey, pieces: Sequence[Piece], elements: int | None) -> None:
    """Args:
    elements: None: as many for each row of a table.
    """
    found = sum(piece.elements for piece in pieces)
    fits = found == elements
    if elements is None and key.table is not None:
        fits = found % key.table.num_rows == 0 if key.table.num_rows else found == 0
    if not fits:
        raise ValueError(f"an array of key {key.key!r} has not the size of the key")


def _field(plain: Any, name: str, kind: type[T]) -> T:
    value = plain.get(name) if isinstance(plain, Mapping) else None
    if type(value) is not kind:
        raise ValueError(f"{name} is missing, or no {kind.__name__}")
    return value


def _whole(plain: Any, name: str) -> int:
    value = _field(plain, name, int)
    if not 0 <= value <= BIGGEST:
        raise ValueError(f"{name} is {value}")
    return value


def _text(plain: Any, name: str, pattern: re.Pattern[str] | None = None) -> str:
    value = _field(plain, name, str)
    if pattern is not None and not pattern.fullmatch(value):
        raise ValueError(f"{name} is {value[:80]!r}")
    return value


def _list(plain: Any, name: str) -> list[Any]:
    return _field(plain, name, list)
