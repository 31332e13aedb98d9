"""Whether a server can take a push: the checks before anything of it is staged, and what it remembers of a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvd.core.machine import Received
from kvd.core.push_policy import push_error as policy_error
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.rounds import PushStatus, Refusal
from kvd.protocol.messages import ABSENT, Push, PushBatch, Refused
from kvd.protocol.specs import payload_nbytes


class PushTarget(NamedTuple):
    """What a part of a request is about."""

    group: FusedGroup
    slice: Slice | None  # None: all of the group
    clock: int
    nbytes: int


def push_error(
    push: Push | PushBatch, event: Received, rank: int, targets: Sequence[PushTarget], merge: str
) -> Refused | None:
    """The refusal of a push that cannot be taken as a whole; nothing of it is staged then."""
    brings_bytes = push.how != ABSENT and not push.probe
    expected_nbytes = payload_nbytes([target.nbytes for target in targets]) if brings_bytes else 0
    if event.nbytes != expected_nbytes:
        text = f"a push of these {len(targets)} slices has {expected_nbytes} bytes, this one has {event.nbytes}"
        return Refused(push.request, "ProtocolError", text)
    for target in targets:
        turn = target.group.log.turn(rank, target.clock)
        if turn is not PushStatus.KNOWN:
            error = _clock_error(push, event.sender, rank, target, turn) or _kind_error(push, target, merge)
            if error is not None:
                return error
    return None


def _clock_error(
    push: Push | PushBatch, sender: int, rank: int, target: PushTarget, turn: PushStatus
) -> Refused | None:
    request, group, log = push.request, target.group, target.group.log
    if turn is PushStatus.MISSED:
        text = f"round {target.clock} of {group.key!r} was closed without worker {rank}, which had left the rounds"
        return Refused(request, "NotAllowed", text, (), group.key, target.clock)
    told = log.refusal(rank, sender, request)
    if told is not None:
        return Refused(request, told.error, told.text, (), group.key)
    if turn is PushStatus.WRONG or push.probe or log.is_outdated(rank, sender, request):
        expected = log.staged_clock(rank) + 1
        text = f"push {target.clock} of {group.key!r} by worker {rank} is out of turn, {expected} is next"
        return Refused(request, "clock", text, (), group.key, expected)
    return None


def _kind_error(push: Push | PushBatch, target: PushTarget, merge: str) -> Refused | None:
    group = target.group
    mixes = group.log.mixes(target.clock, push.how)
    has_optimizer = group.optimizer is not None
    text = policy_error(group.key, group.dtype, push.how, has_optimizer=has_optimizer, merge=merge, mixes=mixes)
    return None if text is None else Refused(push.request, "NotAllowed", text, (), group.key)


def remembered(error: Refused, sender: int, rank: int, targets: Sequence[PushTarget]) -> Refused:
    """The refusal as it is sent, written down where it is for good: the sender gives the clock to another push then,
    unless it hears (`expected`) that a part of this one is taken already.

    Bytes that do not fit are no worker's of ours: they must not spoil a number that one will use.
    """
    if error.error in ("clock", "ProtocolError"):
        return error
    for target in targets:
        turn = target.group.log.turn(rank, target.clock)
        if turn is PushStatus.NEXT:
            target.group.log.refuse(rank, Refusal(sender, error.request, error.error, error.text))
        elif turn is PushStatus.KNOWN:
            error = replace(error, expected=target.clock)
    return error
