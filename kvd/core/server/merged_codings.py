"""Merged values that are encoded: how, and who takes them in that form. The value of such a version is what its encoded
bytes decode into, so all who read it get the same bits, in either form."""

from __future__ import annotations

from typing import Any

from kvd.compression import from_wire, to_wire
from kvd.core.server.groups import FusedGroup
from kvd.core.server.pending import Pending
from kvd.core.server.rounds import Record
from kvd.protocol.messages import Coding, MergedCoding, MergedForm, Push
from kvd.protocol.specs import DTYPES


def asked_by(push: Push) -> MergedCoding | None:
    """How a push asks for what it is merged into to be encoded."""
    coding = push.coding
    if coding is None or coding.merged is MergedForm.PLAIN or isinstance(coding.method, str):
        return None
    return MergedCoding(coding.method, coding.merged is MergedForm.FED_BACK)


def merged_coding(group: FusedGroup, record: Record, merge: str) -> MergedCoding | None:
    """How the merged value of a round, to which no optimizer is applied, is encoded; None: it is not."""
    asked = record.coding
    if asked is None or len(group.slices) > 1:
        return None
    count = len(record.contributions) if merge == "sum" else 1
    try:
        compressor = from_wire(asked.method).of_merged(count)
        return None if compressor is None else asked._replace(method=to_wire(compressor))
    except Exception:  # noqa: BLE001  no compressor can say so large a sum; and installed ones may raise anything
        return None


def taken_by(push: Push) -> str:
    """The name of the compressor in whose form the sender of a push takes the value."""
    asked = asked_by(push)
    return "" if asked is None else _name_of(asked.method)


def is_taken(pending: Pending, method: Any) -> bool:
    """Whether the sender takes what this compressor made. Its request is about one slice then, and counts: an Uncounted
    says nothing of its bytes."""
    return pending.counts and not pending.is_of_many and pending.takes == _name_of(method)


def coding_of(group: FusedGroup, method: Any) -> Coding:
    """What an answer says of the encoded value of a group of one slice."""
    return Coding(method, group.dtype, group.nbytes // DTYPES[group.dtype].itemsize)


def _name_of(method: Any) -> str:
    return str(method[0])
