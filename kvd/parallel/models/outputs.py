"""The outputs of models that are functions: their names, and descriptions that running the function gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from kvd.errors import ConfigError
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Shape

#: Name → shape and NumPy dtype of each output for inputs of these descriptions.
OutputShapes: TypeAlias = Callable[[Sequence[DataDesc]], Mapping[str, tuple[Shape, str]]]


def named_outputs(returned: Any) -> dict[str, Any]:
    """Name → value of what a function returned: a mapping as it is, the items of a tuple or list numbered."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple | list):
        return {f"output{index}": value for index, value in enumerate(returned)}
    return {"output": returned}


class OutputDescriptions:
    """Describes the outputs of a function by running it, and remembers the answers.

    The batch axis of an output is the one that grows by one when the inputs have one more sample.

    Arguments:
        run: runs the function without side effects, and raises ConfigError for inputs that it cannot take.
        setting: which argument of the model the function is, for messages.
    """

    def __init__(self, run: OutputShapes, setting: str) -> None:
        self._run = run
        self._setting = setting
        self._known: dict[tuple[DataDesc, ...], tuple[DataDesc, ...]] = {}
        self._lock = threading.Lock()  # the devices of a group ask at the same time

    def of(self, data: Sequence[DataDesc]) -> tuple[DataDesc, ...]:
        """One description per output, for inputs of these descriptions.

        Raises:
            ConfigError: the function cannot take such inputs, or the batch axis of an output grows by more than one
                per sample, or several axes grow.
        """
        with self._lock:
            key = tuple(data)
            if key not in self._known:
                self._known[key] = self._describe(data)
            return self._known[key]

    def _describe(self, data: Sequence[DataDesc]) -> tuple[DataDesc, ...]:
        sizes = {desc.batch_size for desc in data if desc.batch_size is not None}
        size = next(iter(sizes), 1) or 1
        here = self._run([desc.with_batch_size(size) for desc in data])
        more = self._run([desc.with_batch_size(size + 1) for desc in data]) if sizes else here
        descs = []
        for (name, (shape, dtype)), (_, (larger, _)) in zip(here.items(), more.items(), strict=True):
            changed = [axis for axis, (a, b) in enumerate(zip(shape, larger, strict=True)) if a != b]
            if len(changed) > 1 or any(shape[axis] != size or larger[axis] != size + 1 for axis in changed):
                raise ConfigError(
                    f"{name} has shape {shape} for {size} samples and {larger} for {size + 1}: "
                    "one axis of an output has to count the samples",
                    setting=self._setting,
                )
            layout = "".join("N" if axis in changed else "." for axis in range(len(shape)))
            descs.append(DataDesc(name, shape, dtype, layout))
        return tuple(descs)
