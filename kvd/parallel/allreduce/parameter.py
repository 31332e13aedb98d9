"""`AllReduceParameter`: a vector of parameters; every worker owns and updates one slice of it. After BigDL's.

One iteration of every worker, ZeRO-1 style: ::

    parameter.get_weights(weights).result()          # everybody's slices
    parameter.put_gradients(compute_gradients(weights))
    parameter.aggregate_gradient_partition(number_of_gradients)
    parameter.weight_partition -= rate * parameter.gradient_partition
    parameter.send_weight_partition()

`kvd.parallel.allreduce.blocks` explains how the slices travel, and what keeps iterations apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.client.calls.process_bound import ProcessBound
from kvd.client.facades.blocking import KVStore
from kvd.client.facades.exchange import Exchange
from kvd.compute.tensors import as_array, writable_view, write_back
from kvd.errors import ConfigError, DtypeMismatch, NotAllowed, NotResumed, ShapeMismatch
from kvd.parallel.allreduce.blocks import Blocks, Wanted
from kvd.parallel.allreduce.codec import Floats, codec_named, fold

FoldRule: TypeAlias = Literal["float32", "truncating"]


class AllReduceParameter(ProcessBound):
    """One worker's part in a vector of parameters that all train together.

    Every worker makes one with the same arguments and calls `init`, `put_gradients` and `send_weight_partition`
    equally often. The members are BigDL's, with these differences:

    - Slices may be empty, so that ``size`` may be smaller than ``partition_num``.
    - The sum is taken in float32 of the gradients as they travelled. BigDL's, which truncates after every addition,
      is ``fold="truncating"``: there 1000 ones add up to 256.
    - `aggregate_gradient_partition` may be called again, with the same result. BigDL's adds into the first block.
    - A block that is missing raises. In BigDL it can leave a partial sum.
    - A NaN stays a NaN in ``"fp16"``.

    The full-precision slice of a worker that dies is lost: its successor gets NotResumed. Let all workers go on from a
    checkpoint, under a new id.

    Arguments:
        kv: a blocking store of any type, whatever its optimizer and merge.
        id: distinguishes vectors; a whole number or a short text.
        partition_num: how many slices; in a cluster, the number of its workers. In a store of this process each
            partition has an object, and the program (or its threads) decides the order of their calls.
        size: elements of the whole vector, 0 or more.
        param_offset: where the vector starts in the larger one it is cut from; see `local_partition_range`.
        compress: how blocks travel: ``"fp16"`` (bfloat16 by truncation) or ``"none"`` (float32).
        partition_id: the slice of this worker; None: its rank. In a cluster it must be the rank.
        fold: see above.
        timeout: seconds to wait for blocks; None: the store's deadline.

    Raises:
        ConfigError: an argument is out of range, or does not fit the store.
    """

    _NOT_COPYABLE: ClassVar[str] = (
        "an AllReduceParameter cannot be copied, pickled or saved, since it belongs to the store of this process: save "
        "its weight_partition, and make one in each process, after its start"
    )

    def __init__(
        self,
        kv: KVStore,
        id: int | str,  # noqa: A002  the name is part of the public surface
        partition_num: int,
        size: int,
        param_offset: int = 1,
        compress: str = "fp16",
        partition_id: int | None = None,
        *,
        fold: FoldRule = "float32",
        timeout: float | None = None,
    ) -> None:
        if not isinstance(kv, KVStore):
            raise ConfigError(f"kv is a {type(kv).__module__} object: make a store with kvd.create", setting="kv")
        self.id = id
        self.partition_num = _whole(partition_num, "partition_num", 1)
        self.size = _whole(size, "size", 0)
        self.param_offset = _whole(param_offset, "param_offset", 0)
        self.compress = compress
        self.partition_id = kv.rank if partition_id is None else _whole(partition_id, "partition_id", 0)
        self._codec = codec_named(compress)
        if fold not in ("float32", "truncating"):
            raise ConfigError(f'fold={fold!r} is neither "float32" nor "truncating"', setting="fold")
        self._truncating = fold == "truncating"
        exchange = Exchange(kv)
        if self.partition_id >= self.partition_num:
            text = f"partition_id={self.partition_id}: {self.partition_num} partitions have the ids from 0"
            raise ConfigError(text, setting="partition_id")
        if exchange.distributed:
            _check_one_each(kv, self.partition_num, self.partition_id)
        self._blocks = Blocks(exchange, self._codec, exchange.timeout_s if timeout is None else timeout)
        self._weights: Floats | None = None
        self._gradients: Floats | None = None
        self._gradient_writes = self._weight_writes = 0  # of a key, over its life
        self._puts = self._sends = 0  # since init

    # ── partitions ──

    def partition(self, partition_id: int) -> tuple[int, int]:
        """Start, counted from 0, and length of a slice: the first ``size mod partition_num`` have one element more."""
        length, extra = divmod(self.size, self.partition_num)
        return partition_id * length + min(partition_id, extra), length + (partition_id < extra)

    @property
    def local_partition_range(self) -> tuple[int, int]:
        """``param_offset`` + start, and length, of this worker's slice."""
        start, length = self.partition(self.partition_id)
        return self.param_offset + start, length

    @property
    def weight_partition(self) -> Floats:
        """This worker's slice of the weights in full precision: float32, live. Assigning copies into it."""
        return self._initialised(self._weights)

    @weight_partition.setter
    def weight_partition(self, value: Any) -> None:
        _assign(self.weight_partition, value)

    @property
    def gradient_partition(self) -> Floats:
        """The result of `aggregate_gradient_partition`: float32, as long as the slice, live; zeros after `init`."""
        return self._initialised(self._gradients)

    @gradient_partition.setter
    def gradient_partition(self, value: Any) -> None:
        _assign(self.gradient_partition, value)

    # ── by BigDL's names ──

    def init(self, parameter: Any) -> tuple[int, int, int]:
        """Take this worker's slice of ``parameter`` and send it; all workers call it. A second call starts over.

        Arguments:
            parameter: shape (size,), float32 or float64, on any device. For each slice its owner's values are used.

        Returns:
            The partition id, and start (from 0) and length of the slice.

        Raises:
            ShapeMismatch: it has another shape; or rank 0 uses the id for another size, or number of partitions.
            DtypeMismatch: it is neither float32 nor float64.
            NodeLost: rank 0 is gone.
            NotResumed: this worker was restarted, and its predecessor had used the id.
        """
        values = self._vector(parameter, "parameter")
        start, length = self.partition(self.partition_id)
        self._make_keys()
        own = self._weight_key(self.partition_id)
        if self._blocks.is_inherited(own):
            text = (
                f"this worker was restarted, and its slice of the weights {self.id!r} died with its predecessor: "
                f"let all workers go on from a checkpoint, under another id"
            )
            raise NotResumed(text, key=own)
        self._gradient_writes = self._blocks.written(self._gradient_key(self.partition_id, self.partition_id))
        self._weight_writes = self._blocks.written(own)
        self._puts, self._sends = 0, -1
        self._weights = values[start : start + length].copy()
        self._gradients = np.zeros(length, np.float32)
        self.send_weight_partition()
        return self.partition_id, start, length

    def put_gradients(self, parameter: Any) -> None:
        """Send each owner its slice of this worker's gradients. Returns at once.

        Arguments:
            parameter: shape (size,), float32 or float64, on any device; it may be reused when this returns.

        Raises:
            NotAllowed: before `init`.
            ShapeMismatch, DtypeMismatch: as `init`.
        """
        self._initialised(self._gradients)
        values = self._vector(parameter, "gradients")
        partitions = range(self.partition_num)
        own = self.partition_id
        self._puts += 1
        self._gradient_writes += 1
        mine = {}
        for to in partitions:
            start, length = self.partition(to)
            mine[self._gradient_key(own, to)] = values[start : start + length]
        others = [self._gradient_key(of, to) for of in partitions if of != own for to in partitions]
        self._blocks.write(mine, others, self._gradient_writes, self._puts)

    def aggregate_gradient_partition(self, avg_numbers: int) -> None:
        """Sum the gradients of all workers for this worker's slice, in order of partitions, into `gradient_partition`.

        Arguments:
            avg_numbers: the number of gradients in the sum, by which it is divided.

        Raises:
            NotAllowed: before `put_gradients`.
            RequestTimeout: a block did not come; ``waiting_for`` names its worker.
            NodeLost: its worker died.
            MissingBlock: it will not come.
            After any of these, `gradient_partition` is unchanged.
        """
        gradients = self._initialised(self._gradients)
        if isinstance(avg_numbers, bool) or not avg_numbers > 0:
            raise ConfigError(f"avg_numbers must be more than 0, not {avg_numbers!r}", setting="avg_numbers")
        if self._puts == 0:
            raise NotAllowed("there are no gradients since init: call put_gradients first")
        keys = [self._gradient_key(of, self.partition_id) for of in range(self.partition_num)]
        lengths = [gradients.size] * self.partition_num
        wanted = Wanted("gradients", keys, lengths, self._gradient_writes, self._puts)
        blocks = self._blocks.read_later(wanted)()
        fold(self._codec, blocks, gradients, truncating=self._truncating)
        np.divide(gradients, np.float32(avg_numbers), out=gradients)

    def send_weight_partition(self) -> None:
        """Send this worker's slice of the weights to all. Returns at once.

        Raises:
            NotAllowed: before `init`.
        """
        weights = self._initialised(self._weights)
        self._sends += 1
        self._weight_writes += 1
        own = self.partition_id
        others = [self._weight_key(of) for of in range(self.partition_num) if of != own]
        self._blocks.write({self._weight_key(own): weights}, others, self._weight_writes, self._sends)

    def get_weights(self, local: Any) -> Future[None]:
        """Write all slices of the weights, as they travelled, into ``local``; in the background.

        They are those of this worker's last `send_weight_partition` (or `init`); the future waits for those of other
        workers. ``local`` is written when all slices have arrived, and is unchanged if one is missing.

        Arguments:
            local: shape (size,), float32 or float64, on any device, not to be used before the future is done.

        Returns:
            A future whose ``result()`` waits, and raises what `aggregate_gradient_partition` does.

        Raises:
            NotAllowed: before `init`, or ``local`` is read-only.
            ShapeMismatch, DtypeMismatch: as `init`.
        """
        self._initialised(self._weights)
        view = writable_view(local)
        array = as_array(local) if view is None else view
        self._check_vector(array, "local")
        if view is None:
            write_back(local, array)  # raises if it cannot be written to
        keys = [self._weight_key(of) for of in range(self.partition_num)]
        lengths = [self.partition(of)[1] for of in range(self.partition_num)]
        finish = self._blocks.read_later(Wanted("weights", keys, lengths, self._weight_writes, self._sends))

        def work() -> None:
            weights = np.empty(self.size, np.float32)
            for of, block in enumerate(finish()):
                start, length = self.partition(of)
                self._codec.decompress(block, weights[start : start + length])
            write_back(local, weights.astype(array.dtype, copy=False))

        return _in_background(work)

    # ── keys ──

    def _gradient_key(self, of: int, to: int) -> str:
        return f"allreduce/{self.id}/gradients/{of}/{to}"

    def _weight_key(self, of: int) -> str:
        return f"allreduce/{self.id}/weights/{of}"

    def _make_keys(self) -> None:
        lengths = {}
        for of in range(self.partition_num):
            length = self.partition(of)[1]
            lengths[self._weight_key(of)] = length
            lengths |= {self._gradient_key(by, of): length for by in range(self.partition_num)}
        self._blocks.make(lengths)

    # ── checks ──

    def _initialised(self, array: Floats | None) -> Floats:
        if array is None:
            raise NotAllowed("call init(parameter) first")
        return array

    def _vector(self, value: Any, what: str) -> Floats:
        """``value`` as float32 on the host; float64 is rounded to it."""
        array = as_array(value)
        self._check_vector(array, what)
        with np.errstate(over="ignore"):
            return array.astype(np.float32, copy=False)

    def _check_vector(self, array: npt.NDArray[Any], what: str) -> None:
        if array.shape != (self.size,):
            raise ShapeMismatch(f"{what}: expected the shape ({self.size},), got {array.shape}")
        if array.dtype not in (np.float32, np.float64):
            raise DtypeMismatch(f"{what}: expected float32 or float64, got {array.dtype}")


def _check_one_each(kv: KVStore, partition_num: int, partition_id: int) -> None:
    """In a cluster every worker has the partition of its rank, so that each round has a writer for every key."""
    if partition_num != kv.num_workers:
        text = f"partition_num={partition_num}, but the cluster has {kv.num_workers} workers: each owns one partition"
        raise ConfigError(text, setting="partition_num")
    if partition_id != kv.rank:
        text = f"partition_id={partition_id}, but this is worker {kv.rank}: leave it out"
        raise ConfigError(text, setting="partition_id")


def _assign(target: Floats, value: Any) -> None:
    if value is not target:  # as it is after `parameter.weight_partition -= …`
        if np.shape(value) != target.shape:
            raise ShapeMismatch(f"expected the shape {target.shape}, got {np.shape(value)}")
        target[...] = value


def _whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name} must be a whole number, {least} or more, not {value!r}", setting=name)
    return int(value)


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Run ``work`` in a daemon thread, which does not keep the program from ending."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  it is the future's
            future.set_exception(error)
        else:
            future.set_result(None)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name="kvd-get-weights", daemon=True).start()
    return future
