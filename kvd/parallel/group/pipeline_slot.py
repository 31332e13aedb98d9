"""One parameter on its way between a group and a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvd.client.handle import Handle
from kvd.compute.optimizers import SliceState, apply_update
from kvd.errors import InputMismatch
from kvd.optimizer import Optimizer
from kvd.parallel.device import HostArray


@dataclass
class LocalUpdate:
    """The update of one parameter in the worker itself, with the arithmetic of the servers.

    Attributes:
        optimizer: the rule, its ``rescale_grad`` included.
        gradient: shaped and typed as the parameter; receives what the workers' gradients were merged into.
        spare: a second array for the weights, which an update writes while it reads the first.
        state: what the optimizer remembers.
    """

    optimizer: Optimizer
    gradient: HostArray
    spare: HostArray
    state: SliceState = field(default_factory=SliceState)

    @classmethod
    def of(cls, optimizer: Optimizer, like: HostArray, gradient: HostArray | None = None) -> LocalUpdate:
        """For a parameter shaped and typed as ``like``, and so the ``gradient``; None: a new array."""
        return cls(optimizer, np.empty_like(like) if gradient is None else gradient, np.empty_like(like))


@dataclass
class Slot:
    """One parameter.

    Attributes:
        key: in the store.
        priority: of its pushes and pulls.
        weights: on the host, as of the last step that was waited for.
        gradient: the sum over the devices, in memory that the store sends without a copy: not to be written to from
            the push until `wait` has returned. None: the store copies what it is given.
        local: None where the store updates.
        is_trained: whether gradients are sent.
        ready: on how many devices the gradient of this step is complete.
        handle: of the step that is under way, None between steps.
    """

    key: str
    priority: int
    weights: HostArray
    gradient: HostArray | None
    local: LocalUpdate | None
    is_trained: bool
    ready: int = 0
    handle: Handle | None = None

    @property
    def incoming(self) -> HostArray:
        """Where the store's answer goes."""
        return self.weights if self.local is None else self.local.gradient

    def wait(self) -> None:
        """Return when `weights` are those after the step. Raises what the store raised."""
        if self.handle is None:
            return
        self.handle.wait()
        local = self.local
        if local is not None:
            flat = self.weights.reshape(-1), [local.gradient.reshape(-1)], local.spare.reshape(-1)
            apply_update(local.optimizer, local.state, *flat)
            self.weights, local.spare = local.spare, self.weights
            self.handle = Handle.of(None)  # updated: waiting again must not update again

    def load(self, arrays: Mapping[str, HostArray]) -> None:
        """Take over the state of the local update from `SliceState.export`."""
        assert self.local is not None
        state = SliceState.load(arrays)
        if any(slot.size != self.weights.size for slot in state.slots.values()):
            raise InputMismatch(f"the optimizer's state of {self.key} is of another size", setting=self.key)
        self.local.state = state
