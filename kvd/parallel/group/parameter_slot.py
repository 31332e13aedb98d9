"""One parameter between a group and a store: its gradient on the way there, its weights on the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvd.client.calls.handle import Handle
from kvd.compute.optimizers import SliceState, apply_update
from kvd.errors import InputMismatch
from kvd.optimizer import Optimizer
from kvd.parallel.device import HostArray


@dataclass
class LocalUpdate:
    """The update of one parameter in the worker itself, with the arithmetic of the servers.

    Attributes:
        optimizer: the rule, its ``rescale_grad`` included.
        gradient: shaped and typed as the parameter; receives the merged gradient of all workers.
        spare: a second array for the weights, which an update writes while it reads the first.
        state: of the optimizer.
        done_for: the handle of the last answer that was used.
    """

    optimizer: Optimizer
    gradient: HostArray
    spare: HostArray
    state: SliceState = field(default_factory=SliceState)
    done_for: Handle | None = None


@dataclass
class ParameterSlot:
    """The place of one parameter in a gradient pipeline.

    Attributes:
        key: in the store.
        priority: of its pushes and pulls.
        weights: an array of this process for them.
        is_viewed: the store's answer comes in a read-only array, which may lie in the memory of a server: `weights` is
            not written.
        viewed: that array, as of the last step that `wait` has returned for, until `take` has given it away.
        gradient: the sum over the devices, in memory that the store sends without a copy: not to be written to from
            the push until `wait` has returned. None: the store copies what it is given.
        local: the worker's own update; None where the store updates.
        is_trained: whether gradients are sent.
        ready: on how many devices the gradient of this step is complete.
        handle: of the step under way; None between steps.
    """

    key: str | int
    priority: int
    weights: HostArray
    gradient: HostArray | None
    local: LocalUpdate | None
    is_trained: bool
    is_viewed: bool = False
    viewed: HostArray | None = None
    ready: int = 0
    handle: Handle | None = None

    @property
    def incoming(self) -> HostArray:
        """Where the store's answer goes: the weights, or the merged gradient for a local update."""
        return self.weights if self.local is None else self.local.gradient

    def take(self) -> HostArray:
        """The weights on the host, as of the last step that `wait` has returned for. Nothing here refers to the memory
        of a server any more."""
        viewed, self.viewed = self.viewed, None
        return self.weights if viewed is None else viewed

    def wait(self) -> None:
        """Wait for the store's answer to this step's gradient. On return `take` gives the weights after the step.

        Raises:
            What the store raised for the pushpull of the gradient, such as NodeLost or RequestTimeout.
        """
        if self.handle is None:
            return
        answer = self.handle.wait()
        if self.is_viewed:
            self.viewed = answer
        local = self.local
        if local is not None and local.done_for is not self.handle:
            flat = self.weights.reshape(-1), [local.gradient.reshape(-1)], local.spare.reshape(-1)
            apply_update(local.optimizer, local.state, *flat, slice_id=(str(self.key), 0))
            self.weights, local.spare = local.spare, self.weights
            local.done_for = self.handle  # waiting again, as after the error of another slot, must not update again

    def load(self, arrays: Mapping[str, HostArray]) -> None:
        """Take over the state of the local update from `SliceState.export`."""
        assert self.local is not None
        state = SliceState.load(arrays)
        if any(slot.size != self.weights.size for slot in state.slots.values()):
            raise InputMismatch(f"the optimizer's state of {self.key} is of another size", setting=str(self.key))
        self.local.state = state


def make_slot(
    key: str | int,
    priority: int,
    own: HostArray,
    bound: tuple[HostArray, HostArray] | None,
    optimizer: Optimizer | None,
    is_trained: bool,
    *,
    is_viewed: bool = False,
) -> ParameterSlot:
    """The slot of one parameter.

    Arguments:
        own: a host array shaped and typed as the parameter.
        bound: the store's arrays for its gradient and its weights (``kv.bind``), if this pipeline may use them.
        optimizer: of the local update; None: the store updates.
        is_viewed: where the store updates: its answer may lie in the memory of a server.
    """
    gradient, incoming = (None, own) if bound is None else bound
    if (incoming.shape, incoming.dtype) != (own.shape, own.dtype):
        incoming = own  # a key of another model: the pull that follows raises
    if optimizer is None or not is_trained:
        return ParameterSlot(key, priority, incoming, gradient, None, is_trained, is_viewed)
    merged = np.empty_like(own) if incoming is own else incoming
    local = LocalUpdate(optimizer, merged, np.empty_like(own))
    return ParameterSlot(key, priority, own, gradient, local, is_trained)
