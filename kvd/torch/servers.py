"""``where="servers"``: the servers update the weights, and each worker gets them in its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from kvd.client.calls.backend import SentHyperparameters
from kvd.client.calls.handle import Handle
from kvd.client.facades.blocking import KVStore, backend_of
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer
from kvd.torch.buckets import Bucket, Slot
from kvd.torch.gradients import GradientPasses, Phase
from kvd.torch.mapping import Hyperparameters, changes_between


def set_only_optimizer(store: KVStore, optimizer: Optimizer, user: str) -> None:
    """Set the optimizer of the servers, which is one for all keys of a store.

    Args:
        user: the part of the program that needs it, for the message.

    Raises:
        NotAllowed: this program has set another one.
    """
    backend = backend_of(store)
    there = backend.updates.last_set
    if there is not None and there != optimizer and not backend.steps.restored_steps:
        raise NotAllowed(
            f"the servers have one optimizer for all keys of a store, which is {there!r}, and {user} asks for "
            f'{optimizer!r}: use the same for both, or a store of another job, such as kvd.create("dist_sync", '
            f'job="other")'
        )
    store.set_optimizer(optimizer)


class ServersMode:
    """The gradients of a pass are an update of the servers. `step` waits for the weights after it.

    A store has one optimizer for all keys. Several wrapped ones of one class share it: each pass begins with the
    hyperparameters of its own. A worker sends them for all, before its first gradients leave: that of the lowest rank.

    Args:
        wrapped: the optimizer of the program, which makes no step.
        hyperparameters: of the wrapped optimizer, as on the servers.

    Raises:
        NotAllowed: the store has an optimizer of another class.
    """

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        store: KVStore,
        buckets: Sequence[Bucket],
        hyperparameters: Hyperparameters,
    ) -> None:
        self._wrapped = wrapped
        self._store = store
        self._updates = backend_of(store).updates
        self._buckets = buckets
        self._parameters = [slot.parameter for bucket in buckets for slot in bucket.slots]
        self._hyperparameters = hyperparameters
        self._change: Handle | None = None  # of hyperparameters
        self._make_current(backend_of(store).steps.restored_steps > 0)
        self._hooked_step = torch.optim.Optimizer.profile_hook_step(self._step)
        self.passes: GradientPasses

    def destination(self, slot: Slot) -> torch.Tensor:
        """Return the tensor that the weights go to."""
        return slot.parameter

    def begin(self) -> None:
        """A pass begins: send the hyperparameters that the program has changed."""
        self._hyperparameters.changed()
        mine, there = self._hyperparameters.optimizer, self._there()
        if mine == there:
            return
        lowest = min(self._store.ranks)
        self._updates.last_sent = SentHyperparameters(self._updates.last_set, mine, lowest)
        if self._store.rank == lowest:
            self._change = self._updates.update_optimizer(changes_between(there, mine))

    def _make_current(self, is_restored: bool) -> None:
        """Set the optimizer, unless the store has one of its class, whose state is kept."""
        mine = self._hyperparameters.optimizer
        if self._updates.last_set is not None:
            self._there()
        elif is_restored and type(self._updates.current().wait()) is type(mine):
            self._updates.last_sent = SentHyperparameters(None, None, 0)
        else:
            self._store.set_optimizer(mine)

    def _there(self) -> Optimizer | None:
        """The optimizer as the servers have it; None: this worker sends the hyperparameters from now on, and only its
        predecessor, or the worker that sent them before, knows which ones have arrived.

        Raises:
            NotAllowed: it is of another class than this one.
        """
        last_set, mine = self._updates.last_set, self._hyperparameters.optimizer
        if last_set is not None and type(last_set) is not type(mine):
            raise NotAllowed(
                f"the servers have one optimizer for all keys of a store, which is {type(last_set).__name__}, so a "
                f'{type(mine).__name__} cannot join it: use optimizers of one class, or where="workers" for all'
            )
        known = self._updates.last_sent
        if known is None or known.of is not last_set:
            return None if self._store.restarted and known is None else last_set
        is_successor = self._store.rank == min(self._store.ranks) != known.sender
        return None if is_successor else known.sent

    def before_first(self) -> None:
        """The first gradients are about to leave: the servers must have the hyperparameters for them."""
        change, self._change = self._change, None
        if change is not None:
            change.wait()

    def end(self) -> None:
        """Backward has ended: everything is under way."""

    def step(self, closure: Callable[[], Any] | None) -> None:
        """Wait for the weights.

        Raises:
            NotAllowed: there is a closure; or gradients are not sent.
        """
        if closure is not None:
            raise NotAllowed(
                'with where="servers" step() takes no closure, since servers do not run code: call backward() before '
                'step(), or use where="workers"'
            )
        self._hooked_step(self._wrapped)

    def _step(self, _: torch.optim.Optimizer) -> None:
        self.passes.check_ended()
        if self.passes.phase is Phase.IDLE:
            if any(parameter.grad is not None for parameter in self._parameters):
                raise NotAllowed(
                    "no gradients were sent since the last step(): the servers get those of the last backward() "
                    "outside of no_sync(), not those that a program writes into .grad"
                )
            return
        for bucket in self._buckets:
            bucket.receive()
        torch.autograd.graph.increment_version(self._parameters)
        self.passes.step_done()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients.

        Raises:
            NotAllowed: they, or some of a backward that has failed, were sent already.
        """
        if self.passes.phase is Phase.SENT:
            raise NotAllowed(
                "these gradients were sent already, and the servers update the weights with them: call step() before "
                "zero_grad(). If they come from the backward() of another optimizer's loss, as that of a generator, "
                "put it into no_sync() of this optimizer"
            )
        self.passes.forget()
        self._wrapped.zero_grad(set_to_none)

    def end_step(self) -> None:
        """An iteration of `steps` is over.

        Raises:
            NotAllowed: gradients were sent, and `step` was not called.
        """
        self.passes.check_ended()
        if self.passes.phase is Phase.SENT:
            raise NotAllowed("this step has sent gradients, and did not call optimizer.step()")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load hyperparameters.

        Raises:
            NotAllowed: there is state of parameters, which is on the servers here.
        """
        if state_dict.get("state"):
            raise NotAllowed(
                'with where="servers" the state of the optimizer is on the servers, and a state_dict of torch cannot '
                "be loaded there: load a snapshot of the store with kv.restore, or its kv.load_optimizer_states"
            )
        self._wrapped.load_state_dict(dict(state_dict))

    def refuse_scaler(self) -> NoReturn:
        """Raise NotAllowed: `torch.amp.GradScaler` is about to make a step."""
        raise NotAllowed(
            'a GradScaler cannot be used with where="servers": the scaled gradients were sent in backward(), before it '
            "could divide them, and the weights are spoilt. Use bfloat16, which needs no scaler, or "
            'where="workers"'
        )
