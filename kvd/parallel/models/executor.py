"""The executor of every model here: what it allows and keeps between passes. The library's part is its `Passes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from kvd.errors import NotAllowed
from kvd.parallel.device import Array
from kvd.parallel.models.bind_plan import BindPlan
from kvd.parallel.models.model import GradientHook, GradReq, MonitorHook, RowReader


@dataclass(frozen=True)
class ExecutorArrays:
    """The arrays of an executor, each by name; see `kvd.parallel.Executor`.

    Attributes:
        params, aux: all parameters and states.
        grads, input_grads: of the parameters and data inputs whose request is not ``"null"``.
    """

    params: dict[str, Array]
    aux: dict[str, Array]
    grads: dict[str, Array]
    input_grads: dict[str, Array]


class Passes(Protocol):
    """Forward and backward of one model on one device, in one library. All arguments have been checked."""

    @property
    def arrays(self) -> ExecutorArrays:
        """The arrays that the passes read and write."""
        ...

    @property
    def loss(self) -> float | None:
        """The loss of the last forward for training; None if there was none, or the model does not tell it."""
        ...

    def set_row_reader(self, reader: RowReader | None) -> None:
        """See `kvd.parallel.ReadsRows`."""
        ...

    def forward(self, inputs: Mapping[str, Array], step: int, is_train: bool) -> list[Array]:
        """The outputs for these inputs. Random numbers depend on the seed and ``step``."""
        ...

    def backward(self, out_grads: Sequence[Array] | None, on_gradient: GradientHook | None) -> None:
        """Write the gradients, starting from ``out_grads``; None: from the loss."""
        ...

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """See `kvd.parallel.Executor.use_gradients`. Here the arrays are checked."""
        ...

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """See `kvd.parallel.Executor.set_monitor`."""
        ...


P = TypeVar("P", bound=Passes)


class DeviceExecutor(Generic[P]):
    """See `kvd.parallel.Executor`; the ``bind`` of a model makes it.

    Attributes:
        device: where the arrays live.
        step: the number of forward passes with ``is_train=True`` so far; settable.
        output_descs: name, shape, dtype and layout of each output.
        params, aux, grads, input_grads: name → array.
        grad_req: name → request, for every parameter and data input.
        passes: what computes.
    """

    def __init__(self, plan: BindPlan, passes: P) -> None:
        self.device = plan.device
        self.step = 0
        self.output_descs = plan.description.outputs
        self.params: Mapping[str, Array] = MappingProxyType(passes.arrays.params)
        self.aux: Mapping[str, Array] = MappingProxyType(passes.arrays.aux)
        self.grads: Mapping[str, Array] = MappingProxyType(passes.arrays.grads)
        self.input_grads: Mapping[str, Array] = MappingProxyType(passes.arrays.input_grads)
        self.grad_req: Mapping[str, GradReq] = MappingProxyType(dict(plan.requests))
        self.passes = passes
        self._plan = plan
        self._outputs: list[Array] | None = None
        self._can_go_backward = False

    @property
    def outputs(self) -> list[Array]:
        """The outputs of the last forward. Raises NotAllowed before the first."""
        if self._outputs is None:
            raise NotAllowed("there is no output yet: run forward first")
        return list(self._outputs)

    @property
    def loss(self) -> float:
        """This device's part of the loss of the batch, of the last forward for training.

        Raises:
            NotAllowed: there was none, or the model has no loss or does not tell it (`Sequential`).
        """
        loss = self.passes.loss
        if loss is None:
            raise NotAllowed("there is no loss: it is computed by a forward for training, with labels")
        return loss

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """See `kvd.parallel.Executor.set_monitor`."""
        self.passes.set_monitor(hook)

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """See `kvd.parallel.Executor.use_gradients`."""
        self.passes.use_gradients(arrays)

    def set_row_reader(self, reader: RowReader | None) -> None:
        """See `kvd.parallel.ReadsRows`."""
        self.passes.set_row_reader(reader)

    def forward(self, inputs: Mapping[str, Array], is_train: bool) -> list[Array]:
        """See `kvd.parallel.Executor.forward`. Also raises what the model raises for wrong values."""
        self._plan.check_inputs(inputs, is_train)
        self._can_go_backward = False
        self._outputs = self.passes.forward(inputs, self.step, is_train)
        if is_train:
            self.step += 1
            self._can_go_backward = True
        return list(self._outputs)

    def backward(self, out_grads: Sequence[Array] | None = None, on_gradient: GradientHook | None = None) -> None:
        """See `kvd.parallel.Executor.backward`. Also raises what the model raises for wrong labels."""
        if not self._plan.for_training:
            raise NotAllowed("not bound for training: re-bind with for_training=True to run backward")
        if not self._can_go_backward:
            raise NotAllowed("backward needs a forward with is_train=True since the last backward")
        self._plan.check_head_gradients(out_grads)
        self._can_go_backward = False  # the pass uses up what forward left for it, even if it fails
        self.passes.backward(out_grads, on_gradient)
