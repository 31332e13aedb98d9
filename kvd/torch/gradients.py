"""The gradients of one optimizer on their way: from autograd's hooks through the buckets to the end of a pass.

A *pass* is one backward whose gradients are sent. `GradientPasses` notices that a gradient is complete, sends each
bucket as soon as its last gradient is there, counts parameters without a gradient as zeros, and calls back when the
pass has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch

from kvd.client.calls.backend import Backend
from kvd.errors import NotAllowed
from kvd.torch.buckets import Bucket, Slot
from kvd.torch.parameters import Named

WRAP_AGAIN = (
    "delete the keys (optimizer.store.delete), and wrap the optimizer again in all workers, between the same steps"
)

_NO_PASS = -1

F = TypeVar("F", bound=Callable[..., Any])

#: What becomes of sparse gradients, as of ``nn.Embedding(sparse=True)``.
Sparse: TypeAlias = Literal["refuse", "dense"]

_engine: Any = torch.autograd.Variable._execution_engine
_current_pass: Callable[[], int] = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = torch._C._current_autograd_node


def uncompiled(function: F) -> F:
    """Return the function such that torch.compile calls it as it is, with all that it calls."""
    made: F = cast(Any, torch.compiler).disable(function)
    return made


class Phase(Enum):
    """How far the gradients of a step are."""

    IDLE = auto()  # none has been sent since the last step
    OPEN = auto()  # a backward is under way, or has failed
    SENT = auto()  # the pass has ended, and all were sent
    FAILED = auto()  # the same, but what was to come back has not


class GradientHook:
    """What autograd calls when the gradient of a parameter is complete.

    Attributes:
        passes: where it belongs.
    """

    def __init__(self, passes: GradientPasses, slot: Slot) -> None:
        self.passes = passes
        self._ready: Callable[[], None] = uncompiled(partial(passes.ready, slot))

    def __call__(self, parameter: torch.Tensor) -> None:
        self._ready()


class GradientPasses:
    """The passes of one optimizer. Hooks run on the thread of backward, or on several on CUDA, one at a time.

    Args:
        backend: of the store.
        buckets: in the order in which their gradients are expected.
        frozen: parameters that take no part.
        destination: gives the tensor that the value of a slot goes to.
        sparse: see `Sparse`.
        repeats: whether a step may have several passes: each sends what the parameters hold then.
        on_begin: called when the first gradient of a pass is complete.
        on_first: called before the first bucket of a pass is sent.
        on_end: called when backward has ended and all buckets were sent, on the thread that ends it.

    Attributes:
        phase: how far the gradients of this step are.
        has_local: whether gradients were accumulated that have not been sent.
        slots: all of them, in the order of the buckets.
    """

    def __init__(
        self,
        backend: Backend,
        buckets: Sequence[Bucket],
        frozen: Sequence[Named],
        destination: Callable[[Slot], torch.Tensor],
        sparse: Sparse,
        *,
        repeats: bool,
        on_begin: Callable[[], None],
        on_first: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.phase = Phase.IDLE
        self.has_local = False
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        self._backend = backend
        self._buckets = buckets
        self._frozen = frozen
        self._destination = destination
        self._sparse = sparse
        self._repeats = repeats
        self._on_begin = on_begin
        self._on_first = on_first
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_syncing = True
        self._pass = _NO_PASS  # of autograd, whose end is noticed
        self._first_pass = _NO_PASS  # of autograd, in which this one began
        self._unready = 0  # gradients
        self._has_sent = False
        self._is_in_loop = False  # over steps, each of which sends once
        self._has_sent_in_step = False  # of that loop
        self._is_ended = True
        self._end_pass = uncompiled(self._pass_ended)
        self._hooks = [_register(slot.parameter, GradientHook(self, slot)) for slot in self.slots]

    @property
    def is_live(self) -> bool:
        """Whether the store is open, and the keys have not been deleted."""
        return self._backend.binding.is_bound(self.slots[0].name)

    def remove(self) -> None:
        """Notice no more gradients."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients that are complete within the block in the parameters, and send none."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def begin_step(self) -> None:
        """Begin a step of a loop, in which one pass sends gradients."""
        self._is_in_loop, self._has_sent_in_step = True, False

    def end_loop(self) -> None:
        """Leave the loop over steps: each pass may send again."""
        self._is_in_loop = self._has_sent_in_step = False

    def step_done(self) -> None:
        """The gradients were used, or set to zero: those that come next belong to another step."""
        self.phase = Phase.IDLE
        self.has_local = False

    def forget(self) -> None:
        """Begin again: the program sets the gradients to zero.

        Raises:
            NotAllowed: a backward has failed that has sent gradients already.
        """
        if self.phase is Phase.OPEN and self._has_sent:
            self.check_ended()
        if self.phase is Phase.OPEN:
            for slot in self.slots:
                slot.gradient = None
        if self.phase is not Phase.FAILED:
            self.step_done()

    def check_ended(self) -> None:
        """Raise NotAllowed if a pass has begun and not ended, or has failed."""
        if self.phase is Phase.FAILED:
            raise _failed()
        if self.phase is not Phase.OPEN:
            return
        missing = [slot.name for slot in self.slots if not slot.is_ready]
        text = f"{missing[0]!r} and {len(missing) - 1} more" if len(missing) > 1 else repr(missing[0])
        raise NotAllowed(
            f"the last backward() did not end: {text} had no gradient when others were sent already. If it raised an "
            f"error, end this program: what was sent cannot be taken back. If the model has parameters without "
            f"gradients and uses checkpoint(…, use_reentrant=True), use use_reentrant=False",
            key=missing[0],
        )

    # ── autograd calls these ──

    def ready(self, slot: Slot) -> None:
        """The gradient of a parameter is complete."""
        if not self._is_syncing:
            self.has_local = True
            return
        with self._lock:
            if self.phase is not Phase.OPEN:
                self._begin(slot)
            elif slot.is_ready:
                raise _sent_twice(slot)
            number = _current_pass()
            if number != self._pass:
                self._pass = number
                _engine.queue_callback(self._end_pass)
            self._take(slot)

    def _pass_ended(self) -> None:
        """A pass of autograd has ended: the whole backward, or the part of it that a checkpoint makes again."""
        with self._lock:
            self._pass = _NO_PASS
            self._check_began_here()
            if self.phase is Phase.OPEN and _current_node() is None:
                self._fill_up()
            if self.phase is not Phase.SENT or self._is_ended:
                return
            self._check_frozen()
            self._is_ended = True
        try:
            self._on_end()
        except BaseException:
            self.phase = Phase.FAILED
            raise

    # ── one pass ──

    def _begin(self, slot: Slot) -> None:
        if self._has_sent_in_step or (self.phase is Phase.SENT and not self._repeats):
            raise _sent_twice(slot)
        if self.phase is Phase.FAILED:
            raise _failed()
        self._on_begin()
        for bucket in self._buckets:
            bucket.restart()
        self._first_pass = _current_pass()
        self._unready = len(self.slots)
        self.has_local = self._has_sent = self._is_ended = False
        self.phase = Phase.OPEN

    def _take(self, slot: Slot) -> None:
        """Take the gradient as it is, and send the bucket if it was the last one there."""
        gradient = slot.parameter.grad
        if gradient is not None and not (
            gradient.dtype is slot.dtype and gradient.shape == slot.shape and gradient.layout is torch.strided
        ):
            gradient = self._checked(slot, gradient)
        slot.gradient = gradient
        slot.is_used = gradient is not None
        slot.is_ready = True
        self._unready -= 1
        bucket = slot.bucket
        bucket.missing -= 1
        if not bucket.missing:
            self._send(bucket)
        if not self._unready:
            last = self._buckets[-1]
            if last.also_sent is not None:
                last.also_sent[:] = [slot.is_used for slot in self.slots]
                self._send(last)
            self.phase = Phase.SENT

    def _send(self, bucket: Bucket) -> None:
        if not self._has_sent:
            self._has_sent = True
            self._has_sent_in_step = self._is_in_loop
            self._on_first()
        bucket.send(self._backend, self._destination)

    def _fill_up(self) -> None:
        """Backward has ended: what it has not computed is sent as it is, and counts as zeros if there is nothing."""
        for slot in self.slots:
            if slot.is_ready:
                continue
            if not slot.parameter.requires_grad:
                text = f"parameter {slot.name!r} needs no gradients any more, but did when its optimizer was wrapped"
                raise NotAllowed(f"{text}: {WRAP_AGAIN}", key=slot.name)
            self._take(slot)

    def _check_began_here(self) -> None:
        """Raise NotAllowed if gradients of an earlier backward, which failed, are among those of this one."""
        if _current_node() is not None or self._is_ended or self.phase not in (Phase.OPEN, Phase.SENT):
            return
        if _current_pass() > self._first_pass:  # what a checkpoint makes again has a higher number than its backward
            self.phase = Phase.FAILED
            raise NotAllowed(
                "an earlier backward() has failed, and the gradients that it had computed were mixed with those of "
                "this one: end this program. To leave out a batch whose backward() fails, call optimizer.zero_grad() "
                "before the next one, which says whether gradients of it were sent already"
            )

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                text = f"parameter {name!r} needs gradients now, and did not when its optimizer was wrapped"
                raise NotAllowed(f"{text}: {WRAP_AGAIN}", key=name)

    def _checked(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout != torch.strided:
            if self._sparse == "refuse":
                raise NotAllowed(
                    f"the gradient of {slot.name!r} is sparse, and would travel as a dense one: keep a large table on "
                    f'the servers (docs/tables.md), or say sparse="dense" to send it so',
                    key=slot.name,
                )
            gradient = gradient.to_dense()
        if gradient.dtype != slot.dtype or gradient.shape != slot.shape:
            raise NotAllowed(
                f"parameter {slot.name!r} has become {gradient.dtype} of shape {tuple(gradient.shape)} since its "
                f"optimizer was wrapped, when it was {slot.dtype} of shape {tuple(slot.shape)}: convert the model "
                f"first, then wrap",
                key=slot.name,
            )
        return gradient


def _register(parameter: Any, hook: GradientHook) -> Any:
    return parameter.register_post_accumulate_grad_hook(hook)


def _failed() -> NotAllowed:
    return NotAllowed(
        "the last backward() has failed when its gradients were merged, and they cannot be sent again: end this "
        "program, and start the job again from a checkpoint"
    )


def _sent_twice(slot: Slot) -> NotAllowed:
    return NotAllowed(
        f"backward() gives {slot.name!r} a second gradient in this step, after the first one was sent. To accumulate, "
        f"put all but the last backward() of a step into `with optimizer.no_sync():`. If this backward() is about "
        f"another optimizer's parameters, as that of a generator is, put it into no_sync() of this one, too. If the "
        f"last backward() has failed, end the program: what was sent cannot be taken back",
        key=slot.name,
    )
