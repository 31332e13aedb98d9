"""Payloads of messages: slices that travel in another form than their key has, values in parts, and many small buffers.

A slice may travel in another dtype than that of its key, or compressed.

What a peer sent is checked when it arrives, so that decoding it cannot fail; it is decoded when it is merged, or copied
to where a call wants it. So what the machine does not admit costs little, however many elements it says it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from kvd.compression import from_wire, name_of
from kvd.compute.codecs import Codec, codec_of
from kvd.compute.quiet import quietly
from kvd.compute.tensors import named_dtype
from kvd.core.machine import Buffer, Scatter, Span
from kvd.errors import ProtocolError
from kvd.protocol.messages import Coding, Message, Push, Values
from kvd.protocol.specs import DTYPES, MAX_SLICE_BYTES
from kvd.transport.base import NOTHING

Array: TypeAlias = np.ndarray[Any, Any]

FLOAT32: np.dtype[Any] = np.dtype(np.float32)


class CodedSlice:
    """The bytes of a slice as they travelled, checked. In a Span it stands for what they decode into."""

    __slots__ = ("_decode", "_dtype", "_size")

    def __init__(self, decode: Callable[[Array | None], Array], size: int, dtype: np.dtype[Any]) -> None:
        self._decode = decode
        self._size = size
        self._dtype = dtype

    def decoded(self) -> Array:
        """The elements of the slice, in the dtype of its key, in memory of their own."""
        return quietly(self._decode, None)

    def decode_into(self, target: Any, start: int) -> None:
        """Write the elements into a buffer, from byte `start` on."""
        if not self._size:
            return
        out = np.frombuffer(target, self._dtype, self._size, start)
        made = quietly(self._decode, out)
        if made is not out:
            np.copyto(out, made)


def arrived(message: Message, payload: memoryview | None) -> tuple[Buffer, int, str]:
    """The payload, for how many bytes of its key it stands, and why it cannot be decoded ("": it can)."""
    nbytes = 0 if payload is None else payload.nbytes
    if not isinstance(message, Push | Values) or message.coding is None or payload is None:
        return payload, nbytes, ""
    data = np.frombuffer(payload, np.uint8) if nbytes else np.empty(0, np.uint8)
    try:
        return *_checked(message.coding, data), ""
    except ProtocolError as error:
        return payload, nbytes, str(error)


def _checked(coding: Coding, data: Array) -> tuple[CodedSlice, int]:
    wanted = DTYPES.get(coding.wanted)
    if wanted is None or not wanted.is_float:
        raise ProtocolError(f"nothing becomes {coding.wanted!r}: it is no floating dtype")
    dtype, nbytes = named_dtype(coding.wanted), coding.size * wanted.itemsize
    if nbytes > MAX_SLICE_BYTES:
        raise ProtocolError(f"a slice has at most {MAX_SLICE_BYTES} bytes, not {nbytes}")
    if isinstance(coding.method, str):
        decode = _cast(coding.method, data, coding)
    else:
        codec = _codec_for(coding, data)
        decode = partial(_decompressed, codec, data, coding.size, dtype)
    return CodedSlice(decode, coding.size, dtype), nbytes


def _codec_for(coding: Coding, data: Array) -> Codec:
    """The codec that decodes these bytes, which it has checked."""
    compressor = from_wire(coding.method)
    try:
        codec = codec_of(compressor)
        codec.check(data, coding.size)
    except ProtocolError:
        raise
    except Exception as error:  # an installed compressor may raise anything, and no message may stop a daemon
        text = f"the compressor {name_of(compressor)} cannot decode it: {type(error).__name__}: {error}"
        raise ProtocolError(text) from error
    return codec


def _cast(name: str, data: Array, coding: Coding) -> Callable[[Array | None], Array]:
    given = DTYPES.get(name)
    if given is None or not given.is_float:
        raise ProtocolError(f"nothing is made of {name!r:.40}: it is no floating dtype")
    if data.size != coding.size * given.itemsize:
        raise ProtocolError(f"{coding.size} elements of {name} have {coding.size * given.itemsize} bytes")
    values, dtype = data.view(named_dtype(name)), named_dtype(coding.wanted)
    return lambda _: values.astype(dtype)


def _decompressed(codec: Codec, data: Array, size: int, dtype: np.dtype[Any], out: Array | None) -> Array:
    """The elements: in `out`, if they need not be converted and it is given."""
    values = out if out is not None and dtype == FLOAT32 else np.empty(size, FLOAT32)
    codec.decode(data, values)
    return values if dtype == FLOAT32 else values.astype(dtype)


class ReassemblyBuffer:
    """The parts of a pulled value while its size is unknown.

    Keeps received bytes where they arrived, without a copy and as they travelled, until they are put into an array.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[int, Span]] = []

    def add(self, offset: int, span: Span) -> None:
        """Keep the bytes of the span, which begin at byte `offset` of the value."""
        self._parts.append((offset, span))

    @property
    def parts(self) -> Sequence[tuple[int, Span]]:
        """What was added."""
        return self._parts

    def whole(self) -> Span | None:
        """All that was added as one span, if it lies in one buffer as in the value: side by side, in order."""
        parts = self._parts
        if len(parts) < 2:
            return parts[0][1] if parts else None
        parts = sorted(parts, key=itemgetter(0))
        begin, first = parts[0]
        end = begin
        for offset, span in parts:
            if span.buffer is not first.buffer or offset != end or span.offset - first.offset != offset - begin:
                return None
            end += span.nbytes
        return first._replace(nbytes=end - begin)

    def move_to(self, target: Any) -> None:
        """Copy all bytes into the target, a contiguous writable buffer, and forget them."""
        whole = memoryview(target).cast("B")
        for offset, span in self._parts:
            if isinstance(span.buffer, CodedSlice):
                span.buffer.decode_into(whole, offset)
            elif span.nbytes:
                part = memoryview(span.buffer).cast("B")[span.offset : span.offset + span.nbytes]
                whole[offset : offset + span.nbytes] = part
        self.clear()

    def clear(self) -> None:
        """Forget all bytes."""
        self._parts = []


def joined(span: Span) -> Span:
    """Return what is gathered for this span as one buffer, joined by a loop in C.

    Raises:
        ValueError: the buffers have other sizes than when they were given.
    """
    gathered, nbytes = span.buffer, span.nbytes
    buffers = gathered.buffers
    whole = b"".join(buffers if gathered.gaps is None else _in_turn(buffers, gathered.gaps))
    if len(whole) != nbytes:
        raise ValueError(f"the values of a list have {len(whole)} bytes, not {nbytes}: their arrays were changed")
    return Span(whole, 0, nbytes)


def scatter(effect: Scatter) -> None:
    """Copy received bytes into the buffers, by a loop in C.

    Raises:
        ValueError: a buffer has another size than when it was given, or cannot be written to.
    """
    targets, sizes = effect.targets, effect.nbytes
    if effect.gaps is not None:
        targets = _in_turn(targets, [bytearray(len(gap)) for gap in effect.gaps])
        sizes = _in_turn(sizes, [len(gap) for gap in effect.gaps])
    source = BytesIO(NOTHING if effect.source is None else effect.source)
    if list(map(source.readinto, targets)) != list(sizes):
        raise ValueError("the arrays of a list were changed while values were on their way to them")


def _in_turn(entries: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The first of the one, the first of the other, and so on."""
    mixed = [None] * (2 * len(entries))
    mixed[::2], mixed[1::2] = list(entries), list(others)
    return mixed
