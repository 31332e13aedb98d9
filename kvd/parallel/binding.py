"""What a group is bound to: descriptions, slices and executors; and which arrays a new binding takes over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array
from kvd.parallel.executor import Executor, GradReq, ModelDescription


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
