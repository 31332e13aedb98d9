"""How the gradients that torch computes get into the executor's arrays, each as soon as it is complete."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kvd.parallel.device import Array
from kvd.parallel.models.bind_plan import BindPlan, check_fits, check_names
from kvd.parallel.models.model import GradientHook
from kvd.parallel.models.torch.tensors import as_tensor, torch_stream


class GradientWriter:
    """Runs torch's backward, which calls this for every parameter whose gradient is complete.

    Attributes:
        arrays: name → gradient array of each parameter that has one; zeros unless the plan gives them.

    Arguments:
        plan: of the executor.
        tensors: all parameters of the module.
        params: the same, as arrays of the device.

    Raises:
        ConfigError, ShapeMismatch, DtypeMismatch: the plan gives gradient arrays that do not fit.
    """

    def __init__(self, plan: BindPlan, tensors: Mapping[str, torch.Tensor], params: Mapping[str, Array]) -> None:
        self._plan = plan
        self._tensors = tensors
        trained = plan.trained()
        xp = plan.device.xp
        self._check(plan.grads, {name: params[name] for name in trained})
        self.arrays: dict[str, Array] = {
            name: plan.grads[name] if name in plan.grads else xp.zeros(params[name].shape, dtype=params[name].dtype)
            for name in trained
        }
        self._targets = {name: as_tensor(array, plan.device) for name, array in self.arrays.items()}
        self._on_gradient: GradientHook | None = None
        self._written: set[str] = set()
        self._stream: Any = None
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in self.arrays)
            if name in self.arrays:
                hook: Any = functools.partial(self._accumulated, name)
                tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def use(self, arrays: Mapping[str, Array]) -> None:
        """See `kvd.parallel.Executor.use_gradients`."""
        self._check(arrays, self.arrays)
        self.arrays.update(arrays)
        self._targets.update({name: as_tensor(array, self._plan.device) for name, array in arrays.items()})

    def backward(
        self,
        roots: Sequence[torch.Tensor],
        heads: Sequence[torch.Tensor | None],
        on_gradient: GradientHook | None,
    ) -> None:
        """Write the gradients of ``roots``, weighted by ``heads``; ``on_gradient`` is called for each parameter."""
        device = self._plan.device
        self._on_gradient, self._written = on_gradient, set()
        self._stream = device.xp.cuda.get_current_stream() if device.is_cuda else None
        try:
            torch.autograd.backward(roots, heads)
        finally:
            self._on_gradient = None
            for tensor in self._tensors.values():
                tensor.grad = None
        for name in reversed(list(self.arrays)):
            if name not in self._written:  # it has no part in these roots
                if self._plan.requests[name] == "write":
                    self._targets[name].zero_()
                if on_gradient is not None:
                    on_gradient(name)

    def _accumulated(self, name: str, tensor: torch.Tensor) -> None:
        """torch has the gradient of a parameter. On CUDA this is one of torch's threads and streams, not ours.

        torch always computes into memory of its own. With our array as ``.grad`` it would add to it: that costs
        zeroing it first and one more read than this copy, and -0.0 would become 0.0.
        """
        target, gradient = self._targets[name], tensor.grad
        assert gradient is not None
        with self._stream_of_the_device_thread(), torch.no_grad():
            if self._plan.requests[name] == "add":
                target.add_(gradient)
            else:
                target.copy_(gradient)
            tensor.grad = None
            self._written.add(name)
            if self._on_gradient is not None:
                self._on_gradient(name)

    @contextlib.contextmanager
    def _stream_of_the_device_thread(self) -> Iterator[None]:
        """Make the stream on which `backward` was called current for both libraries, after what torch queued."""
        if self._stream is None:
            yield
            return
        device = self._plan.device
        ours = torch_stream(self._stream, device)
        ours.wait_stream(torch.cuda.current_stream(device.index))
        with device.current(), self._stream, torch.cuda.stream(ours):
            yield

    def _check(self, given: Mapping[str, Array], like: Mapping[str, Array]) -> None:
        check_names("grads", given, like)
        for name, array in given.items():
            check_fits("grads", name, array, like[name].shape, like[name].dtype)
