"""A `Sequential` bound to one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvd.errors import ConfigError, DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device, Shape
from kvd.parallel.models.model import GradientHook, GradReq, MonitorHook, resolve_grad_req
from kvd.parallel.models.numpy.layer import Frame, Layer

if TYPE_CHECKING:
    from kvd.parallel.models.numpy.sequential import Sequential


class SequentialExecutor:
    """See `kvd.parallel.Executor`; made by `Sequential.bind`.

    With the same inputs, parameters, states and `step`, forward and backward give the same bits every time.

    Attributes:
        device: where the arrays live.
        output_descs: name, shape and dtype of the one output.
        step: how many forward passes with ``is_train=True`` there were. Chance (dropout) depends on the seed and on
            this number, so that whoever sets it back, and the states too, gets the same step again.
    """

    def __init__(
        self,
        model: Sequential,
        device: Device,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc],
        *,
        for_training: bool,
        grad_req: GradReq | Mapping[str, GradReq],
        params: Mapping[str, Array] | None,
        grads: Mapping[str, Array] | None,
        aux: Mapping[str, Array] | None,
        normalization: int | None,
        seed: int | tuple[int, ...],
        dtype: str,
    ) -> None:
        device.check()
        description = model.describe(data, labels)
        self.device = device
        self.step = 0
        self._model = model
        self._data = data[0]
        self._label = labels[0] if labels else None
        self._dtype = _compute_dtype(dtype)
        (output,) = description.outputs
        self.output_descs = (DataDesc(output.name, output.shape, self._dtype.name, output.layout),)
        self._for_training = for_training
        self._normalization = _checked_normalization(normalization, output.shape[0])
        self._seed = (seed,) if isinstance(seed, int) else tuple(seed)
        self._grad_req = resolve_grad_req(grad_req, list(description.params), [self._data.name], for_training)
        with device.current():
            self._params = self._arrays("params", description.params, params)
            self._aux = self._initialized_aux(description.aux, aux)
            self._grads = self._arrays("grads", self._with_gradient(description.params), grads)
            self._input_grads = self._arrays(
                "input_grads", self._with_gradient({self._data.name: self._data.shape}), None
            )
        shapes = model.layer_shapes(self._data.batch_first_shape)
        self._frames = [self._frame(i, layer, shapes[i]) for i, layer in enumerate(model.layers)]
        self._loss_frame = self._new_frame(str(model.loss.name) if model.loss else "", len(model.layers))
        self._stop = self._first_layer_with_gradients()
        self._monitor: MonitorHook | None = None
        self._output: Array | None = None
        self._label_array: Array | None = None
        self._can_go_backward = False

    @property
    def params(self) -> Mapping[str, Array]:
        """Name → parameter, first layer first."""
        return MappingProxyType(self._params)

    @property
    def grads(self) -> Mapping[str, Array]:
        """Name → gradient array of each parameter whose request is not ``"null"``."""
        return MappingProxyType(self._grads)

    @property
    def aux(self) -> Mapping[str, Array]:
        """Name → state that gradients do not train."""
        return MappingProxyType(self._aux)

    @property
    def input_grads(self) -> Mapping[str, Array]:
        """The gradient of the data by its name, shaped as the data, if it was asked for."""
        return MappingProxyType(self._input_grads)

    @property
    def grad_req(self) -> Mapping[str, GradReq]:
        """Name → request, for every parameter and the data."""
        return MappingProxyType(self._grad_req)

    @property
    def outputs(self) -> list[Array]:
        """The output of the last forward, in a list. Raises NotAllowed before the first."""
        if self._output is None:
            raise NotAllowed("there is no output yet: run forward first")
        return [self._output]

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """Call ``hook(name, array)`` with the output of every layer from the next forward on; None ends it."""
        self._monitor = hook

    def forward(self, inputs: Mapping[str, Array], is_train: bool) -> list[Array]:
        """See `kvd.parallel.Executor.forward`. Also raises what the layers raise for wrong values (ValueError)."""
        data, label = self._checked_inputs(inputs, is_train)
        self._can_go_backward = False
        x = self.device.xp.moveaxis(self.device.xp.asarray(data), self._data.batch_axis, 0)
        if self._model.layers[0].is_differentiable:  # else: ids, which a float32 could not hold beyond 2²⁴
            x = self.device.xp.asarray(x, dtype=self._dtype)
        for layer, frame in zip(self._model.layers, self._frames, strict=True):
            frame.is_train = is_train
            x = layer.forward(frame, x)
            if not is_train:
                frame.saved.clear()
            self._show(frame, x)
        if self._model.loss is not None:
            x = self._model.loss.forward(self._loss_frame, x)
            self._show(self._loss_frame, x)
        self._output, self._label_array = x, label
        if is_train:
            self.step += 1
            self._can_go_backward = True
        return [x]

    def backward(self, out_grads: Sequence[Array] | None = None, on_gradient: GradientHook | None = None) -> None:
        """See `kvd.parallel.Executor.backward`. Also raises ValueError for labels that are none."""
        self._check_backward()
        grad = self._head_gradient(out_grads)
        self._can_go_backward = False  # the layers give up what they saved
        for index in range(len(self._frames) - 1, self._stop - 1, -1):
            frame = self._frames[index]
            frame.on_gradient = on_gradient
            grad = self._model.layers[index].backward(frame, grad)
        for frame in self._frames[: self._stop]:
            frame.saved.clear()
        self._put_input_gradient(grad)

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """See `kvd.parallel.Executor.use_gradients`."""
        shapes = {name: array.shape for name, array in self._grads.items()}
        self._grads.update(self._arrays("grads", shapes, {**self._grads, **arrays}))
        for frame in self._frames:
            frame.grads.update({own: self._grads[f"{frame.name}_{own}"] for own in frame.grads})

    def _checked_inputs(self, inputs: Mapping[str, Array], is_train: bool) -> tuple[Array, Array | None]:
        descs = {desc.name: desc for desc in (self._data, self._label) if desc is not None}
        for name, array in inputs.items():
            if name not in descs:
                raise NotAllowed(f"{name!r} was not bound; bound inputs: {', '.join(descs)}", key=name)
            if tuple(array.shape) != descs[name].shape:
                raise ShapeMismatch(f"{name} has shape {array.shape}, but was bound with {descs[name].shape}", key=name)
        if self._data.name not in inputs:
            raise KeyNotFound(f"the data {self._data.name!r} is missing", key=self._data.name)
        if self._label is None:
            return inputs[self._data.name], None
        if is_train and self._for_training and self._label.name not in inputs:
            raise KeyNotFound(f"the label {self._label.name!r} is bound, and training needs it", key=self._label.name)
        return inputs[self._data.name], inputs.get(self._label.name)

    def _check_backward(self) -> None:
        if not self._for_training:
            raise NotAllowed("not bound for training: re-bind with for_training=True to run backward")
        if not self._can_go_backward:
            raise NotAllowed("backward needs a forward with is_train=True since the last backward")

    def _head_gradient(self, out_grads: Sequence[Array] | None) -> Array:
        """The gradient of the last layer's output: from the loss, or as given."""
        loss, shape = self._model.loss, self.output_descs[0].shape
        if loss is None:
            if out_grads is None or len(out_grads) != 1:
                raise NotAllowed("head gradients are required: the model has no loss, so give one array per output (1)")
            if tuple(out_grads[0].shape) != shape:
                raise ShapeMismatch(f"the head gradient has shape {out_grads[0].shape}, the output {shape}")
            return self.device.xp.asarray(out_grads[0], dtype=self._dtype)
        if out_grads is not None:
            raise NotAllowed(f"the model ends in {loss.name}, which starts backward itself: give no head gradients")
        if self._label is None or self._label_array is None:
            raise NotAllowed(f"{loss.name} needs a label for backward: bind one (label_shapes) and give it to forward")
        label = self.device.xp.moveaxis(self.device.xp.asarray(self._label_array), self._label.batch_axis, 0)
        return loss.backward(self._loss_frame, self._output, label, self._normalization)

    def _put_input_gradient(self, grad: Array | None) -> None:
        for name, target in self._input_grads.items():  # at most one
            moved = self.device.xp.moveaxis(grad, 0, self._data.batch_axis)
            if self._grad_req[name] == "add":
                target += moved
            else:
                target[...] = moved

    def _show(self, frame: Frame, output: Array) -> None:
        if self._monitor is not None:
            self._monitor(f"{frame.name}_output", output)

    def _with_gradient(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        return {name: shape for name, shape in shapes.items() if self._grad_req[name] != "null"}

    def _initialized_aux(self, shapes: Mapping[str, Shape], given: Mapping[str, Array] | None) -> dict[str, Array]:
        arrays = self._arrays("aux", shapes, given)
        for name, value in self._model.initialize_aux(self._data.batch_first_shape).items():
            if name not in (given or {}):
                arrays[name][...] = self.device.array(value)
        return arrays

    def _arrays(self, what: str, shapes: Mapping[str, Shape], given: Mapping[str, Array] | None) -> dict[str, Array]:
        """The arrays of these names: those given, which must fit, and zeros for the others."""
        given = given or {}
        for name, array in given.items():
            if name not in shapes:
                raise ConfigError(f"{what} has {name!r}, which the model does not need here", setting=what)
            self._check_given(what, name, array, shapes[name])
        xp = self.device.xp
        return {
            name: given[name] if name in given else xp.zeros(shape, dtype=self._dtype) for name, shape in shapes.items()
        }

    def _check_given(self, what: str, name: str, array: Array, shape: Shape) -> None:
        if not isinstance(array, self.device.xp.ndarray):
            raise ConfigError(f"{what}: {name} is a {type(array).__name__}, no array of {self.device}", setting=what)
        if tuple(array.shape) != tuple(shape):
            raise ShapeMismatch(f"{what}: {name} has shape {array.shape}, the model wants {shape}", key=name)
        if array.dtype != self._dtype:
            raise DtypeMismatch(f"{what}: {name} has dtype {array.dtype}, the executor {self._dtype}", key=name)
        if what == "grads" and not array.flags.c_contiguous:
            raise ConfigError(f"{what}: {name} is not C-contiguous, and gradients are written in place", setting=what)

    def _frame(self, index: int, layer: Layer, shape: Shape) -> Frame:
        """The frame of one layer: the executor's arrays under the layer's own names."""
        frame = self._new_frame(str(layer.name), index)
        prefix = f"{layer.name}_"
        for name in layer.parameter_shapes(shape):
            frame.params[name] = self._params[prefix + name]
            frame.grad_req[name] = self._grad_req[prefix + name]
            if frame.grad_req[name] != "null":
                frame.grads[name] = self._grads[prefix + name]
        for name in layer.aux_shapes(shape):
            frame.aux[name] = self._aux[prefix + name]
        return frame

    def _first_layer_with_gradients(self) -> int:
        """Where backward may stop: nobody asks for gradients of the layers before.

        Raises:
            ConfigError: the gradient of the data was asked for, but the first layer has none.
        """
        if self._input_grads:
            if not self._model.layers[0].is_differentiable:
                raise ConfigError(
                    f"{self._model.layers[0].name} has no gradient for {self._data.name!r}", setting="grad_req"
                )
            return 0
        first = next((i for i, frame in enumerate(self._frames) if frame.grads), len(self._frames))
        if first < len(self._frames):
            self._frames[first].needs_input_gradient = False
        return first

    def _new_frame(self, name: str, index: int) -> Frame:
        def generator() -> np.random.Generator:
            return np.random.default_rng([*self._seed, index, self.step])

        return Frame(name, self.device, self._dtype, {}, {}, {}, {}, generator)


def _compute_dtype(dtype: str) -> np.dtype[Any]:
    if dtype not in ("float32", "float64"):
        raise ConfigError(f'dtype {dtype!r} is neither "float32" nor "float64"', setting="dtype")
    return np.dtype(dtype)


def _checked_normalization(normalization: int | None, own_samples: int) -> int:
    if normalization is None:
        return max(own_samples, 1)  # with no samples the gradients are 0 whatever they are divided by
    if normalization < 1:
        raise ConfigError(f"normalization must be above 0, not {normalization}", setting="normalization")
    return normalization
