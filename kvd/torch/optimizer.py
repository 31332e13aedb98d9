"""`DistributedOptimizer`: a torch optimizer whose gradients are those of all workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from kvd.client.facades.blocking import KVStore, backend_of, create, healing_of
from kvd.errors import NotAllowed, NotResumed
from kvd.torch.buckets import Bucket, divide
from kvd.torch.buffers import ModuleBuffers, mean_of
from kvd.torch.gradients import GradientHook, GradientPasses, Sparse, uncompiled
from kvd.torch.mapping import Hyperparameters, from_torch
from kvd.torch.parameters import ModelParameters, Named, check_agreement, parameters_of
from kvd.torch.servers import ServersMode
from kvd.torch.state import TrainingState
from kvd.torch.workers import WorkersMode, optimizer_error
from kvd.torch.wrapping import WrappedOptimizer

Where: TypeAlias = Literal["servers", "workers"]
Op: TypeAlias = Literal["mean", "sum"]
Buffers: TypeAlias = Literal["local", "mean"]

_USED = "kvd.torch/used/"  # begins the key that counts how many workers have gradients of each parameter


class DistributedOptimizer(WrappedOptimizer):
    """A torch optimizer whose gradients are those of all workers of a job.

    It takes the place of the optimizer that it wraps, in the training loop, in learning rate schedulers, and in
    ``torch.amp.GradScaler``. Both have the same ``param_groups``, ``state``, ``defaults`` and hooks. Each parameter
    that needs gradients is a key of the store, named as in ``state_dict()``. Every worker begins with the parameters
    of worker 0. During ``backward()``, gradients are sent in buckets, the last layers first, while those of earlier
    layers are computed.

    **where="servers"**: the servers make the steps of the optimizer (see `from_torch`) and keep its state. ``step()``
    waits for the new weights, which equal those of one process with the whole batch, to rounding. A worker that is
    restarted continues with its step (`steps`), and snapshots, readers and workers that join later find everything on
    the servers. A learning rate that the program or a scheduler has changed counts from the next ``backward()`` on. A
    parameter without a gradient counts as one with zeros: momentum and weight decay still change it. The servers get
    the gradients before the program can change them, so ``clip_grad_norm_`` and ``GradScaler`` do not work.

    **where="workers"**: when ``backward()`` returns, each ``.grad`` is the mean (or sum) over the workers, so clipping,
    ``GradScaler``, and any optimizer work as in one process, with the bits of ``DistributedDataParallel``. A parameter
    to which no worker has a gradient keeps ``.grad`` as it is. The weights are in the memory of the workers. In a loop
    over `steps`, a worker that is restarted, or joins later, gets the weights, the optimizer's state, the buffers of
    `module`, and what `keep` names from another one, exactly as they are where it continues. If no worker has them any
    more, `StateLost` is raised.

    Buffers, such as the statistics of BatchNorm, are each worker's own, unless `buffers` says otherwise: see also
    `broadcast_buffers`. A backward that gives no gradient to any of these parameters sends nothing, so several
    optimizers may take turns.

    Attributes:
        store: the store of the keys.

    Args:
        optimizer: the optimizer to wrap. Use this one in its place from now on.
        named_parameters: ``model.named_parameters()`` of every module that it updates. Of tied parameters the first
            name counts. Parameters that need no gradients are only given the values of worker 0.
        where: where the optimizer runs.
        op: what becomes of the gradients of the workers. With ``"sum"``, set gradients to zero in each step.
        store: None: ``kvd.create("dist_sync")``.
        bucket_bytes: how many bytes of gradients travel together. A larger parameter travels alone.
        first_bucket_bytes: the same for the bucket that leaves first.
        compression: compresses gradients, as `kvd.KVStore.set_gradient_compression` does for all of the store.
        sparse: what becomes of sparse gradients: ``"refuse"`` raises, ``"dense"`` sends them as dense ones.
        module: with ``where="workers"``, the model: its buffers that are in its `state_dict` belong to the state that a
            restarted worker gets.
        buffers: ``"local"``: each worker's buffers are its own. ``"mean"``: when ``backward()`` returns, floating-point
            buffers of `module` are the mean over the workers.

    Raises:
        NotAllowed: the parameters are not those of the optimizer, cannot be trained, or are wrapped already; the
            servers have no such optimizer; other workers have other parameters or options (in all workers); or an
            argument is wrong.
        NodeLost, RequestTimeout, BarrierBroken: as the calls of the store.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        where: Where,
        op: Op,
        store: KVStore | None = None,
        bucket_bytes: int = 4 << 20,
        first_bucket_bytes: int = 1 << 20,
        compression: Mapping[str, Any] | None = None,
        sparse: Sparse = "refuse",
        module: torch.nn.Module | None = None,
        buffers: Buffers = "local",
    ) -> None:
        super().__init__(optimizer)
        _check_choice("where", where, get_args(Where))
        _check_choice("op", op, get_args(Op))
        _check_choice("sparse", sparse, get_args(Sparse))
        _check_choice("buffers", buffers, get_args(Buffers))
        _check_module(module, where, buffers)
        parameters = parameters_of(optimizer, named_parameters)
        named = [*parameters.trained, *parameters.frozen]
        hyperparameters = None
        if where == "servers":
            from_torch(optimizer, named)  # raises if it has made steps
            hyperparameters = Hyperparameters(optimizer, named)
        self.store = create("dist_sync") if store is None else store
        backend = backend_of(self.store)
        _check_store(self.store, where)
        _check_free(self.store, parameters)
        of_module = None if module is None else ModuleBuffers(module)
        merged = mean_of(of_module) if of_module is not None and buffers == "mean" else None
        options = f"where={where} op={op} bucket_bytes={bucket_bytes} first_bucket_bytes={first_bucket_bytes}"
        lines = [f"{options} buffers={buffers}", *parameters.lines(), *(() if merged is None else merged.lines())]
        check_agreement(backend.rounds, self.store.rank, lines)
        if compression is not None:
            self.store.set_gradient_compression(compression)
        also = (f"{_USED}{parameters.trained[0][0]}", len(parameters.trained)) if where == "workers" else None
        self._make_keys(parameters, op, also)
        if merged is not None:
            merged.make_keys(self.store)
        # The keys of where="workers" hold weights until the first step only.
        self._lacks_state = where == "workers" and self._is_under_way(parameters.trained)
        if not self._lacks_state:
            self._load(named)
            self._lacks_state = where == "workers" and self._is_under_way(parameters.trained)  # by now
        divided = divide(parameters.trained, first_bytes=first_bucket_bytes, most_bytes=bucket_bytes)
        buckets = [Bucket(slots, -slots[-1].number, also if slots is divided[-1] else None) for slots in divided]
        for bucket in buckets:
            bucket.bind(backend)
        self._mode: WorkersMode | ServersMode
        if hyperparameters is not None:
            self._mode = ServersMode(optimizer, self.store, buckets, hyperparameters)
        else:
            self._mode = WorkersMode(optimizer, backend.updates, buckets, merged, healing_of(self.store))
        self._passes = GradientPasses(
            backend,
            buckets,
            parameters.frozen,
            self._mode.destination,
            sparse,
            repeats=where == "workers" and op == "mean",
            on_begin=self._begin,
            on_first=self._mode.before_first,
            on_end=self._mode.end,
        )
        self._mode.passes = self._passes
        self._keys = [name for bucket in buckets for name in bucket.names]
        self._keys += [] if merged is None else merged.bucket.names
        self._state: TrainingState | None = None
        if where == "workers":
            self._state = TrainingState(optimizer, named, of_module)

    def _make_keys(self, parameters: ModelParameters, op: Op, also: tuple[str, int] | None) -> None:
        """Make a key per parameter, with the values of worker 0."""
        values = backend_of(self.store).values
        names, first = zip(*[(name, parameter.detach()) for name, parameter in parameters.trained], strict=True)
        values.init(list(names), list(first), op, gradients=also is not None).wait()
        if parameters.frozen:
            names, first = zip(*[(name, parameter.detach()) for name, parameter in parameters.frozen], strict=True)
            self.store.init(list(names), list(first))
        if also is not None:
            name, size = also
            self.store.init(name, np.zeros(size, np.int32), merge="sum")

    def _is_under_way(self, trained: Sequence[Named]) -> bool:
        """Whether others may have made steps, or a snapshot was restored, so that the keys hold merged gradients.

        In the first step, the parameters of the last layers usually have gradients first.
        """
        backend = backend_of(self.store)
        if self.store.restarted or backend.steps.restored_steps:
            return True
        ends = [backend.rounds.version(name) for name in {trained[0][0]: None, trained[-1][0]: None}]
        return any(int(version.wait()) > 0 for version in ends)

    def _load(self, named: Sequence[Named]) -> None:
        """Give the parameters the values of their keys."""
        self.store.pull([name for name, _ in named], out=[parameter.detach() for _, parameter in named])

    def _begin(self) -> None:
        self.check_parameters()
        if self._lacks_state:
            raise NotResumed(
                f'worker {self.store.rank} came to a training with where="workers" that is under way, and has other '
                f"weights than the others: loop over optimizer.steps(total), which gets weights and optimizer state "
                f"from another worker. Or load both from a checkpoint of your own, the latter with "
                f"optimizer.load_state_dict"
            )
        self._mode.begin()

    # ── what a training loop calls ──

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients of all workers.

        Args:
            closure: computes the loss again, and its gradients, for optimizers that want that.

        Returns:
            What the closure returned, if there is one.

        Raises:
            NotAllowed: the gradients of this step are not complete, or not sent.
        """
        return self._mode.step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # hooks of steps are called by the wrapped optimizer

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the parameters, as `torch.optim.Optimizer.zero_grad` does.

        If ``backward()`` has failed, call this before the next one.

        Raises:
            NotAllowed: gradients were sent already, and cannot be taken back.
        """
        self._mode.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients only accumulate. The next ``backward()`` outside of it sends the sum."""
        return self._passes.no_sync()

    def keep(self, name: str, thing: object) -> None:
        """With ``where="workers"``, give a restarted worker the state of something else of the program as well.

        All workers call it for the same names, before the first step. Change the thing after ``step()``, not between
        the beginning of a step and ``backward()``: another worker may read it then.

        Args:
            name: tells the things apart.
            thing: a learning rate scheduler, a `torch.amp.GradScaler`, or anything else with `state_dict` and
                `load_state_dict`; or a pair of functions, one that returns the state, and one that takes it. A state
                consists of plain values, tensors and NumPy arrays, in lists, tuples and dicts.

        Raises:
            NotAllowed: the optimizer is on the servers; the thing has no state, or one that cannot travel; or there is
                one of this name.
        """
        if self._state is None:
            raise NotAllowed(
                'keep(…) is for where="workers": with where="servers" a restarted worker gets nothing from others. '
                "Compute what it needs from the number of the step, or broadcast it"
            )
        self._state.keep(name, thing)

    def steps(self, total: int, *, seed: int | None = None, restored: bool = False) -> Iterator[int]:
        """Iterate over the steps of a training, as `kvd.KVStore.steps` does for the keys of this optimizer.

        Each step has one ``backward()`` whose gradients are sent. With ``where="workers"``, a process that does not
        have the state of the step before, since it was restarted, joined later or was late, gets it from another one
        here; in the first step, all get that of worker 0. So one optimizer per store has `steps`, and all loops of the
        store are such. Within a step, other keys are not pushed, and barriers and broadcasts come before
        ``backward()``. A program with several optimizers uses ``store.steps(total)``.

        If the workers leave a loop early (``break``), all do so in the same step, between ``step()`` and the next
        ``backward()``. The loop then counts as made to its end: a worker that is restarted gets the state there, and
        continues behind the loop.

        Args:
            total: how many steps the loop has.
            seed: seeds torch's generators in each step, by this number, the step and the rank: so a step that is made
                again, such as one with dropout, has the same bits.
            restored: with ``where="workers"``, after `kvd.KVStore.restore`: this program has loaded the state after the
                steps of the snapshot itself, in all workers.

        Raises:
            StateLost: no living worker has the state that this one needs.
            NotAllowed: another worker's model, optimizer or `keep` differs; the message names the parameter and the
                worker. Or a loop over ``store.steps`` came before.
        """
        backend = backend_of(self.store)
        if self._state is None:
            loop: Iterator[int] = iter(self.store.steps(total, keys=self._keys))
        else:
            healing = healing_of(self.store)
            healing.hold(self._state)
            loop = healing.steps(total, self._keys, restored=restored)
        try:
            for step in loop:
                if seed is not None:
                    torch.manual_seed(_mixed(seed, backend.steps.number, self.store.rank))
                if self._state is not None:
                    self._lacks_state = False
                    self._state.begin_step()
                self._passes.begin_step()
                yield step
                self._mode.end_step()
                if self._state is not None:
                    self._state.end_step()
        finally:
            self._passes.end_loop()
            if self._state is not None and backend.steps.is_updating:
                self._state.leave_loop()
            close = getattr(loop, "close", None)
            if close is not None:
                close()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, in all workers.

        Raises:
            NotAllowed: with ``where="servers"``, it has the state of an optimizer that has made steps.
        """
        self._mode.load_state_dict(state_dict)
        self._lacks_state = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` divides gradients by the scale of a `torch.amp.GradScaler`, which asks for it."""
        if isinstance(self._mode, ServersMode):
            self._mode.refuse_scaler()
        return False


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = " or ".join(repr(choice) for choice in choices)
        raise NotAllowed(f"{name} is {known}, not {value!r:.40}")


def _check_module(module: object, where: Where, buffers: Buffers) -> None:
    if module is not None and not isinstance(module, torch.nn.Module):
        raise NotAllowed(f"module is the model, a torch.nn.Module, not a {type(module).__name__}")
    if where == "servers" and (module is not None or buffers != "local"):
        raise NotAllowed(
            'module= and buffers= are for where="workers": with where="servers" use kvd.torch.broadcast_buffers'
        )
    if buffers == "mean" and module is None:
        raise NotAllowed('buffers="mean" needs module=, the model that has them')


def _mixed(seed: int, step: int, rank: int) -> int:
    """One number of three, the same in each process."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _check_store(store: KVStore, where: Where) -> None:
    backend = backend_of(store)
    if where == "servers":
        return
    if not backend.facts.versioned:
        text = f'a {store.type} store merges no gradients, so where="workers" has nothing to update with'
        raise NotAllowed(f'{text}: use dist_sync, or where="servers"')
    if backend.steps.has_optimizer().result():
        raise optimizer_error("before this one was wrapped")


def _check_free(store: KVStore, parameters: ModelParameters) -> None:
    """Raise NotAllowed if another optimizer has one of the parameters, or of the keys."""
    binding = backend_of(store).binding
    for name, parameter in parameters.trained:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in list(hooks.values()):
            if not isinstance(hook, GradientHook):
                continue
            if hook.passes.is_live:
                raise NotAllowed(f"parameter {name!r} is wrapped already, by another DistributedOptimizer", key=name)
            hook.passes.remove()
        if binding.is_bound(name):
            raise NotAllowed(
                f"key {name!r} is in use, by another optimizer of this store or by kv.bind: two modules whose "
                f"parameters have the same names need prefixes, as module.named_parameters(prefix='generator') has",
                key=name,
            )
