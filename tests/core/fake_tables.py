"""Parts of tables for the tests of the machines: a row has 8 bytes, and what the shell makes of it does not matter."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvd.core.machine import Apply, ReadRows, Span, TableVersion
from kvd.protocol.specs import Initial, KeySpec, TableSpec

ROW = 8
ROWS = 1000


def table(parts: int = 1, merge: str = "") -> KeySpec:
    """A table of ROWS rows."""
    return KeySpec("float32", (2,), 4096, merge, TableSpec(ROWS, Initial("Zeros"), parts))


def packed_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


def unpacked_ids(span: Span) -> list[int]:
    return list(struct.unpack_from(f"<{span.nbytes // 8}q", span.buffer, span.offset) if span.nbytes else ())


def pushed(ids: Sequence[int], fill: int = 1) -> bytes:
    """The payload of a push of these rows, each of which has ROW times this byte."""
    return packed_ids(ids) + bytes([fill]) * (ROW * len(ids))


def next_version(job: Apply) -> TableVersion:
    """As if all rows of the push were new, and no two workers had named the same."""
    current = job.current
    assert isinstance(current, TableVersion)
    rows = sum(given.span.nbytes for given in job.contributions if given.span is not None) // (8 + ROW)
    return TableVersion(current.number + 1, current.rows + rows, current.nbytes + rows * ROW)


def rows_at(job: ReadRows) -> tuple[Span, ...]:
    """Each byte of a row is the number of its version."""
    sizes = [ids.nbytes // 8 * ROW for ids in job.ids]
    return tuple([Span(bytes([job.version.number]) * size, 0, size) for size in sizes])
