"""A model bound to the devices of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvd.errors import ConfigError, NotAllowed
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array
from kvd.parallel.device_threads import DeviceThread, run_on_all
from kvd.parallel.group.requests import RequestRules
from kvd.parallel.group.split import SplitRule, common_batch_size, split_batch_axis
from kvd.parallel.models.model import BindOptions, Executor, GradReq, Model, ModelDescription
from kvd.parallel.models.row_gradients import check_same_kind


@dataclass(frozen=True)
class Binding:
    """The result of one bind. It is replaced as a whole, so that a bind that fails changes nothing.

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
    def arg_names(self) -> list[str]:
        """Data, parameters and labels, in this order."""
        return [*_names(self.data), *self.description.params, *_names(self.labels)]

    @property
    def trained(self) -> list[str]:
        """The parameters that have gradients, the first layer's first."""
        return list(self.executors[0].grads)

    def descs_for(self, batch_size: int) -> tuple[list[DataDesc], list[DataDesc]]:
        """The descriptions of data and labels for another number of samples."""
        data, labels = ([desc.with_batch_size(batch_size) for desc in descs] for descs in (self.data, self.labels))
        return data, labels

    def arrays(self, name: str) -> list[Array]:
        """The array of this parameter or state on each device."""
        if name in self.description.params:
            return [executor.params[name] for executor in self.executors]
        return [executor.aux[name] for executor in self.executors]

    def gradients(self, name: str) -> list[Array | None]:
        """The gradient array of this parameter on each device; None where there is no gradient."""
        return [executor.grads.get(name) for executor in self.executors]


class BoundModel:
    """How a group binds its model, and the binding of the moment.

    Attributes:
        threads: of the devices.
        current: the binding; None before the first.

    Arguments:
        model, workload, split, seed: see `kvd.parallel.DataParallelExecutorGroup`.
        rules: which gradients are computed.
    """

    def __init__(
        self,
        model: Model,
        threads: Sequence[DeviceThread],
        workload: Sequence[float],
        split: SplitRule,
        rules: RequestRules,
        seed: int,
    ) -> None:
        self.threads = list(threads)
        self.current: Binding | None = None
        self._model = model
        self._workload = workload
        self._split: SplitRule = split
        self._rules = rules
        self._seed = seed

    @property
    def binding(self) -> Binding:
        """The binding of the moment. Raises NotAllowed before the first."""
        if self.current is None:
            raise NotAllowed("not bound")
        return self.current

    @property
    def executors(self) -> list[Executor]:
        """Those of the binding of the moment."""
        return self.binding.executors

    def bind(self, data: Sequence[DataDesc], labels: Sequence[DataDesc], shared: BoundModel | None = None) -> None:
        """Replace the binding by one for these descriptions, of the whole batch.

        Arguments:
            shared: whose parameter, gradient and state arrays of the same names are used here too; None: those of the
                binding that is replaced.

        Raises:
            InputMismatch, ConfigError, ShapeMismatch, DtypeMismatch: see `kvd.parallel.DataParallelExecutorGroup`.
            The binding is then what it was.
        """
        batch_size = common_batch_size([*data, *labels])
        slices = split_batch_axis(batch_size, self._workload, self._split)
        description = self._model.describe(data, labels)
        requests = self._rules.resolve(_names(data), list(description.params), _names(labels))
        previous = None if self.current is None else self.current.executors
        kept = previous if shared is None else self._executors_of(shared)
        if shared is not None:
            check_same_kind(description, shared.binding.description)

        def bind(index: int) -> Executor:
            samples = slices[index].stop - slices[index].start
            options: BindOptions = {
                **_arrays_to_keep(kept[index] if kept else None, description, requests),
                "for_training": self._rules.for_training,
                "grad_req": requests,
                "normalization": batch_size,
                "seed": (self._seed, index),
            }
            return self._model.bind(
                self.threads[index].device,
                [desc.with_batch_size(samples) for desc in data],
                [desc.with_batch_size(samples) for desc in labels],
                **options,
            )

        executors = run_on_all(self.threads, bind)
        if previous is not None:
            for executor, old in zip(executors, previous, strict=True):
                executor.step = old.step
        self.current = Binding(tuple(data), tuple(labels), batch_size, slices, description, executors)

    def _executors_of(self, shared: BoundModel) -> list[Executor]:
        theirs, ours = ([thread.device for thread in bound.threads] for bound in (shared, self))
        if theirs != ours:
            raise ConfigError(
                f"shared_group is on {', '.join(map(str, theirs))}, this group on {', '.join(map(str, ours))}",
                setting="shared_group",
            )
        return shared.executors


def _arrays_to_keep(
    source: Executor | None, description: ModelDescription, requests: Mapping[str, GradReq]
) -> BindOptions:
    """The arrays of ``source`` that an executor of this description needs too."""
    if source is None:
        return {}
    wanted = [name for name in description.params if requests.get(name, "write") != "null"]
    return {
        "params": {name: source.params[name] for name in description.params if name in source.params},
        "grads": {name: source.grads[name] for name in wanted if name in source.grads},
        "aux": {name: source.aux[name] for name in description.aux if name in source.aux},
    }


def _names(descs: Sequence[DataDesc]) -> list[str]:
    return [desc.name for desc in descs]
