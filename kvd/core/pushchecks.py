"""Whether a server can take a push: the checks before anything of it is staged, and what it remembers of a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvd.core.machine import Received
from kvd.core.slicelog import Refusal, Turn
from kvd.core.units import Slice, Unit
from kvd.protocol.messages import ABSENT, ADD, Push, PushPack, Refused
from kvd.protocol.specs import DTYPES, payload_nbytes


class Aim(NamedTuple):
    """What a part of a request is about."""

    unit: Unit
    slice: Slice | None  # None: all of the unit
    clock: int
    nbytes: int


def push_error(push: Push | PushPack, event: Received, rank: int, aims: Sequence[Aim], merge: str) -> Refused | None:
    """The refusal of a push that cannot be taken as a whole; nothing of it is staged then."""
    brings_bytes = push.how != ABSENT and not push.probe
    expected_nbytes = payload_nbytes([aim.nbytes for aim in aims]) if brings_bytes else 0
    if event.nbytes != expected_nbytes:
        text = f"a push of these {len(aims)} slices has {expected_nbytes} bytes, this one has {event.nbytes}"
        return Refused(push.request, "ProtocolError", text)
    for aim in aims:
        turn = aim.unit.log.turn(rank, aim.clock)
        if turn is not Turn.KNOWN:
            error = _clock_error(push, event.sender, rank, aim, turn) or _kind_error(push, aim, merge)
            if error is not None:
                return error
    return None


def _clock_error(push: Push | PushPack, sender: int, rank: int, aim: Aim, turn: Turn) -> Refused | None:
    request, unit, log = push.request, aim.unit, aim.unit.log
    if turn is Turn.MISSED:
        text = f"round {aim.clock} of {unit.key!r} was closed without worker {rank}, which had left the rounds"
        return Refused(request, "NotAllowed", text, (), unit.key, aim.clock)
    told = log.refusal(rank, sender, request)
    if told is not None:
        return Refused(request, told.error, told.text, (), unit.key)
    if turn is Turn.WRONG or push.probe or log.is_outdated(rank, sender, request):
        expected = log.staged_clock(rank) + 1
        text = f"push {aim.clock} of {unit.key!r} by worker {rank} is out of turn, {expected} is next"
        return Refused(request, "clock", text, (), unit.key, expected)
    return None


def _kind_error(push: Push | PushPack, aim: Aim, merge: str) -> Refused | None:
    request, unit = push.request, aim.unit
    if unit.log.mixes(aim.clock, push.how):
        text = f"key {unit.key!r} is broadcast and pushed in the same round: all workers must do the same"
        return Refused(request, "NotAllowed", text, (), unit.key)
    if push.how == ADD and not DTYPES[unit.dtype].is_float:
        if unit.optimizer is not None:
            text = f"key {unit.key!r} is {unit.dtype}: optimizers update float keys only"
            return Refused(request, "NotAllowed", text, (), unit.key)
        if merge == "weighted":
            text = f"key {unit.key!r} is {unit.dtype}: a weighted merge takes float keys only"
            return Refused(request, "NotAllowed", text, (), unit.key)
    return None


def remembered(error: Refused, sender: int, rank: int, aims: Sequence[Aim]) -> Refused:
    """The refusal as it is sent, written down where it is for good: the sender gives the clock to another push then,
    unless it hears (`expected`) that a part of this one is taken already.

    Bytes that do not fit are no worker's of ours: they must not spoil a number that one will use.
    """
    if error.error in ("clock", "ProtocolError"):
        return error
    for aim in aims:
        turn = aim.unit.log.turn(rank, aim.clock)
        if turn is Turn.NEXT:
            aim.unit.log.refuse(rank, Refusal(sender, error.request, error.error, error.text))
        elif turn is Turn.KNOWN:
            error = replace(error, expected=aim.clock)
    return error
