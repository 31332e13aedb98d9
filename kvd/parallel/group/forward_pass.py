"""One forward of a group: each device gets its part of the batch, and the rows that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array
from kvd.parallel.device_threads import run_on_all
from kvd.parallel.group.binding import BoundModel
from kvd.parallel.group.input_checks import part_of
from kvd.parallel.group.table_parameters import TableParameters


def run_forward(
    bound: BoundModel, arrays: Sequence[tuple[DataDesc, Array]], is_train: bool, rows: TableParameters | None
) -> None:
    """Compute the outputs of every device.

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

    run_on_all(threads, run)
