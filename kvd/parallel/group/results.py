"""What the passes of a group have computed: outputs and gradients of the inputs, by device or of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvd.errors import NotAllowed, ShapeMismatch
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device
from kvd.parallel.group.binding import Binding
from kvd.parallel.group.input_checks import fitting, part_of


class Stage(Enum):
    """How far a binding has come. A new binding, and each forward, starts from ``BOUND``."""

    BOUND = "bound"
    OUTPUTS = "outputs"
    GRADIENTS = "gradients"


class Results:
    """The outputs and input gradients of one binding, which are there or not depending on its stage.

    Attributes:
        stage: set by the group that runs the passes.

    Arguments:
        device: where merged arrays are made.
        has_input_grads: whether the gradients of the inputs are computed.
    """

    def __init__(self, binding: Binding, device: Device, has_input_grads: bool) -> None:
        self.stage = Stage.BOUND
        self._binding = binding
        self._device = device
        self._has_input_grads = has_input_grads

    def outputs(self) -> list[list[Array]]:
        """See `kvd.parallel.DataParallelExecutorGroup.get_outputs`."""
        if self.stage is Stage.BOUND:
            raise NotAllowed("there are no outputs: run forward first")
        per_device = [executor.outputs for executor in self._binding.executors]
        return [list(parts) for parts in zip(*per_device, strict=True)]

    def outputs_merged(self) -> list[Array]:
        """See `kvd.parallel.DataParallelExecutorGroup.get_outputs_merged`."""
        descs = self._binding.description.outputs
        return [self._merged(parts, desc) for parts, desc in zip(self.outputs(), descs, strict=True)]

    def input_grads(self) -> list[list[Array]]:
        """See `kvd.parallel.DataParallelExecutorGroup.get_input_grads`."""
        if not self._has_input_grads:
            raise NotAllowed("no gradients of the inputs: bind with inputs_need_grad=True and for_training=True")
        if self.stage is not Stage.GRADIENTS:
            raise NotAllowed("there are no gradients of the inputs: run backward first")
        executors = self._binding.executors
        for desc in self._binding.data:
            if desc.name not in executors[0].input_grads:
                raise NotAllowed(f"grad_req gives {desc.name} no gradient")
        return [[executor.input_grads[desc.name] for executor in executors] for desc in self._binding.data]

    def input_grads_merged(self) -> list[Array]:
        """The gradient of each data array for the whole batch."""
        return [self._merged(parts, desc) for parts, desc in zip(self.input_grads(), self._binding.data, strict=True)]

    def head_gradients(self, out_grads: Sequence[Array] | Array | None) -> list[list[Array]] | None:
        """For each device its part of each head gradient; None: backward starts from the loss.

        Raises:
            ShapeMismatch: a head gradient is not shaped as its output.
        """
        if out_grads is None:
            return None
        heads = list(out_grads) if isinstance(out_grads, list | tuple) else [out_grads]
        descs = self._binding.description.outputs
        if len(heads) != len(descs):
            raise ShapeMismatch(f"{len(heads)} head gradients for {len(descs)} outputs")
        whole = [(fitting(d.name, head, d.shape), d.batch_axis) for head, d in zip(heads, descs, strict=True)]
        return [[part_of(head, axis, samples) for head, axis in whole] for samples in self._binding.slices]

    def _merged(self, parts: list[Array], desc: DataDesc) -> Array:
        if len(parts) == 1 or desc.batch_axis < 0:
            return parts[0]
        device, axis = self._device, desc.batch_axis
        with device.current():
            merged = device.xp.empty(desc.shape, dtype=parts[0].dtype)
            for part, samples in zip(parts, self._binding.slices, strict=True):
                device.put(part_of(merged, axis, samples), part)
        return merged
