"""`DataParallelExecutorGroup`: one model on several devices, each of which computes a part of every batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from kvd.errors import ConfigError, GradientAnomaly, InputMismatch, NotAllowed, ShapeMismatch
from kvd.optimizer import Optimizer
from kvd.parallel.batch import DataBatch, DataDesc
from kvd.parallel.device import Array, Device, HostArray
from kvd.parallel.device_threads import Lane, run_on_all
from kvd.parallel.group.binding import Binding, Bound, names_of, shared_arrays
from kvd.parallel.group.input_checks import (
    DescLike,
    as_descs,
    batch_arrays,
    checked_input,
    common_size,
    fitting,
    part_of,
)
from kvd.parallel.group.parameters import copy_in, copy_out
from kvd.parallel.group.pipeline import Feed, Update
from kvd.parallel.group.requests import RequestRules
from kvd.parallel.group.split import SplitRule, common_batch_size, split_batch_axis
from kvd.parallel.models.model import Executor, GradReq, Model
from kvd.parallel.training.metric import Metric

if TYPE_CHECKING:
    from kvd.client.store import KVStore

#: Called with (place of the device in the group, device, name, array) for the output of every layer.
GroupMonitor: TypeAlias = Callable[[int, Device, str, Array], None]
#: Called with (place of the device in the group, name of the parameter) once a gradient is complete on that device.
GroupGradientHook: TypeAlias = Callable[[int, str], None]


class DataParallelExecutorGroup(Bound):
    """Executors of one model on several devices, fed with the parts of one batch. After MXNet's class of this name.

    The loss is averaged over the whole batch on every device, so the gradient of the batch is the *sum* over the
    devices of `grad_arrays`. Devices run at the same time; calls of the group itself are not for several threads.

    Where MXNet's class goes on with stale, partial or guessed state, this one raises: see each member.

    Arguments:
        model: what to bind, such as a `Sequential`.
        devices: one executor each; ``"cpu"`` may stand several times.
        data_shapes, label_shapes: a `DataDesc` (or its fields in a tuple) per array, of the whole batch. Arrays
            without a batch axis go whole to every device.
        workload: a positive weight per device; None: all alike.
        for_training: without it there are no gradients.
        inputs_need_grad: compute the gradients of the data too.
        shared_group: a group on the same devices, whose parameter, gradient and state arrays of the same names are
            used here too: the *same* arrays. If it is bound to a store, so is this one.
        fixed_param_names: parameters without gradients.
        grad_req: see `RequestRules`.
        split: see `split_batch_axis`.
        reshape: what forward does with a batch of another size than bound: ``"error"`` or ``"auto"`` (reshapes).
        detect_anomaly: raise `GradientAnomaly` from backward for a gradient that is not finite.
        seed: of dropout and the like; each device has a chance of its own.

    Raises:
        InputMismatch: descriptions that disagree on the batch or have none, or a batch too small for the devices.
        ConfigError: a device that does not exist, and what `RequestRules`, `split_batch_axis` and the model refuse.
        ShapeMismatch, DtypeMismatch: arrays of ``shared_group`` that do not fit.
    """

    def __init__(
        self,
        model: Model,
        devices: Sequence[Device | str],
        data_shapes: Sequence[DescLike],
        label_shapes: Sequence[DescLike] | None = None,
        *,
        workload: Sequence[float] | None = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        shared_group: DataParallelExecutorGroup | None = None,
        fixed_param_names: Sequence[str] = (),
        grad_req: GradReq | Sequence[GradReq] | Mapping[str, GradReq] = "write",
        split: SplitRule = "even",
        reshape: Literal["error", "auto"] = "error",
        detect_anomaly: bool = False,
        seed: int = 0,
    ) -> None:
        if not devices or isinstance(devices, str):
            raise ConfigError(f"devices must be a list of at least one device, not {devices!r}", setting="devices")
        if reshape not in ("error", "auto"):
            raise ConfigError(f'reshape={reshape!r} is neither "error" nor "auto"', setting="reshape")
        self.model = model
        self.devices = tuple(Device.parse(device) for device in devices)
        self.workload = [1.0] * len(self.devices) if workload is None else list(workload)
        if len(self.workload) != len(self.devices):
            raise ConfigError(f"{len(self.workload)} workloads for {len(self.devices)} devices", setting="workload")
        self.for_training = for_training
        self.inputs_need_grad = inputs_need_grad
        self._rules = RequestRules(grad_req, tuple(fixed_param_names), inputs_need_grad, for_training)
        self._split: SplitRule = split
        self._reshapes = reshape == "auto"
        self.detect_anomaly = detect_anomaly
        self._seed = seed
        on_cpu = sum(not device.is_cuda for device in self.devices)
        self._lanes = [Lane(device, index, on_cpu) for index, device in enumerate(self.devices)]
        self._monitor: GroupMonitor | None = None
        self._monitor_lock = threading.Lock()
        self._has_outputs = False
        self._has_input_grads = False
        self._binding: Binding | None = None
        self._feed: Feed | None = None
        self.bind_exec(data_shapes, label_shapes, shared_group)
        if shared_group is not None and shared_group._feed is not None:
            shared_group._feed.check_covers(self)
            self._feed = shared_group._feed

    def bind_exec(
        self,
        data_shapes: Sequence[DescLike],
        label_shapes: Sequence[DescLike] | None = None,
        shared_group: DataParallelExecutorGroup | None = None,
        reshape: bool = False,
    ) -> None:
        """Bind an executor per device. The constructor does this; again it is for ``reshape=True`` only.

        With ``reshape`` parameters, gradients and states are kept, as the same arrays, unless ``shared_group`` gives
        others. If it raises, the group is what it was before.

        Raises:
            NotAllowed: already bound, and ``reshape`` is not set; or bound to a store, and ``shared_group`` is set.
            As the constructor.
        """
        if self._binding is not None and not reshape:
            raise NotAllowed("already bound: pass reshape=True, or call reshape")
        if shared_group is not None:
            self._check_not_fed()
        data, labels = as_descs(data_shapes), as_descs(label_shapes or ())
        batch_size = common_batch_size([*data, *labels])
        slices = split_batch_axis(batch_size, self.workload, self._split)
        description = self.model.describe(data, labels)
        requests = self._rules.resolve(names_of(data), list(description.params), names_of(labels))
        sources = self._executors_to_share(shared_group)

        def bind(index: int) -> Executor:
            samples = slices[index].stop - slices[index].start
            return self.model.bind(
                self.devices[index],
                [desc.with_batch_size(samples) for desc in data],
                [desc.with_batch_size(samples) for desc in labels],
                for_training=self.for_training,
                grad_req=requests,
                normalization=batch_size,
                seed=(self._seed, index),
                **shared_arrays(sources[index] if sources else None, description, requests),
            )

        executors = run_on_all(self._lanes, bind)
        if self._binding is not None:
            for executor, old in zip(executors, self._binding.executors, strict=True):
                executor.step = old.step
        self._binding = Binding(data, labels, batch_size, slices, description, executors)
        self._has_outputs = self._has_input_grads = False
        self.install_monitor(self._monitor)

    def reshape(self, data_shapes: Sequence[DescLike], label_shapes: Sequence[DescLike] | None = None) -> None:
        """Bind to other shapes, dtypes or layouts, keeping the parameters; nothing happens if all four fields agree.

        Raises:
            As the constructor; the group is then what it was before.
        """
        binding = self._bound
        if (as_descs(data_shapes), as_descs(label_shapes or ())) != (binding.data, binding.labels):
            self.bind_exec(data_shapes, label_shapes, reshape=True)

    def forward(self, batch: DataBatch, is_train: bool | None = None) -> None:
        """Compute the outputs of every device for its part of ``batch``, of which each byte is copied once.

        Arguments:
            is_train: None: as ``for_training``. Labels are optional when this is False, and ignored if none are bound.

        Raises:
            InputMismatch: the number of arrays differs from the bound one, or labels are missing.
            ShapeMismatch: an array does not fit its description; in the number of samples that is an error unless the
                group was made with ``reshape="auto"``, which then binds to the new size.
            DtypeMismatch: an array cannot become the bound dtype without losing its kind, as floats as integers do.
            What the model raises for wrong values, with a note that names the device.
            Bound to a store, what it raises for the weights that are waited for: NodeLost, RequestTimeout.
        """
        train = self.for_training if is_train is None else is_train
        self._receive()
        arrays = self._fitting_arrays(batch, needs_labels=train and self.for_training)
        binding = self._bound
        self._has_outputs = self._has_input_grads = False

        def run(index: int) -> None:
            lane, inputs = self._lanes[index], {}
            for desc, array in arrays:
                part = part_of(array, desc.batch_axis, binding.slices[index])
                inputs[desc.name] = lane.buffer(replace(desc, shape=part.shape))
                lane.device.put(inputs[desc.name], part)
            binding.executors[index].forward(inputs, train)

        run_on_all(self._lanes, run)
        self._has_outputs = True

    def backward(
        self, out_grads: Sequence[Array] | Array | None = None, on_gradient: GroupGradientHook | None = None
    ) -> None:
        """Compute the gradients of every device from the last forward.

        Arguments:
            out_grads: for a model without a loss, the gradient of the objective with respect to each output, of the
                whole batch; split as the output is.
            on_gradient: called from the threads of the devices, as soon as each gradient is complete.

        Raises:
            NotAllowed: not bound for training; no forward with ``is_train=True`` since the last backward; head
                gradients missing, or given to a model with a loss.
            ShapeMismatch: a head gradient is not shaped as its output.
            GradientAnomaly: see ``detect_anomaly``.
        """
        binding = self._bound
        if not self.for_training:
            raise NotAllowed("not bound for training: re-bind with for_training=True to run backward")
        if not self._has_outputs:
            raise NotAllowed("backward needs a forward: run forward(batch, is_train=True) first")
        heads = self._head_gradients(out_grads)
        self._has_input_grads = False
        feed = self._feed
        if feed is not None:
            feed.begin(self, when_ready=not self.detect_anomaly)
        told = [hook for hook in (on_gradient, None if feed is None else feed.completed) if hook is not None]

        def run(index: int) -> None:
            executor = binding.executors[index]

            def complete(name: str) -> None:
                if self.detect_anomaly:
                    self._check_finite(executor, name)
                for hook in told:
                    hook(index, name)

            parts = [part_of(head, axis, binding.slices[index]) for head, axis in heads] if heads else None
            executor.backward(parts, complete if self.detect_anomaly or told else None)

        run_on_all(self._lanes, run)
        if feed is not None:
            feed.end()
        self._has_input_grads = True

    def forward_backward(self, batch: DataBatch) -> None:
        """`forward` for training, then `backward`."""
        self.forward(batch, is_train=True)
        self.backward()

    def bind_to(
        self,
        kv: KVStore,
        *,
        names: Mapping[str, str | int] | None = None,
        optimizer: Optimizer | None = None,
        update: Update = "server",
    ) -> Feed:
        """Train through a store: gradients go there from `backward`, weights come back before the next `forward`.

        Every worker calls it. See `kvd.parallel.Feed` for what happens, and for the errors. On a single CPU it replaces
        the arrays of `grad_arrays`: a group that is to share them is made after it.

        Arguments:
            names: the key of each parameter; None, or left out: its own name.
            optimizer: with ``update="server"`` it is set on the store (None: the store has one already); with
                ``"local"`` each worker updates with it, and the store only merges gradients.

        Raises:
            NotAllowed: this group is bound to a store already, or not for training.
        """
        self._check_not_fed()
        if not self.for_training:
            raise NotAllowed("not bound for training: there would be no gradients to send")
        self._feed = Feed(self, kv, names or {}, optimizer, update)
        return self._feed

    @property
    def feed(self) -> Feed | None:
        """What `bind_to` made; None before."""
        return self._feed

    @property
    def lanes(self) -> list[Lane]:
        """The thread (and stream) of each device."""
        return list(self._lanes)

    def get_outputs(self) -> list[list[Array]]:
        """For each output the array of each device: live, overwritten or replaced by the next forward.

        Raises:
            NotAllowed: no forward since the last bind or reshape, or it failed.
        """
        if not self._has_outputs:
            raise NotAllowed("there are no outputs: run forward first")
        per_device = [executor.outputs for executor in self.executors]
        return [list(parts) for parts in zip(*per_device, strict=True)]

    def get_outputs_merged(self) -> list[Array]:
        """Each output of the whole batch on the first device; on one device the live array itself, else a copy.

        An output without a batch axis is the first device's.

        Raises:
            NotAllowed: as `get_outputs`.
        """
        descs = self._bound.description.outputs
        return [self._merged(parts, desc) for parts, desc in zip(self.get_outputs(), descs, strict=True)]

    def get_input_grads(self) -> list[list[Array]]:
        """For each data array, in the order of ``data_shapes``, the gradient on each device: live.

        Raises:
            NotAllowed: not bound with ``inputs_need_grad``, or no backward since the last forward.
        """
        if not (self.inputs_need_grad and self.for_training):
            raise NotAllowed("no gradients of the inputs: bind with inputs_need_grad=True and for_training=True")
        if not self._has_input_grads:
            raise NotAllowed("there are no gradients of the inputs: run backward first")
        for desc in self._bound.data:
            if desc.name not in self.executors[0].input_grads:
                raise NotAllowed(f"grad_req gives {desc.name} no gradient")
        return [[executor.input_grads[desc.name] for executor in self.executors] for desc in self._bound.data]

    def get_input_grads_merged(self) -> list[Array]:
        """The gradient of each data array for the whole batch; as `get_outputs_merged`."""
        return [self._merged(parts, desc) for parts, desc in zip(self.get_input_grads(), self._bound.data, strict=True)]

    def set_params(
        self, arg_params: Mapping[str, Any], aux_params: Mapping[str, Any] | None = None, allow_extra: bool = False
    ) -> None:
        """Copy parameters and states to every device, cast to the dtype there; names left out keep their values.

        All is checked before anything is changed.

        Arguments:
            allow_extra: ignore names that the model does not have.

        Raises:
            InputMismatch: a name that the model does not have.
            ShapeMismatch: an array does not have its parameter's shape.
            NotAllowed: bound to a store, whose values would replace these at the next step: set them before.
        """
        self._check_not_fed()
        binding = self._bound
        copy_in(self._lanes, binding.executors, binding.description, arg_params, aux_params or {}, allow_extra)

    def get_params(self, arg_params: Mapping[str, HostArray], aux_params: Mapping[str, HostArray]) -> None:
        """Write the mean over the devices, taken in float64, into the given host arrays, cast to their dtype.

        Parameters are the same on every device unless someone updates them one by one; states such as running means
        differ. All is checked before anything is written.

        Raises:
            KeyNotFound: a parameter or state has no target.
            ShapeMismatch: a target has another shape.
            ConfigError: a target is not a NumPy array that can be written.
        """
        self._receive()
        binding = self._bound
        copy_out(binding.executors, binding.description, arg_params, aux_params)

    def install_monitor(self, monitor: GroupMonitor | None) -> None:
        """Call ``monitor(place in the group, device, name, array)`` for every output of every layer; None ends it.

        It is called from the threads of the devices, by one at a time, and stays installed over a reshape.
        """
        self._monitor = monitor
        for index, executor in enumerate(self.executors):
            executor.set_monitor(None if monitor is None else self._monitor_of(index, monitor))

    def update_metric(self, metric: Metric, labels: Sequence[Any]) -> None:
        """Update ``metric`` once per device, in order, with its part of ``labels`` and its outputs.

        Labels have their batch axis where the outputs have theirs. Parts in host memory are views.

        Raises:
            NotAllowed: no labels are bound, so that it is not known how to split them; or as `get_outputs`.
            InputMismatch: as many labels as bound were expected.
            ShapeMismatch: a label does not fit its description.
        """
        binding = self._bound
        if not binding.labels:
            raise NotAllowed("no labels are bound: give label_shapes, which say how labels are split")
        if len(labels) != len(binding.labels):
            raise InputMismatch(f"{len(labels)} labels for {len(binding.labels)} bound", setting="labels")
        arrays = [fitting(d.name, array, d.shape) for d, array in zip(binding.labels, labels, strict=True)]
        outputs = self.get_outputs()
        axis = binding.description.outputs[0].batch_axis
        for index, part in enumerate(binding.slices):
            own = []
            for desc, array in zip(binding.labels, arrays, strict=True):
                label = part_of(array, desc.batch_axis, part)
                own.append(np.moveaxis(label, desc.batch_axis, axis) if min(axis, desc.batch_axis) >= 0 else label)
            metric.update(own, [parts[index] for parts in outputs])

    def _executors_to_share(self, shared_group: DataParallelExecutorGroup | None) -> list[Executor] | None:
        """Whose arrays the next executors use: those of ``shared_group``, else this group's own if it is bound."""
        if shared_group is None:
            return None if self._binding is None else self._binding.executors
        if shared_group.devices != self.devices:
            theirs, ours = (", ".join(map(str, devices)) for devices in (shared_group.devices, self.devices))
            raise ConfigError(f"shared_group is on {theirs}, this group on {ours}", setting="shared_group")
        return shared_group.executors

    def _fitting_arrays(self, batch: DataBatch, needs_labels: bool) -> list[tuple[DataDesc, Array]]:
        """The arrays of ``batch`` with their descriptions, checked; binds to the batch's size if that is asked for."""
        binding = self._bound
        descs, arrays = batch_arrays(batch, binding, needs_labels)
        size = common_size(descs, arrays)
        if self._reshapes and size not in (None, binding.batch_size):
            descs = [desc.with_batch_size(size) for desc in descs]
            pairs = [(d, checked_input(d, a)) for d, a in zip(descs, arrays, strict=True)]
            self.reshape(*([d.with_batch_size(size) for d in part] for part in (binding.data, binding.labels)))
            return pairs
        return [(desc, checked_input(desc, array)) for desc, array in zip(descs, arrays, strict=True)]

    def _head_gradients(self, out_grads: Sequence[Array] | Array | None) -> list[tuple[Array, int]] | None:
        """Each head gradient with the batch axis of its output."""
        if out_grads is None:
            return None
        heads = list(out_grads) if isinstance(out_grads, list | tuple) else [out_grads]
        descs = self._bound.description.outputs
        if len(heads) != len(descs):
            raise ShapeMismatch(f"{len(heads)} head gradients for {len(descs)} outputs")
        return [(fitting(d.name, head, d.shape), d.batch_axis) for head, d in zip(heads, descs, strict=True)]

    def _check_finite(self, executor: Executor, name: str) -> None:
        if not bool(executor.device.xp.isfinite(executor.grads[name]).all()):
            raise GradientAnomaly(name, str(executor.device))

    def _receive(self) -> None:
        """The weights that a store has are on the devices when it returns."""
        if self._feed is not None:
            self._feed.receive()

    def _check_not_fed(self) -> None:
        if self._feed is not None:
            raise NotAllowed("this group is bound to a store, which has the weights: do this before bind_to")

    def _merged(self, parts: list[Array], desc: DataDesc) -> Array:
        if len(parts) == 1 or desc.batch_axis < 0:
            return parts[0]
        device, axis = self.devices[0], desc.batch_axis
        with device.current():
            merged = device.xp.empty(desc.shape, dtype=parts[0].dtype)
            for part, samples in zip(parts, self._bound.slices, strict=True):
                device.put(part_of(merged, axis, samples), part)
        return merged

    def _monitor_of(self, index: int, monitor: GroupMonitor) -> Callable[[str, Array], None]:
        def show(name: str, array: Array) -> None:
            with self._monitor_lock:
                monitor(index, self.devices[index], name, array)

        return show
