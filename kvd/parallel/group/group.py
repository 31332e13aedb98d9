"""`DataParallelExecutorGroup`: one model on several devices, each of which computes a part of every batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from kvd.client.calls.process_bound import ProcessBound
from kvd.client.facades.blocking import KVStore
from kvd.errors import ConfigError, NotAllowed
from kvd.optimizer import Optimizer
from kvd.parallel.batch import DataBatch, DataDesc
from kvd.parallel.device import Array, Device, HostArray, Shape
from kvd.parallel.device_threads import CpuDevices, DeviceThread, run_on_all
from kvd.parallel.group.binding import Binding, BoundModel
from kvd.parallel.group.device_tasks import DeviceTask, backward_task, forward_task, one_after_the_other
from kvd.parallel.group.gradient_hook import GroupGradientHook
from kvd.parallel.group.input_checks import DescLike, as_descs, fit_batch
from kvd.parallel.group.monitor import Monitor
from kvd.parallel.group.monitoring import GroupMonitor, Metric, Monitors, update_metric
from kvd.parallel.group.parameters import copy_in, copy_out
from kvd.parallel.group.pipeline import GradientPipeline, Update
from kvd.parallel.group.requests import RequestRules
from kvd.parallel.group.results import Results, Stage
from kvd.parallel.group.split import SplitRule
from kvd.parallel.models.model import Executor, GradReq, Model, ModelDescription


class DataParallelExecutorGroup(ProcessBound):
    """Executors of one model on several devices, each for a part of the batch. After MXNet's class of this name.

    The loss is averaged over the whole batch on every device, so the gradient of the batch is the *sum* over the
    devices of `grad_arrays`. Devices run at the same time; the group itself is not for several threads.

    Where MXNet's class would continue with stale, partial or guessed state, this one raises: see each member.

    Attributes:
        pipeline: what `bind_to` made; None before.

    Arguments:
        model: what to bind, such as a `Sequential`.
        devices: one executor each; ``"cpu"`` may occur several times.
        data_shapes, label_shapes: a `DataDesc` (or its fields in a tuple) per array, of the whole batch. Every
            device gets all of an array without a batch axis.
        workload: a positive weight per device; None: all equal.
        for_training: without it there are no gradients.
        inputs_need_grad: compute the gradients of the data too.
        shared_group: a group on the same devices, whose parameter, gradient and state arrays of the same names are
            used here too: the *same* arrays. If it is bound to a store, so is this one.
        fixed_param_names: parameters without gradients.
        grad_req: ``"write"``, ``"add"`` or ``"null"``, for each parameter that is not fixed, and for the data if
            ``inputs_need_grad``. A mapping is as ``"write"`` with exceptions by name, even for fixed parameters; a list
            has one request per name of data, parameters and labels. Without ``for_training`` all are ``"null"``.
        split: ``"even"`` gives samples that are left over to the devices with the largest remainders; ``"mxnet"``
            rounds as MXNet does, and fails where MXNet fails.
        reshape: what forward does with a batch of another size than bound: ``"error"`` or ``"auto"`` (reshapes).
        detect_anomaly: raise `GradientAnomaly` from backward for a gradient that is not finite.
        seed: of dropout and the like; each device draws its own random numbers.

    Raises:
        InputMismatch: descriptions that disagree on the batch or have none, or a batch too small for the devices.
        ConfigError: a device that does not exist, requests or a split that make no sense, and what the model refuses.
        ShapeMismatch, DtypeMismatch: arrays of ``shared_group`` that do not fit.
    """

    _NOT_COPYABLE: ClassVar[str] = (
        "a group cannot be copied, pickled or saved, since its executors run in this process: save what get_params "
        "gives, and make a group in each process, after its start"
    )

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
        self.detect_anomaly = detect_anomaly
        self._reshapes = reshape == "auto"
        rules = RequestRules(grad_req, tuple(fixed_param_names), inputs_need_grad, for_training)
        cpus = CpuDevices(sum(not device.is_cuda for device in self.devices))
        threads = [DeviceThread(device, index, cpus) for index, device in enumerate(self.devices)]
        self._bound = BoundModel(model, threads, self.workload, split, rules, seed)
        self._monitors = Monitors(self.devices)
        self.pipeline: GradientPipeline | None = None
        self.bind_exec(data_shapes, label_shapes, shared_group)
        if shared_group is not None and shared_group.pipeline is not None:
            shared_group.pipeline.check_covers(self.binding)
            self.pipeline = shared_group.pipeline

    @property
    def binding(self) -> Binding:
        """Descriptions, slices and executors as the last bind or reshape made them."""
        return self._bound.binding

    @property
    def description(self) -> ModelDescription:
        """Parameters, states and outputs for the whole batch."""
        return self.binding.description

    @property
    def data_shapes(self) -> tuple[DataDesc, ...]:
        """The descriptions of the data, of the whole batch."""
        return self.binding.data

    @property
    def label_shapes(self) -> tuple[DataDesc, ...]:
        """The descriptions of the labels, of the whole batch; empty if none are bound."""
        return self.binding.labels

    @property
    def slices(self) -> list[slice]:
        """Which samples of the batch each device computes."""
        return list(self.binding.slices)

    @property
    def executors(self) -> list[Executor]:
        """The executor of each device."""
        return list(self.binding.executors)

    @property
    def arg_names(self) -> list[str]:
        """Data, parameters and labels: the names to which the items of a list as ``grad_req`` belong."""
        return self.binding.arg_names

    @property
    def param_names(self) -> list[str]:
        """The names of the parameters, the first layer's first."""
        return list(self.description.params)

    @property
    def param_arrays(self) -> list[list[Array]]:
        """For each name of `param_names` the array of each device: live."""
        return [self.binding.arrays(name) for name in self.param_names]

    @property
    def grad_arrays(self) -> list[list[Array | None]]:
        """For each name of `param_names` the gradient array of each device: live; None where there is no gradient.

        Bound to a store, only read them between a backward and the next forward: the store may still be sending them.
        """
        return [self.binding.gradients(name) for name in self.param_names]

    @property
    def aux_names(self) -> list[str]:
        """The names of the states that gradients do not train."""
        return list(self.description.aux)

    @property
    def aux_arrays(self) -> list[list[Array]]:
        """For each name of `aux_names` the array of each device: live."""
        return [self.binding.arrays(name) for name in self.aux_names]

    def get_batch_size(self) -> int:
        """How many samples the whole batch has."""
        return self.binding.batch_size

    def get_output_shapes(self) -> list[tuple[str, Shape]]:
        """Name and shape of each output, of the whole batch."""
        return [(desc.name, desc.shape) for desc in self.description.outputs]

    def bind_exec(
        self,
        data_shapes: Sequence[DescLike],
        label_shapes: Sequence[DescLike] | None = None,
        shared_group: DataParallelExecutorGroup | None = None,
        reshape: bool = False,
    ) -> None:
        """Bind an executor per device. The constructor does this; call it again with ``reshape=True`` only.

        With ``reshape`` parameters, gradients and states are kept, as the same arrays, unless ``shared_group`` gives
        others. If it raises, the group is what it was before.

        Raises:
            NotAllowed: already bound, and ``reshape`` is not set; or bound to a store, and ``shared_group`` is set.
            As the constructor.
        """
        if self._bound.current is not None and not reshape:
            raise NotAllowed("already bound: pass reshape=True, or call reshape")
        if shared_group is not None:
            self._check_has_no_store()
        shared = None if shared_group is None else shared_group._bound
        self._bound.bind(as_descs(data_shapes), as_descs(label_shapes or ()), shared)
        self._results = Results(self.binding, self.devices[0], self.inputs_need_grad and self.for_training)
        self._monitors.attach(self.binding.executors)

    def reshape(self, data_shapes: Sequence[DescLike], label_shapes: Sequence[DescLike] | None = None) -> None:
        """Bind to other shapes, dtypes or layouts, keeping the parameters; nothing happens if all four fields agree.

        Raises:
            As the constructor; the group is then what it was before.
        """
        if (as_descs(data_shapes), as_descs(label_shapes or ())) != (self.data_shapes, self.label_shapes):
            self.bind_exec(data_shapes, label_shapes, reshape=True)

    def forward(self, batch: DataBatch, is_train: bool | None = None) -> None:
        """Compute the outputs of every device for its part of ``batch``, of which each byte is copied once.

        Arguments:
            is_train: None: as ``for_training``. Labels are optional when this is False, and ignored if none are bound.

        Raises:
            InputMismatch: the number of arrays differs from the bound one, or labels are missing.
            ShapeMismatch: an array does not fit its description; for another number of samples that is an error
                unless the group was made with ``reshape="auto"``, which then binds to the new size.
            DtypeMismatch: an array cannot become the bound dtype without losing its kind, as floats as integers do.
            What the model raises for wrong values, with a note that names the device.
            What the store raises for the weights that are waited for, such as NodeLost or RequestTimeout.
        """
        run_on_all(self._bound.threads, self._forward_task(batch, self.for_training if is_train is None else is_train))
        self._results.stage = Stage.OUTPUTS

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
        self._check_for_training()
        if self._results.stage is Stage.BOUND:
            raise NotAllowed("backward needs a forward: run forward(batch, is_train=True) first")
        heads = self._results.head_gradients(out_grads)
        self._results.stage = Stage.OUTPUTS
        self._run_backward(self._backward_task(heads, on_gradient))

    def forward_backward(self, batch: DataBatch) -> None:
        """`forward` for training, then `backward`, between which no device waits for the others.

        Raises what they raise. After an error of a device there are no outputs, and the gradients are undefined.
        """
        self._check_for_training()
        forward = self._forward_task(batch, is_train=True)
        backward = self._backward_task(self._results.head_gradients(None), None)
        self._run_backward(one_after_the_other(forward, backward))

    def bind_to(
        self,
        kv: KVStore,
        *,
        names: Mapping[str, str | int] | None = None,
        optimizer: Optimizer | None = None,
        update: Update = "server",
    ) -> GradientPipeline:
        """Train through a store: gradients go there from `backward`, weights come back before the next `forward`.

        Every worker calls it. See `kvd.parallel.GradientPipeline` for what happens, and for the errors. On a single
        CPU it replaces the arrays of `grad_arrays`: make a group that is to share them after this call.

        Arguments:
            names: the key of each parameter; None, or left out: its own name.
            optimizer: with ``update="server"`` it is set on the store (None: the store has one already); with
                ``"local"`` each worker updates with it, and the store only merges gradients.

        Raises:
            NotAllowed: this group is bound to a store already, or not for training.
        """
        self._check_has_no_store()
        if not self.for_training:
            raise NotAllowed("not bound for training: there would be no gradients to send")
        self.pipeline = GradientPipeline(self._bound, kv, names or {}, optimizer, update)
        return self.pipeline

    def get_outputs(self) -> list[list[Array]]:
        """For each output the array of each device: live, overwritten or replaced by the next forward.

        Raises:
            NotAllowed: no forward since the last bind or reshape, or it failed.
        """
        return self._results.outputs()

    def get_outputs_merged(self) -> list[Array]:
        """Each output of the whole batch on the first device; on one device the live array itself, else a copy.

        An output without a batch axis is the first device's. Raises NotAllowed as `get_outputs`.
        """
        return self._results.outputs_merged()

    def get_input_grads(self) -> list[list[Array]]:
        """For each data array, in the order of ``data_shapes``, the gradient on each device: live.

        Raises:
            NotAllowed: not bound with ``inputs_need_grad``, or no backward since the last forward.
        """
        return self._results.input_grads()

    def get_input_grads_merged(self) -> list[Array]:
        """The gradient of each data array for the whole batch; as `get_outputs_merged`."""
        return self._results.input_grads_merged()

    def set_params(
        self, arg_params: Mapping[str, Any], aux_params: Mapping[str, Any] | None = None, allow_extra: bool = False
    ) -> None:
        """Copy parameters and states to every device, cast to the dtype there; names left out keep their values.

        Everything is checked before anything is changed.

        Arguments:
            allow_extra: ignore names that the model does not have.

        Raises:
            InputMismatch: a name that the model does not have.
            ShapeMismatch: an array does not have its parameter's shape.
            NotAllowed: bound to a store, whose values would replace these at the next step: set them before.
        """
        self._check_has_no_store()
        copy_in(self._bound.threads, self.binding, arg_params, aux_params or {}, allow_extra)

    def get_params(self, arg_params: Mapping[str, HostArray], aux_params: Mapping[str, HostArray]) -> None:
        """Write the mean over the devices, taken in float64, into the given host arrays, cast to their dtype.

        Parameters are the same on every device unless someone updates them one by one; states such as running means
        differ. Everything is checked before anything is written.

        Raises:
            KeyNotFound: a parameter or state has no target.
            ShapeMismatch: a target has another shape.
            ConfigError: a target is not a NumPy array that can be written.
        """
        if self.pipeline is not None:
            self.pipeline.receive()
            self.pipeline.rows.fetch_all(self._bound)
        copy_out(self.binding, arg_params, aux_params)

    def install_monitor(self, monitor: Monitor | GroupMonitor | None) -> None:
        """Show outputs, weights and gradients to a `Monitor`, or call ``monitor(place in the group, device, name,
        array)`` for every output of every layer; None ends it. It stays installed over a reshape.

        A function is called from the threads of the devices, one call at a time.
        """
        self._monitors.install(monitor, self.binding.executors)

    def update_metric(self, metric: Metric, labels: Sequence[Any]) -> None:
        """Update ``metric`` once per device, in order, with its part of ``labels`` and its outputs.

        Labels have their batch axis where the outputs have theirs. Parts in host memory are views.

        Raises:
            NotAllowed: no labels are bound, which say how to split them; or as `get_outputs`.
            InputMismatch: another number of labels is bound.
            ShapeMismatch: a label does not fit its description.
        """
        update_metric(metric, self.binding, self._results, labels)

    def _forward_task(self, batch: DataBatch, is_train: bool) -> DeviceTask:
        """Bring the weights, check the batch and bind to its size; what computes a device's outputs then."""
        if self.pipeline is not None:
            self.pipeline.receive()
        arrays, size = fit_batch(batch, self.binding, is_train and self.for_training, may_resize=self._reshapes)
        if size != self.get_batch_size():
            self.reshape(*self.binding.descs_for(size))
        self._results.stage = Stage.BOUND
        return forward_task(self._bound, arrays, is_train, None if self.pipeline is None else self.pipeline.rows)

    def _backward_task(self, heads: list[list[Array]] | None, on_gradient: GroupGradientHook | None) -> DeviceTask:
        """Begin the step of the store; what computes a device's gradients then."""
        listeners = [] if on_gradient is None else [on_gradient]
        if self.pipeline is not None:
            self.pipeline.begin(self._bound, when_ready=not self.detect_anomaly)
            listeners.append(self.pipeline.completed)
        return backward_task(self.binding.executors, heads, listeners, check_finite=self.detect_anomaly)

    def _run_backward(self, task: DeviceTask) -> None:
        run_on_all(self._bound.threads, task)
        if self.pipeline is not None:
            self.pipeline.end()
        self._results.stage = Stage.GRADIENTS

    def _check_for_training(self) -> None:
        if not self.for_training:
            raise NotAllowed("not bound for training: re-bind with for_training=True to run backward")

    def _check_has_no_store(self) -> None:
        if self.pipeline is not None:
            raise NotAllowed("this group is bound to a store, which has the weights: do this before bind_to")
