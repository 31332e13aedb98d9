"""BytePS's names for torch: ``import kvd.compat.byteps.torch as bps`` in place of ``import byteps.torch as bps``.

The program is started by ``kvd launch -n WORKERS -- python train.py``, or alone. kvd's servers take the place of
BytePS's, and need no ``bpslaunch``. `docs/porting.md` says what is left out, and what to use instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvd.compat.autograd import Reduction, reduced
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
    "rank",
    "size",
    "local_rank",
    "local_size",
    "declare",
    "push_pull",
    "push_pull_async",
    "push_pull_inplace",
    "push_pull_async_inplace",
    "poll",
    "synchronize",
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "Compression",
    "DistributedOptimizer",
    "DistributedDataParallel",
]

_session = Session("BytePS", "bps")

init = _session.init
shutdown = _session.shutdown
rank = _session.rank
size = _session.size
local_rank = _session.local_rank
local_size = _session.local_size

_LEFT_OUT = {
    "suspend": "with --max-workers, workers leave and join while the others go on",
    "resume": "with --max-workers, workers leave and join while the others go on",
    "parallel": "import DistributedDataParallel from kvd.compat.byteps.torch",
    "cross_barrier": "gradients of the first layers overtake the others anyway",
}


def __getattr__(name: str) -> Any:
    raise left_out(__name__, _LEFT_OUT, name)


def declare(name: str) -> None:
    """Do nothing: for programs of BytePS. A name is declared by its first `push_pull`."""


def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: type[Compressor] = Compression.none,
) -> torch.Tensor:
    """Return the mean or the sum of a tensor over the workers. Gradients flow through it.

    Args:
        average: False: the sum.
        name: of the call, which is the same in all workers.
        version: for programs of BytePS; the servers count versions.
        priority: calls with higher ones leave this worker first.
        compression: `Compression.fp16` to send it as float16.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: there is no name, as in BytePS; or the tensor is sparse.
        DtypeMismatch: no key can have its dtype.
        ShapeMismatch: worker 0 has used the name for another shape.
    """
    if name is None:
        raise NotAllowed('push_pull needs a name, which all workers use for the same tensor: push_pull(x, name="loss")')
    sent, context = compression.compress(tensor)
    [result] = reduced(_session.collectives, Reduction(_op(average), name, priority), [sent])
    return compression.decompress(result, context)


def push_pull_async(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> Operation:
    """Begin what `push_pull` does, without gradients; return a handle for `synchronize` and `poll`.

    Without a name, calls are matched by their order.
    """
    return _begun(tensor, average, name, priority, in_place=False)


def push_pull_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> torch.Tensor:
    """Reduce a tensor in place, and return it. Without a name, calls are matched by their order."""
    result: torch.Tensor = push_pull_async_inplace(tensor, average, name, version, priority).wait()
    return result


def push_pull_async_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> Operation:
    """Begin to reduce a tensor in place; return a handle. Leave the tensor alone until `synchronize` has returned."""
    return _begun(tensor, average, name, priority, in_place=True)


def poll(handle: Operation) -> bool:
    """Return True if `synchronize` would not wait."""
    return handle.done()


def synchronize(handle: Operation) -> torch.Tensor:
    """Wait for the end of a call, and return its tensor.

    Raises:
        KvdError: the call failed.
    """
    result: torch.Tensor = handle.wait()
    return result


def broadcast_parameters(params: Any, root_rank: int, prefix: str = "Parameter.") -> None:
    """Write the root's parameters into those of all workers.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a list of these.
        root_rank: the worker with the parameters.
        prefix: for programs of BytePS; no key stays behind.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: `params` is something else, or no worker has this rank.
        ShapeMismatch, DtypeMismatch: the root has other parameters; the first one that differs is named.
    """
    _broadcast_parameters(_session.collectives, params, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter.") -> None:
    """Load the root's optimizer state and hyperparameters in all workers.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: no worker has this rank, or the state holds something that is not sent.
    """
    _broadcast_optimizer_state(_session.collectives, optimizer, root_rank)


def DistributedOptimizer(  # noqa: N802  BytePS's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
) -> AccumulatingOptimizer:
    """Wrap an optimizer, so that gradients are averaged over the workers during ``backward()``.

    When ``backward()`` returns, each ``.grad`` is the mean. All workers begin with the parameters of worker 0.

    Args:
        optimizer: the optimizer to wrap.
        named_parameters: ``model.named_parameters()``; the names are keys of the store. None: they are numbered.
        compression: `Compression.fp16` to send gradients of 64 KiB and more as float16.
        backward_passes_per_step: how many ``backward()`` a step has, whose gradients are added up.

    Returns:
        The wrapped optimizer, also with BytePS's ``synchronize``, ``skip_synchronize`` and
        ``set_backward_passes_per_step``.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: an argument is wrong, or other workers have other parameters, as in
            `kvd.torch.DistributedOptimizer`.
    """
    return AccumulatingOptimizer(
        _session.collectives,
        optimizer,
        named_parameters,
        ReduceOp.AVERAGE,
        compression,
        backward_passes_per_step,
        on_step=_session.count_step,
    )


class DistributedDataParallel(torch.nn.Module):
    """A module whose gradients are averaged over the workers during ``backward()``; any optimizer updates it.

    All workers begin with the parameters and buffers of worker 0.

    Args:
        module: the module to wrap.
        device_ids: for programs of BytePS: at most one device, where the module is already.
        broadcast_buffers: give all workers the buffers of worker 0, such as the statistics of BatchNorm, before each
            forward for training.
        compression: `Compression.fp16` to send gradients of 64 KiB and more as float16.

    Attributes:
        module: the wrapped module.

    Raises:
        NotInitialized: before `init`.
        NotAllowed: there are several devices; or other workers have another module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        broadcast_buffers: bool = True,
        compression: type[Compressor] = Compression.none,
    ) -> None:
        super().__init__()
        if device_ids is not None and len(device_ids) > 1:
            raise NotAllowed(f"device_ids has {len(device_ids)} devices: start a worker for each")
        self.module = module
        self._broadcasts_buffers = broadcast_buffers
        _broadcast_parameters(_session.collectives, module.state_dict(), 0)
        # The optimizer makes no step: it is what the reduction of gradients is attached to.
        holder = torch.optim.SGD(module.parameters(), lr=0.0)
        self._gradients = DistributedOptimizer(holder, module.named_parameters(), compression)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module, for training with the buffers of worker 0."""
        if self._broadcasts_buffers and self.training and torch.is_grad_enabled():
            _broadcast_parameters(_session.collectives, list(self.module.named_buffers()), 0)
        return self.module(*inputs, **named)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients only accumulate. The next ``backward()`` outside of it sends the sum."""
        return self._gradients.no_sync()

    def synchronize(self) -> None:
        """Do nothing: for programs of BytePS. Gradients are complete when ``backward()`` returns."""


def _op(average: bool) -> ReduceOp:
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def _begun(tensor: torch.Tensor, average: bool, name: str | None, priority: int, *, in_place: bool) -> Operation:
    group = _session.collectives.reduce([tensor], _op(average), name=name, in_place=in_place, priority=priority)
    return Operation([group], lambda: group.wait()[0])
