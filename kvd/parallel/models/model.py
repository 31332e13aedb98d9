"""What a group drives: a model bound to one device.

`Model` is a description without arrays (``Sequential``, ``TorchModel``, ``JaxModel``); ``model.bind(…)`` gives an
`Executor`, which owns the arrays of one device and runs forward and backward on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args, runtime_checkable

from kvd.errors import ConfigError
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device, Shape

#: What backward does with a gradient array: overwrite it, add to it, or not compute the gradient at all.
GradReq: TypeAlias = Literal["write", "add", "null"]
#: Called with (name, array) for the output of every layer, after it was computed. The array is live: read it at once.
MonitorHook: TypeAlias = Callable[[str, Array], None]
#: Called with the name of a parameter as soon as its gradient is complete.
GradientHook: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class ModelDescription:
    """What a model needs and gives for inputs of given shapes.

    Attributes:
        params: name → shape of each trainable parameter, in the order of the layers, first layer first.
        aux: name → shape of each state that is not trained by gradients, such as running means.
        outputs: one description per output.
        has_loss: whether the model ends in a loss, so that backward starts by itself.
    """

    params: Mapping[str, Shape]
    aux: Mapping[str, Shape]
    outputs: tuple[DataDesc, ...]
    has_loss: bool


class Executor(Protocol):
    """A model bound to a device. It is used by one thread at a time, inside ``device.current()``.

    The mappings below always hold the same arrays, but for what `use_gradients` is given; their contents change in
    place.

    Attributes:
        step: how many forward passes with ``is_train=True`` there were. Chance (dropout) depends on the seed and on
            this number, so that whoever sets it back gets the chance of the same step again.
    """

    step: int

    @property
    def device(self) -> Device:
        """Where the arrays live."""
        ...

    @property
    def params(self) -> Mapping[str, Array]:
        """Name → parameter, first layer first."""
        ...

    @property
    def grads(self) -> Mapping[str, Array]:
        """Name → gradient array of each parameter whose request is not ``"null"``, in the order of `params`."""
        ...

    @property
    def aux(self) -> Mapping[str, Array]:
        """Name → auxiliary state."""
        ...

    @property
    def input_grads(self) -> Mapping[str, Array]:
        """Name → gradient of each data input whose request is not ``"null"``, shaped as the input."""
        ...

    @property
    def grad_req(self) -> Mapping[str, GradReq]:
        """Name → request, for every parameter and data input."""
        ...

    @property
    def outputs(self) -> list[Array]:
        """The outputs of the last forward. Raises NotAllowed before the first."""
        ...

    @property
    def output_descs(self) -> tuple[DataDesc, ...]:
        """Name, shape, dtype and layout of each output."""
        ...

    def forward(self, inputs: Mapping[str, Array], is_train: bool) -> list[Array]:
        """Compute the outputs from data (and labels) by name. The inputs must stay as they are until backward is done.

        Raises:
            KeyNotFound: a data input, or in training a bound label, is missing.
            NotAllowed: an input that was not bound.
            ShapeMismatch: an input has another shape than it was bound with.
        """
        ...

    def backward(self, out_grads: Sequence[Array] | None = None, on_gradient: GradientHook | None = None) -> None:
        """Write the gradients of the last forward into `grads` and `input_grads`.

        ``on_gradient`` is called with each parameter's name once its gradient is complete (on CUDA: once the kernels
        that make it complete are on the current stream), the last layer's first, while the pass goes on. An exception
        that it raises ends the pass.

        Raises:
            NotAllowed: not bound for training; no forward with ``is_train=True`` since the last backward; no head
                gradients for a model without a loss, or head gradients for one with a loss.
            ShapeMismatch: a head gradient is not shaped as its output.
        """
        ...

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """From the next backward on write the gradients of these parameters into these arrays; `grads` holds them.

        Raises:
            ConfigError: a name that has no gradient here.
            ShapeMismatch, DtypeMismatch: an array does not fit. In both cases nothing has changed.
        """
        ...

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """Call ``hook`` with the output of every layer from the next forward on; None ends it."""
        ...


@runtime_checkable
class Model(Protocol):
    """What a group can bind."""

    def describe(self, data: Sequence[DataDesc], labels: Sequence[DataDesc] = ()) -> ModelDescription:
        """Parameters, states and outputs for inputs described so. Raises ConfigError if the model cannot take them."""
        ...

    def bind(
        self,
        device: Device | str,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc] = (),
        *,
        for_training: bool = True,
        grad_req: GradReq | Mapping[str, GradReq] = "write",
        params: Mapping[str, Array] | None = None,
        grads: Mapping[str, Array] | None = None,
        aux: Mapping[str, Array] | None = None,
        normalization: int | None = None,
        seed: int | tuple[int, ...] = 0,
    ) -> Executor:
        """An executor on ``device`` for inputs described so.

        Arguments:
            for_training: without it there are no gradients, and backward raises.
            grad_req: one request for all parameters, or a request by name (of parameters and data inputs). What a
                mapping leaves out is ``"write"`` for a parameter and ``"null"`` for an input.
            params, grads, aux: arrays to use as they are, by name; those left out are allocated.
            normalization: how many samples the loss is averaged over; None: those of this executor. A group gives the
                size of the whole batch to each of its executors, so that the *sum* of their gradients is the gradient
                of the mean loss of the whole batch.
            seed: of whatever chance the layers use.

        Raises:
            ConfigError: inputs, names or requests that the model cannot take, or a device that does not exist.
            ShapeMismatch, DtypeMismatch: a given array does not fit.
        """
        ...


def resolve_grad_req(
    grad_req: GradReq | Mapping[str, GradReq], params: Sequence[str], inputs: Sequence[str], for_training: bool
) -> dict[str, GradReq]:
    """The request of every parameter and data input; see `Model.bind`. All ``"null"`` if not for training.

    Raises:
        ConfigError: a request that does not exist, or a name that is neither parameter nor input.
    """
    if isinstance(grad_req, str):
        given: dict[str, GradReq] = dict.fromkeys(params, grad_req)
    else:
        given = dict(grad_req)
    for name, request in given.items():
        if request not in get_args(GradReq):
            raise ConfigError(f'{name}: grad_req {request!r} is none of "write", "add", "null"', setting="grad_req")
        if name not in params and name not in inputs:
            known = ", ".join([*params, *inputs])
            raise ConfigError(
                f"grad_req names {name!r}, which the model does not have; it has {known}", setting="grad_req"
            )
    if not for_training:
        return dict.fromkeys([*params, *inputs], "null")
    resolved: dict[str, GradReq] = {name: given.get(name, "write") for name in params}
    return resolved | {name: given.get(name, "null") for name in inputs}
