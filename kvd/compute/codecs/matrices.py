"""Matrices as products of two thin ones: ``powersgd``.

First come the columns of the matrix and the place of the slice's first element in its first row, as uint32; then P, of
shape (rank, rows), and Q, of shape (rank, columns), as float32. The rank is at most the rows and the columns.

Sums are made by additions whose order is NumPy's and not a library's, and the product element by element: what is
encoded and decoded has the same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.draws import draws
from kvd.compute.codecs.lengths import TILE, check_length
from kvd.errors import ProtocolError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]

_HEAD = 8  # bytes
_DEPENDENT = 1e-5  # what is left of a column that depends on those before it, in parts of its length
_LARGEST = float(np.finfo(np.float32).max)


class Grid(NamedTuple):
    """A slice as rows of a matrix: what is missing of the first and the last one is 0.

    Attributes:
        lead: elements that are missing of the first row.
    """

    rows: int
    columns: int
    lead: int
    rank: int

    @classmethod
    def of(cls, size: int, columns: int, lead: int, rank: int) -> Grid:
        rows = -(-(lead + size) // columns) if size else 0
        return cls(rows, columns, lead, min(rank, rows, columns))

    @property
    def nbytes(self) -> int:
        return _HEAD + 4 * self.rank * (self.rows + self.columns)

    def factors(self, data: Bytes) -> tuple[Floats, Floats]:
        """Return views of P and Q in the bytes."""
        numbers, end = data[_HEAD : self.nbytes].view("<f4"), self.rank * self.rows
        return numbers[:end].reshape(self.rank, self.rows), numbers[end:].reshape(self.rank, self.columns)

    def tiles(self) -> Iterator[slice]:
        """Yield tiles of rows that fit into the cache."""
        step = max(TILE // self.columns, 1)
        return (slice(start, min(start + step, self.rows)) for start in range(0, self.rows, step))


class LowRankCodec:
    """A slice whose shape is not known is folded to a square.

    Args:
        rank: of the matrices that are sent.
        seed: of the first Q.
    """

    tile = 0

    def __init__(self, rank: int, seed: int) -> None:
        self._rank = rank
        self._seed = seed

    def of_slice(self, shape: Sequence[int], start: int, size: int) -> MatrixSlice | None:
        """Return the codec for ``size`` elements from ``start`` on of a value of this shape; None if it has no columns.

        The rows are those of the first dimension.
        """
        columns = math.prod(shape[1:])
        if len(shape) < 2 or not columns:
            return None
        return MatrixSlice(Grid.of(size, columns, start % columns, self._rank), self._seed)

    def max_nbytes(self, size: int) -> int:
        return self._square(size).nbytes

    def encode(self, values: Floats, out: Bytes, nonce: int) -> int:
        return MatrixSlice(self._square(values.size), self._seed).encode(values, out, nonce)

    def check(self, data: Bytes, size: int) -> None:
        if data.size < _HEAD:
            raise ProtocolError(f"a matrix has a head of {_HEAD} bytes, not {data.size} bytes")
        grid = self._given(data, size)
        if data.size != grid.nbytes:
            text = f"{size} elements in rows of {grid.columns} have {grid.nbytes} bytes with rank {grid.rank}"
            raise ProtocolError(f"{text}, not {data.size}")

    def decode(self, data: Bytes, out: Floats) -> None:
        _multiply(self._given(data, out.size), data, out)

    def _square(self, size: int) -> Grid:
        return Grid.of(size, max(math.isqrt(size), 1), 0, self._rank)

    def _given(self, data: Bytes, size: int) -> Grid:
        columns, lead = data[:_HEAD].view("<u4").tolist()
        if lead >= columns:
            raise ProtocolError(f"a slice begins within a row: not at {lead} of {columns}")
        return Grid.of(size, columns, lead, self._rank)


class MatrixSlice:
    """Codec of one slice of a matrix: one step of the power method per push, starting from the last Q.

    Args:
        memory: shape (memory_size,): Q as it was left, and is left; 0: it is drawn. Without it, each push draws one.
    """

    tile = 0

    def __init__(self, grid: Grid, seed: int, memory: Floats | None = None) -> None:
        self._grid = grid
        self._seed = seed
        self._memory = memory

    @property
    def memory_size(self) -> int:
        """Number of float32 that are kept from push to push."""
        return self._grid.rank * self._grid.columns

    def remembering(self, memory: Floats) -> MatrixSlice:
        """Return the codec with a memory."""
        return MatrixSlice(self._grid, self._seed, memory)

    def max_nbytes(self, size: int) -> int:
        return self._grid.nbytes

    def encode(self, values: Floats, out: Bytes, nonce: int) -> int:
        grid = self._grid
        out[:_HEAD].view("<u4")[:] = grid.columns, grid.lead
        p, q = grid.factors(out)
        matrix, exponent = self._matrix(values)
        start = self._started(nonce)
        for tile in grid.tiles():
            for index in range(grid.rank):
                p[index, tile] = np.add.reduce(matrix[tile] * start[index], axis=1)
        p[:] = _orthonormal(p.astype(np.float64))
        q[:] = 0
        for tile in grid.tiles():
            for index in range(grid.rank):
                q[index] += np.add.reduce(matrix[tile] * p[index, tile, np.newaxis], axis=0)
        if self._memory is not None:
            self._memory[:] = _unit_rows(q.astype(np.float64)).reshape(-1)
        most = _LARGEST / (2 * max(grid.rank, 1))  # so that no sum of products is infinite
        q[:] = np.clip(np.ldexp(q.astype(np.float64), exponent), -most, most)
        return grid.nbytes

    def check(self, data: Bytes, size: int) -> None:
        check_length(data, self._grid.nbytes, size)

    def decode(self, data: Bytes, out: Floats) -> None:
        _multiply(self._grid, data, out)

    def _matrix(self, values: Floats) -> tuple[Floats, int]:
        """Return the slice as a matrix with elements below 1, and the power of two that it was divided by."""
        grid = self._grid
        flat = np.zeros(grid.rows * grid.columns, np.float32)
        part = flat[grid.lead : grid.lead + values.size]
        part[:] = values
        if not np.isfinite(np.add.reduce(part)):
            part[~np.isfinite(part)] = 0
        largest = max(abs(float(part.max(initial=0))), abs(float(part.min(initial=0))))
        exponent = max(math.frexp(largest)[1], -126)
        part *= np.float32(2.0**-exponent)
        return flat.reshape(grid.rows, grid.columns), exponent

    def _started(self, nonce: int) -> Floats:
        grid = self._grid
        drawn = draws(self._seed, nonce, 0, self.memory_size).reshape(grid.rank, grid.columns)
        start = (drawn >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
        if self._memory is None:
            return start
        kept = self._memory.reshape(start.shape)
        return np.where(np.any(kept != 0, axis=1, keepdims=True), kept, start)


def _orthonormal(rows: Doubles) -> Doubles:
    """Orthonormalize the rows one after the other (Gram and Schmidt, twice); dependent rows become 0."""
    for index, row in enumerate(rows):
        length = _length(row)
        for before in [*rows[:index], *rows[:index]]:
            row -= np.add.reduce(before * row) * before
        left = _length(row)
        row[:] = row / left if left > _DEPENDENT * length else 0
    return rows


def _unit_rows(rows: Doubles) -> Doubles:
    for row in rows:
        length = _length(row)
        if length:
            row /= length
    return rows


def _length(row: Doubles) -> float:
    return math.sqrt(float(np.add.reduce(row * row)))


def _multiply(grid: Grid, data: Bytes, out: Floats) -> None:
    """Write the elements of the slice of the product of P and Q."""
    p, q = grid.factors(data)
    for tile in grid.tiles():
        block = np.zeros((tile.stop - tile.start, grid.columns), np.float32)
        for index in range(grid.rank):
            block += p[index, tile, np.newaxis] * q[index]
        first = tile.start * grid.columns - grid.lead  # where the block begins in the slice
        skipped = max(-first, 0)
        part = out[first + skipped : first + block.size]
        part[:] = block.reshape(-1)[skipped : skipped + part.size]
