"""Forward and backward of a `Sequential` on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.device import Array, HostArray, Shape
from kvd.parallel.device_threads import outside_of_turn
from kvd.parallel.models.bind_plan import BindPlan, check_fits, check_names
from kvd.parallel.models.executor import ExecutorArrays
from kvd.parallel.models.model import GradientHook, MonitorHook, RowReader
from kvd.parallel.models.numpy.blas import share_of_cpu
from kvd.parallel.models.numpy.layer import Frame, Layer
from kvd.parallel.models.numpy.losses import Loss
from kvd.parallel.models.numpy.workspace import Workspace
from kvd.parallel.models.row_gradients import check_dense, check_rows, no_rows


class SequentialPasses:
    """See `kvd.parallel.models.executor.Passes`; made by `Sequential.bind`.

    With the same inputs, parameters, states and step, forward and backward give the same bits every time.

    Attributes:
        arrays: of the executor.
        loss: always None: a `Loss` gives predictions and gradients, not its own value.

    Arguments:
        layers, final: the layers, and the loss after them, if there is one.
        shapes: of the data and of each layer's output, batch first.
        aux: the initial value of each state that the plan does not give.
        dtype: of the computation.
    """

    loss: None = None

    def __init__(
        self,
        layers: Sequence[Layer],
        final: Loss | None,
        plan: BindPlan,
        shapes: Sequence[Shape],
        aux: Mapping[str, HostArray],
        dtype: np.dtype[Any],
    ) -> None:
        self._layers = layers
        self._final = final
        self._plan = plan
        self._dtype = dtype
        (self._data,) = plan.data
        self._label = plan.labels[0] if plan.labels else None
        with plan.device.current():
            self.arrays = self._make_arrays(aux)
        self._step = 0
        self._workspace = Workspace(plan.device, dtype)
        self._frames = [self._frame(i, layer, shapes[i]) for i, layer in enumerate(layers)]
        self._let_overwrite()
        self._final_frame = self._new_frame(str(final.name) if final else "", len(layers))
        self._stop = self._first_layer_with_gradients()
        self._monitor: MonitorHook | None = None
        self._kept: tuple[Array, Array | None] | None = None  # output and label of the last forward

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """See `kvd.parallel.Executor.set_monitor`."""
        self._monitor = hook and outside_of_turn(hook)

    def set_row_reader(self, reader: RowReader | None) -> None:
        """See `kvd.parallel.ReadsRows`."""
        for frame in self._frames:
            frame.row_reader = reader and outside_of_turn(reader)

    def forward(self, inputs: Mapping[str, Array], step: int, is_train: bool) -> list[Array]:
        """The output, in a list. Raises what the layers raise for wrong values (ValueError)."""
        self._step = step
        with share_of_cpu(self._plan.device):
            return [self._forward(inputs, is_train)]

    def backward(self, out_grads: Sequence[Array] | None, on_gradient: GradientHook | None) -> None:
        """Write the gradients, last layer first. Raises ValueError for labels that are out of range."""
        with share_of_cpu(self._plan.device):
            self._backward(out_grads, on_gradient and outside_of_turn(on_gradient))

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """See `kvd.parallel.Executor.use_gradients`."""
        grads = self.arrays.grads
        check_dense(arrays, self._plan.description)
        shapes = self._plan.description.params
        self._check_given("grads", arrays, {name: shapes[name] for name in grads})
        grads.update(arrays)
        for frame in self._frames:
            frame.grads.update({own: grads[f"{frame.name}_{own}"] for own in frame.grads})

    def _forward(self, inputs: Mapping[str, Array], is_train: bool) -> Array:
        xp = self._plan.device.xp
        x = xp.moveaxis(xp.asarray(inputs[self._data.name]), self._data.batch_axis, 0)
        if self._layers[0].is_differentiable:  # else: ids, which a float32 could not hold beyond 2²⁴
            x = xp.asarray(x, dtype=self._dtype)
        for layer, frame in zip(self._layers, self._frames, strict=True):
            frame.is_train = is_train
            x = layer.forward(frame, x)
            if not is_train:
                frame.saved.clear()
            self._show(frame, x)
        if self._final is not None:
            x = self._final.forward(self._final_frame, x)
            self._show(self._final_frame, x)
        if self._workspace.holds(x):  # the caller may keep it
            x = xp.array(x, order="C")
        self._kept = x, None if self._label is None else inputs.get(self._label.name)
        return x

    def _backward(self, out_grads: Sequence[Array] | None, on_gradient: GradientHook | None) -> None:
        grad: Array | None = self._head_gradient(out_grads)
        for index in range(len(self._frames) - 1, self._stop - 1, -1):
            frame = self._frames[index]
            frame.on_gradient = on_gradient
            grad = self._layers[index].backward(frame, grad)
        for frame in self._frames[: self._stop]:
            frame.saved.clear()
        self._put_input_gradient(grad)

    def _head_gradient(self, out_grads: Sequence[Array] | None) -> Array:
        """The gradient of the last layer's output: from the loss, or as given."""
        xp = self._plan.device.xp
        if self._final is None:
            assert out_grads is not None
            return xp.asarray(out_grads[0], dtype=self._dtype)
        assert self._kept is not None
        assert self._label is not None
        output, given = self._kept
        label = xp.moveaxis(xp.asarray(given), self._label.batch_axis, 0)
        return self._final.backward(self._final_frame, output, label, self._plan.normalization)

    def _put_input_gradient(self, grad: Array | None) -> None:
        for name, target in self.arrays.input_grads.items():  # at most one
            moved = self._plan.device.xp.moveaxis(grad, 0, self._data.batch_axis)
            if self._plan.requests[name] == "add":
                target += moved
            else:
                target[...] = moved

    def _show(self, frame: Frame, output: Array) -> None:
        if self._monitor is not None:
            self._monitor(f"{frame.name}_output", output)

    def _make_arrays(self, aux: Mapping[str, HostArray]) -> ExecutorArrays:
        plan, described = self._plan, self._plan.description
        states = self._arrays("aux", described.aux, plan.aux)
        for name, value in aux.items():
            if name not in plan.aux:
                states[name][...] = plan.device.array(value)
        trained = {name: described.params[name] for name in plan.trained()}
        inputs = {desc.name: desc.shape for desc in plan.data if plan.wants_gradient(desc.name)}
        return ExecutorArrays(
            params=self._arrays("params", described.params, plan.params),
            aux=states,
            grads=self._gradients(trained),
            input_grads=self._arrays("input_grads", inputs, {}),
        )

    def _gradients(self, trained: Mapping[str, Shape]) -> dict[str, Array]:
        """As `_arrays`; those of row-sparse parameters hold rows."""
        plan = self._plan
        check_names("grads", plan.grads, trained)
        dense = {name: shape for name, shape in trained.items() if name not in plan.description.row_sparse}
        made = self._arrays("grads", dense, {name: plan.grads[name] for name in plan.grads if name in dense})
        for name, shape in trained.items():
            if name in dense:
                continue
            if name in plan.grads:
                check_rows(name, plan.grads[name], plan.device, shape, self._dtype)
                made[name] = plan.grads[name]
            else:
                made[name] = no_rows(plan.device, shape, self._dtype)
        return {name: made[name] for name in trained}

    def _arrays(self, what: str, shapes: Mapping[str, Shape], given: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays of these names: the given ones, which must fit, and zeros for the others."""
        self._check_given(what, given, shapes)
        xp = self._plan.device.xp
        return {
            name: given[name] if name in given else xp.zeros(shape, dtype=self._dtype) for name, shape in shapes.items()
        }

    def _check_given(self, what: str, given: Mapping[str, Array], shapes: Mapping[str, Shape]) -> None:
        check_names(what, given, shapes)
        for name, array in given.items():
            if not isinstance(array, self._plan.device.xp.ndarray):
                text = f"{what}: {name} is a {type(array).__name__}, not an array of {self._plan.device}"
                raise ConfigError(text, setting=what)
            check_fits(what, name, array, shapes[name], self._dtype)
            if what == "grads" and not array.flags.c_contiguous:
                text = f"{what}: {name} is not C-contiguous, and gradients are written in place"
                raise ConfigError(text, setting=what)

    def _frame(self, index: int, layer: Layer, shape: Shape) -> Frame:
        """The frame of one layer: the executor's arrays under the layer's own names."""
        frame = self._new_frame(str(layer.name), index)
        prefix = f"{layer.name}_"
        for name in layer.parameter_shapes(shape):
            frame.params[name] = self.arrays.params[prefix + name]
            frame.grad_req[name] = self._plan.requests[prefix + name]
            if frame.grad_req[name] != "null":
                frame.grads[name] = self.arrays.grads[prefix + name]
        for name in layer.aux_shapes(shape):
            frame.aux[name] = self.arrays.aux[prefix + name]
        return frame

    def _let_overwrite(self) -> None:
        """Tell each layer whether anyone still needs its input."""
        is_free = False  # the data is the caller's
        for layer, frame in zip(self._layers, self._frames, strict=True):
            frame.may_overwrite_input = is_free
            is_free = not layer.keeps_output and (is_free or not layer.passes_input_on)

    def _first_layer_with_gradients(self) -> int:
        """Where backward may stop: the layers before it have no gradients to compute.

        Raises:
            ConfigError: the gradient of the data is requested, but the first layer has none.
        """
        if self.arrays.input_grads:
            if not self._layers[0].is_differentiable:
                text = f"{self._layers[0].name} has no gradient for {self._data.name!r}"
                raise ConfigError(text, setting="grad_req")
            return 0
        first = next((i for i, frame in enumerate(self._frames) if frame.grads), len(self._frames))
        if first < len(self._frames):
            self._frames[first].needs_input_gradient = False
        return first

    def _new_frame(self, name: str, index: int) -> Frame:
        def generator() -> np.random.Generator:
            return np.random.default_rng([*self._plan.seed, index, self._step])

        return Frame(name, self._plan.device, self._dtype, {}, {}, {}, {}, generator, self._workspace)
