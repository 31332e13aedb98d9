"""Forward and backward of a `TorchModel` on one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvd.errors import ConfigError, ShapeMismatch
from kvd.parallel.device import Array
from kvd.parallel.models.bind_plan import BindPlan, check_names
from kvd.parallel.models.executor import ExecutorArrays
from kvd.parallel.models.model import GradientHook, MonitorHook, RowReader
from kvd.parallel.models.torch.embeddings import RowReads
from kvd.parallel.models.torch.gradients import GradientWriter
from kvd.parallel.models.torch.loss import BatchLoss
from kvd.parallel.models.torch.module_copy import copy_module, restore_states
from kvd.parallel.models.torch.step_seed import StepSeed
from kvd.parallel.models.torch.tensors import as_device_array, as_tensor, outputs_of, torch_device, torch_stream
from kvd.parallel.models.torch.threads import CpuThreads


@dataclass(frozen=True)
class _Graph:
    """What a forward leaves for backward.

    Attributes:
        inputs: the data, in the order of their descriptions.
        outputs: by name.
    """

    inputs: list[torch.Tensor]
    outputs: dict[str, torch.Tensor]


class TorchPasses:
    """See `kvd.parallel.models.executor.Passes`; made by `TorchModel.bind`.

    With the same inputs, parameters, states and step, forward and backward give the same bits every time, as far as
    torch's operations do (on a CPU: with the same number of threads).

    Attributes:
        arrays: of the executor.
        module: this device's copy; its parameters use the memory of ``arrays.params``.

    Arguments:
        module: what to copy.
        loss: see `TorchModel`.
        threads: of the CPU devices.
    """

    def __init__(self, module: torch.nn.Module, loss: BatchLoss | None, plan: BindPlan, threads: CpuThreads) -> None:
        device, described = plan.device, plan.description
        where = torch_device(device)
        check_names("params", plan.params, described.params)
        check_names("aux", plan.aux, described.aux)
        self._plan = plan
        self._batch_loss = loss
        self._threads = threads
        self._seed = StepSeed(where, plan.seed)
        with device.current():
            self.module = copy_module(module, {**plan.params, **plan.aux}, device, where)
            named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
            self._states = {name: named[name] for name in described.aux}
            tensors = {name: named[name] for name in described.params}
            params = {**{name: as_device_array(tensor, device) for name, tensor in tensors.items()}, **plan.params}
            aux = {**{name: as_device_array(tensor, device) for name, tensor in self._states.items()}, **plan.aux}
            self._row_reads = RowReads(self.module, described.row_sparse, device)
            self._writer = GradientWriter(plan, tensors, params)
            self.arrays = ExecutorArrays(params, aux, self._writer.arrays, self._input_gradient_arrays())
        self._monitors: list[Any] = []
        self._graph: _Graph | None = None
        self._loss: torch.Tensor | None = None

    @property
    def loss(self) -> float | None:
        """This device's part of the loss of the batch, of the last forward for training."""
        return None if self._loss is None else float(self._loss)

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """Call ``hook(name, array)`` with the output of every module that has no modules inside; None ends it."""
        for handle in self._monitors:
            handle.remove()
        self._monitors = []
        if hook is None:
            return
        for name, module in self.module.named_modules():
            if next(module.children(), None) is None:
                self._monitors.append(module.register_forward_hook(functools.partial(self._show, hook, name)))

    def set_row_reader(self, reader: RowReader | None) -> None:
        """See `kvd.parallel.ReadsRows`."""
        self._row_reads.reader = reader

    def forward(self, inputs: Mapping[str, Array], step: int, is_train: bool) -> list[Array]:
        """The outputs. Raises what the module raises, and ShapeMismatch if they are not as described."""
        plan = self._plan
        self._graph = self._loss = None
        with_graph = is_train and plan.for_training
        self.module.train(is_train)
        with self._current(), torch.set_grad_enabled(with_graph), self._seed.during(step, is_train):
            tensors = [as_tensor(inputs[desc.name], plan.device) for desc in plan.data]
            for desc, tensor in zip(plan.data, tensors, strict=True):
                if with_graph and plan.wants_gradient(desc.name):
                    tensor.requires_grad_()
            returned = self.module(*tensors)
            outputs = self._checked_outputs(returned)
            if with_graph and self._batch_loss is not None and plan.labels:
                self._loss = self._batch_loss.part(returned, self._labels(inputs), plan.samples, plan.normalization)
            restore_states(self.module, self._states)
        self._graph = _Graph(tensors, outputs)
        return [as_device_array(tensor, plan.device) for tensor in outputs.values()]

    def backward(self, out_grads: Sequence[Array] | None, on_gradient: GradientHook | None) -> None:
        """Write the gradients as torch computes them, which is last layer first."""
        assert self._graph is not None
        if out_grads is None:
            assert self._loss is not None
            roots: list[torch.Tensor] = [self._loss]
            heads: list[torch.Tensor | None] = [None]
        else:
            roots, heads = self._roots(self._graph, out_grads)
        with self._current():
            self._writer.backward(roots, heads, on_gradient)
            self._put_input_gradients(self._graph)
        self._graph = None  # it is used up: let its memory go
        if self._loss is not None:
            self._loss = self._loss.detach()

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """See `kvd.parallel.Executor.use_gradients`."""
        self._writer.use(arrays)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """torch works with this device's share of the threads or, on CUDA, on the stream that is current for CuPy."""
        device = self._plan.device
        if not device.is_cuda:
            with self._threads.share():
                yield
            return
        with torch.cuda.stream(torch_stream(device.xp.cuda.get_current_stream(), device)):
            yield

    def _checked_outputs(self, returned: Any) -> dict[str, torch.Tensor]:
        outputs = outputs_of(returned)
        got = [(name, tuple(tensor.shape)) for name, tensor in outputs.items()]
        wanted = [(desc.name, desc.shape) for desc in self._plan.description.outputs]
        if got != wanted:
            raise ShapeMismatch(f"the module returned {got}, but was described as {wanted}")
        return outputs

    def _labels(self, inputs: Mapping[str, Array]) -> list[torch.Tensor]:
        return [as_tensor(inputs[desc.name], self._plan.device) for desc in self._plan.labels]

    def _roots(self, graph: _Graph, out_grads: Sequence[Array]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The outputs that have gradients, and their head gradients."""
        device = self._plan.device
        roots: list[torch.Tensor] = []
        heads: list[torch.Tensor | None] = []
        for output, head in zip(graph.outputs.values(), out_grads, strict=True):
            if output.requires_grad:
                own = head if device.is_cuda else device.xp.require(head, requirements=["C", "W"])
                roots.append(output)
                heads.append(as_tensor(device.xp.asarray(own), device).to(output.dtype))
        return roots, heads

    def _put_input_gradients(self, graph: _Graph) -> None:
        for desc, tensor in zip(self._plan.data, graph.inputs, strict=True):
            if desc.name not in self.arrays.input_grads:
                continue
            target = as_tensor(self.arrays.input_grads[desc.name], self._plan.device)
            if self._plan.requests[desc.name] == "write":
                target.zero_()
            if tensor.grad is not None:
                target += tensor.grad

    def _input_gradient_arrays(self) -> dict[str, Array]:
        arrays = {}
        for desc in self._plan.data:
            if self._plan.wants_gradient(desc.name):
                if not getattr(torch, desc.dtype).is_floating_point:
                    raise ConfigError(f"{desc.name} is {desc.dtype}, which has no gradient", setting="grad_req")
                arrays[desc.name] = self._plan.device.xp.zeros(desc.shape, dtype=desc.dtype)
        return arrays

    def _show(self, hook: MonitorHook, name: str, _module: Any, _inputs: Any, output: Any) -> None:
        for own_name, tensor in outputs_of(output).items():
            hook(f"{name or 'module'}_{own_name}", as_device_array(tensor, self._plan.device))
