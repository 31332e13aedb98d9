"""The state of a program on its way between two workers: read and written on their own threads.

A thread that has waited in the store for a moment offers the state of its program (`kvd.core.server.healing`). It is
read there, in parts, when another worker lacks it: nothing can change it meanwhile, and nothing is copied before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from zlib import crc32

from kvd.client.calls.healing import StateHolder
from kvd.client.calls.promise import Promise
from kvd.client.cluster.engine import Array, Engine
from kvd.core import requests
from kvd.core.membership import name_of
from kvd.core.worker.state_transfers import Begin, PartRead, Script, give, offer_of, take
from kvd.errors import KvdError, ProtocolError, StateLost
from kvd.protocol.messages import (
    NO_STATE,
    PARTS_AHEAD,
    STATE_PART_BYTES,
    GiveState,
    Gone,
    StateGiven,
    StateGone,
    StatePart,
)

OFFER_AFTER_S = 0.1  # of waiting: steps that are shorter cost no message
FIRST_OFFER_S = 2.0  # how long worker 0 waits in its first step for those who want its state


def carry_out(engine: Engine, script: Script) -> Any:
    """Runs a script on this thread, and returns its result."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = script.send(value) if error is None else script.throw(error)
        except StopIteration as end:
            return end.value
        value = error = None
        try:
            if isinstance(step, Begin):
                value = engine.submit(step.request)
            else:
                engine.wait(step.call, None)
                value = step.call.result()
        except BaseException as failure:  # noqa: BLE001  the script decides
            error = failure


class _Reader:
    """A state as parts: the layout, then the bytes.

    Attributes:
        size: the number of parts, and the bytes of the layout.
    """

    def __init__(self, engine: Engine, holder: StateHolder) -> None:
        self._holder = holder
        self._head = holder.layout()
        self._nbytes = len(self._head) + holder.nbytes()
        parts = max(1, -(-self._nbytes // STATE_PART_BYTES))
        self.size = (parts, len(self._head))
        part_nbytes = min(self._nbytes, STATE_PART_BYTES)
        self._buffers: list[Array] = [engine.memory(part_nbytes) for _ in range(min(parts, PARTS_AHEAD))]

    def read(self, part: int) -> PartRead:
        start = part * STATE_PART_BYTES
        nbytes = min(STATE_PART_BYTES, self._nbytes - start)
        buffer = self._buffers[part % len(self._buffers)]
        view = memoryview(buffer)[:nbytes]  # type: ignore[arg-type]
        of_head = self._head[start : start + nbytes]
        view[: len(of_head)] = of_head
        if len(of_head) < nbytes:
            self._holder.read(start + len(of_head) - len(self._head), view[len(of_head) :])
        return PartRead(buffer, nbytes, crc32(view))


class _Writer:
    """Puts a state together in the memory of the program.

    Attributes:
        has_written: whether any of the state was overwritten.
    """

    def __init__(self, holder: StateHolder) -> None:
        self.has_written = False
        self._holder = holder
        self._donor = ""
        self._head = bytearray()
        self._head_nbytes = 0
        self._nbytes: int | None = None  # of the state, once its layout is here
        self._offset = 0

    def begin(self, given: StateGiven) -> None:
        self._donor = name_of("worker", given.donor)
        self._head, self._head_nbytes = bytearray(), given.head_nbytes
        self._nbytes, self._offset = None, 0

    def write(self, message: StatePart, payload: Any) -> None:
        data = memoryview(payload).cast("B")
        if crc32(data) != message.checksum:
            raise ProtocolError(f"part {message.part} of the state of {self._donor} was damaged on its way")
        lacks = self._head_nbytes - len(self._head)
        self._head += data[:lacks]
        data = data[lacks:]
        if len(self._head) < self._head_nbytes:
            return
        if self._nbytes is None:
            self._nbytes = self._holder.begin_write(bytes(self._head), self._donor)
        if self._offset + len(data) > self._nbytes:
            raise ProtocolError(f"the state of {self._donor} has more bytes than the {self._nbytes} of its layout")
        if data:
            self.has_written = True
            self._holder.write(self._offset, data)
            self._offset += len(data)

    def end(self) -> None:
        if self._nbytes is None or self._offset != self._nbytes:
            raise ProtocolError(f"the state of {self._donor} has {self._offset} bytes, its layout says {self._nbytes}")
        self._holder.end_write()


class ClusterStates:
    """Gives the state of this program, and takes that of others. As a duty of the program's thread, it offers the state
    when the thread has waited for `OFFER_AFTER_S`, and takes the offer back when the thread goes on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._holder: StateHolder | None = None
        self._made: int | None = None
        self._thread = 0
        self._wake: Callable[[], object] | None = None
        self._offer: Promise | None = None  # that waits for those who lack the state
        self._offer_at = 0.0

    def attend(self, holder: StateHolder) -> None:
        self._holder = holder
        self._thread = threading.get_ident()
        self._engine.take_duty(self)

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        if self._thread in (0, threading.get_ident()):
            yield
            return
        self._engine.take_duty(self)
        try:
            yield
        finally:
            self._engine.take_duty(None)

    def has(self, made: int | None) -> None:
        self._made = made

    def pass_over(self) -> Promise:
        return self._engine.submit(requests.PassOver())

    # ── a duty ──

    def begin_wait(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._offer_at = time.monotonic() + OFFER_AFTER_S

    def end_wait(self) -> None:
        self._wake = None
        self._withdraw()

    def next_s(self) -> float | None:
        if self._made is None or self._offer is not None:
            return None
        return max(0.0, self._offer_at - time.monotonic())

    def is_due(self) -> bool:
        if self._made is None:
            return False
        if self._offer is not None:
            return self._offer.done()
        return time.monotonic() >= self._offer_at

    def run(self) -> None:
        self._engine.take_duty(None)  # waits in here have none
        try:
            if self._offer is None:
                self._make_offer()
            else:
                self._answer_offer()
        finally:
            self._engine.take_duty(self)

    def _make_offer(self) -> None:
        assert self._made is not None
        try:
            timeout_s = self._engine.config.round_timeout_s
            offer = self._offer = self._engine.submit(offer_of(self._made, self._home), timeout_s)
        except KvdError:  # the store is being closed
            self._offer_at = float("inf")
        else:
            offer.on_end(lambda _: self._wake_up())

    def _wake_up(self) -> None:
        wake = self._wake
        if wake is not None:
            wake()

    def _answer_offer(self) -> None:
        offer, self._offer = self._offer, None
        assert offer is not None
        self._offer_at = time.monotonic() + OFFER_AFTER_S
        if offer.has_result():
            ((answer, _, _),) = offer.result()
            if isinstance(answer, GiveState):
                self._give(answer)
                self._offer_at = 0.0  # others may lack it, too

    def _give(self, told: GiveState) -> None:
        assert self._holder is not None
        try:
            reader = _Reader(self._engine, self._holder)
            carry_out(self._engine, give(told, self._home, reader.size, reader.read))
        except BaseException:
            self._offer_nothing()  # others may have the state, too
            raise

    def _withdraw(self) -> None:
        if self._offer is not None:
            self._offer = None
            self._offer_nothing()

    def _offer_nothing(self) -> None:
        with suppress(KvdError):  # the store is being closed
            self._engine.submit(offer_of(NO_STATE, self._home), self._engine.config.round_timeout_s)

    @property
    def _home(self) -> int:
        return self._engine.machine.view.first_partition

    # ── of others ──

    def take(self, made: int, *, restored: bool) -> bool:
        assert self._holder is not None
        writer = _Writer(self._holder)
        script = take(
            made,
            self._home,
            writer.begin,
            writer.write,
            has_pushed=self._engine.machine.has_pushed_in_loops,
            restored=restored,
        )
        gone: StateGone | None = carry_out(self._engine, script)
        if gone is not None and gone.why is Gone.PASSED:
            return False
        if gone is None:
            writer.end()
        elif gone.why is Gone.FIRST and not restored and not writer.has_written:
            self._give_first(gone.others)
        else:
            raise _lost(made, gone.why)
        return True

    def _give_first(self, others: int) -> None:
        """Nobody has made a step: the state with which this worker has begun is everyone's."""
        if not others:
            return
        self._engine.take_duty(None)
        try:
            offer = self._engine.submit(offer_of(0, self._home), self._engine.config.round_timeout_s)
            self._engine.wait(offer, FIRST_OFFER_S)
            with suppress(TimeoutError):
                ((answer, _, _),) = offer.result(FIRST_OFFER_S)
                if isinstance(answer, GiveState):
                    self._give(answer)
            if not offer.done():
                self._offer = offer
                self._withdraw()
        finally:
            self._engine.take_duty(self)


def _lost(made: int, why: Gone) -> StateLost:
    what = f"the weights and the optimizer's state after {made} steps"
    if why is Gone.OVER:
        return StateLost(
            f"this worker needs {what}, but all others have finished well and left: the job is done, and its result is "
            f"with them",
            steps=made,
        )
    return StateLost(
        f"no living worker has {what}, which the workers of this job keep themselves: start the job again from its "
        f"newest snapshot or checkpoint, as `kvd launch --restart N --restore auto` does",
        steps=made,
    )
