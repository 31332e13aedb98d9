"""A server's slices, alone and fused, and the jobs that its machine would start for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.compute.tensors import named_dtype
from kvd.core.machine import (
    Apply,
    Checksums,
    Contribution,
    Create,
    Export,
    Extent,
    FirstBytes,
    Load,
    ScatterList,
    Span,
    Whole,
)
from kvd.errors import KvdError
from kvd.node.jobs.runner import JobRunner
from kvd.optimizer import SGD, Adam
from kvd.protocol.messages import ABSENT, ADD, ASSIGN
from kvd.protocol.specs import padded

MOMENTUM = SGD(learning_rate=0.1, momentum=0.9, wd=0.01)
ADAM = Adam(learning_rate=0.01, wd=0.001)


@dataclass
class Server:
    """Gives a server its jobs as its machine does. A list of keys is a group while it stays the same."""

    dtype: str = "float32"
    runner: JobRunner = field(default_factory=JobRunner)
    current: dict[str, Span] = field(default_factory=dict)
    groups: dict[tuple[str, ...], int] = field(default_factory=dict)
    number: int = 0
    merged: Any = None  # the buffer that the latest update kept

    def create(self, key: str, values: Any) -> None:
        data = np.asarray(values, named_dtype(self.dtype)).tobytes()
        done = self.runner.run(Create(1, (FirstBytes(key, 0, self.dtype, Span(data, 0, len(data))),)))
        assert done.error is None
        self.current[key] = Span(done.result[0], 0, len(data))
        self.groups = {keys: number for keys, number in self.groups.items() if key not in keys}

    def push(self, keys: Sequence[str], *given: dict[str, Any], optimizer: Any = None, how: int = ADD) -> None:
        """A round of the keys as one group, to which each worker gave an array for each key."""
        error = self.try_push(keys, *given, optimizer=optimizer, how=how)
        assert error is None, error

    def try_push(
        self,
        keys: Sequence[str],
        *given: dict[str, Any],
        optimizer: Any = None,
        how: int = ADD,
        merge: str = "sum",
        keeps_merged: bool = False,
    ) -> KvdError | None:
        """As `push`; says what went wrong."""
        layout = self.layout(keys)
        offset = layout[-1].offset + layout[-1].nbytes
        contributions = []
        for rank, values in enumerate(given):
            payload = bytearray(b"\x7f" * offset)  # what lies between two slices is anything
            for entry in layout:
                part = np.asarray(values[entry.key], named_dtype(self.dtype)).tobytes()
                payload[entry.offset : entry.offset + entry.nbytes] = part
            contributions.append(Contribution(rank, 1, Span(payload, 0, offset), rank + 1, how))
        if how == ASSIGN:
            contributions.append(Contribution(len(given), 1, None, 1, ABSENT))
        return self._apply(layout, contributions, optimizer, how == ASSIGN, merge, keeps_merged)

    def hold(self, keys: Sequence[str], merged: Any, optimizer: Any) -> KvdError | None:
        """Does what the server did that merged this."""
        contributions = [
            Contribution(0, 1, None, 1, ABSENT),
            Contribution(1, 1, Span(bytes(8) + bytes(merged), 8, len(bytes(merged))), 1, ADD),
        ]
        return self._apply(self.layout(keys), contributions, optimizer, assign=False, is_merged=True)

    def layout(self, keys: Sequence[str]) -> list[Extent]:
        """The slices side by side."""
        layout, offset = [], 0
        for key in keys:
            offset = padded(offset)
            layout.append(Extent(key, 0, offset, self.current[key].nbytes))
            offset += self.current[key].nbytes
        return layout

    def _apply(
        self,
        layout: list[Extent],
        contributions: list[Contribution],
        optimizer: Any,
        assign: bool,
        merge: str = "sum",
        keeps_merged: bool = False,
        is_merged: bool = False,
    ) -> KvdError | None:
        group = tuple(entry.key for entry in layout)
        offset = layout[-1].offset + layout[-1].nbytes
        if group not in self.groups:
            self.groups = {other: number for other, number in self.groups.items() if not set(other) & set(group)}
            self.number += 1
            self.groups[group] = self.number
        current: Any = ScatterList(tuple(self.current[key] for key in group))
        spans = [self.current[key] for key in group]
        if all(span.buffer is spans[0].buffer for span in spans) and [span.offset for span in spans] == [
            entry.offset for entry in layout
        ]:
            current = spans[0].buffer
        job = Apply(
            2,
            self.groups[group],
            tuple(layout),
            self.dtype,
            offset,
            current,
            tuple(contributions),
            assign,
            merge,
            optimizer,
            keeps_merged,
            is_merged,
        )
        done = self.runner.run(job)
        if done.error is None:
            made, merged = done.result if keeps_merged else (done.result, None)
            self.merged = None if merged is None else merged.buffer
            for entry in layout:
                self.current[entry.key] = Span(made, entry.offset, entry.nbytes)
        return done.error

    def value(self, key: str) -> Any:
        span = self.current[key]
        dtype = named_dtype(self.dtype)
        return np.frombuffer(span.buffer, dtype, span.nbytes // dtype.itemsize, span.offset)

    def checksum(self, key: str) -> int:
        (checksum,), nbytes = self.runner.run(Checksums(3, (Whole(key, 0, self.current[key]),))).result
        assert nbytes == self.current[key].nbytes + sum(map(len, self.state(key)[1].values()))
        return int(checksum)

    def state(self, key: str) -> tuple[int, dict[str, bytes]]:
        """Step, and the bytes of each array."""
        step, slots, spans = self.runner.run(Export(3, key, 0)).result
        return step, {
            name: bytes(span.buffer)[span.offset : span.offset + span.nbytes]
            for (name, _), span in zip(slots, spans, strict=True)
        }

    def load(self, key: str, step: int, arrays: dict[str, Any]) -> KvdError | None:
        payload = b""
        for array in arrays.values():
            payload = payload.ljust(padded(len(payload)), b"\0") + array.tobytes()
        slots = tuple((name, array.dtype.name) for name, array in arrays.items())
        return self.runner.run(Load(4, key, 0, step, slots, Span(payload, 0, len(payload)))).error

    def everything(self) -> dict[str, Any]:
        return {key: (self.value(key).tobytes(), self.state(key)) for key in self.current}


SIZES = {"a": 3, "b": 1, "c": 8, "d": 5}


def started(dtype: str = "float32", sizes: dict[str, int] | None = None) -> Server:
    server = Server(dtype)
    for number, (key, size) in enumerate((sizes or SIZES).items()):
        server.create(key, np.linspace(-1, 1, size) + number)
    return server


def gradients(seed: int, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {key: random.normal(size=size).astype(np.float32) for key, size in (sizes or SIZES).items()}
