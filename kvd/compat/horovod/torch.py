"""Horovod's names for torch: ``import kvd.compat.horovod.torch as hvd`` in place of ``import horovod.torch as hvd``.

The program is started by ``kvd launch -n WORKERS -- python train.py``, or alone. Gradients are merged on kvd's servers,
and each worker has its own optimizer. `docs/porting.md` says what is left out, and what to use instead.

What differs from Horovod: an average is over the workers that take part, without those that wait in `join`; handles are
objects; objects are not pickled; a process that is restarted in the midst of a training raises `kvd.NotResumed`, where
Horovod restarts all processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvd.compat.autograd import Reduction, broadcasted, gathered, reduced
from kvd.compat.collectives import Operation, ReduceOp
from kvd.compat.compression import Compression, Compressor
from kvd.compat.session import Session, left_out
from kvd.compat.training import AccumulatingOptimizer
from kvd.compat.training import broadcast_optimizer_state as _broadcast_optimizer_state
from kvd.compat.training import broadcast_parameters as _broadcast_parameters
from kvd.errors import NotAllowed

__all__ = [
    "init",
    "shutdown",
    "is_initialized",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "allgather",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "broadcast_object",
    "poll",
    "synchronize",
    "barrier",
    "join",
    "Average",
    "Sum",
    "Compression",
    "DistributedOptimizer",
]

Average = ReduceOp.AVERAGE
"""The reduction that gives the mean of the workers' values."""
Sum = ReduceOp.SUM
"""The reduction that gives the sum of the workers' values."""

_session = Session("Horovod", "hvd")

init = _session.init
shutdown = _session.shutdown
is_initialized = _session.is_initialized
rank = _session.rank
size = _session.size
local_rank = _session.local_rank
local_size = _session.local_size

_LEFT_OUT = {
    "Adasum": "use op=hvd.Average",
    "Min": "use hvd.allgather and torch.min",
    "Max": "use hvd.allgather and torch.max",
    "Product": "use hvd.allgather and torch.prod",
    "ProcessSet": "all workers take part in each call",
    "add_process_set": "all workers take part in each call",
    "global_process_set": "all workers take part in each call",
    "alltoall": "use hvd.allgather, and take the parts of this worker",
    "alltoall_async": "use hvd.allgather, and take the parts of this worker",
    "reducescatter": "use hvd.allreduce, and take the part of this worker",
    "allgather_async": "use hvd.allgather",
    "allgather_object": "broadcast each worker's object with hvd.broadcast_object",
    "elastic": "use kv.steps of kvd.torch: kvd restarts single workers",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm, or batches that are large enough",
    "start_timeline": "use kvd top",
    "stop_timeline": "use kvd top",
}


def __getattr__(name: str) -> Any:
    raise left_out(__name__, _LEFT_OUT, name)


# ── reductions ──


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the mean or the sum of a tensor over the workers. Gradients flow through it.

    Args:
        average: Horovod's old name of ``op``: True is `Average`, False is `Sum`.
        name: of the call, which is the same in all workers; None: calls without a name are matched by their order.
        compression: `Compression.fp16` to send it as float16.
        op: `Average` or `Sum`; None: `Average`.
        prescale_factor, postscale_factor: factors of the values before and after.

    Raises:
        NotInitialized: before `init`.
        NotAllowed, DtypeMismatch: the tensor is sparse, or of a dtype that no key can have.
        ShapeMismatch: the workers' tensors differ.
    """
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Begin what `allreduce` does, without gradients; return a handle for `synchronize` and `poll`."""
    return _first(_reduce([tensor], average, name, op, prescale_factor, postscale_factor, in_place=False))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor in place, as `allreduce` does, and return it."""
    result: torch.Tensor = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor).wait()
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Begin to reduce a tensor in place; return a handle. Leave the tensor alone until `synchronize` has returned."""
    return _first(_reduce([tensor], average, name, op, prescale_factor, postscale_factor, in_place=True))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return the means or the sums of several tensors, in one call of the store. The rest is as in `allreduce`."""
    reduction = Reduction(_op(average, op), name, 0, prescale_factor, postscale_factor)
    sent = [compression.compress(tensor) for tensor in tensors]
    results = reduced(_session.collectives, reduction, [tensor for tensor, _ in sent])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Begin what `grouped_allreduce` does, without gradients; return a handle."""
    return _reduce(tensors, average, name, op, prescale_factor, postscale_factor, in_place=False)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors in place, and return them."""
    operation = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor)
    return list(operation.wait())


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Begin to reduce several tensors in place; return a handle."""
    return _reduce(tensors, average, name, op, prescale_factor, postscale_factor, in_place=True)


def poll(handle: Operation) -> bool:
    """Return True if `synchronize` would not wait."""
    return handle.done()


def synchronize(handle: Operation) -> Any:
    """Wait for the end of a call, and return its result: a tensor, or a list for a group.

    Raises:
        KvdError: the call failed.
    """
    return handle.wait()


# ── gathering and broadcasts ──


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all workers, joined along their first dimension in the order of the ranks.

    Only the first dimension may differ. Gradients flow through it.

    Args:
        name: for programs of Horovod; calls are matched by their order.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: the tensor has no dimension, or is sparse.
        ShapeMismatch: the other dimensions, or the dtypes, of two workers differ.
    """
    return gathered(_session.collectives, tensor)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the root's tensor in all workers. Gradients flow through it to the root.

    Args:
        root_rank: the worker with the tensor.
        name: of the call, which is the same in all workers; None: calls without a name are matched by their order.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: no worker has this rank, or the tensor is sparse.
        ShapeMismatch: the root's tensor has another shape or dtype.
    """
    return broadcasted(_session.collectives, tensor, root_rank, name)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Operation:
    """Begin what `broadcast` does, without gradients; return a handle."""
    return _session.collectives.broadcast(tensor, root_rank, name=name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Write the root's tensor into those of all workers, and return it."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name).wait()
    return result


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Operation:
    """Begin to write the root's tensor into those of all workers; return a handle."""
    return _session.collectives.broadcast(tensor, root_rank, name=name, in_place=True)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Write the root's parameters into those of all workers.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a list of these.
        root_rank: the worker with the parameters.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: `params` is something else, or no worker has this rank.
        ShapeMismatch, DtypeMismatch: the root has other parameters; the first one that differs is named.
    """
    _broadcast_parameters(_session.collectives, params, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Load the root's optimizer state and hyperparameters in all workers.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: no worker has this rank, or the state holds something that is not sent.
    """
    _broadcast_optimizer_state(_session.collectives, optimizer, root_rank)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's object in all workers.

    It is not pickled: it may hold None, numbers, texts, bytes and tensors, in lists, tuples and dicts.

    Args:
        name: for programs of Horovod; calls are matched by their order.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: no worker has this rank, or the object holds something else; the text says where.
    """
    return _session.collectives.broadcast_object(obj, root_rank)


# ── training ──


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
) -> AccumulatingOptimizer:
    """Wrap an optimizer, so that gradients are reduced over the workers during ``backward()``.

    When ``backward()`` returns, each ``.grad`` is reduced, where Horovod waits for it in ``step()`` or
    ``synchronize()``. So programs may clip and unscale gradients without ``synchronize()``, and those that call it work
    as well. All workers begin with the parameters of worker 0.

    Args:
        optimizer: the optimizer to wrap.
        named_parameters: ``model.named_parameters()``; the names are keys of the store. None: they are numbered.
        compression: `Compression.fp16` to send gradients of 64 KiB and more as float16.
        backward_passes_per_step: how many ``backward()`` a step has, whose gradients are added up.
        op: `Average` or `Sum`.
        gradient_predivide_factor: 1.0, since half precision is added up in float32 and cannot overflow on the way.
        sparse_as_dense: send sparse gradients as dense ones, instead of refusing them.

    Returns:
        The wrapped optimizer, also with Horovod's ``synchronize``, ``skip_synchronize`` and
        ``set_backward_passes_per_step``.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: an argument is wrong, or other workers have other parameters, as in
            `kvd.torch.DistributedOptimizer`.
    """
    if gradient_predivide_factor != 1.0:
        raise NotAllowed(
            f"gradient_predivide_factor={gradient_predivide_factor} is not needed, since the servers add up half "
            f"precision in float32: leave it out"
        )
    return AccumulatingOptimizer(
        _session.collectives,
        optimizer,
        named_parameters,
        op,
        compression,
        backward_passes_per_step,
        sparse_as_dense=sparse_as_dense,
        on_step=_session.count_step,
    )


# ── the others ──


def barrier() -> None:
    """Wait for all workers."""
    _session.store.barrier("kvd.compat")


def join() -> int:
    """Wait for all workers to run out of data: until then the others go on without this one.

    Returns:
        The rank of the worker that made most steps of a `DistributedOptimizer`, whose parameters are the newest; the
        highest one if there are several.

    Raises:
        BarrierBroken: a worker died before it came.
    """
    return _session.collectives.join(_session.steps)


def _reduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    *,
    in_place: bool,
) -> Operation:
    return _session.collectives.reduce(
        tensors, _op(average, op), name=name, in_place=in_place, prescale=prescale, postscale=postscale
    )


def _first(group: Operation) -> Operation:
    """Return the operation of a group's only tensor."""
    return Operation([group], lambda: group.wait()[0])


def _op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if op is None:
        return Sum if average is False else Average
    if average is not None:
        raise NotAllowed("average and op say the same: give op alone")
    if not isinstance(op, ReduceOp):
        raise NotAllowed(f"op is hvd.Average or hvd.Sum, not {op!r:.40}")
    return op
