"""Values of worker 0 for all workers: parameters, buffers and objects.

Each tensor has a key of its own, which stays on the servers: a worker that is restarted, or joins later, repeats the
call and gets the values of the last broadcast. The keys take as much memory on the servers as the tensors, begin with
``kvd.torch/``, and go with ``store.delete`` in all workers. With `name`, two modules whose tensors have the same names
have keys of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from kvd.client.facades.blocking import KVStore
from kvd.errors import NotAllowed, ProtocolError
from kvd.protocol.specs import DTYPES
from kvd.torch.objects import from_bytes, to_bytes

PREFIX = "kvd.torch"
MOST_AT_ONCE_NBYTES = 64 << 20
"""Of the tensors of one call on the store: worker 0 copies them until they are sent."""

HEAD_NBYTES = 4096
"""Of an object's first key, which has the header and as much of the object as fits."""

_HEADER = struct.Struct("<QI?")  # length, CRC-32; whether it is a text that says why there is no object


def broadcast_parameters(
    parameters: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], store: KVStore, *, name: str = ""
) -> None:
    """Write worker 0's tensors into those of all workers. All workers call it.

    Tensors may have any dense layout and any dtype, and lie on any device. Of several names of one tensor (tied
    weights) the first counts. `DistributedOptimizer` does this for its parameters.

    Args:
        parameters: ``module.state_dict()`` or ``module.named_parameters()``. They are written in place.
        store: the store of this worker.
        name: tells the tensors of several modules apart.

    Raises:
        NotAllowed: the tensors of this worker have other names, shapes or dtypes than those of worker 0; or one of them
            is no dense tensor. The message names it.
        NodeLost: worker 0 is gone.
    """
    pairs = _distinct(_named(parameters))
    _check_like_worker_0(pairs, store, name)
    _broadcast(_keys("parameters", name, pairs), [tensor for _, tensor in pairs], store)


def broadcast_buffers(module: torch.nn.Module, store: KVStore, *, name: str = "") -> None:
    """Write worker 0's buffers, such as the running statistics of BatchNorm, into those of all workers.

    All workers call it. In a step of ``kv.steps`` it may be called once; a restarted worker then gets the buffers of
    its step.

    Args:
        module: its buffers are written in place, those that are not in its `state_dict`, too.
        store: the store of this worker.
        name: tells the buffers of several modules apart.

    Raises:
        ShapeMismatch, DtypeMismatch: a buffer is unlike that of worker 0.
        NotAllowed: in a step of a job with ``max_workers``: workers that join later do not know how many broadcasts
            they have missed.
        NodeLost: worker 0 is gone.
    """
    pairs = _distinct(list(module.named_buffers()))
    _broadcast(_keys("buffers", name, pairs), [tensor for _, tensor in pairs], store)


def broadcast_object(thing: Any, store: KVStore, *, name: str) -> Any:
    """Return worker 0's object in all workers. All workers call it.

    An object consists of None, bool, int, float, str, bytes, dense tensors and NumPy arrays, in lists, tuples and dicts
    with plain keys, such as the `state_dict` of an optimizer or a scheduler. It travels without pickle, so nothing that
    a peer sends is executed. Tensors arrive on the CPU.

    Args:
        thing: the object of worker 0; those of the others are not read.
        store: the store of this worker.
        name: of this place in the program: a restarted worker gets the last object of this name.

    Returns:
        `thing` itself in worker 0, a copy in the others, and in a worker 0 that was restarted with another object.

    Raises:
        NotAllowed: in all workers: a part of the object has another type; the message says which, as in
            ``thing['state'][0]``.
        ProtocolError: worker 0 was restarted in the midst of the call, and had another object then.
        NodeLost: worker 0 is gone.
    """
    data = b""
    refusal: NotAllowed | None = None
    if store.rank == 0:
        try:
            data = to_bytes(thing)
        except NotAllowed as error:
            refusal, data = error, str(error).encode()[: HEAD_NBYTES - _HEADER.size]
    header = _HEADER.pack(len(data), crc32(data), refusal is not None)
    head = _padded(header + data[: HEAD_NBYTES - _HEADER.size], HEAD_NBYTES)
    key = f"{PREFIX}/object/{name}"
    store.broadcast(key, head)
    length, checksum, is_refused = _HEADER.unpack(head[: _HEADER.size].tobytes())
    received = head[_HEADER.size :]
    beyond = length - len(received)
    if beyond > 0:  # few sizes make few keys
        capacity = 1 << (beyond - 1).bit_length()
        rest = _padded(data[len(received) :][:capacity], capacity)
        store.broadcast(f"{key}/{capacity}", rest)
        received = np.concatenate([received, rest])
    found = received[:length].tobytes()
    if refusal is not None:
        raise refusal
    if crc32(found) != checksum:
        raise ProtocolError(
            f"the object {name!r} is in two parts of two objects: worker 0 was restarted between them, and had another "
            "one then. Restart the job"
        )
    if is_refused:
        raise NotAllowed(f"worker 0 cannot broadcast {name!r}: {found.decode(errors='replace')}")
    return thing if found == data else from_bytes(found)


def _padded(data: bytes, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An array of that many bytes, which begins with these."""
    return np.frombuffer(bytearray(data.ljust(nbytes, b"\0")), np.uint8)


# ── tensors ──


def _named(parameters: object) -> list[tuple[str, torch.Tensor]]:
    given: Any = parameters.items() if isinstance(parameters, Mapping) else parameters
    pairs: list[tuple[str, torch.Tensor]] = list(given)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise NotAllowed(
                f"tensors are broadcast by name, and a {type(pair).__name__} has none: pass module.state_dict() or "
                "module.named_parameters()"
            )
        if not isinstance(pair[1], torch.Tensor):
            raise NotAllowed(
                f"{pair[0]!r} is a {type(pair[1]).__name__}, no tensor: broadcast it with broadcast_object", key=pair[0]
            )
    return pairs


def _distinct(pairs: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """The tensors with their first names."""
    found: dict[Any, tuple[str, torch.Tensor]] = {}
    for name, tensor in pairs:
        has_memory = tensor.layout == torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()) if has_memory else id(tensor)
        found.setdefault(place, (name, tensor))
    return list(found.values())


def _keys(kind: str, name: str, pairs: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    prefix = f"{PREFIX}/{kind}/{name}/" if name else f"{PREFIX}/{kind}/"
    return [prefix + tensor for tensor, _ in pairs]


def _check_like_worker_0(pairs: Sequence[tuple[str, torch.Tensor]], store: KVStore, name: str) -> None:
    """Raise NotAllowed if the tensors are unlike those of worker 0: the workers would wait for each other."""
    mine = {tensor_name: [str(tensor.dtype), list(tensor.shape)] for tensor_name, tensor in pairs}
    theirs = broadcast_object(mine, store, name=f"parameters of {name}" if name else "parameters")
    for other in theirs:
        if mine.get(other) != theirs[other]:
            here = "has no such tensor" if other not in mine else "has {} of shape {}".format(*mine[other])
            raise NotAllowed(
                f"worker 0 broadcasts {other!r}, {theirs[other][0]} of shape {theirs[other][1]}, and worker "
                f"{store.rank} {here}: broadcast the tensors of the same module in all workers",
                key=other,
            )
    for own in mine:
        if own not in theirs:
            raise NotAllowed(
                f"worker {store.rank} has a tensor {own!r}, and worker 0 has none: broadcast the tensors of the same "
                "module in all workers",
                key=own,
            )


class _Carrier(NamedTuple):
    """A tensor as the store takes it.

    Attributes:
        tensor: of a dtype that keys can have.
        writes_to: the tensor that gets its elements afterwards; None: it shares their memory.
    """

    tensor: torch.Tensor
    writes_to: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Carrier:
        plain = tensor.detach()
        if str(plain.dtype).removeprefix("torch.") in DTYPES:
            return cls(plain)
        if plain.element_size() == 1:
            return cls(plain.view(torch.uint8))
        packed = plain.resolve_conj().resolve_neg().contiguous()
        is_same = packed.data_ptr() == plain.data_ptr() and packed.is_contiguous() and plain.is_contiguous()
        return cls(packed.reshape(-1).view(torch.uint8), None if is_same else plain)

    def finish(self) -> None:
        """Write the elements that have arrived to where they belong."""
        if self.writes_to is not None:
            target = self.writes_to
            target.copy_(self.tensor.view(target.dtype).reshape(target.shape))


def _broadcast(keys: Sequence[str], tensors: Sequence[torch.Tensor], store: KVStore) -> None:
    for part in _parts(tensors):
        carriers = [_Carrier.of(tensor) for tensor in tensors[part]]
        store.broadcast(list(keys[part]), [carrier.tensor for carrier in carriers])
        for carrier in carriers:
            carrier.finish()


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Ranges of tensors of at most `MOST_AT_ONCE_NBYTES`, or of one larger tensor."""
    begin = nbytes = 0
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if index > begin and nbytes + size > MOST_AT_ONCE_NBYTES:
            yield slice(begin, index)
            begin, nbytes = index, 0
        nbytes += size
    if begin < len(tensors):
        yield slice(begin, len(tensors))
