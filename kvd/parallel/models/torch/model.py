"""Any `torch.nn.Module` as a model that a group can bind."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Unpack

import torch

from kvd.client.calls.process_bound import ProcessBound
from kvd.errors import ConfigError
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Device, HostArray, Shape
from kvd.parallel.models.bind_plan import plan_bind
from kvd.parallel.models.executor import DeviceExecutor
from kvd.parallel.models.model import BindOptions, ModelDescription
from kvd.parallel.models.outputs import OutputDescriptions
from kvd.parallel.models.torch.embeddings import row_sparse_parameters
from kvd.parallel.models.torch.loss import BatchLoss, LossFunction, LossReduction
from kvd.parallel.models.torch.module_copy import trained_and_states
from kvd.parallel.models.torch.passes import TorchPasses
from kvd.parallel.models.torch.step_seed import StepSeed
from kvd.parallel.models.torch.tensors import as_tensor, dtype_of, host_copy, outputs_of
from kvd.parallel.models.torch.threads import CpuThreads

HOST = Device("cpu")
QUICK = 2**30
"""Pairs of an input element and a parameter. With fewer, a forward on the CPU takes less time than what torch imports
for its ``meta`` device: more than a second."""


class Trained(Protocol):
    """A group, as far as `TorchModel.state_dict` needs it."""

    def get_params(self, arg_params: Mapping[str, HostArray], aux_params: Mapping[str, HostArray]) -> None:
        """Writes the parameters and states into the given arrays."""
        ...


class TorchModel(ProcessBound):
    """A module, and optionally a loss. Every device gets a deep copy of its own.

    - Parameters are those of ``named_parameters()`` that require a gradient, states (aux) those that do not and the
      persistent buffers. They start with the module's values. The module itself is never changed:
      ``module.load_state_dict(model.state_dict(group))`` gives it what a group has learned.
    - The data arrays are the positional arguments of ``forward``, in the order of their descriptions, as they are
      described: no axis is moved. It returns a tensor, or a tuple, list or dict of tensors, named ``"output"``,
      ``"output0"``, ``"output1"`` …, or by the dict. Their batch axes are found by describing two sizes.
    - The loss is computed in a forward for training. Whatever the number of devices, the sum of their gradients is
      that of the loss of the whole batch: a mean stays the mean over the batch, a sum stays a sum. The losses of torch
      say which they are (``loss.reduction``). A plain callable that returns one number needs ``loss_reduction`` once
      several devices share a batch; one device uses its number as it is. One value per sample (reduction "none") is
      averaged over the batch, or summed with ``loss_reduction="sum"``.
    - A mean has to weigh all samples alike. With class weights or an ``ignore_index`` torch divides by the weights of
      the samples that a device has, so the parts do not add up to torch's mean over the batch: use a sum there.
    - BatchNorm sees each device's part of the batch, as in ``torch.nn.DataParallel``.
    - Random numbers (dropout) come from torch's generator, which is seeded for each device and step, and restored
      afterwards. If a module draws any, devices that share a generator, as all CPU devices do, run their forwards one
      after another.
    - Each of n CPU devices of a group computes with an n-th of the threads that torch had when the model was made,
      at least one; no more devices than threads compute at once.

    Arguments:
        module: copied when it is bound, so only later binds see later changes of it.
        loss: ``loss(outputs, labels)``, such as ``torch.nn.CrossEntropyLoss()``. It gets the outputs as the module
            returned them, and the label, or a list of them if there are several.
        loss_reduction: whether a loss that does not say so is the ``"mean"`` or the ``"sum"`` over its samples.

    Raises:
        ConfigError: ``module`` is not a module, or has lazy parameters without a shape; ``loss_reduction`` is neither
            of the two, contradicts the loss, or comes without a loss.
    """

    _NOT_COPYABLE: ClassVar[str] = (
        "a TorchModel cannot be copied, pickled or saved, since groups of this process use it: "
        "save its module, and make a model of it in each process"
    )

    def __init__(
        self,
        module: torch.nn.Module,
        loss: LossFunction | None = None,
        *,
        loss_reduction: LossReduction | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"module is a {type(module).__name__}, not a torch.nn.Module", setting="module")
        for name, parameter in module.named_parameters():
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise ConfigError(f"{name} has no shape yet: run the module once on a batch", setting="module")
        if loss is None and loss_reduction is not None:
            raise ConfigError("loss_reduction is given, but the model has no loss", setting="loss_reduction")
        self.module = module
        self.loss = None if loss is None else BatchLoss.of(loss, loss_reduction)
        self._threads = CpuThreads()
        self._outputs = OutputDescriptions(self._output_shapes, "module")

    def initial(self) -> tuple[dict[str, HostArray], dict[str, HostArray]]:
        """Copies of the module's parameters and states, as `DataParallelExecutorGroup.set_params` takes them."""
        params, aux = trained_and_states(self.module)
        return {name: host_copy(t) for name, t in params.items()}, {name: host_copy(t) for name, t in aux.items()}

    def state_dict(self, group: Trained) -> dict[str, Any]:
        """What a group has learned, as the module's ``load_state_dict`` takes it and ``torch.save`` writes it.

        Parameters and states are means over the devices of the group, see `DataParallelExecutorGroup.get_params`. They
        are new tensors in host memory, with the names of ``module.state_dict()``; names that share one tensor share
        one here, too. What a module adds to its state by itself (``get_extra_state``) is the module's own. If the
        group is bound to a store, this waits for the weights of its last step.

        Raises:
            KeyNotFound, ShapeMismatch: the group has another model.
            NodeLost, RequestTimeout: the weights are waited for, and do not come.
        """
        params, aux = self.initial()
        group.get_params(params, aux)
        tensors = {name: as_tensor(array, HOST) for name, array in {**params, **aux}.items()}
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        first = {id(tensor): name for name, tensor in named.items() if name in tensors}
        state = self.module.state_dict(keep_vars=True)
        return {name: tensors[first[id(value)]] if id(value) in first else value for name, value in state.items()}

    def describe(self, data: Sequence[DataDesc], labels: Sequence[DataDesc] = ()) -> ModelDescription:
        """See `kvd.parallel.Model.describe`.

        To find the outputs, the module runs in evaluation mode: a small one on the CPU with zeros, a larger one on
        torch's ``meta`` device, which has shapes but no values. If it cannot run there, the other one is tried.

        Raises:
            ConfigError: the module cannot take such data; labels without a loss; an output whose batch axis grows by
                more than one per sample, or on several axes.
        """
        if labels and self.loss is None:
            raise ConfigError("labels are described, but the model has no loss", setting="label_shapes")
        params, aux = trained_and_states(self.module)
        return ModelDescription(
            {name: tuple(tensor.shape) for name, tensor in params.items()},
            {name: tuple(tensor.shape) for name, tensor in aux.items()},
            self._outputs.of(data),
            has_loss=self.loss is not None,
            row_sparse=row_sparse_parameters(self.module),
        )

    def bind(
        self,
        device: Device | str,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc] = (),
        **options: Unpack[BindOptions],
    ) -> DeviceExecutor[TorchPasses]:
        """See `kvd.parallel.Model.bind`. What is not given starts with the module's values."""
        plan = plan_bind(self.describe(data, labels), device, data, labels, **options)
        return DeviceExecutor(plan, TorchPasses(self.module, self.loss, plan, self._threads))

    def _output_shapes(self, descs: Sequence[DataDesc]) -> Mapping[str, tuple[Shape, str]]:
        pairs = sum(math.prod(desc.shape) for desc in descs) * sum(p.numel() for p in self.module.parameters())
        outputs: dict[str, torch.Tensor] | None = None
        errors: dict[str, Exception] = {}
        for where in ("cpu", "meta") if pairs <= QUICK else ("meta", "cpu"):
            try:
                outputs = self._evaluate(where, descs)
                break
            except Exception as error:  # noqa: BLE001  a module may raise anything where there are no values
                errors[where] = error
        if outputs is None:
            given = ", ".join(f"{desc.name} {desc.shape} {desc.dtype}" for desc in descs)
            why = errors["cpu"]
            text = f"the module cannot take {given}: {type(why).__name__}: {why}"
            raise ConfigError(text, setting="data_shapes") from why
        return {name: (tuple(tensor.shape), dtype_of(tensor.dtype).name) for name, tensor in outputs.items()}

    def _evaluate(self, where: str, descs: Sequence[DataDesc]) -> dict[str, torch.Tensor]:
        """The outputs by name; on ``"meta"`` they have no values."""
        module = copy.deepcopy(self.module).to(where).eval()
        inputs = [torch.zeros(desc.shape, dtype=getattr(torch, desc.dtype), device=where) for desc in descs]
        with torch.no_grad(), StepSeed(torch.device("cpu"), ()).during(0, is_train=True):  # as if nothing was drawn
            return outputs_of(module(*inputs))
