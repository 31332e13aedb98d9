"""How the gradients that torch computes get into the executor's arrays, each as soon as it is complete."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kvd.errors import NotAllowed
from kvd.parallel.device import Array
from kvd.parallel.models.bind_plan import BindPlan, check_fits, check_names
from kvd.parallel.models.model import GradientHook
from kvd.parallel.models.row_gradients import check_dense, check_rows, no_rows
from kvd.parallel.models.torch.tensors import as_device_array, as_tensor, torch_stream


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
        self._rows = {name for name in trained if name in plan.description.row_sparse}
        self._check(plan.grads, {name: params[name] for name in trained})
        self.arrays: dict[str, Array] = {}
        for name in trained:
            like = params[name]
            if name in plan.grads:
                self.arrays[name] = plan.grads[name]
            elif name in self._rows:
                self.arrays[name] = no_rows(plan.device, like.shape, like.dtype)
            else:
                self.arrays[name] = xp.zeros(like.shape, dtype=like.dtype)
        self._targets = {
            name: as_tensor(array, plan.device) for name, array in self.arrays.items() if name not in self._rows
        }
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
        check_dense(arrays, self._plan.description)
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
                    self._clear(name)
                if on_gradient is not None:
                    on_gradient(name)

    def _accumulated(self, name: str, tensor: torch.Tensor) -> None:
        """torch has the gradient of a parameter. On CUDA this is one of torch's threads and streams, not ours.

        torch always computes into memory of its own. With our array as ``.grad`` it would add to it: that costs
        zeroing it first and one more read than this copy, and -0.0 would become 0.0.
        """
        gradient = tensor.grad
        assert gradient is not None
        with self._stream_of_the_device_thread(), torch.no_grad():
            if name in self._rows:
                self._take_rows(name, gradient)
            elif self._plan.requests[name] == "add":
                self._targets[name].add_(gradient)
            else:
                self._targets[name].copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            tensor.grad = None
            self._written.add(name)
            if self._on_gradient is not None:
                self._on_gradient(name)

    def _take_rows(self, name: str, gradient: torch.Tensor) -> None:
        """Those of the same id are added up."""
        if not gradient.is_sparse:
            text = f"the gradient of {name} is dense, though its embedding is sparse: its weight is used elsewhere, too"
            raise NotAllowed(f"{text}; write sparse=False")
        array, device = self.arrays[name], self._plan.device
        if self._plan.requests[name] == "add" and len(array.ids):
            ids, rows = as_tensor(array.ids, device), as_tensor(array.rows, device)
            gradient = gradient + torch.sparse_coo_tensor(ids[None], rows, gradient.shape, check_invariants=False)
        summed = gradient.coalesce()
        array.ids = as_device_array(summed.indices()[0].contiguous(), device)
        array.rows = as_device_array(summed.values(), device)

    def _clear(self, name: str) -> None:
        if name in self._rows:
            array = self.arrays[name]
            array.ids, array.rows = array.ids[:0], array.rows[:0]
        else:
            self._targets[name].zero_()

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
            if name in self._rows:
                check_rows(name, array, self._plan.device, like[name].shape, like[name].dtype)
                continue
            check_fits("grads", name, array, like[name].shape, like[name].dtype)
