"""A model of layers in a row, computed with NumPy or CuPy."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Device, HostArray, Shape
from kvd.parallel.models.bind_plan import plan_bind
from kvd.parallel.models.executor import DeviceExecutor
from kvd.parallel.models.model import BindOptions, ModelDescription
from kvd.parallel.models.numpy.layer import Layer
from kvd.parallel.models.numpy.losses import Loss
from kvd.parallel.models.numpy.passes import SequentialPasses

MXNET_LABEL = "softmax_label"  # what iterators and modules of MXNet call a label


@dataclass(frozen=True)
class _Tensor:
    """A parameter or state of the model: the layer it belongs to, its name there, and its shape."""

    layer: Layer
    local_name: str
    shape: Shape


class Sequential:
    """Layers, first to last, the last of which may be a loss. Parameters live in the executors, not here.

    Inside, the batch is axis 0. The batch axis of an input of another layout (such as ``"TNC"`` or ``"CHWN"``) is moved
    to the front; its gradient has the layout of the input; outputs have the batch first.

    Names: ``<prefix><layer>_<parameter>``, such as ``"dense0_weight"``; the layer's name is the given one, or else
    its kind and its number among the layers of that kind. Outputs are called ``<prefix><last layer>_output``.

    Arguments:
        layers: at least one, and a loss nowhere but at the end.
        prefix: of all names of parameters, states and outputs.
        data_name, label_name: the names of the two inputs. MXNet's name of a label, "softmax_label", is taken, too.

    Raises:
        ConfigError: a loss in the middle, an `Embedding` that is not first, no layers, or two layers of one name.
    """

    def __init__(
        self, *layers: Layer | Loss, prefix: str = "", data_name: str = "data", label_name: str = "label"
    ) -> None:
        self.data_name = data_name
        self.label_name = label_name
        *body, last = _named(layers, prefix)
        self.loss = last if isinstance(last, Loss) else None
        if isinstance(last, Layer):
            body.append(last)
        self.layers: tuple[Layer, ...] = tuple(layer for layer in body if isinstance(layer, Layer))
        if len(self.layers) != len(body):
            raise ConfigError("a loss can only be the last layer")
        if not self.layers:
            raise ConfigError("a model needs a layer besides the loss")
        for layer in self.layers[1:]:
            if not layer.is_differentiable:
                raise ConfigError(f"{layer.name} has no gradient for its input: it can only be the first layer")

    def layer_shapes(self, data_shape: Shape) -> list[Shape]:
        """The shape of the data and of the output of each layer, batch first.

        Raises:
            ConfigError: a layer cannot take the output of the one before it.
        """
        shapes = [tuple(data_shape)]
        for layer in self.layers:
            shapes.append(layer.output_shape(shapes[-1]))
        if self.loss is not None:
            self.loss.check(shapes[-1])
        return shapes

    def parameter_shapes(self, data_shape: Shape) -> dict[str, Shape]:
        """Name → shape of each parameter for data of this shape (batch first), first layer first."""
        return {name: tensor.shape for name, tensor in self._tensors(data_shape, aux=False).items()}

    def aux_shapes(self, data_shape: Shape) -> dict[str, Shape]:
        """Name → shape of each state that gradients do not train, first layer first."""
        return {name: tensor.shape for name, tensor in self._tensors(data_shape, aux=True).items()}

    def initialize(self, data_shape: Shape, seed: int = 0) -> dict[str, HostArray]:
        """New float32 parameters by name for data of this shape (batch first); each layer has its own distribution.

        The values of a parameter depend only on the seed, its name and its shape, not on other layers or the device.
        """
        return _initial(self._tensors(data_shape, aux=False), seed)

    def initialize_aux(self, data_shape: Shape, seed: int = 0) -> dict[str, HostArray]:
        """New float32 states by name."""
        return _initial(self._tensors(data_shape, aux=True), seed)

    def describe(self, data: Sequence[DataDesc], labels: Sequence[DataDesc] = ()) -> ModelDescription:
        """See `kvd.parallel.Model.describe`: one data input and, with a loss, at most one label."""
        self._check_inputs(data, labels)
        shape = data[0].batch_first_shape
        output_shape = self.layer_shapes(shape)[-1]
        if labels and self.loss is not None:
            self._check_label(labels[0], self.loss.label_shape(output_shape))
        output = DataDesc(f"{(self.loss or self.layers[-1]).name}_output", output_shape)
        return ModelDescription(
            self.parameter_shapes(shape),
            self.aux_shapes(shape),
            (output,),
            has_loss=self.loss is not None,
            row_sparse=tuple([f"{layer.name}_{own}" for layer in self.layers for own in layer.row_sparse_parameters()]),
        )

    def bind(
        self,
        device: Device | str,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc] = (),
        *,
        dtype: str = "float32",
        **options: Unpack[BindOptions],
    ) -> DeviceExecutor[SequentialPasses]:
        """See `kvd.parallel.Model.bind`. Parameters that are not given start as zeros, states as `initialize_aux`.

        Arguments:
            dtype: of the computation: ``"float32"`` or ``"float64"``. Data of another dtype is converted to it, except
                ids for an `Embedding`.
        """
        description = self.describe(data, labels)
        (output,) = description.outputs
        computed = _compute_dtype(dtype)
        described = replace(description, outputs=(replace(output, dtype=computed.name),))
        plan = plan_bind(described, device, data, labels, **options)
        shape = data[0].batch_first_shape
        shapes, aux = self.layer_shapes(shape), self.initialize_aux(shape)
        return DeviceExecutor(plan, SequentialPasses(self.layers, self.loss, plan, shapes, aux, computed))

    def _tensors(self, data_shape: Shape, *, aux: bool) -> dict[str, _Tensor]:
        tensors: dict[str, _Tensor] = {}
        for layer, shape in zip(self.layers, self.layer_shapes(data_shape), strict=False):
            for name, own_shape in (layer.aux_shapes(shape) if aux else layer.parameter_shapes(shape)).items():
                tensors[f"{layer.name}_{name}"] = _Tensor(layer, name, own_shape)
        return tensors

    def _check_inputs(self, data: Sequence[DataDesc], labels: Sequence[DataDesc]) -> None:
        if [desc.name for desc in data] != [self.data_name]:
            given = ", ".join(desc.name for desc in data) or "none"
            raise ConfigError(f"the model takes one data input, {self.data_name!r}, not {given}", setting="data_shapes")
        names = [desc.name for desc in labels]
        if names and (self.loss is None or names not in ([self.label_name], [MXNET_LABEL])):
            takes = f"one label, {self.label_name!r}" if self.loss else "no label, since it has no loss"
            text = f"the model takes {takes}, not {', '.join(names)}"
            raise ConfigError(text, setting="label_shapes")
        for desc in (*data, *labels):
            if desc.batch_axis < 0:
                raise ConfigError(f"{desc.name}: layout {desc.layout!r} has no batch axis N", setting=desc.name)
        if labels and labels[0].batch_size != data[0].batch_size:
            raise ConfigError(
                f"{labels[0].name} has {labels[0].batch_size} samples and {data[0].name} {data[0].batch_size}",
                setting="label_shapes",
            )

    def _check_label(self, desc: DataDesc, wanted: Shape) -> None:
        got = desc.batch_first_shape
        if [n for n in got if n != 1] != [n for n in wanted if n != 1]:
            raise ConfigError(f"{desc.name} has shape {got} (batch first), not {wanted}", setting="label_shapes")


def _named(layers: Sequence[Layer | Loss], prefix: str) -> list[Layer | Loss]:
    """The layers, each with its final name."""
    if not layers:
        raise ConfigError("a model needs at least one layer")
    counts: dict[str, int] = {}
    named: list[Layer | Loss] = []
    for layer in layers:
        number = counts.get(layer.kind, 0)
        counts[layer.kind] = number + 1
        named.append(replace(layer, name=f"{prefix}{layer.name or f'{layer.kind}{number}'}"))
    names = [layer.name for layer in named]
    doubled = sorted({str(name) for name in names if names.count(name) > 1})
    if doubled:
        raise ConfigError(f"several layers are called {', '.join(doubled)}")
    return named


def _initial(tensors: Mapping[str, _Tensor], seed: int) -> dict[str, HostArray]:
    values = {}
    for name, tensor in tensors.items():
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values[name] = tensor.layer.initial(tensor.local_name, tensor.shape, generator)
    return values


def _compute_dtype(dtype: str) -> np.dtype[Any]:
    if dtype not in ("float32", "float64"):
        raise ConfigError(f'dtype {dtype!r} is neither "float32" nor "float64"', setting="dtype")
    return np.dtype(dtype)
