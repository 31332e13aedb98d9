"""Layers on the last axis, on each element or on the shape: Dense, Embedding, ReLU, Tanh, Flatten, Dropout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.device import Array, HostArray, Shape
from kvd.parallel.models.numpy.ids import sum_by_id, whole_numbers
from kvd.parallel.models.numpy.layer import Frame, Layer, require_positive
from kvd.parallel.models.numpy.workspace import in_memory_order

#: The initial distribution of weights: ``"he"`` for layers before a ReLU, ``"glorot"`` for others.
Initializer: TypeAlias = Literal["he", "glorot"]


def initial_weight(
    initializer: Initializer, shape: Shape, fan_in: int, fan_out: int, generator: np.random.Generator
) -> HostArray:
    """A float32 array drawn from U(-b, b).

    ``"he"``: b = √(6 / fan_in), He et al. 2015 (arXiv:1502.01852), eq. 10 as a uniform distribution.
    ``"glorot"``: b = √(6 / (fan_in + fan_out)), Glorot and Bengio 2010, eq. 16.
    """
    bound = math.sqrt(6.0 / (fan_in if initializer == "he" else fan_in + fan_out))
    return generator.uniform(-bound, bound, shape).astype(np.float32)


def require_initializer(layer: Layer, initializer: str) -> None:
    """Raise ConfigError for an unknown initializer."""
    if initializer not in ("he", "glorot"):
        raise ConfigError(
            f'{layer.kind}: initializer {initializer!r} is neither "he" nor "glorot"', setting="initializer"
        )


@dataclass(frozen=True)
class Dense(Layer):
    """y = x Wᵀ + b on the last axis: (batch, …, in) → (batch, …, units). Images need a `Flatten` before it.

    Parameters: ``weight`` (units, in), as in MXNet and torch, and ``bias`` (units,) unless ``use_bias`` is False.
    The ``initializer`` of the weight is ``"he"`` or ``"glorot"``.

    Raises:
        ConfigError: ``units`` is not above 0, an unknown initializer, or an input without a feature axis.
    """

    units: int
    use_bias: bool = True
    initializer: Initializer = "he"

    kind: ClassVar[str] = "dense"
    keeps_output: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_positive(self, units=self.units)
        require_initializer(self, self.initializer)

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) < 2:
            raise ConfigError(f"{self.name or self.kind} takes (batch, …, features), but its input has shape {shape}")
        return (*shape[:-1], self.units)

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {"weight": (self.units, shape[-1])}
        return shapes | {"bias": (self.units,)} if self.use_bias else shapes

    def initial(self, name: str, shape: Shape, generator: np.random.Generator) -> HostArray:
        if name == "bias":
            return np.zeros(shape, np.float32)
        return initial_weight(self.initializer, shape, shape[1], shape[0], generator)

    def forward(self, frame: Frame, x: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        frame.saved["rows"] = rows
        y = frame.kept("y", (len(rows), self.units))
        frame.xp.matmul(rows, frame.params["weight"].T, out=y)
        if self.use_bias:
            y += frame.params["bias"]
        return y.reshape(*x.shape[:-1], self.units)

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        xp, weight = frame.xp, frame.params["weight"]
        rows = frame.saved.pop("rows")
        grad_rows = grad.reshape(-1, self.units)
        frame.compute_gradient("weight", lambda out: xp.matmul(grad_rows.T, rows, out=out))
        if self.use_bias:
            frame.compute_gradient("bias", lambda out: xp.sum(grad_rows, axis=0, out=out))
        if not frame.needs_input_gradient:
            return None
        into = frame.workspace.gradient_like(rows, apart_from=grad_rows)
        return xp.matmul(grad_rows, weight, out=into).reshape(*grad.shape[:-1], weight.shape[1])


@dataclass(frozen=True)
class Embedding(Layer):
    """Rows of a table: ids (batch, …) of any dtype with whole values → (batch, …, dimensions).

    Parameter: ``weight`` (vocabulary, dimensions), initially U(-√(3/dimensions), √(3/dimensions)): rows of expected
    squared length 1. The ids have no gradient, so this can only be the first layer.

    With ``sparse`` the gradient of the weight is a `kvd.RowSparseArray` of the rows that the batch has named. In a
    store it is a table: only rows of the batch travel, and only they are updated (docs/tables.md says what that is for
    each optimizer). Each device still has the whole weight, of which a forward gets the rows that it reads.

    Raises:
        ConfigError: ``vocabulary`` or ``dimensions`` is not above 0.
        ValueError: in forward, an id that is not a whole number in [0, vocabulary).
    """

    vocabulary: int
    dimensions: int
    sparse: bool = False

    kind: ClassVar[str] = "embedding"
    is_differentiable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_positive(self, vocabulary=self.vocabulary, dimensions=self.dimensions)

    def output_shape(self, shape: Shape) -> Shape:
        return (*shape, self.dimensions)

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"weight": (self.vocabulary, self.dimensions)}

    def initial(self, name: str, shape: Shape, generator: np.random.Generator) -> HostArray:
        bound = math.sqrt(3.0 / self.dimensions)
        return generator.uniform(-bound, bound, shape).astype(np.float32)

    def row_sparse_parameters(self) -> tuple[str, ...]:
        return ("weight",) if self.sparse else ()

    def forward(self, frame: Frame, x: Array) -> Array:
        ids = whole_numbers(frame.xp, x, self.vocabulary, f"{frame.name}: id")
        frame.saved["ids"] = ids
        return frame.read_rows("weight", ids) if self.sparse else frame.params["weight"][ids]

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        ids = frame.saved.pop("ids").reshape(-1)
        if frame.grad_req["weight"] == "null":
            return None
        rows, sums = sum_by_id(frame.xp, ids, grad.reshape(-1, self.dimensions))
        if self.sparse:
            frame.store_rows("weight", rows, sums)
            return None

        def scatter(out: Array | None) -> Array:
            if out is None:
                out = frame.xp.zeros_like(frame.params["weight"])
            else:
                out[...] = 0
            out[rows] = sums
            return out

        frame.compute_gradient("weight", scatter)
        return None


@dataclass(frozen=True)
class ReLU(Layer):
    """max(x, 0); its derivative at 0 is 0, as in torch."""

    kind: ClassVar[str] = "relu"

    def forward(self, frame: Frame, x: Array) -> Array:
        y = x if frame.may_overwrite_input else frame.kept_like("y", x)
        source, target = in_memory_order(x), in_memory_order(y)
        if source.flags.c_contiguous and x.size:
            # NumPy computes the maximum of two vectors three times as fast as that of a vector and a number
            rows = source.shape[0], x.size // source.shape[0]
            frame.xp.maximum(source.reshape(rows), frame.workspace.zeros(rows[1]), out=target.reshape(rows))
        else:
            frame.xp.maximum(x, 0, out=y)
        frame.saved["y"] = y
        return y

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        xp, workspace, y = frame.xp, frame.workspace, frame.saved.pop("y")
        is_positive = xp.greater(y, 0, out=workspace.array_like("is positive", y, bool))
        return xp.multiply(grad, is_positive, out=workspace.gradient_like(y, apart_from=grad))


@dataclass(frozen=True)
class Tanh(Layer):
    """tanh(x), with derivative 1 - tanh²(x)."""

    kind: ClassVar[str] = "tanh"

    def forward(self, frame: Frame, x: Array) -> Array:
        y = frame.xp.tanh(x, out=frame.kept_like("y", x))
        frame.saved["y"] = y
        return y

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        xp, y = frame.xp, frame.saved.pop("y")
        slope = xp.multiply(y, y, out=frame.workspace.array_like("slope", y))
        xp.subtract(1, slope, out=slope)
        return xp.multiply(grad, slope, out=frame.workspace.gradient_like(y, apart_from=grad))


@dataclass(frozen=True)
class Flatten(Layer):
    """(batch, …) → (batch, the product of the rest), in C order."""

    kind: ClassVar[str] = "flatten"
    keeps_output: ClassVar[bool] = False
    passes_input_on: ClassVar[bool] = True

    def output_shape(self, shape: Shape) -> Shape:
        return (shape[0], math.prod(shape[1:]))

    def forward(self, frame: Frame, x: Array) -> Array:
        frame.saved["shape"] = x.shape
        return x.reshape(self.output_shape(x.shape))

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        return grad.reshape(frame.saved.pop("shape"))


@dataclass(frozen=True)
class Dropout(Layer):
    """In training, each element becomes 0 with probability ``rate``, else it is divided by 1 - rate.

    This is "inverted" dropout, as in torch and MXNet: outside training it does nothing. The mask is drawn on the host
    from a generator that depends on the seed, the layer's place and the step only, so it is the same on every kind of
    device, and a repeated step gets the same mask.

    Raises:
        ConfigError: ``rate`` is not in [0, 1).
    """

    rate: float

    kind: ClassVar[str] = "dropout"
    keeps_output: ClassVar[bool] = False
    passes_input_on: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate < 1.0:
            raise ConfigError(f"dropout: rate must be in [0, 1), not {self.rate!r}", setting="rate")

    def forward(self, frame: Frame, x: Array) -> Array:
        if not frame.is_train or self.rate == 0.0:
            frame.saved["factor"] = None
            return x
        kept = frame.generator().random(x.shape, dtype=np.float32) >= np.float32(self.rate)
        factor = frame.kept_like("factor", x)
        factor[...] = frame.device.array(kept)
        factor *= 1.0 / (1.0 - self.rate)
        frame.saved["factor"] = factor
        return frame.xp.multiply(x, factor, out=frame.kept_like("y", x))

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        factor = frame.saved.pop("factor")
        if factor is None:
            return grad
        return frame.xp.multiply(grad, factor, out=frame.workspace.gradient_like(factor, apart_from=grad))
