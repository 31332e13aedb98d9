"""A frame that a thread waits for, of which it knows how it begins."""

from __future__ import annotations


class ExpectedFrame:
    """Belongs to the thread that waits for it.

    Args:
        frame: as long as the one that is expected, and beginning like it.
        head_nbytes: of its beginning.

    Attributes:
        head: how it begins. The thread may change it before it waits.
        buffer: the frame, once it was taken. It stays until the thread waits again.
        view: of the buffer.
    """

    __slots__ = ("buffer", "head", "view")

    def __init__(self, frame: bytes | bytearray, head_nbytes: int) -> None:
        self.head = bytearray(frame[:head_nbytes])
        self.buffer = bytearray(frame)
        self.view = memoryview(self.buffer)
