"""The frames of a small call: those that are sent, and the one that answers it. They are prepared once per key."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from kvd.client.calls.values import Array
from kvd.core.requests import Item
from kvd.core.session import SchedulerSession
from kvd.core.worker.transfer_plans import TransferPlan
from kvd.protocol.fixed import (
    PUSH_NBYTES,
    VALUES_HEAD_NBYTES,
    VALUES_NBYTES,
    VALUES_REQUEST_AT,
    VALUES_TAIL_NBYTES,
    put_push,
    put_values_head,
)
from kvd.protocol.messages import NO_VIEW, Epoch
from kvd.transport.links.frames import PREFIX, ExpectedFrame, inline_frame

MOST_PREPARED = 1024
MOST_PREPARED_BYTES = 16 << 20

HEADER_AT = PREFIX.size
PUSHED_AT = HEADER_AT + PUSH_NBYTES
REQUEST_AT = HEADER_AT + VALUES_REQUEST_AT
VERSION_AT = HEADER_AT + VALUES_HEAD_NBYTES
PULLED_AT = VERSION_AT + VALUES_TAIL_NBYTES


class PushFrame:
    """A frame that pushes a value. One call at a time has it.

    Args:
        value: an array of the dtype and shape of the key.

    Attributes:
        buffer: the bytes that are sent.
        payload: the place of the value in them.
        epoch, run: those in the bytes.
    """

    __slots__ = ("buffer", "epoch", "payload", "run")

    def __init__(self, value: Array) -> None:
        self.buffer = inline_frame(PUSH_NBYTES, value.nbytes)
        payload: Array = np.frombuffer(self.buffer, value.dtype, value.size, PUSHED_AT)
        self.payload = payload.reshape(value.shape)
        self.epoch: Epoch = NO_VIEW
        self.run = -1

    def write_view(self, session: SchedulerSession) -> None:
        """Write what stays as long as there is no other view."""
        self.epoch, self.run = session.view.epoch, session.run
        put_push(self.buffer, HEADER_AT, session.incarnation, self.epoch, self.run, 0, 0, 0, 0, 0, 0)


class ValuesFrame:
    """The frame that a thread waits for: the answer to one call after the other.

    Attributes:
        expected: its beginning, and its bytes once it was taken.
        value: the value in them.
        server, epoch, run: those that it begins with.
    """

    __slots__ = ("epoch", "expected", "run", "server", "value")

    def __init__(self, value: Array) -> None:
        self.expected = ExpectedFrame(inline_frame(VALUES_NBYTES, value.nbytes), VERSION_AT)
        self.value: Array = np.ndarray(value.shape, value.dtype, self.expected.buffer, PULLED_AT)
        self.server: Any = None
        self.epoch: Epoch = NO_VIEW
        self.run = -1

    def write_view(self, session: SchedulerSession, server: Any) -> None:
        """Write what stays as long as there is no other view, and this server answers."""
        self.server, self.epoch, self.run = server, session.view.epoch, session.run
        put_values_head(self.expected.head, HEADER_AT, server, self.epoch, self.run, 0)

    def message(self) -> tuple[bytes, memoryview]:
        """The answer as any other message: its header and its payload, for good."""
        answer = bytes(self.expected.buffer)
        return answer[HEADER_AT:PULLED_AT], memoryview(answer)[PULLED_AT:]


class PreparedCall:
    """What the small calls of one key have in common.

    Args:
        key: as the program writes it.
        item: its name and its spec.
        value: an array of that spec.
        plan: what the machine does for these calls.
        bound_changes: of the bound keys, when this one was none of them.

    Attributes:
        dtype, shape: of the value.
        answer: the frame that answers a call which a thread waits for, one at a time.
        spare: a frame that no call has; None: the next one makes its own.
    """

    __slots__ = ("answer", "bound_changes", "dtype", "item", "key", "plan", "shape", "spare")

    def __init__(self, key: str | int, item: Item, value: Array, plan: TransferPlan, bound_changes: int) -> None:
        self.key = key
        self.item = item
        self.plan = plan
        self.bound_changes = bound_changes
        self.dtype, self.shape = value.dtype, value.shape
        self.answer = ValuesFrame(value)
        self.spare: PushFrame | None = PushFrame(value)


class PreparedCalls:
    """At most `MOST_PREPARED` calls with `MOST_PREPARED_BYTES` of frames: beyond that all are prepared again.

    The frames do not count against the memory of pushes.

    Attributes:
        by_key: the calls, by the key as the program writes it.
    """

    def __init__(self) -> None:
        self.by_key: dict[str | int, PreparedCall] = {}
        self._nbytes = 0  # at most: those of calls that were dropped count until all are

    def keep(self, key: str | int, call: PreparedCall, nbytes: int) -> None:
        """Keeps a call, whose frames take so many bytes."""
        if len(self.by_key) >= MOST_PREPARED or self._nbytes + nbytes > MOST_PREPARED_BYTES:
            self.clear()
        self.by_key[key] = call
        self._nbytes += nbytes

    def forget(self, names: Collection[str]) -> None:
        """Drop the calls on the keys with these names."""
        for key in [key for key in list(self.by_key) if str(key) in names]:  # other threads add
            self.drop(key)

    def drop(self, key: str | int) -> None:
        self.by_key.pop(key, None)

    def clear(self) -> None:
        self.by_key.clear()
        self._nbytes = 0
