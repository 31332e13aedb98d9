"""What a worker compresses, and what compression has left over for the next push of a key."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kvd.client.calls.values import Array, Source
from kvd.compression import Compression, to_wire
from kvd.compute import codecs
from kvd.compute.quiet import quietly
from kvd.compute.tensors import named_dtype
from kvd.core.requests import Encoded
from kvd.protocol.specs import DTYPES, KeySpec, padded

_LAYOUTS_KEPT = 4096


class Layout(NamedTuple):
    """Where the encoded slices of a value lie in one buffer.

    Attributes:
        elements: the first element of each slice, and the one after its last.
        offsets: where its bytes begin.
        nbytes: the most that all slices take.
    """

    elements: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    nbytes: int


class Room(NamedTuple):
    """Memory for the encoded slices of a value."""

    layout: Layout
    memory: Array


class Compressing:
    """One way to compress, as it is in use."""

    def __init__(self, compression: Compression) -> None:
        self.codec = codecs.codec_of(compression.compressor)
        self.method = to_wire(compression.compressor)
        self.feeds_back = compression.feeds_back
        self._min_bytes = compression.min_bytes
        self._layouts: dict[KeySpec, Layout | None] = {}

    def layout(self, spec: KeySpec) -> Layout | None:
        """How a value of this spec is compressed; None: it is sent plain."""
        try:
            return self._layouts[spec]
        except KeyError:
            if len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.clear()
            made = self._layouts[spec] = self._layout(spec)
            return made

    def _layout(self, spec: KeySpec) -> Layout | None:
        dtype = DTYPES[spec.dtype]
        if not dtype.is_float or spec.nbytes < max(self._min_bytes, 1):
            return None
        elements, offsets, end = [], [], 0
        for index in range(spec.num_slices):
            offset, nbytes = spec.span(index)
            elements.append((offset // dtype.itemsize, (offset + nbytes) // dtype.itemsize))
            offsets.append(padded(end))
            end = offsets[-1] + self.codec.max_nbytes(nbytes // dtype.itemsize)
        return Layout(tuple(elements), tuple(offsets), end) if end < spec.nbytes else None


@dataclass(slots=True, eq=False)
class _KeyFeedback:
    """What was left over of the pushes of a key, flat, and how many were encoded."""

    residual: NDArray[np.float32] | None = None
    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class GradientCompression:
    """The compression of one worker.

    Args:
        rank: of this worker.

    Attributes:
        current: how pushes are compressed from now on; None: not at all.
    """

    def __init__(self, rank: int) -> None:
        self.current: Compressing | None = None
        self._rank = rank
        self._keys: dict[str, _KeyFeedback] = {}

    def use(self, compression: Compression | None) -> None:
        """Compress in this way from now on. What is left over stays for a compressor that feeds it back."""
        if compression is None or not compression.feeds_back:
            self._keys = {}
        self.current = None if compression is None else Compressing(compression)

    def forget(self, names: Iterable[str]) -> None:
        """The keys are deleted."""
        for name in names:
            self._keys.pop(name, None)

    def encode(self, compressing: Compressing, name: str, source: Source, room: Room) -> Encoded:
        """Encodes a value into the room for it. Once per push: what is left over is counted in the next one."""
        values = source.data.view(named_dtype(source.spec.dtype))
        kept = self._keys.setdefault(name, _KeyFeedback())
        with kept.lock:
            residual = self._residual(kept, values.size) if compressing.feeds_back else None
            kept.count += 1
            ranges = []
            for index, ((start, stop), offset) in enumerate(
                zip(room.layout.elements, room.layout.offsets, strict=True)
            ):
                part: Any = values[start:stop]
                if part.dtype != np.float32:
                    part = quietly(part.astype, np.float32)
                out, nonce = room.memory[offset:], self._nonce(name, index, kept.count)
                if residual is None:
                    nbytes = codecs.encode(compressing.codec, part, out, nonce)
                else:
                    nbytes = codecs.encode_fed_back(compressing.codec, part, residual[start:stop], out, nonce)
                ranges.append((offset, nbytes))
        return Encoded(compressing.method, tuple(ranges))

    @staticmethod
    def _residual(kept: _KeyFeedback, size: int) -> NDArray[np.float32]:
        if kept.residual is None or kept.residual.size != size:
            kept.residual = np.zeros(size, np.float32)
        return kept.residual

    def _nonce(self, name: str, index: int, count: int) -> int:
        """Differs from push to push, slice to slice, key to key and worker to worker; the same in every run."""
        return crc32(f"{self._rank} {index} {count} {name}".encode())
