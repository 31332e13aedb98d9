"""Forward and backward of a `JaxModel` on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.device import Array, Device, HostArray
from kvd.parallel.models.bind_plan import BindPlan, check_fits, check_names
from kvd.parallel.models.executor import ExecutorArrays
from kvd.parallel.models.model import GradientHook, GradReq, MonitorHook, RowReader
from kvd.parallel.models.outputs import named_outputs

#: ``loss(outputs, labels)``: outputs as ``apply`` returned them; the label, or a list of them if there are several.
LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Functions:
    """What a `JaxModel` computes.

    Attributes:
        apply, loss: as given to it.
        tree: the structure of the parameters.
    """

    apply: Callable[..., Any]
    loss: LossFunction | None
    tree: Any

    def outputs(self, params: Mapping[str, Any], data: Sequence[Any]) -> dict[str, Any]:
        """Name → output, for parameters in the order of the tree."""
        return outputs_of(self.apply(self.tree.unflatten(list(params.values())), *data))


class JaxPasses:
    """See `kvd.parallel.models.executor.Passes`; made by `JaxModel.bind`.

    Parameters, gradients and outputs are NumPy or CuPy arrays that are copied to and from JAX, whose own arrays never
    change. The same inputs and parameters give the same bits on a CPU. JAX computes on its device of the same number.

    Attributes:
        arrays: of the executor.

    Arguments:
        functions: of the model.
        initial: name → the initial value of a parameter, used unless the plan gives its array.
    """

    def __init__(self, functions: Functions, initial: Mapping[str, HostArray], plan: BindPlan) -> None:
        self._functions = functions
        self._plan = plan
        self._where = _jax_device(plan.device)
        with plan.device.current():
            self.arrays = _make_arrays(plan, initial)
        self._evaluate: Callable[..., Any] = jax.jit(functions.outputs)
        self._train: Callable[..., Any] = jax.jit(self._with_gradients if functions.loss else self._with_pullback)
        self._monitor: MonitorHook | None = None
        self._loss: Any = None
        self._pullback: Any = None

    @property
    def loss(self) -> float | None:
        """This device's part of the mean loss of the batch, of the last forward for training."""
        return None if self._loss is None else float(self._loss)

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """Call ``hook`` with every output of ``apply``: the inside of a compiled function cannot be seen."""
        self._monitor = hook

    def set_row_reader(self, reader: RowReader | None) -> None:
        """Its gradients are dense: there is nothing to read."""

    def forward(self, inputs: Mapping[str, Array], step: int, is_train: bool) -> list[Array]:
        """The outputs; in training with labels the gradients, too, are computed here and kept for backward."""
        plan = self._plan
        self._pullback, self._loss = None, None
        with jax.default_device(self._where):
            params = {name: self._to_jax(array) for name, array in self.arrays.params.items()}
            data = [self._to_jax(inputs[desc.name]) for desc in plan.data]
            labels = [self._to_jax(inputs[desc.name]) for desc in plan.labels if desc.name in inputs]
            if not (is_train and plan.for_training):
                outputs = self._evaluate(params, data)
            elif self._functions.loss is None:
                outputs, self._pullback = self._train(params, data)
            elif labels:
                (self._loss, outputs), self._pullback = self._train(params, data, labels)
            else:
                outputs = self._evaluate(params, data)
            arrays = [self._from_jax(array) for array in outputs.values()]
        for desc, array in zip(plan.description.outputs, arrays, strict=True):
            if self._monitor is not None:
                self._monitor(desc.name, array)
        return arrays

    def backward(self, out_grads: Sequence[Array] | None, on_gradient: GradientHook | None) -> None:
        """Write the gradients, the last parameter's first."""
        of_params, of_inputs = self._pullback if out_grads is None else self._pullback(self._heads(out_grads))
        self._pullback = None
        requests = self._plan.requests
        for name in reversed(list(self.arrays.grads)):
            self._store(self.arrays.grads[name], of_params[name], requests[name])
            if on_gradient is not None:
                on_gradient(name)
        for index, desc in enumerate(self._plan.data):
            if desc.name in self.arrays.input_grads:
                self._store(self.arrays.input_grads[desc.name], of_inputs[index], requests[desc.name])

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """See `kvd.parallel.Executor.use_gradients`."""
        grads = self.arrays.grads
        check_names("grads", arrays, grads)
        for name, array in arrays.items():
            check_fits("grads", name, array, grads[name].shape, grads[name].dtype)
        grads.update(arrays)

    def _with_gradients(self, params: Mapping[str, Any], data: Sequence[Any], labels: Sequence[Any]) -> Any:
        """((loss, outputs), (gradients of the parameters, of the inputs))."""
        plan, functions = self._plan, self._functions
        wanted = {name: value for name, value in params.items() if plan.wants_gradient(name)}

        def objective(wanted: Mapping[str, Any], moving: Mapping[int, Any]) -> tuple[Any, Any]:
            given = [moving.get(i, array) for i, array in enumerate(data)]
            tree = functions.tree.unflatten([wanted.get(name, value) for name, value in params.items()])
            returned = functions.apply(tree, *given)
            assert functions.loss is not None
            loss = jnp.asarray(functions.loss(returned, labels[0] if len(labels) == 1 else list(labels)))
            if loss.shape not in ((), (plan.samples,)):
                raise ConfigError(f"the loss gave {loss.shape}: it has to be one number, or one per sample")
            scaled = loss * (plan.samples / plan.normalization) if loss.ndim == 0 else loss.sum() / plan.normalization
            return scaled, outputs_of(returned)

        return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(wanted, self._moving(data))

    def _with_pullback(self, params: Mapping[str, Any], data: Sequence[Any]) -> Any:
        """(outputs, function from head gradients to the gradients of parameters and inputs)."""

        def outputs(params: Mapping[str, Any], moving: Mapping[int, Any]) -> Any:
            return self._functions.outputs(params, [moving.get(i, array) for i, array in enumerate(data)])

        return jax.vjp(outputs, dict(params), self._moving(data))

    def _moving(self, data: Sequence[Any]) -> dict[int, Any]:
        """Place → data input, of those that have a gradient."""
        return {i: data[i] for i, desc in enumerate(self._plan.data) if self._plan.wants_gradient(desc.name)}

    def _heads(self, out_grads: Sequence[Array]) -> dict[str, Any]:
        xp = self._plan.device.xp
        pairs = zip(self._plan.description.outputs, out_grads, strict=True)
        return {desc.name: self._to_jax(xp.asarray(head, dtype=desc.dtype)) for desc, head in pairs}

    def _store(self, target: Array, gradient: Any, request: GradReq) -> None:
        value = self._from_jax(gradient)
        if request == "add":
            target += value
        else:
            target[...] = value

    def _to_jax(self, array: Array) -> Any:
        """A copy on JAX's device: an array of JAX never changes, ours does."""
        if self._plan.device.is_cuda:
            self._plan.device.xp.cuda.get_current_stream().synchronize()
            return jnp.array(jax.dlpack.from_dlpack(array), copy=True)
        return jax.device_put(np.array(array), self._where)

    def _from_jax(self, array: Any) -> Array:
        array.block_until_ready()
        device = self._plan.device
        return device.xp.from_dlpack(array) if device.is_cuda else np.asarray(array)


def outputs_of(returned: Any) -> dict[str, Any]:
    """Name → array of what ``apply`` returned.

    Raises:
        ConfigError: it is neither an array nor a tuple, list or dict of arrays.
    """
    named = named_outputs(returned)
    for name, array in named.items():
        if not hasattr(array, "shape"):
            raise ConfigError(f"apply's {name} is a {type(array).__name__}, not an array", setting="apply")
    return named


def _make_arrays(plan: BindPlan, initial: Mapping[str, HostArray]) -> ExecutorArrays:
    """The arrays of an executor: the given ones, which must fit, and new ones for the others."""
    xp = plan.device.xp
    check_names("params", plan.params, initial)
    check_names("grads", plan.grads, plan.trained())
    for what, given in (("params", plan.params), ("grads", plan.grads)):
        for name, array in given.items():
            check_fits(what, name, array, initial[name].shape, initial[name].dtype)
    return ExecutorArrays(
        params={n: plan.params[n] if n in plan.params else plan.device.array(v) for n, v in initial.items()},
        aux={},
        grads={
            name: plan.grads[name] if name in plan.grads else xp.zeros(initial[name].shape, initial[name].dtype)
            for name in plan.trained()
        },
        input_grads={
            desc.name: xp.zeros(desc.shape, desc.dtype) for desc in plan.data if plan.wants_gradient(desc.name)
        },
    )


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
