"""``where="workers"``: the store merges gradients, and each worker updates its own weights with any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvd.client.calls.backend import Updates
from kvd.errors import NotAllowed
from kvd.torch.buckets import Bucket, Slot
from kvd.torch.buffers import BufferMeans
from kvd.torch.gradients import GradientPasses


class WorkersMode:
    """The merged gradients are in the parameters when backward has ended.

    A parameter to which no worker has a gradient keeps what it had, which is usually None. Who has one is counted in a
    key of the last bucket.

    Args:
        wrapped: the optimizer of the program.
        updates: of the store.
        buckets: the last one counts who has gradients.
        buffers: what is merged besides, when the gradients are; None: nothing.
        on_received: called when the merged gradients are in the parameters.
    """

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        updates: Updates,
        buckets: list[Bucket],
        buffers: BufferMeans | None,
        on_received: Callable[[], None],
    ) -> None:
        self._wrapped = wrapped
        self._updates = updates
        self._buckets = buckets
        self._buffers = buffers
        self._on_received = on_received
        self._fresh: dict[Slot, torch.Tensor] = {}  # gradients of other workers, for parameters that have none here
        self.passes: GradientPasses

    def destination(self, slot: Slot) -> torch.Tensor:
        """Return the tensor that the merged gradient goes to."""
        gradient = slot.parameter.grad
        if gradient is not None and slot.is_used and gradient.layout == torch.strided:
            return gradient
        fresh = self._fresh[slot] = torch.empty_like(slot.parameter, requires_grad=False)
        return fresh

    def begin(self) -> None:
        """A pass begins.

        Raises:
            NotAllowed: an optimizer was set on the servers.
        """
        if self._updates.last_set is not None:
            raise optimizer_error(type(self._updates.last_set).__name__)

    def before_first(self) -> None:
        """The first gradients are about to leave."""

    def end(self) -> None:
        """Backward has ended: put the merged gradients into the parameters."""
        if self._buffers is not None:
            self._buffers.send()
        for bucket in self._buckets:
            bucket.receive()
        if self._fresh:
            used = self._buckets[-1].also_received
            assert used is not None
            places = {slot: place for place, slot in enumerate(self.passes.slots)}
            for slot, gradient in self._fresh.items():
                if used[places[slot]]:
                    slot.parameter.grad = gradient
            self._fresh = {}
        if self._buffers is not None:
            self._buffers.bucket.receive()
        self._on_received()

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Update the weights with the merged gradients.

        Raises:
            NotAllowed: gradients are not merged.
        """
        if closure is None:
            self.passes.check_ended()
            if self.passes.has_local:
                raise NotAllowed(
                    "the gradients of this step are this worker's own: leave no_sync() for the last backward() of a "
                    "step, which sends the sum of all"
                )
        result = self._wrapped.step() if closure is None else self._wrapped.step(closure)
        self.passes.step_done()
        return result

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients.

        Raises:
            NotAllowed: a backward has failed that has sent gradients already.
        """
        self.passes.forget()
        self._wrapped.zero_grad(set_to_none)

    def end_step(self) -> None:
        """An iteration of `steps` is over."""
        self.passes.check_ended()
        self.passes.step_done()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the wrapped optimizer."""
        self._wrapped.load_state_dict(dict(state_dict))


def optimizer_error(kind: str) -> NotAllowed:
    """The error for a store that has an optimizer, whose servers merge no gradients for the workers."""
    return NotAllowed(
        f'with where="workers" the servers only merge gradients, but an optimizer was set on them ({kind}), which '
        f'updates all keys: use where="servers" for all optimizers of this store, or a store of another job, such as '
        f'kvd.create("dist_sync", job="workers")'
    )
