"""What each device of a group does in forward and in backward, in its thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array
from kvd.parallel.group.binding import BoundModel
from kvd.parallel.group.gradient_hook import GroupGradientHook, gradient_hook
from kvd.parallel.group.input_checks import part_of
from kvd.parallel.group.table_parameters import TableParameters
from kvd.parallel.models.model import Executor

#: Called with the place of the device in the group.
DeviceTask: TypeAlias = Callable[[int], None]


def forward_task(
    bound: BoundModel, arrays: Sequence[tuple[DataDesc, Array]], is_train: bool, rows: TableParameters | None
) -> DeviceTask:
    """Computes outputs: a device gets its part of the batch, and the rows that it reads.

    Arguments:
        arrays: of the whole batch, which were checked.
        rows: fetches the rows of row-sparse parameters; None: the group has no store.
    """
    binding, threads = bound.binding, bound.threads

    def run(index: int) -> None:
        thread, executor, inputs = threads[index], binding.executors[index], {}
        for desc, array in arrays:
            part = part_of(array, desc.batch_axis, binding.slices[index])
            inputs[desc.name] = thread.buffer(replace(desc, shape=part.shape))
            thread.device.put(inputs[desc.name], part)
        if rows is not None:
            rows.read_in(executor, binding.description)
        executor.forward(inputs, is_train)

    return run


def backward_task(
    executors: Sequence[Executor],
    heads: Sequence[Sequence[Array]] | None,
    listeners: Sequence[GroupGradientHook],
    check_finite: bool,
) -> DeviceTask:
    """Computes gradients.

    Arguments:
        heads: for each device the head gradients; None: from the loss.
        listeners, check_finite: see `gradient_hook`.
    """

    def run(index: int) -> None:
        hook = gradient_hook(index, executors[index], listeners, check_finite=check_finite)
        executors[index].backward(heads[index] if heads else None, hook)

    return run


def one_after_the_other(first: DeviceTask, second: DeviceTask) -> DeviceTask:
    """Both, without a wait for the other devices in between: none has nothing to do while the slowest ends."""

    def run(index: int) -> None:
        first(index)
        second(index)

    return run
