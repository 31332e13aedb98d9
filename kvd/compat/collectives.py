"""Collective calls on torch tensors, as Horovod and BytePS have them, over one store.

A reduction is a `pushpull` of a key that the servers merge. A broadcast from any worker is an assignment: the root
sends the bytes once, and the others read them. A gathering is a broadcast from each worker.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import msgpack
import numpy as np
import torch

from kvd.client.calls.handle import Handle
from kvd.client.facades.blocking import KVStore
from kvd.client.facades.exchange import Exchange
from kvd.compat.scratch import PIECE_BYTES, RING, CollectiveKeys
from kvd.compute.tensors import as_array, dtype_name
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch
from kvd.torch.objects import from_bytes, to_bytes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

CHECK_ELEMENTS = 16
"""Elements at the end of a key without a name, each 0 or 1: a checksum of what is reduced, the last one always 1."""

LABEL = struct.Struct("<I")
"""What precedes a tensor that is broadcast: a checksum of its name, dtype and shape."""

HEADER = struct.Struct("<QI")
"""What precedes a stream: its length in bytes, and a checksum of what it is."""
FIRST_BYTES = 4096
"""Bytes of the first key of a stream, whose length only the root knows."""


class ReduceOp(Enum):
    """How a reduction makes one value of those of all workers."""

    AVERAGE = "mean"
    SUM = "sum"


class Operation:
    """A collective call under way.

    Args:
        handles: the store's calls that it consists of.
        finish: makes its result when they have ended; called once.
    """

    def __init__(self, handles: Sequence[Handle | Operation], finish: Callable[[], Any]) -> None:
        self._handles = handles
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Return True if `wait` would not wait."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> Any:
        """Wait for the end, and return the result.

        Raises:
            KvdError: the call failed.
        """
        if self._finish is not None:
            for handle in self._handles:
                handle.wait()
            self._result, self._finish, self._handles = self._finish(), None, ()
        return self._result


class Collectives:
    """Collective calls of one worker. All workers make the same ones; those without a name in the same order.

    Args:
        store: a synchronous store, or one in this process, that no optimizer updates.

    Attributes:
        is_compressed: set it if the store compresses what it pushes: these calls stay exact all the same.

    Raises:
        NotAllowed: the store has no rounds.
    """

    def __init__(self, store: KVStore) -> None:
        self._exchange = Exchange(store)
        if not self._exchange.versioned:
            raise NotAllowed(f'collective calls need rounds: create the store as "dist_sync", not as {store.type!r}')
        self.store = store
        self.is_compressed = False
        self._keys = CollectiveKeys(store)

    # ── reductions ──

    def reduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        *,
        name: str | None = None,
        in_place: bool = False,
        priority: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Operation:
        """Begin to reduce tensors over the workers; its result is the list of the reduced ones.

        The average is over the workers that take part, in float32 for half precision. That of integers is cut off at
        the point, as in Horovod.

        Args:
            in_place: write the results into the tensors.
            priority: calls with a name leave this worker by it, higher ones first.
            prescale, postscale: factors of the values before and after.

        Raises:
            NotAllowed, DtypeMismatch: a tensor is sparse, or of a dtype that no key can have.
            ShapeMismatch: (from `Operation.wait`) workers reduce different tensors.
        """
        inputs = [_reducible(tensor) for tensor in tensors]
        if prescale != 1.0:
            inputs = [(tensor * prescale).to(tensor.dtype) for tensor in inputs]
        outs = [
            tensor.detach() if in_place else torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
            for tensor in tensors
        ]
        begin = self._reduce_unnamed if name is None else self._reduce_named
        handles, filled = begin(inputs, outs, op, name or "", priority)

        def finish() -> list[torch.Tensor]:
            filled()
            for out in outs:
                self._scale(out, op, postscale)
            return list(tensors) if in_place else outs

        return Operation(handles, finish)

    def _reduce_named(
        self, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], op: ReduceOp, name: str, priority: int
    ) -> tuple[list[Handle], Callable[[], None]]:
        names = [name] if len(inputs) == 1 else [f"{name}.{place}" for place in range(len(inputs))]
        keys = [
            self._keys.named(
                f"reduce/{_merge(op, tensor)}", own, _dtype(tensor), tuple(tensor.shape), _merge(op, tensor)
            )
            for own, tensor in zip(names, inputs, strict=True)
        ]
        handle = self.store.pushpull_async(
            keys, list(inputs), out=list(outs), priority=priority, cast=self.is_compressed
        )
        return [handle], lambda: None

    def _reduce_unnamed(
        self, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], op: ReduceOp, name: str, priority: int
    ) -> tuple[list[Handle], Callable[[], None]]:
        handles: list[Handle] = []
        finishes: list[Callable[[], None]] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
            places = [place for place, tensor in enumerate(inputs) if tensor.dtype == dtype]
            flat = torch.cat([inputs[place].reshape(-1) for place in places])
            own = [outs[place] for place in places]
            described = repr((op.value, dtype, [tuple(out.shape) for out in own]))
            pieces = self._begin_pieces(flat, op, described, handles)
            finishes.append(partial(_deliver, pieces, own))

        def finish() -> None:
            for one in finishes:
                one()

        return handles, finish

    def _begin_pieces(
        self, flat: torch.Tensor, op: ReduceOp, described: str, handles: list[Handle]
    ) -> list[tuple[torch.Tensor, int, str]]:
        """Begin to reduce a vector in keys without a name. Return each piece, its elements and what it is a part of."""
        merge, dtype = _merge(op, flat), _dtype(flat)
        room = PIECE_BYTES // flat.element_size() - CHECK_ELEMENTS
        pieces = []
        for start in range(0, max(flat.numel(), 1), room):
            part = flat[start : start + room]
            key, size = self._keys.unnamed(f"reduce/{merge}", part.numel() + CHECK_ELEMENTS, dtype, merge)
            piece = torch.zeros(size, dtype=flat.dtype)
            piece[: part.numel()] = part
            piece[-CHECK_ELEMENTS:] = _check_bits(described).to(flat.dtype)
            handles.append(self.store.pushpull_async(key, piece, out=piece, cast=self.is_compressed))
            pieces.append((piece, part.numel(), described))
        return pieces

    def _scale(self, out: torch.Tensor, op: ReduceOp, postscale: float) -> None:
        """Apply what is left of an average, and a factor."""
        if op is ReduceOp.AVERAGE and not out.is_floating_point():
            out.copy_(torch.div(out, self.store.num_workers, rounding_mode="trunc"))
        if postscale != 1.0:
            out.copy_((out * postscale).to(out.dtype))

    # ── from one to all ──

    def broadcast(
        self, tensor: torch.Tensor, root: int, *, name: str | None = None, in_place: bool = False
    ) -> Operation:
        """Begin to give all workers the root's tensor; its result is the tensor.

        Raises:
            NotAllowed: no worker has the rank `root`, or the tensor is sparse.
            ShapeMismatch: (from `Operation.wait`) the root has a tensor of another shape or dtype.
        """
        self._check_root(root)
        _check_dense(tensor)
        out = tensor if in_place else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        described = repr((name, tensor.dtype, tuple(tensor.shape)))
        label = LABEL.pack(zlib.crc32(described.encode()))
        nbytes = LABEL.size + tensor.numel() * tensor.element_size()
        message = np.frombuffer(label + _bytes_of(tensor).tobytes(), np.uint8) if self._is_root(root) else None
        if name is None:
            parts = [self._begin_bytes(message, start, nbytes, root) for start in range(0, nbytes, PIECE_BYTES)]
        else:
            key = self._keys.named("broadcast", name, "uint8", (nbytes,), "sum")
            parts = [self._begin_key(key, message, nbytes, root)]

        def finish() -> torch.Tensor:
            if self._is_root(root):
                if out is not tensor:
                    out.detach().copy_(tensor.detach())
                return out
            received = np.concatenate([array[:size] for _, array, size in parts])
            if received[: LABEL.size].tobytes() != label:
                raise ShapeMismatch(
                    f"worker {root} broadcasts another tensor than worker {self.store.rank} expects "
                    f"({_described(tensor)}): broadcasts without a name are matched by their order"
                )
            _write_bytes(received[LABEL.size :], out)
            return out

        return Operation([handle for handle, _, _ in parts if handle is not None], finish)

    def broadcast_all(self, tensors: Sequence[tuple[str, torch.Tensor]], root: int) -> None:
        """Write the root's tensors into those of all workers, in one stream.

        Raises:
            NotAllowed: no worker has the rank `root`, or a tensor is sparse.
            ShapeMismatch: the root has others; the first one that differs is named.
        """
        self._check_root(root)
        for _, tensor in tensors:
            _check_dense(tensor)
        own = [_form(name, tensor) for name, tensor in tensors]
        sent = msgpack.unpackb(self._stream(msgpack.packb(own), root, "tensors"))
        fits = sent == own
        self._segments([tensor for _, tensor in tensors] if fits else None, sum(form[3] for form in sent), root)
        if not fits:
            raise _first_unlike(sent, own, root, self.store.rank)

    def broadcast_object(self, thing: Any, root: int) -> Any:
        """Return the root's object in all workers. It is not pickled; see `kvd.torch.broadcast_object`.

        Raises:
            NotAllowed: no worker has the rank `root`; or, in all workers, the object holds something that is not sent.
        """
        self._check_root(root)
        refusal: NotAllowed | None = None
        message = b""
        if self._is_root(root):
            try:
                message = b"\1" + to_bytes(thing)
            except NotAllowed as error:
                refusal, message = error, b"\0" + str(error).encode()
        sent = self._stream(message, root, "an object")
        if self._is_root(root):
            if refusal is not None:
                raise refusal
            return thing
        if not sent[0]:
            raise NotAllowed(f"worker {root} cannot broadcast its object: {sent[1:].decode(errors='replace')}")
        return from_bytes(memoryview(sent)[1:])

    def gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the tensors of all workers, joined along their first dimension in the order of the ranks, and where
        this worker's begins.

        Raises:
            NotAllowed: the tensor has no dimension, or is sparse.
            ShapeMismatch: the other dimensions, or the dtypes, of two workers differ.
        """
        _check_dense(tensor)
        if tensor.dim() == 0:
            raise NotAllowed("a tensor without dimensions cannot be joined with others: pass tensor.reshape(1)")
        rank, ranks = self.store.rank, self.store.ranks
        width = max(ranks) + 1
        mine = torch.zeros(2 * width, dtype=torch.int64)
        mine[rank] = tensor.shape[0]
        mine[width + rank] = zlib.crc32(repr((tensor.dtype, tuple(tensor.shape[1:]))).encode())
        [all_of] = self.reduce([mine], ReduceOp.SUM).wait()
        lengths, kinds = all_of[:width].tolist(), all_of[width:].tolist()
        for other in ranks:
            if kinds[other] != kinds[rank]:
                raise ShapeMismatch(
                    f"worker {other} gathers a tensor whose dtype, or shape after the first dimension, is not that of "
                    f"worker {rank} ({_described(tensor)})"
                )
        parts = [tensor.new_empty((lengths[of], *tensor.shape[1:])) for of in ranks]
        for of, part in zip(ranks, parts, strict=True):
            if of == rank:
                part.copy_(tensor.detach())
            self._segments([part], part.numel() * part.element_size(), of)
        return torch.cat(parts), sum(lengths[of] for of in ranks if of < rank)

    def join(self, progress: int) -> int:
        """Leave the rounds until all workers have called this; return the rank that got furthest.

        Args:
            progress: how many steps this worker has made; of several workers that made most, the highest rank counts.
        """
        self.store.join(until="kvd.compat.join")
        ranks = self.store.ranks
        steps = torch.zeros(max(ranks) + 1, dtype=torch.int64)
        steps[self.store.rank] = progress + 1
        [made] = self.reduce([steps], ReduceOp.SUM).wait()
        most = int(made.max())
        return max(rank for rank in ranks if int(made[rank]) == most)

    # ── bytes ──

    def _is_root(self, root: int) -> bool:
        return self.store.rank == root

    def _check_root(self, root: int) -> None:
        if isinstance(root, bool) or not isinstance(root, int) or root not in self.store.ranks:
            raise NotAllowed(f"no worker has the rank {root!r:.40}: the job has {self.store.num_workers} workers")

    def _begin_bytes(
        self, message: Bytes | None, start: int, nbytes: int, root: int
    ) -> tuple[Handle | None, Bytes, int]:
        """Begin to send the piece of a message that starts there (None: to receive it)."""
        size = min(PIECE_BYTES, nbytes - start)
        key, room = self._keys.unnamed("broadcast", size, "uint8", "sum")
        padded = None
        if message is not None:
            padded = np.zeros(room, np.uint8)
            padded[:size] = message[start : start + size]
        handle, array, _ = self._begin_key(key, padded, room, root)
        return handle, array, size

    def _begin_key(self, key: str, message: Bytes | None, nbytes: int, root: int) -> tuple[Handle | None, Bytes, int]:
        """Begin to send a key from the root, and to read it elsewhere."""
        if message is not None:
            self._exchange.assign({key: message}, ())
            return None, message, nbytes
        self._exchange.assign({}, [key])
        array = np.empty(nbytes, np.uint8)
        return self.store.pull_async(key, out=array), array, nbytes

    def _stream(self, message: bytes, root: int, what: str) -> bytes:
        """Return the root's bytes in all workers, however many they are."""
        label = zlib.crc32(what.encode())
        head = np.zeros(FIRST_BYTES, np.uint8)
        begun = np.frombuffer(HEADER.pack(len(message), label) + message[: FIRST_BYTES - HEADER.size], np.uint8)
        head[: begun.size] = begun
        handle, head, _ = self._begin_bytes(head if self._is_root(root) else None, 0, FIRST_BYTES, root)
        if handle is not None:
            handle.wait()
        nbytes, sent = HEADER.unpack_from(head.data)
        if sent != label:
            raise NotAllowed(f"worker {root} sends something else than {what}: all workers make the same calls")
        rest = torch.empty(max(nbytes - (FIRST_BYTES - HEADER.size), 0), dtype=torch.uint8)
        if self._is_root(root) and rest.numel():
            rest.copy_(torch.frombuffer(bytearray(message[FIRST_BYTES - HEADER.size :]), dtype=torch.uint8))
        self._segments([rest], rest.numel(), root)
        return message if self._is_root(root) else (head[HEADER.size :].tobytes() + _bytes_of(rest).tobytes())[:nbytes]

    def _segments(self, tensors: Sequence[torch.Tensor] | None, nbytes: int, root: int) -> None:
        """Send the bytes of the root's tensors into those of the others, piece by piece.

        Args:
            tensors: equally many bytes in all workers; None: this worker has no use for them.
            nbytes: their sum.
        """
        hosts = [] if tensors is None else [_on_host(tensor) for tensor in tensors]
        views = [_flat_bytes(host) for host in hosts]
        under_way: deque[tuple[Handle | None, Bytes, int, int]] = deque()

        def finish_one() -> None:
            handle, array, start, size = under_way.popleft()
            if handle is not None:
                handle.wait()
                _copy_at(views, start, array[:size], out_of=False)

        for start in range(0, nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, nbytes - start)
            message = None
            if self._is_root(root):
                message = np.empty(size, np.uint8)
                _copy_at(views, start, message, out_of=True)
            handle, array, _ = self._begin_bytes(message, 0, size, root)
            under_way.append((handle, array, start, size))
            if len(under_way) == RING:
                finish_one()
        while under_way:
            finish_one()
        if tensors is not None and not self._is_root(root):
            for tensor, host in zip(tensors, hosts, strict=True):
                if host.data_ptr() != tensor.data_ptr() or tensor.device != host.device:
                    tensor.detach().copy_(host)


# ── tensors ──


def _check_dense(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise NotAllowed(f"a collective call takes torch tensors, not a {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise NotAllowed(f"a tensor of layout {tensor.layout} is not dense: pass tensor.to_dense()")


def _reducible(tensor: object) -> torch.Tensor:
    """Return the values of a tensor that can be a key, in memory that `as_array` reads."""
    _check_dense(tensor)
    assert isinstance(tensor, torch.Tensor)
    _dtype(tensor)
    return tensor.detach()


def _dtype(tensor: torch.Tensor) -> str:
    """Return the name of a dtype that keys can have. Raises DtypeMismatch."""
    return dtype_name(as_array(torch.empty(0, dtype=tensor.dtype)).dtype)


def _merge(op: ReduceOp, tensor: torch.Tensor) -> str:
    """Return how servers merge: they would round a mean of integers down."""
    return op.value if tensor.is_floating_point() else ReduceOp.SUM.value


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}, shape {tuple(tensor.shape)}"


def _form(name: str, tensor: torch.Tensor) -> list[Any]:
    """Return name, dtype, shape and bytes of a tensor, as they are sent."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [name, dtype, list(tensor.shape), tensor.numel() * tensor.element_size()]


def _first_unlike(
    sent: Sequence[list[Any]], own: Sequence[list[Any]], root: int, rank: int
) -> ShapeMismatch | DtypeMismatch:
    """Return the error of a worker whose tensors are not the root's."""
    for theirs, mine in zip(sent, own, strict=False):
        if theirs[0] != mine[0]:
            return ShapeMismatch(f"worker {root} broadcasts {theirs[0]!r} where worker {rank} has {mine[0]!r}")
        if theirs[2] != mine[2]:
            text = (
                f"{mine[0]!r} has the shape {tuple(theirs[2])} in worker {root}, and {tuple(mine[2])} in worker {rank}"
            )
            return ShapeMismatch(text, key=mine[0])
        if theirs[1] != mine[1]:
            text = f"{mine[0]!r} has the dtype {theirs[1]} in worker {root}, and {mine[1]} in worker {rank}"
            return DtypeMismatch(text, key=mine[0])
    longer, of = (sent, root) if len(sent) > len(own) else (own, rank)
    name = longer[min(len(sent), len(own))][0]
    return ShapeMismatch(
        f"only worker {of} has {name!r}: worker {root} broadcasts {len(sent)} tensors, worker {rank} expects {len(own)}"
    )


def _flat_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a contiguous tensor on the host, as a view."""
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor on the host: the same memory if it can be."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return _flat_bytes(_on_host(tensor))


def _write_bytes(source: Bytes, out: torch.Tensor) -> None:
    values = (
        torch.frombuffer(bytearray(source.data), dtype=torch.uint8)
        if source.size
        else torch.empty(0, dtype=torch.uint8)
    )
    out.detach().copy_(values.view(out.dtype).reshape(out.shape))


def _copy_at(views: Sequence[Bytes], start: int, piece: Bytes, *, out_of: bool) -> None:
    """Copy a piece of the concatenated views out of them, or into them."""
    done = 0
    for view in views:
        if start >= view.size:
            start -= view.size
            continue
        size = min(view.size - start, piece.size - done)
        if out_of:
            piece[done : done + size] = view[start : start + size]
        else:
            view[start : start + size] = piece[done : done + size]
        done, start = done + size, 0
        if done == piece.size:
            return


# ── the check of calls without a name ──


def _check_bits(described: str) -> torch.Tensor:
    """Return a checksum as zeros and ones, which a sum or mean over equal workers keeps apart in every dtype."""
    checksum = zlib.crc32(described.encode())
    return torch.tensor([checksum >> place & 1 for place in range(CHECK_ELEMENTS - 1)] + [1])


def _checked(pieces: Sequence[tuple[torch.Tensor, int, str]]) -> torch.Tensor:
    """Return the elements of pieces.

    Raises:
        ShapeMismatch: workers have reduced different tensors.
    """
    for piece, _, described in pieces:
        bits, total = _check_bits(described), piece[-1]
        if not torch.equal(piece[-CHECK_ELEMENTS:], torch.where(bits == 1, total, torch.zeros_like(total))):
            raise ShapeMismatch(
                f"the workers reduce different tensors in the same call, which is here {described}: calls without a "
                f"name are matched by their order"
            )
    return torch.cat([piece[:elements] for piece, elements, _ in pieces])


def _deliver(pieces: Sequence[tuple[torch.Tensor, int, str]], outs: Sequence[torch.Tensor]) -> None:
    """Write what has been reduced into the tensors that it is for."""
    flat, start = _checked(pieces), 0
    for out in outs:
        out.detach().copy_(flat[start : start + out.numel()].reshape(out.shape))
        start += out.numel()
