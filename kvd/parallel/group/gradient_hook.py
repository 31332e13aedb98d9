"""What happens in a device's thread when backward has completed a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvd.errors import GradientAnomaly
from kvd.parallel.models.model import Executor, GradientHook
from kvd.parallel.models.row_gradients import elements_of

#: Called with (place of the device in the group, name of the parameter) once a gradient is complete on that device.
GroupGradientHook: TypeAlias = Callable[[int, str], None]


def gradient_hook(
    index: int, executor: Executor, listeners: Sequence[GroupGradientHook], *, check_finite: bool
) -> GradientHook | None:
    """The hook for `Executor.backward` on one device: checks the gradient if wanted, then tells the listeners.

    Arguments:
        index: the device's place in the group.
        listeners: called in order. One of them is `GradientPipeline.completed` where the group is bound to a store.
        check_finite: raise GradientAnomaly, which ends the pass, for a gradient with an infinity or a NaN.
    """
    if not (listeners or check_finite):
        return None

    def complete(name: str) -> None:
        if check_finite and not bool(executor.device.xp.isfinite(elements_of(executor.grads[name])).all()):
            raise GradientAnomaly(name, str(executor.device))
        for listener in listeners:
            listener(index, name)

    return complete
