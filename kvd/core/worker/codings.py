"""In which form the slices of an item travel, if not as their keys have them."""

from __future__ import annotations

from typing import Any

from kvd.core.requests import Item, Transfer
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.message_plans import MessagePlan
from kvd.protocol.messages import Coding, MergedForm
from kvd.protocol.specs import DTYPES


def method_of(key: WorkerKey, item: Item) -> Any:
    """What the server has to decode the bytes of the item with; None: they are those of the key."""
    assert key.spec is not None
    if item.encoded is not None:
        return item.encoded.method
    return None if item.spec is None or item.spec.dtype == key.spec.dtype else item.spec.dtype


def comes_encoded(key: WorkerKey, transfer: Transfer) -> bool:
    """Whether the value of a key that is only pulled may come as a compressor made it."""
    return transfer.takes is not None and key.spec is not None and transfer.takes.fits(key.spec)


def fits(key: WorkerKey, plan: MessagePlan, coding: Coding | None) -> bool:
    """Whether an answer that says this of its bytes is one to this message."""
    return coding is None or (plan.is_alone and key.spec is not None and coding.wanted == key.spec.dtype)


def coding_of(key: WorkerKey, item: Item, plan: MessagePlan) -> Coding | None:
    """What a push of one slice says of its bytes; None: they are those of the key."""
    if not plan.is_alone or item.ranges is not None:
        return None
    assert key.spec is not None
    merged = MergedForm.PLAIN if item.encoded is None else item.encoded.merged
    return Coding(method_of(key, item), key.spec.dtype, plan.nbytes // DTYPES[key.spec.dtype].itemsize, merged)
