"""What a worker compresses, and what compression has left over for the next push of a key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kvd.client.calls.values import Array, Source
from kvd.client.cluster.kept_files import Kept, KeptFile
from kvd.client.cluster.kept_folder import KeptFolder
from kvd.compression import Compression, name_of, to_wire
from kvd.compute import codecs
from kvd.compute.quiet import quietly
from kvd.compute.tensors import named_dtype
from kvd.core.requests import Encoded, TakenForm
from kvd.protocol.messages import MAX_COMPRESSOR_CHARS, MergedForm
from kvd.protocol.specs import DTYPES, KeySpec, padded

_LAYOUTS_KEPT = 4096
_SPECS_KEPT = 8  # of a key: its own, and those of values that are refused


class Layout(NamedTuple):
    """Where the encoded slices of a value lie in one buffer.

    Attributes:
        elements: the first element of each slice, and the one after its last.
        offsets: where its bytes begin.
        nbytes: the most that all slices take.
        slice_codecs: of each slice; empty: they are not encoded, but changed.
        memory_size: how many float32 the codecs keep, those of the first slice first.
    """

    elements: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    nbytes: int
    slice_codecs: tuple[codecs.Codec, ...]
    memory_size: int = 0

    @property
    def is_plain(self) -> bool:
        return not self.slice_codecs


class Room(NamedTuple):
    """Memory for the encoded slices of a value."""

    layout: Layout
    memory: Array


class Compressing:
    """One way to compress, as it is in use.

    Attributes:
        codec: what encodes.
        method: the compressor as servers are told of it.
        feeds_back: what is left over of a push is added to the next one.
        mu: of the momentum; 0: none.
        merged: what may become of the values that the pushes are merged into.
        takes: the form in which they may come back; None: as they are.
    """

    def __init__(self, compression: Compression) -> None:
        self.codec = codecs.codec_of(compression.compressor)
        self.method = to_wire(compression.compressor)
        self.feeds_back = compression.feeds_back
        self.mu = compression.mu
        self.merged = _merged_form(compression)
        name = name_of(compression.compressor)
        are_taken = self.merged is not MergedForm.PLAIN and len(name) <= MAX_COMPRESSOR_CHARS
        self.takes = TakenForm(name, self._is_encoded) if are_taken else None
        self._min_bytes = compression.min_bytes
        self._layouts: dict[KeySpec, Layout | None] = {}

    def layout(self, spec: KeySpec) -> Layout | None:
        """How a value of this spec is compressed; None: it is sent as it is."""
        try:
            return self._layouts[spec]
        except KeyError:
            if len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.clear()
            made = self._layouts[spec] = self._layout(spec)
            return made

    def _is_encoded(self, spec: KeySpec) -> bool:
        layout = self.layout(spec)
        return layout is not None and not layout.is_plain

    def _layout(self, spec: KeySpec) -> Layout | None:
        dtype = DTYPES[spec.dtype]
        if not dtype.is_float or spec.nbytes == 0:
            return None
        encoded = self._encoded_layout(spec) if spec.nbytes >= self._min_bytes else None
        if encoded is not None and encoded.nbytes < spec.nbytes:
            return encoded
        return Layout(((0, spec.nbytes // dtype.itemsize),), (0,), spec.nbytes, ()) if self.mu else None

    def _encoded_layout(self, spec: KeySpec) -> Layout | None:
        itemsize = DTYPES[spec.dtype].itemsize
        elements, offsets, end, memory_size = [], [], 0, 0
        slice_codecs = []
        for index in range(spec.num_slices):
            start, size = (number // itemsize for number in spec.span(index))
            codec = self.codec
            if isinstance(codec, codecs.ShapedCodec):
                remembering = codec.of_slice(spec.shape, start, size)
                if remembering is None:
                    return None
                codec, memory_size = remembering, memory_size + remembering.memory_size
            slice_codecs.append(codec)
            elements.append((start, start + size))
            offsets.append(padded(end))
            end = offsets[-1] + codec.max_nbytes(size)
        return Layout(tuple(elements), tuple(offsets), end, tuple(slice_codecs), memory_size)


_NOTHING = np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class _KeyState:
    """What was left over of the pushes of a key, flat, and their momentum; what its codecs keep; and how many were
    encoded."""

    residual: NDArray[np.float32] = field(default_factory=lambda: _NOTHING)
    momentum: NDArray[np.float32] = field(default_factory=lambda: _NOTHING)
    memory: NDArray[np.float32] = field(default_factory=lambda: _NOTHING)
    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    file: KeptFile | None = None
    is_known: bool = False  # no predecessor has left anything, or it was read


class GradientCompression:
    """The compression of one worker.

    Args:
        rank: of this worker.
        restarted: whether it goes on where a predecessor stopped.
        clock_of: the number of pushes of a key by this worker and its predecessors.

    Attributes:
        current: how pushes are compressed from now on; None: not at all.
    """

    def __init__(self, rank: int, restarted: bool = False, clock_of: Callable[[str], int] = lambda _: 0) -> None:
        self.current: Compressing | None = None
        self._rank = rank
        self._restarted = restarted
        self._clock_of = clock_of
        self._keys: dict[str, dict[KeySpec, _KeyState]] = {}
        self._folder: KeptFolder | None = None

    def use(self, compression: Compression | None) -> None:
        """Compress in this way from now on. What is left over stays for a compressor that feeds it back, and momentum
        for one that has it.

        Raises:
            ConfigError: nothing can be written to the directory in which it is to be kept.
        """
        folder = None if compression is None else self._folder_of(compression)
        keys = {}
        stays = folder is self._folder
        if compression is not None and (compression.feeds_back or compression.mu):
            for name, states in self._keys.items():
                keys[name] = {
                    spec: _kept(state, compression, state.file if stays else None) for spec, state in states.items()
                }
        if self._folder is not None and not stays:
            self._folder.clear()
        self._folder = folder
        self._keys = keys
        self.current = None if compression is None else Compressing(compression)

    def _folder_of(self, compression: Compression) -> KeptFolder | None:
        if not compression.state_dir:
            return None
        folder = KeptFolder(Path(compression.state_dir), self._rank)
        if self._folder is not None and folder.path == self._folder.path:
            return self._folder
        folder.open(emptied=not self._restarted)
        return folder

    def forget(self, names: Iterable[str]) -> None:
        """The keys are deleted."""
        for name in names:
            for spec in self._keys.pop(name, {}):
                if self._folder is not None:
                    self._folder.remove(name, spec)

    def encode(
        self, compressing: Compressing, name: str, source: Source, room: Room
    ) -> tuple[Encoded | None, Callable[[int], None] | None]:
        """Encodes a value into the room for it. Once per push: what is left over is counted in the next one.

        Returns:
            What decodes it; None: it is sent plain. And what wants to know the clock under which the push sets out.
        """
        values = source.data.view(named_dtype(source.spec.dtype))
        state = self._state(name, source.spec)
        with state.lock:
            self._prepare(compressing, name, source.spec, state, room.layout, values.size)
            slice_codecs = _remembering(room.layout, state.memory)
            nbytes = [
                self._encode_slice(compressing, name, state, values, index, room, codec)
                for index, codec in enumerate(slice_codecs or [None])
            ]
            note = None
            if state.file is not None:
                state.file.end(state.count)
                note = partial(state.file.set_clock, state.count)
        if room.layout.is_plain:
            return None, note
        ranges = tuple(zip(room.layout.offsets, nbytes, strict=True))
        return Encoded(compressing.method, ranges, compressing.merged), note

    def _prepare(
        self, compressing: Compressing, name: str, spec: KeySpec, state: _KeyState, layout: Layout, size: int
    ) -> None:
        """Counts the push, and has the arrays in their sizes; in the file, if what is kept has one."""
        feeds_back = compressing.feeds_back and not layout.is_plain
        sizes = (
            size if feeds_back else state.residual.size,
            size if compressing.mu else state.momentum.size,
            layout.memory_size,
        )
        folder, clock = self._folder, 0
        if folder is not None and self._restarted and not state.is_known:
            found = folder.read(name, spec, sizes, self._clock_of)
            if found is not None:
                (state.count, (state.residual, state.momentum, state.memory)), clock = found
        state.is_known = True
        arrays = tuple(
            _of_size(*pair) for pair in zip((state.residual, state.momentum, state.memory), sizes, strict=True)
        )
        if folder is not None:
            state.file = folder.file(name, spec, sizes, state.file, Kept(state.count, arrays), clock)
        state.count += 1
        if state.file is not None:
            arrays = state.file.begin(Kept(state.count, arrays))
        state.residual, state.momentum, state.memory = arrays

    def _state(self, name: str, spec: KeySpec) -> _KeyState:
        """By what is pushed, too: a value of another shape or dtype than the key's is refused, after it was encoded."""
        states = self._keys.setdefault(name, {})
        if spec not in states and len(states) >= _SPECS_KEPT:
            oldest = next(iter(states))
            states.pop(oldest, None)
            if self._folder is not None:
                self._folder.remove(name, oldest)
        return states.setdefault(spec, _KeyState())

    def _encode_slice(
        self,
        compressing: Compressing,
        name: str,
        state: _KeyState,
        values: Array,
        index: int,
        room: Room,
        codec: codecs.Codec | None,
    ) -> int:
        start, stop = room.layout.elements[index]
        part: Any = values[start:stop]
        if part.dtype != np.float32:
            part = quietly(part.astype, np.float32)
        if compressing.mu:
            part = codecs.with_momentum(part, state.momentum[start:stop], compressing.mu)
        out = room.memory[room.layout.offsets[index] :]
        if codec is None:
            out.view(values.dtype)[:] = quietly(part.astype, values.dtype)
            return room.layout.nbytes
        nonce = self._nonce(name, index, state.count)
        if compressing.feeds_back:
            return codecs.encode_fed_back(codec, part, state.residual[start:stop], out, nonce)
        return codecs.encode(codec, part, out, nonce)

    def _nonce(self, name: str, index: int, count: int) -> int:
        """Differs from push to push, slice to slice, key to key and worker to worker; the same in every run."""
        return crc32(f"{self._rank} {index} {count} {name}".encode())


def _merged_form(compression: Compression) -> MergedForm:
    """What may become of the values that the pushes are merged into."""
    if not compression.pulls_encoded or compression.compressor.of_merged(1) is None:
        return MergedForm.PLAIN
    return MergedForm.FED_BACK if compression.feeds_back else MergedForm.ENCODED


def _remembering(layout: Layout, memory: NDArray[np.float32]) -> Sequence[codecs.Codec]:
    """The codecs of the slices, with what they keep."""
    if not layout.memory_size:
        return layout.slice_codecs
    found, end = [], 0
    for codec in layout.slice_codecs:
        assert isinstance(codec, codecs.RememberingCodec)
        begin, end = end, end + codec.memory_size
        found.append(codec.remembering(memory[begin:end]))
    return found


def _kept(state: _KeyState, compression: Compression, file: KeptFile | None) -> _KeyState:
    """What goes on under another compression."""
    return _KeyState(
        residual=state.residual if compression.feeds_back else _NOTHING,
        momentum=state.momentum if compression.mu else _NOTHING,
        count=state.count,
        file=file,
        is_known=state.is_known,
    )


def _of_size(kept: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """What is kept of a key of this size: zeros at first."""
    return kept if kept.size == size else np.zeros(size, np.float32)
