"""The frames of an express call: the one that is sent, and the one that answers it. Both are prepared once per key."""

from __future__ import annotations

import numpy as np

from kvd.client.calls.values import Array
from kvd.core.requests import Item
from kvd.core.session import SchedulerSession
from kvd.core.worker.express import Repeated
from kvd.protocol.fixed import (
    PUSH_NBYTES,
    VALUES_HEAD_NBYTES,
    VALUES_NBYTES,
    VALUES_REQUEST_AT,
    VALUES_TAIL_NBYTES,
    put_number,
    put_push,
    put_push_numbers,
    put_values_head,
    version_of,
)
from kvd.transport.links.frames import PREFIX, ExpectedFrame, inline_frame
from kvd.transport.links.link import Link

HEADER_AT = PREFIX.size
PUSHED_AT = HEADER_AT + PUSH_NBYTES
REQUEST_AT = HEADER_AT + VALUES_REQUEST_AT
VERSION_AT = HEADER_AT + VALUES_HEAD_NBYTES
PULLED_AT = VERSION_AT + VALUES_TAIL_NBYTES


class PreparedCall:
    """What the pushpulls of one key have in common. One of them at a time uses the frames.

    Args:
        key: as the program writes it.
        item: its name and its spec.
        value: an array of that spec.
        repeated: what the machine knows of these calls.
        bound_changes: of the bound keys, when this one was none of them.

    Attributes:
        dtype, shape: of the value.
        link: by which the call went that began last; None: another way.
        frame: what is sent.
        expected: what is answered.
        answer: the value in that, where it was read.
    """

    __slots__ = (
        "_generation",
        "_pushed",
        "answer",
        "bound_changes",
        "dtype",
        "expected",
        "frame",
        "item",
        "key",
        "link",
        "repeated",
        "shape",
    )

    def __init__(self, key: str | int, item: Item, value: Array, repeated: Repeated, bound_changes: int) -> None:
        self.key = key
        self.item = item
        self.repeated = repeated
        self.bound_changes = bound_changes
        self.dtype, self.shape = value.dtype, value.shape
        self.link: Link | None = None
        self.frame = inline_frame(PUSH_NBYTES, value.nbytes)
        self.expected = ExpectedFrame(inline_frame(VALUES_NBYTES, value.nbytes), VERSION_AT)
        self.answer: Array = np.ndarray(self.shape, self.dtype, self.expected.buffer, PULLED_AT)
        self._pushed: Array = np.ndarray(self.shape, self.dtype, self.frame, PUSHED_AT)
        self._generation = -1  # of the machine's lane when the numbers of the view were written

    def fits(self, value: Array, out: Array) -> bool:
        """Whether these are arrays of the dtype and shape of the key, in memory that the general way could use."""
        dtype, shape = self.dtype, self.shape
        return (
            out.dtype == dtype
            and out.shape == shape
            and out.flags.carray
            and (value is out or (value.dtype == dtype and value.shape == shape and value.flags.c_contiguous))
        )

    def fill(self, session: SchedulerSession, value: Array, place: int) -> None:
        """Writes the numbers of the call that has begun, and its value."""
        repeated = self.repeated
        request = repeated.request
        if repeated.generation != self._generation:
            self._write_view(session)
        put_push_numbers(
            self.frame,
            HEADER_AT,
            request,
            repeated.plan.batch,
            repeated.clock,
            repeated.step,
            repeated.settled,
            place,
        )
        self._pushed[...] = value
        put_number(self.expected.head, REQUEST_AT, request)

    def _write_view(self, session: SchedulerSession) -> None:
        """Writes what stays as long as the machine has taken no event the general way."""
        epoch, run = session.view.epoch, session.run
        put_push(self.frame, HEADER_AT, session.incarnation, epoch, run, 0, 0, 0, 0, 0, 0)
        put_values_head(self.expected.head, HEADER_AT, self.repeated.peer, epoch, run, 0)
        self._generation = self.repeated.generation

    def version(self) -> int | None:
        """That of the answer. None: it is another answer than it seemed."""
        return version_of(self.expected.buffer, VERSION_AT)

    def message(self) -> tuple[bytes, memoryview]:
        """The answer as any other message: its header and its payload, for good."""
        answer = bytes(self.expected.buffer)
        return answer[HEADER_AT:PULLED_AT], memoryview(answer)[PULLED_AT:]
