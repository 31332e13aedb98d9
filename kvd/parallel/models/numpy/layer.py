"""The base of every layer of a `Sequential`, and the frame in which a layer runs.

A layer is a frozen description without arrays. When it is bound to a device it gets a `Frame`, which holds its
parameters, its gradient arrays and what forward leaves for backward. Inside a model the batch is always axis 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.device import Array, Device, HostArray, Shape
from kvd.parallel.models.model import GradientHook, GradReq, RowReader
from kvd.parallel.models.numpy.ids import sum_by_id
from kvd.parallel.models.numpy.workspace import Workspace


@dataclass(slots=True)
class Frame:
    """One layer of one executor: its arrays, and how it writes gradients.

    Attributes:
        name: the layer's name within its model.
        device: where the arrays live.
        dtype: of parameters, activations and gradients: float32 or float64.
        params, aux: the arrays by the layer's own names (``"weight"``, not ``"dense0_weight"``).
        grads: those of the parameters whose request is not ``"null"``; of row-sparse ones each a `kvd.RowSparseArray`.
        grad_req: the request of each parameter.
        generator: makes the random generator of this layer and step, with the same state at each call.
        saved: what forward leaves for backward; emptied by backward.
        workspace: memory of the executor, for everything else that the layers compute.
        may_overwrite_input: whether forward may compute its output in the memory of its input.
        needs_input_gradient: whether backward has to return the gradient of the layer's input.
        on_gradient: called with the full name of a parameter once its gradient is complete.
        row_reader: called before rows of a parameter are read.
    """

    name: str
    device: Device
    dtype: np.dtype[Any]
    params: dict[str, Array]
    aux: dict[str, Array]
    grads: dict[str, Array]
    grad_req: dict[str, GradReq]
    generator: Callable[[], np.random.Generator]
    workspace: Workspace
    is_train: bool = False
    may_overwrite_input: bool = False
    needs_input_gradient: bool = True
    saved: dict[str, Any] = field(default_factory=dict)
    on_gradient: GradientHook | None = None
    row_reader: RowReader | None = None

    @property
    def xp(self) -> Any:
        """The array module of the device."""
        return self.device.xp

    def kept(self, name: str, shape: Shape) -> Array:
        """Memory for what the layer computes in forward, its output above all; it lasts until the next forward."""
        return self.workspace.array(f"{self.name} {name}", shape)

    def kept_like(self, name: str, model: Array) -> Array:
        """As `kept`, in the shape of ``model`` and with the order of its axes in memory."""
        return self.workspace.array_like(f"{self.name} {name}", model)

    def compute_gradient(self, name: str, compute: Callable[[Array | None], Array]) -> None:
        """Fill the gradient of parameter ``name``, unless its request is ``"null"``.

        ``compute(out)`` computes the gradient into ``out``, or into a new array if ``out`` is None. So ``"write"``
        costs no copy, and ``"add"`` one temporary array.
        """
        request = self.grad_req[name]
        if request == "null":
            return
        if request == "write":
            compute(self.grads[name])
        else:
            self.grads[name] += compute(None)
        self._complete(name)

    def store_gradient(self, name: str, gradient: Array) -> None:
        """As `compute_gradient`, for a gradient that is already computed."""
        request = self.grad_req[name]
        if request == "null":
            return
        if request == "write":
            self.grads[name][...] = gradient
        else:
            self.grads[name] += gradient
        self._complete(name)

    def read_rows(self, name: str, ids: Array) -> Array:
        """The rows of a row-sparse parameter, for these ids, in their shape."""
        if self.row_reader is not None:
            self.row_reader(f"{self.name}_{name}", ids)
        return self.params[name][ids]

    def store_rows(self, name: str, ids: Array, rows: Array) -> None:
        """As `store_gradient`, for the parameter of a row-sparse layer: the rows of these ids, each of which is there
        once; the others are 0."""
        request, gradient = self.grad_req[name], self.grads.get(name)
        if request == "null" or gradient is None:
            return
        if request == "add" and len(gradient.ids):
            xp = self.xp
            ids, rows = sum_by_id(xp, xp.concatenate((gradient.ids, ids)), xp.concatenate((gradient.rows, rows)))
        gradient.ids, gradient.rows = ids, rows
        self._complete(name)

    def _complete(self, name: str) -> None:
        if self.on_gradient is not None:
            self.on_gradient(f"{self.name}_{name}")


@dataclass(frozen=True)
class Layer:
    """The description of a layer. All shapes have the batch first; subclasses override what they need.

    Attributes:
        name: the prefix of its parameters' names; None: the kind and a number, such as ``"dense0"``.
    """

    _: KW_ONLY
    name: str | None = None

    kind: ClassVar[str] = "layer"
    is_differentiable: ClassVar[bool] = True
    """Whether the layer has a gradient with respect to its input; without one it can only be the first layer."""
    keeps_output: ClassVar[bool] = True
    """Whether the output has to stay as forward has returned it: backward reads it, or it is not new memory."""
    passes_input_on: ClassVar[bool] = False
    """Whether the output may be the input, or a view of it."""

    def output_shape(self, shape: Shape) -> Shape:
        """The shape of the output for an input of ``shape``. Raises ConfigError if the layer cannot take it."""
        return shape

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        """The layer's own names → shapes of its parameters for an input of ``shape``."""
        return {}

    def aux_shapes(self, shape: Shape) -> dict[str, Shape]:
        """The layer's own names → shapes of its states for an input of ``shape``."""
        return {}

    def row_sparse_parameters(self) -> tuple[str, ...]:
        """The layer's own names of the parameters whose gradients are rows, and of which forward reads rows."""
        return ()

    def initial(self, name: str, shape: Shape, generator: np.random.Generator) -> HostArray:
        """Initial values, float32, of the parameter or state ``name``."""
        return np.zeros(shape, np.float32)

    def forward(self, frame: Frame, x: Array) -> Array:
        """The output for input ``x``, which must not be changed, unless ``frame.may_overwrite_input`` is set."""
        raise NotImplementedError

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        """Write the gradients of the parameters, given that of the output, and return that of the input.

        None may be returned if ``frame.needs_input_gradient`` is not set.
        """
        raise NotImplementedError


def require_positive(layer: Layer, **values: int) -> None:
    """Raise ConfigError unless every one of the named values is a whole number above zero."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{layer.kind}: {name} must be a whole number above 0, not {value!r}", setting=name)


def require_axes(layer: Layer, shape: Shape, count: int, meaning: str) -> None:
    """Raise ConfigError unless ``shape`` has ``count`` axes; ``meaning`` names them."""
    if len(shape) != count:
        raise ConfigError(f"{layer.name or layer.kind} takes {meaning}, but its input has shape {shape}")
