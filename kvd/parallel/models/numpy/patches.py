"""What the kernel of a convolution sees at each of its places, as the columns of a matrix (im2col)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvd.parallel.device import Array, Shape
from kvd.parallel.models.numpy.workspace import Workspace

COLUMNS_NBYTES = {"cpu": 1 << 22, "cuda": 256 << 20}
"""So many columns are computed at a time: on a CPU as stay in its cache, on a GPU as keep it busy. Columns that all
stood in memory at once would take the kernel's area times as much memory as the images."""


class Patches:
    """The patches of images (channels, height, width, batch), the padding included.

    Each method is a few large operations on arrays: for each, a thread gives up the interpreter's lock and has to get
    it back from those of the other devices.

    Arguments:
        xp: the array module.
        workspace: for the columns.
        kernel, stride: see `Conv2D`.
        images: their shape.
        places: of the kernel: (out height, out width).
        limit_nbytes: of the columns of a tile, unless a single row of places has more.
    """

    def __init__(
        self, xp: Any, workspace: Workspace, kernel: int, stride: int, images: Shape, places: Shape, limit_nbytes: int
    ) -> None:
        self._xp = xp
        self._workspace = workspace
        self._kernel = kernel
        self._stride = stride
        self._channels, _, _, self._batch = images
        self._places = places
        self._limit_nbytes = limit_nbytes

    def tiles(self) -> Iterator[slice]:
        """The rows of places whose columns are computed at a time."""
        row_nbytes = math.prod(self._shape(slice(0, 1))) * self._workspace.dtype.itemsize
        height = max(1, self._limit_nbytes // max(1, row_nbytes))
        for first in range(0, self._places[0], height):
            yield slice(first, min(first + height, self._places[0]))

    def columns(self, images: Array, rows: slice) -> Array:
        """(channels·kernel·kernel, rows·out width·batch): a column for each place of these rows and each sample."""
        if self._kernel == self._stride == 1:
            return images[:, rows].reshape(len(images), -1)
        columns = self.memory(rows)
        columns.reshape(self._shape(rows))[...] = self._windows(images, rows)
        return columns

    def memory(self, rows: slice) -> Array:
        """Memory in the shape of `columns`."""
        shape = self._shape(rows)
        return self._workspace.array("columns", (math.prod(shape[:3]), math.prod(shape[3:])))

    def add(self, columns: Array, images: Array, rows: slice) -> None:
        """The transpose of `columns`: add each element of a column to the pixel that it would be read from.

        Pixels of one offset never overlap, so the additions happen in the order of the rows and then of the offsets.
        """
        windows, patches = self._windows(images, rows), columns.reshape(self._shape(rows))
        for i in range(self._kernel):
            for j in range(self._kernel):
                target = windows[:, i, j]
                target += patches[:, i, j]

    def _shape(self, rows: slice) -> Shape:
        height = rows.stop - rows.start
        return (self._channels, self._kernel, self._kernel, height, self._places[1], self._batch)

    def _windows(self, images: Array, rows: slice) -> Array:
        """A view of the images in the shape of the columns: a pixel of several columns is there several times."""
        across_channels, down, across, to_next = images.strides
        part = images[:, rows.start * self._stride :]
        return self._xp.lib.stride_tricks.as_strided(
            part,
            self._shape(rows),
            (across_channels, down, across, down * self._stride, across * self._stride, to_next),
        )
