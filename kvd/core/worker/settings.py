"""What a worker is told besides what the view says."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.protocol.messages import SMALL_PUSH_BYTES


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of one worker.

    Attributes:
        credit_bytes: bounds the payload in flight to one server.
        small_push_bytes: pushes of up to this many bytes take no credit.
        batches: whether keys that are pushed or pulled together again are declared as a batch, and then named by its
            number.
        notice_s: after this many seconds, a call that waits for others is explained in the log.
    """

    credit_bytes: int
    small_push_bytes: int = SMALL_PUSH_BYTES
    batches: bool = True
    notice_s: float = 10.0
