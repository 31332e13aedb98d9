"""A `JaxModel` bound to one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvd.errors import ConfigError, DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device
from kvd.parallel.models.model import GradientHook, GradReq, MonitorHook, resolve_grad_req

if TYPE_CHECKING:
    from kvd.parallel.models.jax.model import JaxModel


class JaxExecutor:
    """See `kvd.parallel.Executor`; made by `JaxModel.bind`.

    Parameters, gradients and outputs are NumPy or CuPy arrays that are copied to and from JAX, whose own arrays never
    change. The same inputs and parameters give the same bits on a CPU.

    Attributes:
        device: where the arrays live; JAX computes on its device of the same number.
        output_descs: name, shape, dtype and layout of each output.
        step: how many forward passes with ``is_train=True`` there were.
    """

    def __init__(
        self,
        model: JaxModel,
        device: Device,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc],
        *,
        for_training: bool,
        grad_req: GradReq | Mapping[str, GradReq],
        params: Mapping[str, Array],
        grads: Mapping[str, Array],
        normalization: int | None,
    ) -> None:
        device.check()
        description = model.describe(data, labels)
        if normalization is not None and normalization < 1:
            raise ConfigError(f"normalization must be above 0, not {normalization}", setting="normalization")
        self.device = device
        self.step = 0
        self.output_descs = description.outputs
        self._model = model
        self._where = _jax_device(device)
        self._data, self._labels = list(data), list(labels)
        self._for_training = for_training
        self._samples = next((desc.batch_size for desc in data if desc.batch_size is not None), 1)
        self._normalization = normalization or self._samples
        names = [desc.name for desc in data]
        self._grad_req = resolve_grad_req(grad_req, list(description.params), names, for_training)
        initial = model.initial()
        with device.current():
            self._params = {name: _given("params", params, name, device.array(v)) for name, v in initial.items()}
            self._grads = {
                name: _given("grads", grads, name, device.xp.zeros(value.shape, value.dtype))
                for name, value in initial.items()
                if self._grad_req[name] != "null"
            }
            self._input_grads = {
                desc.name: device.xp.zeros(desc.shape, desc.dtype)
                for desc in data
                if self._grad_req[desc.name] != "null"
            }
        _check_names("params", params, self._params)
        _check_names("grads", grads, self._grads)
        self._evaluate: Callable[..., Any] = jax.jit(self._apply)
        self._train: Callable[..., Any] = jax.jit(self._with_gradients if model.loss else self._with_pullback)
        self._monitor: MonitorHook | None = None
        self._outputs: list[Array] | None = None
        self._loss: Any = None
        self._pullback: Any = None
        self._can_go_backward = False

    @property
    def params(self) -> Mapping[str, Array]:
        """Name → parameter, in the order of the pytree."""
        return MappingProxyType(self._params)

    @property
    def grads(self) -> Mapping[str, Array]:
        """Name → gradient array of each parameter whose request is not ``"null"``."""
        return MappingProxyType(self._grads)

    @property
    def aux(self) -> Mapping[str, Array]:
        """Empty: a pure function has no states."""
        return MappingProxyType({})

    @property
    def input_grads(self) -> Mapping[str, Array]:
        """Name → gradient of each data input that one was asked for."""
        return MappingProxyType(self._input_grads)

    @property
    def grad_req(self) -> Mapping[str, GradReq]:
        """Name → request, for every parameter and data input."""
        return MappingProxyType(self._grad_req)

    @property
    def outputs(self) -> list[Array]:
        """The outputs of the last forward. Raises NotAllowed before the first."""
        if self._outputs is None:
            raise NotAllowed("there is no output yet: run forward first")
        return list(self._outputs)

    @property
    def loss(self) -> float:
        """This device's part of the mean loss of the batch, of the last forward for training. Raises NotAllowed."""
        if self._loss is None:
            raise NotAllowed("there is no loss: it is computed by a forward for training, with labels")
        return float(self._loss)

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """Call ``hook`` with every output of ``apply``: what is inside of a compiled function cannot be seen."""
        self._monitor = hook

    def forward(self, inputs: Mapping[str, Array], is_train: bool) -> list[Array]:
        """See `kvd.parallel.Executor.forward`."""
        self._check_inputs(inputs, is_train)
        self._pullback, self._loss = None, None
        with jax.default_device(self._where):
            params = {name: self._to_jax(array) for name, array in self._params.items()}
            data = [self._to_jax(inputs[desc.name]) for desc in self._data]
            labels = [self._to_jax(inputs[desc.name]) for desc in self._labels if desc.name in inputs]
            if not (is_train and self._for_training):
                outputs = self._evaluate(params, data)
            elif self._model.loss is None:
                outputs, self._pullback = self._train(params, data)
            elif labels:
                (self._loss, outputs), self._pullback = self._train(params, data, labels)
            else:
                outputs = self._evaluate(params, data)
            self._outputs = [self._from_jax(array) for array in outputs.values()]
        for desc, array in zip(self.output_descs, self._outputs, strict=True):
            if self._monitor is not None:
                self._monitor(desc.name, array)
        self._can_go_backward = is_train
        if is_train:
            self.step += 1
        return self.outputs

    def backward(self, out_grads: Sequence[Array] | None = None, on_gradient: GradientHook | None = None) -> None:
        """See `kvd.parallel.Executor.backward`."""
        gradients, input_gradients = self._gradients(out_grads)
        self._can_go_backward, self._pullback = False, None
        for name in reversed(list(self._grads)):
            self._store(self._grads[name], gradients[name], self._grad_req[name])
            if on_gradient is not None:
                on_gradient(name)
        for desc, gradient in zip(self._data, input_gradients, strict=True):
            if desc.name in self._input_grads:
                self._store(self._input_grads[desc.name], gradient, self._grad_req[desc.name])

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """See `kvd.parallel.Executor.use_gradients`."""
        _check_names("grads", arrays, self._grads)
        self._grads.update({name: _given("grads", arrays, name, self._grads[name]) for name in arrays})

    def _apply(self, params: Mapping[str, Any], data: Sequence[Any]) -> dict[str, Any]:
        tree = self._model.tree.unflatten(list(params.values()))
        return named_outputs(self._model.apply(tree, *data))

    def _with_gradients(self, params: Mapping[str, Any], data: Sequence[Any], labels: Sequence[Any]) -> Any:
        """((loss, outputs), (gradients of the parameters, of the inputs))."""
        wanted = {name: value for name, value in params.items() if self._grad_req[name] != "null"}
        moving = {i: data[i] for i, desc in enumerate(self._data) if self._grad_req[desc.name] != "null"}

        def objective(wanted: Mapping[str, Any], moving: Mapping[int, Any]) -> tuple[Any, Any]:
            given = [moving.get(i, array) for i, array in enumerate(data)]
            tree = self._model.tree.unflatten([wanted.get(name, value) for name, value in params.items()])
            returned = self._model.apply(tree, *given)
            assert self._model.loss is not None
            loss = jnp.asarray(self._model.loss(returned, labels[0] if len(labels) == 1 else list(labels)))
            if loss.shape not in ((), (self._samples,)):
                raise ConfigError(f"the loss gave {loss.shape}: it has to be one number, or one per sample")
            scaled = (
                loss * (self._samples / self._normalization) if loss.ndim == 0 else loss.sum() / self._normalization
            )
            return scaled, named_outputs(returned)

        return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(wanted, moving)

    def _with_pullback(self, params: Mapping[str, Any], data: Sequence[Any]) -> Any:
        """(outputs, function from head gradients to the gradients of parameters and inputs)."""
        moving = {i: data[i] for i, desc in enumerate(self._data) if self._grad_req[desc.name] != "null"}

        def outputs(params: Mapping[str, Any], moving: Mapping[int, Any]) -> Any:
            return self._apply(params, [moving.get(i, array) for i, array in enumerate(data)])

        return jax.vjp(outputs, dict(params), moving)

    def _gradients(self, out_grads: Sequence[Array] | None) -> tuple[Mapping[str, Any], list[Any]]:
        """Gradients by parameter, and of each data input (None where none was asked for)."""
        if not self._for_training:
            raise NotAllowed("not bound for training: re-bind with for_training=True to run backward")
        if not self._can_go_backward:
            raise NotAllowed("backward needs a forward with is_train=True since the last backward")
        if self._model.loss is not None:
            if out_grads is not None:
                raise NotAllowed("the model ends in a loss, which starts backward itself: give no head gradients")
            if self._pullback is None:
                raise NotAllowed(
                    "the loss needs labels for backward: bind them (label_shapes) and give them to forward"
                )
            params, moving = self._pullback
        else:
            params, moving = self._pullback(self._heads(out_grads))
        return params, [moving.get(i) for i in range(len(self._data))]

    def _heads(self, out_grads: Sequence[Array] | None) -> dict[str, Any]:
        count = len(self.output_descs)
        if out_grads is None or len(out_grads) != count:
            raise NotAllowed(
                f"head gradients are required: the model has no loss, so give one array per output ({count})"
            )
        heads = {}
        for desc, head in zip(self.output_descs, out_grads, strict=True):
            if tuple(head.shape) != desc.shape:
                raise ShapeMismatch(f"the head gradient of {desc.name} has shape {head.shape}, not {desc.shape}")
            heads[desc.name] = self._to_jax(self.device.xp.asarray(head, dtype=desc.dtype))
        return heads

    def _store(self, target: Array, gradient: Any, request: GradReq) -> None:
        value = self._from_jax(gradient)
        if request == "add":
            target += value
        else:
            target[...] = value

    def _to_jax(self, array: Array) -> Any:
        """A copy on JAX's device: an array of JAX never changes, ours does."""
        if self.device.is_cuda:
            self.device.xp.cuda.get_current_stream().synchronize()
            return jnp.array(jax.dlpack.from_dlpack(array), copy=True)
        return jax.device_put(np.array(array), self._where)

    def _from_jax(self, array: Any) -> Array:
        array.block_until_ready()
        return self.device.xp.from_dlpack(array) if self.device.is_cuda else np.asarray(array)

    def _check_inputs(self, inputs: Mapping[str, Array], is_train: bool) -> None:
        descs = {desc.name: desc for desc in (*self._data, *self._labels)}
        for name, array in inputs.items():
            if name not in descs:
                raise NotAllowed(f"{name!r} was not bound; bound inputs: {', '.join(descs)}", key=name)
            if tuple(array.shape) != descs[name].shape:
                raise ShapeMismatch(f"{name} has shape {array.shape}, but was bound with {descs[name].shape}", key=name)
        for desc in self._data:
            if desc.name not in inputs:
                raise KeyNotFound(f"the data {desc.name!r} is missing", key=desc.name)
        for desc in self._labels if is_train and self._for_training else []:
            if desc.name not in inputs:
                raise KeyNotFound(f"the label {desc.name!r} is bound, and training needs it", key=desc.name)


def named_outputs(returned: Any) -> dict[str, Any]:
    """Name → array of what ``apply`` returned. Raises ConfigError if that is no array, tuple, list or dict of such."""
    if isinstance(returned, Mapping):
        named = dict(returned)
    elif isinstance(returned, tuple | list):
        named = {f"output{index}": array for index, array in enumerate(returned)}
    else:
        named = {"output": returned}
    for name, array in named.items():
        if not hasattr(array, "shape"):
            raise ConfigError(f"apply's {name} is a {type(array).__name__}, no array", setting="apply")
    return named


def _jax_device(device: Device) -> Any:
    """JAX's device of this kind and number; a CPU device of ours is always JAX's first, which uses all cores."""
    try:
        found = jax.devices("cuda" if device.is_cuda else "cpu")
    except RuntimeError as error:
        raise ConfigError(f"JAX finds no {device.kind} device: {error}", setting="devices") from error
    index = device.index if device.is_cuda else 0
    if index >= len(found):
        raise ConfigError(f"JAX has no {device}; it finds {', '.join(map(str, found))}", setting="devices")
    return found[index]


def _given(what: str, arrays: Mapping[str, Array], name: str, like: Array) -> Array:
    """The array of this name if it was given, which must fit, else ``like``."""
    if name not in arrays:
        return like
    array = arrays[name]
    if tuple(array.shape) != tuple(like.shape):
        raise ShapeMismatch(f"{what}: {name} has shape {array.shape}, the model wants {like.shape}", key=name)
    if array.dtype != like.dtype:
        raise DtypeMismatch(f"{what}: {name} has dtype {array.dtype}, the model {like.dtype}", key=name)
    return array


def _check_names(what: str, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in given:
        if name not in wanted:
            raise ConfigError(f"{what} has {name!r}, which the model does not need here", setting=what)
