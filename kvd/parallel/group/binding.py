"""What a group is bound to: descriptions, slices and executors; and which arrays a new binding takes over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvd.errors import NotAllowed
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Shape
from kvd.parallel.models.model import Executor, GradReq, ModelDescription


@dataclass(frozen=True)
class Binding:
    """What one bind makes; replaced as a whole, so that a bind that fails changes nothing.

    Attributes:
        data, labels: the descriptions, of the whole batch.
        batch_size: samples in the whole batch.
        slices: which of them each device computes.
        description: of the model for the whole batch.
        executors: one per device.
    """

    data: tuple[DataDesc, ...]
    labels: tuple[DataDesc, ...]
    batch_size: int
    slices: list[slice]
    description: ModelDescription
    executors: list[Executor]

    @property
    def inputs(self) -> tuple[DataDesc, ...]:
        """Data, then labels."""
        return self.data + self.labels


class Bound:
    """What can be read of a group: the part of `DataParallelExecutorGroup` that changes nothing."""

    _binding: Binding | None = None

    @property
    def binding(self) -> Binding:
        """Descriptions, slices and executors as the last bind or reshape made them."""
        return self._bound

    @property
    def description(self) -> ModelDescription:
        """Parameters, states and outputs for the whole batch."""
        return self._bound.description

    @property
    def data_shapes(self) -> tuple[DataDesc, ...]:
        """The descriptions of the data, of the whole batch."""
        return self._bound.data

    @property
    def label_shapes(self) -> tuple[DataDesc, ...]:
        """The descriptions of the labels, of the whole batch; empty if none are bound."""
        return self._bound.labels

    @property
    def slices(self) -> list[slice]:
        """Which samples of the batch each device computes."""
        return list(self._bound.slices)

    @property
    def executors(self) -> list[Executor]:
        """The executor of each device."""
        return list(self._bound.executors)

    @property
    def arg_names(self) -> list[str]:
        """Data, parameters and labels: the names that a list as ``grad_req`` is for."""
        binding = self._bound
        return [*names_of(binding.data), *binding.description.params, *names_of(binding.labels)]

    @property
    def param_names(self) -> list[str]:
        """The names of the parameters, the first layer's first."""
        return list(self._bound.description.params)

    @property
    def param_arrays(self) -> list[list[Array]]:
        """For each name of `param_names` the array of each device: live."""
        return [[executor.params[name] for executor in self.executors] for name in self.param_names]

    @property
    def grad_arrays(self) -> list[list[Array | None]]:
        """For each name of `param_names` the gradient array of each device: live; None where there is no gradient.

        Bound to a store they are only read from a backward to the next forward: it may still be sending them.
        """
        return [[executor.grads.get(name) for executor in self.executors] for name in self.param_names]

    @property
    def aux_names(self) -> list[str]:
        """The names of the states that gradients do not train."""
        return list(self._bound.description.aux)

    @property
    def aux_arrays(self) -> list[list[Array]]:
        """For each name of `aux_names` the array of each device: live."""
        return [[executor.aux[name] for executor in self.executors] for name in self.aux_names]

    def get_batch_size(self) -> int:
        """How many samples the whole batch has."""
        return self._bound.batch_size

    def get_output_shapes(self) -> list[tuple[str, Shape]]:
        """Name and shape of each output, of the whole batch."""
        return [(desc.name, desc.shape) for desc in self._bound.description.outputs]

    @property
    def _bound(self) -> Binding:
        if self._binding is None:
            raise NotAllowed("not bound")
        return self._binding


def shared_arrays(
    source: Executor | None, description: ModelDescription, requests: Mapping[str, GradReq]
) -> dict[str, dict[str, Array]]:
    """The arrays of ``source`` that an executor of this description needs too, as arguments of `Model.bind`."""
    if source is None:
        return {}
    wanted = [name for name in description.params if requests.get(name, "write") != "null"]
    return {
        "params": {name: source.params[name] for name in description.params if name in source.params},
        "grads": {name: source.grads[name] for name in wanted if name in source.grads},
        "aux": {name: source.aux[name] for name in description.aux if name in source.aux},
    }


def names_of(descs: Sequence[DataDesc]) -> list[str]:
    """Their names, in order."""
    return [desc.name for desc in descs]
