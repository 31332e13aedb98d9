"""The blocks of `AllReduceParameter`: which block may be read when, over any store.

Vectors travel as *blocks*. For gradients there is a key per pair of partitions, written by the partition that computed
them and read by the owner of the slice; for weights there is a key per partition. BigDL relies on the stages of Spark
for their order. Here the store and a header in every block give it:

- In `dist_sync` writing a block is a round of its key, in which the writer assigns its bytes and all others are absent
  (a header without bytes, see `kvd.client.facades.exchange`). A reader asks for the version of its own clock, so it
  gets exactly the blocks of its own iteration, even if their writers are one ahead, and waits for those that are
  behind.
- In `dist_async` and in a store of this process writing replaces, and readers wait until their block is there.
  A writer cannot overtake a reader: it computes its next gradients from weights that their owners send after they
  have read its last ones. A worker that skips `get_weights` can; the header shows it.
- The header has the number of the write of the key (over the life of the key, so that another object with the same id,
  or a second `init`, continues counting) and the iteration since `init` (which reveals a restarted worker). Where
  slices of a block may come from different writes, a checksum detects it. A block is used only if all three fit; if one
  block is missing, nothing is aggregated.

The number of bytes is that of an all-reduce: a worker sends each of its gradients once and its weights once.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np

from kvd.client.calls.handle import Handle
from kvd.client.facades.exchange import Exchange
from kvd.errors import KvdError, NodeLost, RequestTimeout
from kvd.parallel.allreduce.codec import Bytes, Codec, Floats

_HEADER = Struct(">QQQ")  # which write of the key, which iteration since init, checksum of the rest (0: none)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_LEFT = "it has left the rounds"


class MissingBlock(KvdError):
    """A block is missing and will not come: nothing was aggregated.

    Attributes:
        partition: whose block it is.
        node: which should have written it, such as ``"worker 1"``.
    """

    def __init__(self, message: str, *, partition: int, node: str) -> None:
        super().__init__(message)
        self.partition = partition
        self.node = node


class Wanted(NamedTuple):
    """The blocks of one iteration, one of each partition.

    Attributes:
        what: ``"gradients"`` or ``"weights"``, for messages.
        keys: in the order of the partitions that write them.
        lengths: how many values each has.
        write: which write of their keys they are.
        iteration: since `init`.
    """

    what: str
    keys: Sequence[str]
    lengths: Sequence[int]
    write: int
    iteration: int


class Blocks:
    """Blocks of float32 vectors, over one store."""

    def __init__(self, exchange: Exchange, codec: Codec, timeout_s: float) -> None:
        self._exchange = exchange
        self._codec = codec
        self._timeout_s = timeout_s

    def make(self, lengths: Mapping[str, int]) -> None:
        """Make the keys for vectors of these lengths; see `Exchange.make`."""
        self._exchange.make({key: self._nbytes(length) for key, length in lengths.items()})

    def written(self, key: str) -> int:
        """The number of writes of this worker to the key, over the key's life."""
        return self._exchange.store.clock(key)

    def is_inherited(self, key: str) -> bool:
        """See `Exchange.is_inherited`."""
        return self._exchange.is_inherited(key)

    def write(self, mine: Mapping[str, Floats], others: Sequence[str], write: int, iteration: int) -> None:
        """Send vectors, which are copied; `others` are the keys that the other partitions write at the same time."""
        blocks = {key: self._packed(values, write, iteration) for key, values in mine.items()}
        self._exchange.assign(blocks, others)

    def read_later(self, wanted: Wanted) -> Callable[[], list[Bytes]]:
        """Ask for blocks now. The function it returns waits for them and gives their contents, still compressed.

        It raises MissingBlock, NodeLost or RequestTimeout, each of which names the missing writer.
        """
        deadline = time.monotonic() + self._timeout_s
        blocks = [np.zeros(self._nbytes(length), np.uint8) for length in wanted.lengths]
        gone = self._exchange.gone_workers()  # before the pull, which includes their last writes
        asked = self._exchange.store.pull_async(list(wanted.keys), out=blocks)

        def finish() -> list[Bytes]:
            nonlocal gone
            self._wait(asked, wanted, deadline)
            pause_s = _FIRST_PAUSE_S
            missing = self._missing(wanted, blocks, range(len(blocks)))
            while missing:
                self._check_hope(wanted, missing, gone, deadline)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                keys, outs = [wanted.keys[of] for of in missing], [blocks[of] for of in missing]
                gone = self._exchange.gone_workers()
                self._wait(self._exchange.store.pull_async(keys, out=outs), wanted, deadline)
                missing = self._missing(wanted, blocks, missing)
            return [block[_HEADER.size :] for block in blocks]

        return finish

    def _nbytes(self, length: int) -> int:
        return _HEADER.size + length * self._codec.itemsize

    def _packed(self, values: Floats, write: int, iteration: int) -> Bytes:
        block = np.empty(self._nbytes(values.size), np.uint8)
        content = block[_HEADER.size :]
        self._codec.compress(values, content)
        checksum = 0 if self._exchange.versioned else zlib.crc32(content.data)
        _HEADER.pack_into(block.data, 0, write, iteration, checksum)
        return block

    def _missing(self, wanted: Wanted, blocks: Sequence[Bytes], partitions: Iterable[int]) -> list[int]:
        """Those of these partitions whose block is not there yet. Raises if one will never be."""
        exchange, missing = self._exchange, []
        for of in partitions:
            write, iteration, checksum = _HEADER.unpack_from(blocks[of].data)
            late = write < wanted.write
            if late and exchange.distributed and exchange.versioned:
                raise self._never(wanted, of, _LEFT)
            if not late and (write, iteration) != (wanted.write, wanted.iteration):
                raise self._never(
                    wanted,
                    of,
                    f"it is at iteration {iteration}, write {write} in place of {wanted.write}. All workers must call "
                    f"init, put_gradients and send_weight_partition equally often, with get_weights between; a "
                    f"restarted worker cannot continue: use a checkpoint and a new id",
                )
            torn = not late and not exchange.versioned and zlib.crc32(blocks[of][_HEADER.size :].data) != checksum
            if late or torn:
                missing.append(of)
        return missing

    def _never(self, wanted: Wanted, of: int, why: str) -> MissingBlock:
        node = self._writer(of)
        text = f"the {wanted.what} of iteration {wanted.iteration} by {node} are missing: {why}"
        return MissingBlock(text, partition=of, node=node)

    def _check_hope(self, wanted: Wanted, missing: Sequence[int], gone: Mapping[int, bool], deadline: float) -> None:
        """Raise if waiting longer for the blocks of these partitions is pointless.

        Arguments:
            gone: rank → whether it died, of the workers that had stopped writing when the blocks were asked for.
        """
        for of in missing:
            if gone.get(of):
                text = f"the {wanted.what} by {self._writer(of)} are missing, and it died: continue from a checkpoint"
                raise NodeLost(text, node=self._writer(of))
            if of in gone:
                raise self._never(wanted, of, _LEFT)
        if time.monotonic() >= deadline:
            raise _too_late(wanted, tuple(map(self._writer, missing)))

    def _wait(self, asked: Handle, wanted: Wanted, deadline: float) -> None:
        waits_for_workers = self._exchange.versioned and self._exchange.distributed
        try:
            asked.wait(max(deadline - time.monotonic(), 0.0) if waits_for_workers else None)
        except RequestTimeout as error:
            raise _too_late(wanted, self._exchange.late_workers() or error.waiting_for) from error

    def _writer(self, partition: int) -> str:
        return f"{'worker' if self._exchange.distributed else 'partition'} {partition}"


def _too_late(wanted: Wanted, writers: tuple[str, ...]) -> RequestTimeout:
    whose = ", ".join(writers) or "some worker"
    text = (
        f"the {wanted.what} of iteration {wanted.iteration} by {whose} did not come in time; without them nothing was "
        f"done, and the call may be made again"
    )
    return RequestTimeout(text, outcome="unknown", waiting_for=writers)
