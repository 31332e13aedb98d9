"""Local SGD (DiLoCo): workers train alone, and exchange once in many steps how far they have come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from kvd.client.calls.checks import whole
from kvd.client.calls.handle import Handle
from kvd.client.facades.blocking import KVStore, backend_of, create
from kvd.errors import KeyExists, NotAllowed
from kvd.optimizer import Optimizer
from kvd.optimizer.fields import number
from kvd.torch.parameters import Named, check_agreement, parameters_of
from kvd.torch.servers import set_only_optimizer
from kvd.torch.wrapping import WrappedOptimizer

OPTIONS_KEY = "kvd.torch/local_sgd"
"""The key with `every`, the number of fragments, and the delay: workers that join later compare them with their own."""

ROUND_KEY = "kvd.torch/local_sgd_round"
"""The key that each worker pushes a 1 to when it begins a round. So the servers know in which round it is, although it
may exchange nothing for long, and a restarted worker begins with that round, not with the one before."""


class _Place(Enum):
    """The program's place in a loop over `LocalSGD.steps`."""

    OUTSIDE = auto()
    IN_STEP = auto()  # this inner step has not ended
    AFTER_STEP = auto()  # it has, and the program is yet to ask for the next one


@dataclass(slots=True)
class _Round:
    """The inner steps between two exchanges of a fragment.

    Attributes:
        length: inner steps in it.
        is_last: the last one of a loop, at whose end all fragments are exchanged.
        made: inner steps that have ended.
    """

    length: int
    is_last: bool = False
    made: int = 0

    @property
    def is_over(self) -> bool:
        return self.made == self.length


@dataclass(slots=True, eq=False)
class _Fragment:
    """Parameters that are exchanged together.

    Attributes:
        due_after: inner steps of a round after which they are exchanged.
        anchors: their weights after the last outer step; differences are measured from these.
        exchange: the one under way. It writes to the anchors.
        wait: inner steps after which its result is used.
    """

    names: list[str]
    parameters: list[Parameter]
    due_after: int
    anchors: list[torch.Tensor] = field(init=False)
    exchange: Handle | None = None
    wait: int = 0

    def __post_init__(self) -> None:
        self.anchors = [
            parameter.detach().clone(memory_format=torch.contiguous_format) for parameter in self.parameters
        ]

    @torch.no_grad()
    def differences(self) -> list[torch.Tensor]:
        """Anchor minus parameter: the outer gradient."""
        return [anchor - parameter for anchor, parameter in zip(self.anchors, self.parameters, strict=True)]

    @torch.no_grad()
    def adopt_anchors(self, local_share: float) -> None:
        """Move the parameters to the anchors, but for this share of their distance."""
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            if local_share:
                parameter.lerp_(anchor, 1 - local_share)
            else:
                parameter.copy_(anchor)

    def check_unchanged(self) -> None:
        """Check that the parameters are as they were when the optimizer was wrapped.

        Raises:
            NotAllowed: one was frozen, moved, or given another dtype or shape.
        """
        for name, anchor, parameter in zip(self.names, self.anchors, self.parameters, strict=True):
            if not parameter.requires_grad:
                raise NotAllowed(
                    f"parameter {name!r} was frozen after its optimizer was wrapped: freeze it before, in all workers",
                    key=name,
                )
            was, now = (f"{it.dtype} {tuple(it.shape)} on {it.device}" for it in (anchor, parameter))
            if was != now:
                raise NotAllowed(
                    f"parameter {name!r} was {was} when its optimizer was wrapped, and is {now}: convert and move the "
                    f"model before",
                    key=name,
                )

    def is_at_anchors(self) -> bool:
        """Whether the parameters are the anchors; NaN counts as equal to NaN."""
        return all(
            torch.allclose(parameter, anchor, rtol=0, atol=0, equal_nan=True)
            for anchor, parameter in zip(self.anchors, self.parameters, strict=True)
        )


class LocalSGD(WrappedOptimizer):
    """Local SGD with an outer optimizer, as in DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

    Each worker trains with its own torch optimizer. After `every` inner steps it pushes how far its weights have moved,
    the anchor minus the parameter. The servers apply the mean of all workers as the gradient of `outer`, and the new
    weights are the next anchor of every worker::

        optimizer = kt.LocalSGD(torch.optim.AdamW(model.parameters(), 1e-3), model.named_parameters(), every=50,
                                outer=kvd.optimizer.SGD(0.7, momentum=0.9, nesterov=True))
        for step in optimizer.steps(10_000):
            optimizer.zero_grad()
            loss(model, batch(step, optimizer.store.rank)).backward()
            optimizer.step()  # every 50th call returns with the weights of all workers

    With several `fragments` the parameters are divided into that many parts of about the same size, which take turns
    (Douillard et al. 2025, arXiv 2501.18512): fragment f of F is exchanged after (f + 1) · every / F steps of a round.
    The bytes are the same, in smaller bursts. With a `delay` an exchange is under way while that many inner steps are
    made; then a parameter becomes ``local_share`` · itself + (1 − ``local_share``) · its new anchor. At the end of a
    loop over `steps` all fragments are exchanged without delay, so the weights of all workers are equal.

    A worker that is restarted begins the round again in which it died, with the weights of the last outer step and a
    new inner optimizer. Lost are the state of its inner optimizer, and what it had trained since the last exchange of
    each fragment: at most `every` inner steps of one worker. The same holds for a worker that joins later, or comes
    back after the others went on without it (`on_worker_loss = "shrink"`, a quorum). Set learning rates by the number
    of the step, so that they fit there. Buffers, such as running statistics, stay those of each worker. Rounds are the
    steps of the store: ``--snapshot-every`` counts them, and `kvd.KVStore.snapshot` is called after the last step of a
    round.

    It is a torch optimizer by `isinstance`, with the parameter groups, state and hooks of the wrapped one, also for
    schedulers and ``GradScaler``. `store.set_gradient_compression` compresses the differences. Keys are the names of
    the parameters. In `dist_async` every exchange is an update of its own: use `kvd.optimizer.DelayedNesterov`, and
    pull after a barrier to get equal weights.

    Args:
        optimizer: the inner optimizer, with all its parameter groups.
        named_parameters: `module.named_parameters()`; the values of worker 0 are used. Frozen ones are copied from
            worker 0, and not trained. Load a checkpoint before.
        every: inner steps from one exchange of a parameter to the next, ≥ 1.
        outer: the optimizer of the servers. ``SGD(0.7, momentum=0.9, nesterov=True)`` is that of the paper.
        store: None: ``kvd.create("dist_sync")``.
        fragments: from 1 to `every`, and to the number of trained parameters.
        delay: inner steps that are made while an exchange is under way, from 0 to `every` - 1.
        local_share: from 0 to 1; used with a `delay` only.

    Attributes:
        every: as given.

    Raises:
        NotAllowed: an argument is out of its range; a parameter has no name or cannot be trained here; the workers have
            different models, options or outer optimizers, in all workers; or the store has a `LocalSGD` already.
        KeyExists: the store has a key with the name of a parameter.
        ShapeMismatch, DtypeMismatch: this worker came later, or restores a snapshot, with another model.
        NodeLost, RequestTimeout, BarrierBroken: as the calls of the store.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        every: int = 50,
        outer: Optimizer,
        store: KVStore | None = None,
        fragments: int = 1,
        delay: int = 0,
        local_share: float = 0.5,
    ) -> None:
        super().__init__(optimizer)
        if not isinstance(outer, Optimizer):
            raise NotAllowed(
                f"outer is an optimizer of the servers, such as kvd.optimizer.SGD(0.7, momentum=0.9, nesterov=True), "
                f"not {outer!r:.80}"
            )
        self.every = whole("every", every, 1)
        self._delay = whole("delay", delay, 0)
        if self._delay >= self.every:
            raise NotAllowed(f"delay is less than every ({self.every}), not {delay}: the next exchange begins then")
        self._local_share = number("local_share", local_share) if self._delay else 0.0
        if not 0 <= self._local_share <= 1:
            raise NotAllowed(f"local_share is a number from 0 to 1, not {local_share!r}")
        self._parameters = parameters_of(optimizer, named_parameters)
        self._fragments = _divided(self._parameters.trained, whole("fragments", fragments, 1), self.every)
        self._store = create("dist_sync") if store is None else store
        self._round = _Round(self.every)
        self._place = _Place.OUTSIDE
        self._is_at_anchors = True
        self._make_keys(outer)

    @property
    def store(self) -> KVStore:
        """The store with the anchors."""
        return self._store

    def _make_keys(self, outer: Optimizer) -> None:
        """Make a key for each parameter, if all workers have the same ones, and take the values of worker 0."""
        options = [self.every, len(self._fragments), self._delay]
        shown = "every={}, fragments={}, delay={}".format(*options)
        lines = [shown, f"outer={outer}", *self._parameters.lines()]
        check_agreement(backend_of(self._store).rounds, self._store.rank, lines)
        try:
            self._store.init(OPTIONS_KEY, np.array(options, np.int64), merge="sum")
        except KeyExists:
            raise NotAllowed("this store has a LocalSGD already: another one needs a job of its own") from None
        self._store.init(ROUND_KEY, np.zeros(1, np.int64), merge="sum")
        of_job = self._store.pull(OPTIONS_KEY).tolist()
        if of_job != options:
            job = "every={}, fragments={}, delay={}".format(*of_job)
            raise NotAllowed(f"worker {self._store.rank} has {shown}, and the job {job}: all need the same options")
        named = [*self._parameters.trained, *self._parameters.frozen]
        self._store.init([name for name, _ in named], [parameter.detach() for _, parameter in named], merge="mean")
        set_only_optimizer(self._store, outer, "LocalSGD(outer=…)")
        frozen = self._parameters.frozen
        if frozen:
            self._store.pull([name for name, _ in frozen], out=[parameter.detach() for _, parameter in frozen])
        self._take_anchors()

    # ── the loop ──

    def steps(self, total: int) -> Iterator[int]:
        """Iterate over the inner steps of a training: ``for step in optimizer.steps(total)``.

        A new worker gets ``range(total)``, a restarted one the steps from the beginning of the round in which its
        predecessor died, as `kvd.KVStore.steps` does for rounds. Call `step` once in each inner step; one that
        ``GradScaler`` skips counts, too. All workers name the same total. After the loop all have the same weights; a
        loop that is left early keeps local ones, and the next loop begins with those of the last outer step.

        Args:
            total: inner steps of each worker. The last round is shorter if it is no multiple of `every`.

        Raises:
            NotAllowed: another loop is open; a parameter was changed since the optimizer was wrapped, or since the last
                loop, other than by `step`.
        """
        return self._make_steps(whole("the number of steps", total, 0))

    def _make_steps(self, total: int) -> Iterator[int]:
        rounds = -(-total // self.every)
        keys = [ROUND_KEY, *[name for name, _ in self._parameters.trained]]
        expected = None  # the round for which the parameters are right
        try:
            for number in self._store.steps(rounds, keys):
                if number != expected:
                    self._begin_from_anchors()
                self._store.push(ROUND_KEY, np.ones(1, np.int64))
                first, expected = number * self.every, number + 1
                self._round = _Round(min(self.every, total - first), is_last=expected == rounds)
                for step in range(first, first + self._round.length):
                    self._place = _Place.IN_STEP
                    yield step
                    if self._place is _Place.IN_STEP:
                        self._end_step()
            if expected != rounds and rounds:  # the last rounds were made without this process
                self._begin_from_anchors()
        finally:
            self._place, self._round = _Place.OUTSIDE, _Round(self.every)

    def _begin_from_anchors(self) -> None:
        """Replace the parameters with the servers' weights at this point of the program."""
        if self._is_at_anchors:
            self._check_at_anchors()
        self._take_anchors()

    def _check_at_anchors(self) -> None:
        for fragment in self._fragments:
            fragment.check_unchanged()
            if not fragment.is_at_anchors():
                raise NotAllowed(
                    f"a parameter among {_some(fragment.names)} was changed after LocalSGD set it, but the servers "
                    f"have the earlier value: load weights before the optimizer is wrapped"
                )

    def _take_anchors(self) -> None:
        for fragment in self._fragments:
            if fragment.exchange is not None:
                fragment.exchange.exception()  # it writes to the anchors until it has ended
                fragment.exchange = None
        names = [name for fragment in self._fragments for name in fragment.names]
        self._store.pull(names, out=[anchor for fragment in self._fragments for anchor in fragment.anchors])
        for fragment in self._fragments:
            fragment.adopt_anchors(0.0)
        self._is_at_anchors = True

    # ── a step ──

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Make an inner step, and exchange the fragments that are due after it.

        Outside of loops over `steps` each call is one inner step.

        Args:
            args: passed to the wrapped optimizer, such as a closure.
            kwargs: passed to the wrapped optimizer.

        Returns:
            The value that the wrapped optimizer returns.

        Raises:
            NotAllowed: it is the second call in one step of the loop; or a parameter was moved, frozen or added since
                the optimizer was wrapped.
            NodeLost: the exchange waits for a worker that died, or a server did.
        """
        if self._place is _Place.AFTER_STEP:
            raise NotAllowed(
                "optimizer.step() was called twice in one step of optimizer.steps(total): accumulate gradients with "
                "several backward(), and call step() once"
            )
        result = self.step_wrapped(*args, **kwargs)
        self._is_at_anchors = False
        self._end_step()
        return result

    def _end_step(self) -> None:
        if self._place is _Place.IN_STEP:
            self._place = _Place.AFTER_STEP
        here = self._round
        here.made += 1
        is_end_of_loop = here.is_last and here.is_over
        for fragment in self._fragments:
            if fragment.exchange is not None:
                fragment.wait -= 1
                if not fragment.wait:
                    self._finish(fragment, self._local_share)
        due = [it for it in self._fragments if (is_end_of_loop if here.is_last else it.due_after == here.made)]
        for fragment in due:
            self._begin(fragment)
        if is_end_of_loop or not self._delay:
            for fragment in self._fragments:
                self._finish(fragment, 0.0)
        self._is_at_anchors = is_end_of_loop
        if here.is_over:
            self._round = _Round(self.every)

    def _begin(self, fragment: _Fragment) -> None:
        """Begin the exchange of a fragment."""
        self._finish(fragment, self._local_share)
        self.check_parameters()
        fragment.check_unchanged()
        fragment.exchange = self._store.pushpull_async(fragment.names, fragment.differences(), out=fragment.anchors)
        fragment.wait = self._delay

    def _finish(self, fragment: _Fragment, local_share: float) -> None:
        """Wait for the exchange of a fragment, if one is under way, and use its result."""
        if fragment.exchange is not None:
            fragment.exchange.wait()
            fragment.exchange = None
            fragment.adopt_anchors(local_share)


def _divided(named: Sequence[Named], count: int, every: int) -> list[_Fragment]:
    """Divide parameters into this many fragments of neighbours, of about the same number of bytes.

    Raises:
        NotAllowed: there are more fragments than inner steps in a round, or than parameters.
    """
    if count > every:
        raise NotAllowed(f"fragments ({count}) are at most every ({every}): one is exchanged after a step")
    if count > len(named):
        raise NotAllowed(f"fragments ({count}) are at most the trained parameters ({len(named)})")
    sizes = [parameter.numel() * parameter.element_size() for _, parameter in named]
    fragments, begin = [], 0
    for place in range(count):
        end = _end_of_fragment(sizes, begin, count - place)
        names, parameters = zip(*named[begin:end], strict=True)
        fragments.append(_Fragment(list(names), list(parameters), (place + 1) * every // count))
        begin = end
    return fragments


def _end_of_fragment(sizes: Sequence[int], begin: int, left: int) -> int:
    """The end of a fragment that begins here, if this many are left: at least one parameter for each."""
    share = sum(sizes[begin:]) / left
    end, total = begin + 1, sizes[begin]
    while left > 1 and len(sizes) - end > left - 1 and total + sizes[end] / 2 <= share:
        total += sizes[end]
        end += 1
    return end if left > 1 else len(sizes)


def _some(names: Sequence[str]) -> str:
    """A few of the names, for a text."""
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
