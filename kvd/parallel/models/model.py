"""What a group can bind: the protocols of a model and of its executors.

A `Model` is a description without arrays (``Sequential``, ``TorchModel``, ``JaxModel``). ``model.bind(…)`` gives an
`Executor`, which owns the arrays of one device and runs forward and backward on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypedDict, Unpack, runtime_checkable

from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device, Shape

GradReq: TypeAlias = Literal["write", "add", "null"]
"""What backward does with a gradient array: overwrite it, add to it, or not compute the gradient at all."""

#: Called with (name, array) for the output of every layer, right after it is computed. The array is live: read it now.
MonitorHook: TypeAlias = Callable[[str, Array], None]
#: Called with the name of a parameter as soon as its gradient is complete.
GradientHook: TypeAlias = Callable[[str], None]
#: Called with the name of a row-sparse parameter and the ids of the rows that are read next, in any shape; it may write
#: them into the parameter.
RowReader: TypeAlias = Callable[[str, Array], None]


@dataclass(frozen=True)
class ModelDescription:
    """What a model needs, and what it returns, for inputs of given shapes.

    Attributes:
        params: name → shape of each trainable parameter, in the order of the layers, first layer first.
        aux: name → shape of each state that gradients do not train, such as running means.
        outputs: one description per output.
        has_loss: whether the model ends in a loss, so that backward needs no head gradients.
        row_sparse: the parameters whose gradients are rows: such a gradient is a `kvd.RowSparseArray`, whose ids and
            rows each backward replaces, and its executors are `ReadsRows`.
    """

    params: Mapping[str, Shape]
    aux: Mapping[str, Shape]
    outputs: tuple[DataDesc, ...]
    has_loss: bool
    row_sparse: tuple[str, ...] = ()


class BindOptions(TypedDict, total=False):
    """The keyword arguments of `Model.bind`.

    Attributes:
        for_training: default True. Without it there are no gradients, and backward raises.
        grad_req: one request for all parameters, or a request by name (of parameters and data inputs). Default
            ``"write"``. A mapping may leave names out: a parameter is then ``"write"`` and an input ``"null"``.
        params, grads, aux: arrays to use as they are, by name; the others are allocated.
        normalization: how many samples the loss is averaged over; None: those of this executor. A group passes the
            size of the whole batch to each of its executors, so that the *sum* of their gradients is the gradient of
            the mean loss of the whole batch. A loss that is a sum (`TorchModel`) is not divided by it.
        seed: of any random numbers that the layers draw. Default 0.
    """

    for_training: bool
    grad_req: GradReq | Mapping[str, GradReq]
    params: Mapping[str, Array] | None
    grads: Mapping[str, Array] | None
    aux: Mapping[str, Array] | None
    normalization: int | None
    seed: int | tuple[int, ...]


class Executor(Protocol):
    """A model bound to a device. One thread at a time uses it, inside ``device.current()``.

    The mappings always hold the same arrays, except for those passed to `use_gradients`. Their contents change in
    place.

    Attributes:
        step: the number of forward passes with ``is_train=True`` so far. Random numbers (dropout) depend on the seed
            and on this number, so setting it back draws the numbers of that step again.
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
        """Name → gradient array of each parameter whose request is not ``"null"``, in the order of `params`. Of a
        row-sparse parameter it is a `kvd.RowSparseArray` of arrays of the device, each id once."""
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
        """Compute the outputs from data (and labels) by name. The inputs must not change before backward is done.

        Raises:
            KeyNotFound: a data input, or in training a bound label, is missing.
            NotAllowed: an input that was not bound.
            ShapeMismatch: an input has another shape than it was bound with.
        """
        ...

    def backward(self, out_grads: Sequence[Array] | None = None, on_gradient: GradientHook | None = None) -> None:
        """Write the gradients of the last forward into `grads` and `input_grads`.

        ``on_gradient`` is called with each parameter's name once its gradient is complete (on CUDA: once the kernels
        that complete it are on the current stream), the last layer's first, while the pass goes on. An exception
        that it raises ends the pass.

        Raises:
            NotAllowed: not bound for training; no forward with ``is_train=True`` since the last backward; no head
                gradients for a model without a loss, or head gradients for one with a loss.
            ShapeMismatch: a head gradient is not shaped as its output.
        """
        ...

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """From the next backward on, write the gradients of these parameters into these arrays; `grads` holds them.

        Raises:
            ConfigError: a name that has no gradient here.
            ShapeMismatch, DtypeMismatch: an array does not fit. In each case nothing has changed.
        """
        ...

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """Call ``hook`` with the output of every layer from the next forward on; None ends it."""
        ...


class ReadsRows(Executor, Protocol):
    """The executor of a model with row-sparse parameters, of which a forward reads a few rows."""

    def set_row_reader(self, reader: RowReader | None) -> None:
        """Call ``reader`` in each forward before the rows of a parameter are read; None ends it."""
        ...


@runtime_checkable
class Model(Protocol):
    """What a group can bind."""

    def describe(self, data: Sequence[DataDesc], labels: Sequence[DataDesc] = ()) -> ModelDescription:
        """Parameters, states and outputs for such inputs. Raises ConfigError if the model cannot take them."""
        ...

    def bind(
        self,
        device: Device | str,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc] = (),
        **options: Unpack[BindOptions],
    ) -> Executor:
        """An executor on ``device`` for inputs of these descriptions; see `BindOptions` for the keyword arguments.

        Raises:
            ConfigError: inputs, names or requests that the model cannot take, or a device that does not exist.
            ShapeMismatch, DtypeMismatch: a given array does not fit.
        """
        ...
