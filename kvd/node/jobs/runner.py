"""Runs the numeric jobs of a server, and its commands: functions from bytes to bytes, by name.

Only here bytes become arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from kvd.compression import from_wire
from kvd.compute.codecs import add_left_over, codec_of, encode_merged
from kvd.compute.delays import compensated
from kvd.compute.merge import accumulator_dtype, add_up, is_half, merge
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.quiet import quietly
from kvd.compute.tensors import named_dtype
from kvd.core.machine import (
    Apply,
    Buffer,
    Checksums,
    Create,
    EncodedValue,
    Export,
    FirstBytes,
    Job,
    JobDone,
    KeepRows,
    ListRows,
    Load,
    LoadRows,
    ReadPart,
    ReadRows,
    ReadStored,
    Run,
    ScatterList,
    Span,
    TableVersion,
)
from kvd.errors import KvdError, NotAllowed, ProtocolError
from kvd.node.jobs.optimizer_states import OptimizerStates
from kvd.node.jobs.table_parts import TableParts
from kvd.node.shell.counters import TIMED_OF, Counters
from kvd.node.shell.payloads import CodedSlice
from kvd.protocol.messages import NO_RUN
from kvd.protocol.specs import padded, state_of_table_text

Controller: TypeAlias = Callable[[bytes], bytes]


def ping(body: bytes) -> bytes:
    """The controller that every server has: it answers with what it was sent."""
    return body


def installed_controllers() -> dict[str, Controller]:
    """The controllers by head: `ping`, and the entry points of the group `kvd.commands` installed on this machine.

    One that cannot be loaded says so when a command asks for it: it must not keep the others from working.
    """
    from importlib.metadata import entry_points  # takes a while, and most processes run no commands

    controllers: dict[str, Controller] = {"ping": ping}
    for entry in entry_points(group="kvd.commands"):
        try:
            controllers[entry.name] = entry.load()
        except Exception as error:  # noqa: BLE001  importing foreign code may raise anything
            controllers[entry.name] = _broken(entry.name, error)
    return controllers


def _broken(name: str, error: Exception) -> Controller:
    text = f"the controller for {name!r} cannot be loaded on this server: {type(error).__name__}({error})"

    def refuse(_: bytes) -> bytes:
        raise NotAllowed(text)

    return refuse


Array: TypeAlias = np.ndarray[Any, Any]

UINT8: np.dtype[Any] = np.dtype(np.uint8)
MOST_ADDED_BYTES = 64 << 10  # in one go, without tiles


def view(span: Span, dtype: np.dtype[Any]) -> Array:
    """The span as a 1-D array, without a copy."""
    count = span.nbytes // dtype.itemsize
    if count == 0:
        return np.empty(0, dtype)
    return np.frombuffer(span.buffer, dtype, count, span.offset)


def _pushed(span: Span, dtype: np.dtype[Any]) -> Array:
    """What was pushed as a 1-D array, which may be written to if it was encoded."""
    if not isinstance(span.buffer, CodedSlice):
        return view(span, dtype)
    return span.buffer.decoded()  # it is all of one slice


def _merged(job: Apply, given: Sequence[tuple[int, Array]], memory: Array) -> Array:
    """What was merged, in an array that may be written to: `memory`, or what was decoded."""
    arrays = [array for _, array in given]
    if job.is_merged:
        return arrays[0].copy()
    mode: Any = job.merge
    out = arrays[0] if arrays[0].flags.owndata and arrays[0].flags.writeable else memory
    merge(arrays, out, mode, [number for number, _ in given])
    return out


def _use_up(state: SliceState, value: Array | None) -> None:
    """What encoding has left over belongs to this value, which is not encoded; None: to none."""
    if state.residual is not None and value is not None:
        add_left_over(value, state.residual)
    state.residual = None


def gathered(buffer: Buffer | ScatterList, nbytes: int) -> Array:
    """The bytes of a version as one uint8 array; a copy if they come as a scatter list."""
    if not isinstance(buffer, ScatterList):
        whole: Array = np.frombuffer(buffer, np.uint8, nbytes) if nbytes else np.empty(0, np.uint8)
        return whole
    if len(buffer.spans) == 1:
        return view(buffer.spans[0], UINT8)
    whole = np.zeros(nbytes, np.uint8)
    offset = 0
    for span in buffer.spans:
        offset = padded(offset)
        whole[offset : offset + span.nbytes] = view(span, UINT8)
        offset += span.nbytes
    return whole


def _private_memory(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)


class JobRunner:
    """Runs jobs, and owns the optimizer states of a server's slices. The machine runs one job of a slice at a time.

    Args:
        controllers: the commands by head; None: those that are installed.
        allocate: gives memory for a new version: this many bytes, as a uint8 array.
        counters: count the updates; None: nobody reads them.
    """

    def __init__(
        self,
        controllers: Mapping[str, Controller] | None = None,
        allocate: Callable[[int], Array] | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._counters = counters or Counters()
        self._states = OptimizerStates()
        self._counts: dict[tuple[str, int], int] = {}  # elements of a slice
        self._controllers = controllers
        self._allocate = allocate or _private_memory
        self._tables = TableParts(self._allocate, view)

    def run(self, job: Job, run: int = NO_RUN) -> JobDone:
        """Run a job of this run. An error comes back as the error of the JobDone."""
        try:
            return JobDone(job.job, self._result(job), None, run)
        except KvdError as error:
            return JobDone(job.job, None, error, run)
        except Exception as error:  # noqa: BLE001  custom optimizers and commands may raise anything
            return JobDone(job.job, None, NotAllowed(f"{type(error).__name__}: {error}"), run)

    @property
    def slices(self) -> set[tuple[str, int]]:
        """The slices that were made and not forgotten, by key and index."""
        return {*self._counts, *self._tables.ids()}

    def reset(self, slices: Sequence[tuple[str, int]]) -> None:
        """Start these slices with a new state, because another optimizer was set for them."""
        self._states.reset([slice_id for slice_id in slices if slice_id not in self._tables])
        for slice_id in slices:
            if slice_id in self._tables:
                self._tables.reset(slice_id)

    def forget(self, slices: Sequence[tuple[str, int]]) -> None:
        """Forget the states of slices that are deleted."""
        for slice_id in slices:
            self._counts.pop(slice_id, None)
            self._states.drop(slice_id)
            self._tables.forget(slice_id)

    def _result(self, job: Job) -> Any:
        if isinstance(job, Apply):
            counters = self._counters
            counters.updates += 1
            if counters.updates % TIMED_OF:
                return self._tables.apply(job) if isinstance(job.current, TableVersion) else self._apply(job)
            begun = time.perf_counter()
            made = self._tables.apply(job) if isinstance(job.current, TableVersion) else self._apply(job)
            counters.timed_update_s += time.perf_counter() - begun
            return made
        if isinstance(job, ReadRows):
            return self._tables.read(job)
        if isinstance(job, ListRows):
            return self._tables.list_rows(job)
        if isinstance(job, ReadPart):
            return self._tables.piece(job)
        if isinstance(job, KeepRows):
            return self._tables.keep(job)
        if isinstance(job, ReadStored):
            return self._tables.stored(job)
        if isinstance(job, LoadRows):
            return self._tables.load(job)
        if isinstance(job, Create):
            return self._create(job)
        if isinstance(job, Export):
            return self._export(job)
        if isinstance(job, Checksums):
            return self._checksums(job)
        if isinstance(job, Load):
            return self._load(job)
        return self._run_command(job)

    def _create(self, job: Create) -> list[Array | TableVersion]:
        return [self._first_version(first) for first in job.slices]

    def _first_version(self, first: FirstBytes) -> Array | TableVersion:
        slice_id = (first.key, first.slice_index)
        if first.is_copied:
            copied = self._tables.adopt(first)
            self._counts.pop(slice_id, None)
            self._states.drop(slice_id)
            return copied
        self.forget([slice_id])
        if first.table is not None:
            return self._tables.create(first)
        self._counts[slice_id] = first.source.nbytes // named_dtype(first.dtype).itemsize
        made = self._allocate(first.source.nbytes)
        np.copyto(made, view(first.source, UINT8))
        return made

    def _apply(self, job: Apply) -> Array | tuple[Array, Span] | tuple[Array, Span | None, EncodedValue | None]:
        dtype = named_dtype(job.dtype)
        if job.optimizer is None and len(job.layout) == 1 and (added := self._added(job, dtype)) is not None:
            return added
        current = gathered(job.current, job.nbytes).view(dtype)
        given_dtype = accumulator_dtype(dtype) if job.is_merged else dtype
        given = [(c.samples, _pushed(c.span, given_dtype)) for c in job.contributions if c.span is not None]
        made = self._allocate(job.nbytes)
        out = made.view(dtype)
        if job.assign:
            np.copyto(out, given[0][1] if given else current)
            self._states.renew(job.group, job.layout, dtype.itemsize)
            return made
        if job.encoding is not None:
            return self._encoded(job, current.size, given, made)
        if job.pulled is not None:
            arrays, samples = [array for _, array in given], [number for number, _ in given]
            mode: Any = job.merge
            optimizer: Any = job.optimizer
            pulled = gathered(job.pulled, job.nbytes).view(dtype)
            given = [(1, compensated(optimizer, current, pulled, arrays, mode, samples))]
            job = job._replace(is_merged=True)
        if not job.keeps_merged:
            self._update(job, current, given, out, None)
            return made
        merged = self._allocate(current.size * accumulator_dtype(dtype).itemsize)
        self._update(job, current, given, out, merged.view(accumulator_dtype(dtype)))
        return made, Span(merged, 0, merged.nbytes)

    def _added(self, job: Apply, dtype: np.dtype[Any]) -> Array | None:
        """The next version of one slice, if it is a plain sum of few numbers of which nothing need be checked: what
        `_update` would write. None: nothing was done."""
        nbytes, contributions = job.nbytes, job.contributions
        if job.assign or job.keeps_merged or job.is_merged or job.encoding is not None or job.merge != "sum":
            return None
        if len(contributions) < 2 or not 0 < nbytes <= MOST_ADDED_BYTES or is_half(dtype):
            return None
        state = self._states.of_group(job.group, job.layout, dtype.itemsize)[0].state
        if state.residual is not None or state.master is not None:
            return None
        given = []
        for contribution in contributions:
            span = contribution.span
            if span is None or span.nbytes != nbytes or type(span.buffer) is CodedSlice:
                return None
            given.append(np.frombuffer(span.buffer, dtype, nbytes // dtype.itemsize, span.offset))
        made = self._allocate(nbytes)
        quietly(add_up, given, made.view(dtype))
        return made

    def _encoded(
        self, job: Apply, size: int, given: Sequence[tuple[int, Array]], made: Array
    ) -> tuple[Array, Span | None, EncodedValue | None]:
        """Encodes what is merged; the new version is what that decodes into."""
        assert job.encoding is not None
        (method, feeds_back), version = job.encoding
        dtype, (key, index, *_) = named_dtype(job.dtype), job.layout[0]
        codec = codec_of(from_wire(method))
        state = self._states.of_group(job.group, job.layout, dtype.itemsize)[0].state
        sums = _merged(job, given, np.empty(size, dtype))
        merged = None
        if job.keeps_merged:
            kept = self._allocate(size * accumulator_dtype(dtype).itemsize)
            kept.view(accumulator_dtype(dtype))[:] = sums
            merged = Span(kept, 0, kept.nbytes)
        if hasattr(codec, "of_slice"):  # a ShapedCodec; to ask whether it follows that protocol takes long
            np.copyto(made.view(dtype), sums, casting="unsafe")
            _use_up(state, made.view(dtype))
            return made, merged, None
        out = self._allocate(codec.max_nbytes(size))
        left_over = sums if sums.dtype == np.float32 else quietly(sums.astype, np.float32)
        nonce = crc32(f"merged {index} {version} {key}".encode())
        nbytes = encode_merged(codec, left_over, state.residual, out, made.view(dtype), nonce)
        state.residual = left_over if feeds_back else None
        return made, merged, EncodedValue(method, Span(out, 0, nbytes))

    def _update(
        self, job: Apply, current: Array, given: Sequence[tuple[int, Array]], out: Array, merged: Array | None
    ) -> None:
        arrays = [array for _, array in given]
        samples = [number for number, _ in given]
        optimizer: Any = job.optimizer
        mode: Any = job.merge
        ranges = self._states.of_group(job.group, job.layout, current.itemsize, optimizer)
        if len(ranges) == 1:
            apply_update(
                optimizer,
                ranges[0].state,
                current,
                arrays,
                out,
                mode,
                samples,
                merged=merged,
                is_merged=job.is_merged,
                slice_id=ranges[0].first,
            )
            _use_up(ranges[0].state, None if optimizer is not None or job.is_final else out)
            return
        after = [each._replace(state=each.state.copy()) for each in ranges]  # if one update fails, none has changed
        for array in (out,) if merged is None else (out, merged):
            array.fill(0)  # the padding between two slices too
        for start, stop, state, first in after:
            apply_update(
                optimizer,
                state,
                current[start:stop],
                [array[start:stop] for array in arrays],
                out[start:stop],
                mode,
                samples,
                merged=None if merged is None else merged[start:stop],
                is_merged=job.is_merged,
                slice_id=first,
            )
            _use_up(state, None if optimizer is not None or job.is_final else out[start:stop])
        self._states.keep(job.group, after)

    # ── optimizer states: on the wire they are the step, then name, dtype and bytes of each array ──

    def _export(self, job: Export) -> tuple[int, tuple[tuple[str, str], ...], tuple[Span, ...]]:
        self._check_no_table(job.key, job.slice_index)
        arrays = self._states.of_slice((job.key, job.slice_index)).export()
        step = int(arrays.pop("step"))
        slots = tuple((name, array.dtype.name) for name, array in arrays.items())
        spans = tuple(Span(array.view(np.uint8), 0, array.nbytes) for array in arrays.values())
        return step, slots, spans

    def _checksums(self, job: Checksums) -> tuple[tuple[int, ...], int]:
        found, nbytes = [], 0
        for key, index, span in job.slices:
            if (key, index) in self._tables:
                checksum, read = self._tables.checksum((key, index))
                found.append(checksum)
                nbytes += read
                continue
            state = self._states.of_slice((key, index))
            found.append(state.checksum(crc32(view(span, UINT8).data)))
            nbytes += span.nbytes + state.nbytes
        return tuple(found), nbytes

    def _load(self, job: Load) -> TableVersion | None:
        slice_id = (job.key, job.slice_index)
        if slice_id in self._tables:
            return self._tables.store(job)
        arrays: dict[str, Array] = {"step": np.asarray(job.step, np.int64)}
        offset = job.source.offset
        end = offset + job.source.nbytes
        for name, dtype in job.slots:
            if dtype not in ("float32", "float64"):
                raise ProtocolError(f"optimizer states are float32 or float64, not {dtype!r:.40}")
            span = Span(job.source.buffer, offset, self._counts[slice_id] * np.dtype(dtype).itemsize)
            if span.offset + span.nbytes > end:
                raise ProtocolError(f"the state of {job.key!r} is shorter than its slots say")
            arrays[name] = view(span, np.dtype(dtype))
            offset += padded(span.nbytes)
        self._states.put(slice_id, SliceState.load(arrays), self._counts[slice_id])
        return None

    def _check_no_table(self, key: str, index: int) -> None:
        if (key, index) in self._tables:
            raise NotAllowed(state_of_table_text(key), key=key)

    # ── commands ──

    def _run_command(self, job: Run) -> bytes:
        if self._controllers is None:
            self._controllers = installed_controllers()
        controller = self._controllers.get(job.head)
        if controller is None:
            known = ", ".join(sorted(self._controllers))
            raise NotAllowed(
                f"no controller is registered for {job.head!r}; there are: {known}. Install one on the servers as an "
                f"entry point of the group kvd.commands"
            )
        span = job.body
        body = bytes(memoryview(span.buffer)[span.offset : span.offset + span.nbytes]) if span.nbytes else b""
        answer = controller(body)
        if not isinstance(answer, bytes):
            raise NotAllowed(f"the controller for {job.head!r} answered {type(answer).__name__}, it must be bytes")
        return answer
