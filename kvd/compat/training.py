"""What Horovod and BytePS offer for a training: a wrapped optimizer, and one worker's parameters and states for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import kvd.torch as kt
from kvd.compat.collectives import Collectives, ReduceOp
from kvd.compat.compression import Compressor
from kvd.errors import NotAllowed

_engine: Any = torch.autograd.Variable._execution_engine


class AccumulatingOptimizer(kt.DistributedOptimizer):
    """A torch optimizer whose gradients are reduced over the workers in the last ``backward()`` of each step.

    When that ``backward()`` returns, each ``.grad`` is the mean or the sum over the workers: gradients can be clipped
    and unscaled right away. Every worker begins with the parameters of worker 0.

    Args:
        collectives: the calls of this worker.
        optimizer: the one that is wrapped; it updates the parameters in each worker.
        named_parameters: their names are keys; None: they are numbered.
        op: how gradients are reduced.
        compression: the form in which they travel.
        passes: how many ``backward()`` a step has; their gradients are added up.
        sparse_as_dense: whether sparse gradients travel as dense ones, which are refused otherwise.
        on_step: called after each step.

    Raises:
        NotAllowed: an argument is wrong; see also `kvd.torch.DistributedOptimizer`.
    """

    def __init__(
        self,
        collectives: Collectives,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        op: ReduceOp,
        compression: type[Compressor],
        passes: int,
        *,
        sparse_as_dense: bool = False,
        on_step: Callable[[], None],
    ) -> None:
        if not isinstance(op, ReduceOp):
            raise NotAllowed(f"op is Average or Sum, not {op!r:.40}")
        named = _numbered(optimizer) if named_parameters is None else list(named_parameters)
        super().__init__(
            optimizer,
            named,
            where="workers",
            op=op.value,
            store=collectives.store,
            compression=None if compression is Compressor else compression.options,
            sparse="dense" if sparse_as_dense else "refuse",
        )
        collectives.is_compressed |= compression is not Compressor
        self._collectives = collectives
        self._optimizer = optimizer
        self._op = op
        self._on_step = on_step
        self._trained = [parameter for _, parameter in named if parameter.requires_grad]
        self._made = 0  # passes of this step
        self._is_in_pass = self._skips = self._was_reduced_late = False
        self._local = ExitStack()  # holds `no_sync` until the last pass of a step
        self._counts_passes = False
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many ``backward()`` a step has. Call it between two steps."""
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise NotAllowed(f"backward_passes_per_step is a whole number, 1 or more, not {passes!r:.40}")
        self._passes_per_step = passes
        if passes > 1 and not self._counts_passes:
            self._counts_passes = True
            for parameter in self._trained:
                hookable: Any = parameter
                hookable.register_post_accumulate_grad_hook(self._notice_pass)
        self._begin_step()

    def synchronize(self) -> None:
        """Reduce the gradients now, if the step has made fewer ``backward()`` than it should. Otherwise they are
        reduced already, and nothing happens."""
        if not 0 < self._made < self._passes_per_step:
            return
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        self._collectives.reduce(gradients, self._op, in_place=True).wait()
        self._made = self._passes_per_step
        self._was_reduced_late = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` does not call `synchronize`, since the program has."""
        before, self._skips = self._skips, True
        try:
            yield
        finally:
            self._skips = before

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; see `kvd.torch.DistributedOptimizer.step`."""
        if not self._skips:
            self.synchronize()
        if self._was_reduced_late:
            result = self._optimizer.step() if closure is None else self._optimizer.step(closure)
            self._passes.step_done()
        else:
            result = super().step(closure)
        self._begin_step()
        self._on_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # as in the base

    def _begin_step(self) -> None:
        self._made = 0
        self._was_reduced_late = False
        self._local.close()
        if self._passes_per_step > 1:
            self._local.enter_context(self.no_sync())

    def _notice_pass(self, parameter: torch.Tensor) -> None:
        """A gradient is complete: count the pass when it has ended."""
        if not self._is_in_pass:
            self._is_in_pass = True
            _engine.queue_callback(self._pass_ended)

    def _pass_ended(self) -> None:
        self._is_in_pass = False
        self._made += 1
        if self._made == self._passes_per_step - 1:
            self._local.close()


def broadcast_parameters(collectives: Collectives, parameters: Any, root: int) -> None:
    """Write the root's tensors into those of all workers.

    Args:
        parameters: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a list of these.

    Raises:
        NotAllowed: they are something else, or a value of the dict is no tensor.
        ShapeMismatch, DtypeMismatch: the root has others; the first one that differs is named.
    """
    if isinstance(parameters, torch.Tensor) or not isinstance(parameters, Mapping | Iterable):
        text = f"parameters to broadcast are a dict or a list of tensors, not a {type(parameters).__name__}"
        raise NotAllowed(f"{text}: pass model.state_dict()")
    if isinstance(parameters, Mapping):
        named = sorted(parameters.items())
    else:
        listed = list(parameters)
        named = [entry if isinstance(entry, tuple) else (str(place), entry) for place, entry in enumerate(listed)]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise NotAllowed(f"{name!r} is a {type(tensor).__name__}, not a tensor: use broadcast_object for it")
    collectives.broadcast_all(named, root)


def broadcast_optimizer_state(collectives: Collectives, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Load the root's optimizer state and hyperparameters in all workers.

    Raises:
        NotAllowed: the state holds something that is not sent; the text says where.
    """
    state = collectives.broadcast_object(optimizer.state_dict(), root)
    if collectives.store.rank != root:
        optimizer.load_state_dict(state)


def _numbered(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of an optimizer with their numbers as names."""
    groups = optimizer.param_groups
    return [
        (f"parameter.{place}.{number}", parameter)
        for place, group in enumerate(groups)
        for number, parameter in enumerate(group["params"])
    ]
