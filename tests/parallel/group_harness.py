"""What the tests of groups share: groups on CPUs, what they have learned, and torch as the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd.optimizer import SGD
from kvd.parallel import (
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Dense,
    Model,
    ReLU,
    Sequential,
    SoftmaxCrossEntropy,
)


@dataclass(frozen=True)
class Groups:
    """Makes groups on CPUs, for one data input with the batch on axis 0 and one label per sample.

    Attributes:
        model: that a group has unless the call says otherwise.
        features: the shape of one sample.
        params: what groups of `model` start with; None: what the model starts with.
        devices, size: likewise.
        label: the dtype of the labels; None: no labels.
        names: of the inputs.
    """

    model: Model
    features: tuple[int, ...]
    params: Mapping[str, Any] | None = None
    devices: int = 2
    size: int = 8
    label: str | None = "int64"
    names: tuple[str, str] = ("data", "label")

    def __call__(
        self, model: Model | None = None, *, devices: int | None = None, size: int | None = None, **arguments: Any
    ) -> DataParallelExecutorGroup:
        group = DataParallelExecutorGroup(
            model or self.model,
            ["cpu"] * (self.devices if devices is None else devices),
            *self.descs(self.size if size is None else size),
            **arguments,
        )
        if self.params is not None and model in (None, self.model) and arguments.get("shared_group") is None:
            group.set_params(self.params)
        return group

    def descs(self, size: int) -> tuple[list[DataDesc], list[DataDesc]]:
        """The descriptions of data and labels for this many samples."""
        data, label = self.names
        labels = [] if self.label is None else [DataDesc(label, (size,), self.label)]
        return [DataDesc(data, (size, *self.features))], labels


#: A small classifier and a batch of 11 samples, which divides evenly over no number of devices but 1 and 11.
MODEL = Sequential(Dense(4), ReLU(), Dense(3), SoftmaxCrossEntropy())
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(11, 2)).astype(np.float32)
Y = GENERATOR.integers(0, 3, 11)
BATCH = DataBatch([X], [Y])
PARAMS = MODEL.initialize(X.shape, seed=1)
group_of = Groups(MODEL, (2,), PARAMS, devices=3, size=11)


def descs(size: int = 11) -> tuple[list[DataDesc], list[DataDesc]]:
    """The descriptions of the data and labels of `group_of`."""
    return group_of.descs(size)


def weights_of(group: DataParallelExecutorGroup) -> list[Any]:
    """The parameters in float32, after the store has answered everything that was sent to it."""
    described = group.description
    values = {name: np.empty(shape, np.float32) for name, shape in described.params.items()}
    group.get_params(values, {name: np.empty(shape) for name, shape in described.aux.items()})
    return list(values.values())


def summed_gradients(group: DataParallelExecutorGroup) -> dict[str, Any]:
    """The gradient of the batch: the sum over the devices, in order."""
    return {name: sum(arrays) for name, arrays in zip(group.param_names, group.grad_arrays, strict=True)}


def torch_network(params: Mapping[str, Any]) -> Any:
    """Linear, Tanh, Linear with these weights and biases, in float32."""
    import torch  # workers' programs import this file, and do without: it takes seconds

    first, _, second, _ = params.values()
    made = torch.nn.Sequential(
        torch.nn.Linear(*reversed(first.shape)), torch.nn.Tanh(), torch.nn.Linear(*reversed(second.shape))
    )
    with torch.no_grad():
        for parameter, value in zip(made.parameters(), params.values(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return made


def torch_weights(params: Mapping[str, Any], steps: Iterable[tuple[Any, Any]], rule: SGD) -> list[Any]:
    """The weights after these (data, labels), one process in float64: torch's network, cross entropy and SGD."""
    import torch

    net = torch_network(params).double()
    rate: Any = rule.learning_rate
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=rule.momentum, weight_decay=rule.wd)
    for x, y in steps:
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(net(torch.from_numpy(x).double()), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in net.parameters()]


def assert_close(got: Iterable[Any], wanted: Iterable[Any], atol: float = 2e-6) -> None:
    """Each array equals the expected one, up to the rounding of float32."""
    for array, value in zip(got, wanted, strict=True):
        np.testing.assert_allclose(array, value, rtol=0, atol=atol)


def assert_same(first: Iterable[Any], second: Iterable[Any]) -> None:
    """The arrays are equal bit for bit, but for the sign of zeros."""
    for array, value in zip(first, second, strict=True):
        np.testing.assert_array_equal(array, value)
