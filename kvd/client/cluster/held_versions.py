"""Values as read-only arrays over the memory where they arrived: within a host, that of their server.

A payload in a server's memory stays as it is while an array refers to it (`kvd.transport.memory.leases`). So an array
needs nothing besides: when it and all views of it are gone, the server may use the memory again. What a program may
keep in this way has a limit, which servers count when keys are made (`kvd.core.server.memory_use`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvd.client.calls.keys import WrittenKeys
from kvd.client.calls.values import Array, fresh_target, read_only
from kvd.compute.tensors import named_dtype
from kvd.core.machine import Span
from kvd.node.shell.payloads import CodedSlice, ReassemblyBuffer
from kvd.protocol.specs import MOST_HELD_VERSIONS, KeySpec
from kvd.transport.memory.remote_segments import PayloadReference, reference_to

logger = logging.getLogger("kvd")

FEW_KEYS = 64

Payloads: TypeAlias = dict[int, "memoryview | None"]


class HeldVersions:
    """What the arrays of this worker keep of the memory of servers. Thread-safe.

    Args:
        written: how the program writes the keys.
    """

    def __init__(self, written: WrittenKeys) -> None:
        self._written = written
        self._lock = threading.Lock()
        self._held: dict[str, list[tuple[int, PayloadReference]]] = {}  # by key: address of the payload, and reference
        self._most_keys = FEW_KEYS  # more of them are looked through
        self._has_warned = False

    def arrays(
        self, names: Sequence[str], buffers: Sequence[ReassemblyBuffer], specs: Sequence[KeySpec]
    ) -> list[Array]:
        """The values that have arrived in the buffers, which are empty afterwards.

        A value whose slices came in several messages, or one that travelled in another form, gets memory of its own,
        and so does one that lies in a server's memory if this worker keeps too many versions of its key there.
        """
        wholes = [buffer.whole() for buffer in buffers]
        payloads = self._kept_payloads(names, buffers, wholes)
        each = zip(buffers, wholes, specs, strict=True)
        return [_array(buffer, whole, spec, payloads) for buffer, whole, spec in each]

    def _kept_payloads(
        self, names: Sequence[str], buffers: Sequence[ReassemblyBuffer], wholes: Sequence[Span | None]
    ) -> Payloads:
        """By the identity of each payload that lies in a server's memory: the one that the program may keep for it,
        which may be an earlier one of the same bytes; None: it may keep none."""
        found: dict[int, tuple[memoryview, dict[str, None]]] = {}
        has_whole: set[int] = set()
        for name, buffer, whole in zip(names, buffers, wholes, strict=True):
            for span in [span for _, span in buffer.parts] if whole is None else (whole,):
                if type(span.buffer) is memoryview:
                    number = id(span.buffer.obj)
                    found.setdefault(number, (span.buffer, {}))[1][name] = None
                    if whole is not None:
                        has_whole.add(number)
        kept: Payloads = {}
        with self._lock:
            for number in has_whole:
                payload, of_keys = found[number]
                reference = reference_to(payload)
                if reference is not None:
                    kept[number] = self._kept(payload, reference, list(of_keys))
        return kept

    def _kept(self, payload: memoryview, reference: PayloadReference, names: Sequence[str]) -> memoryview | None:
        address = int(np.frombuffer(payload, np.uint8).__array_interface__["data"][0])
        held = [self._live(name) for name in names]
        for entries in held:
            for place, earlier in entries:
                same = earlier()
                if place == address and same is not None and same.nbytes == payload.nbytes:
                    return same.data
        for name, entries in zip(names, held, strict=True):
            if len(entries) >= MOST_HELD_VERSIONS:
                self._warn(name)
                return None
        reference.lend()
        for name, entries in zip(names, held, strict=True):
            entries.append((address, reference))
            self._held[name] = entries
        if len(self._held) > self._most_keys:
            self._forget_gone()
        return payload

    def _live(self, name: str) -> list[tuple[int, PayloadReference]]:
        return [entry for entry in self._held.get(name, ()) if not entry[1].is_over()]

    def _forget_gone(self) -> None:
        """Forgets the keys of which nothing is kept: a program may make and delete keys of ever new names."""
        self._held = {name: live for name in self._held if (live := self._live(name))}
        self._most_keys = max(FEW_KEYS, 2 * len(self._held))

    def _warn(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the program keeps arrays of %d versions of key %r that came with copy=False, as many as its server "
                "holds for a worker: more of them are copies. Let go of the arrays of a step before the step after the "
                "next, or copy what is to be kept; what a forked child has counts until that ends",
                MOST_HELD_VERSIONS,
                self._written.of(name),
            )


def _array(buffer: ReassemblyBuffer, whole: Span | None, spec: KeySpec, payloads: Payloads) -> Array:
    if whole is not None and spec.nbytes:
        made = _view(whole, spec, payloads)
        if made is not None:
            buffer.clear()
            return made
    target = fresh_target(spec)
    buffer.move_to(target.data)
    return read_only(target.finish())


def _view(span: Span, spec: KeySpec, payloads: Payloads) -> Array | None:
    """The value where it arrived; None: it is to be copied."""
    source: Any = span.buffer
    if type(source) is CodedSlice or span.nbytes != spec.nbytes:
        return None
    payload = memoryview(source)
    in_servers_memory = id(payload.obj) in payloads
    if in_servers_memory:
        kept = payloads[id(payload.obj)]
        if kept is None:
            return None
        payload = kept
    elif 2 * span.nbytes < payload.nbytes:  # it would keep much more than itself
        return None
    dtype = named_dtype(spec.dtype)
    made: Array = np.frombuffer(payload, dtype, span.nbytes // dtype.itemsize, span.offset).reshape(spec.shape)
    return read_only(made) if made.flags.aligned else None
