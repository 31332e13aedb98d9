"""Admission of pushes: the one place where the answer to a push is decided.

A message is taken as a whole or not at all. Its size is checked first, then each of its targets by the table below and
by the kind of push (`kvd.core.push_policy`), then whether one more request may wait. A push that is admitted is staged,
or was before, and is answered when it commits (`kvd.core.server.waiting`). docs/architecture.md shows the same table.

A training loop pushes the same slices round after round. What an admission finds out that holds for the next push too
is kept in `kvd.core.server.verdicts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from itertools import product
from typing import NamedTuple, TypeAlias

from kvd.core.push_policy import push_error
from kvd.core.server.progress import PushRequest, Refusal
from kvd.core.server.rounds import PushStatus
from kvd.core.server.targets import PushTarget
from kvd.protocol.messages import (
    ABSENT,
    MAX_TEXT_CHARS,
    ErrorCode,
    NotYet,
    NotYetReason,
    Push,
    PushBatch,
    Refused,
    Taken,
)
from kvd.protocol.specs import payload_nbytes


class Decision(Enum):
    """What becomes of one target of a push."""

    STAGE = "stage it; Done when it commits"
    TAKEN_BEFORE = "nothing to stage; Done when it commits"
    MISSED = "Refused NOT_ALLOWED: its round closed without this worker"
    REFUSED_BEFORE = "Refused: the same again"
    SEND_NEXT = "NotYet OUT_OF_TURN, with the clock that is next"
    UNCOUNTED = "nothing to stage; Uncounted: the rounds go on without this worker"


class Row(NamedTuple):
    """One row of the table; None stands for both."""

    status: PushStatus
    probe: bool | None  # it asks what became of a push, and brings no bytes
    refused_before: bool | None  # the sender was told that this push is refused for good
    outdated: bool | None  # a later push of the sender was taken: this one was given up
    decision: Decision


TABLE = (
    #   what the clock means     probe  refused outdated
    Row(PushStatus.KNOWN, None, None, None, Decision.TAKEN_BEFORE),
    Row(PushStatus.MISSED, None, None, None, Decision.MISSED),
    Row(PushStatus.OUT_OF_TURN, None, True, None, Decision.REFUSED_BEFORE),
    Row(PushStatus.OUT_OF_TURN, None, False, None, Decision.SEND_NEXT),
    Row(PushStatus.NEXT, None, True, None, Decision.REFUSED_BEFORE),
    Row(PushStatus.NEXT, True, False, None, Decision.SEND_NEXT),
    Row(PushStatus.NEXT, False, False, True, Decision.SEND_NEXT),
    Row(PushStatus.NEXT, False, False, False, Decision.STAGE),
)

_DECISIONS = {
    (row.status, *facts): row.decision
    for row in TABLE
    for facts in product((False, True), repeat=3)
    if all(wanted in (None, fact) for wanted, fact in zip(row[1:4], facts, strict=True))
}

Answer: TypeAlias = NotYet | Refused


def admit(
    push: Push | PushBatch,
    request: PushRequest,
    nbytes: int,
    rank: int,
    targets: Sequence[PushTarget],
    merge: str,
    *,
    is_full: bool,
    is_apart: bool = False,
    memory_error: Callable[[], str] | None = None,
) -> list[Decision] | Answer:
    """A decision for each target if the push is let in; else the answer, and nothing of it is taken.

    Args:
        nbytes: of the payload that came with it.
        is_apart: the rounds go on without this worker: of its pushes, those count that were counted before.
        merge: the cluster's setting.
        is_full: whether MAX_PENDING requests wait, or too many of the sender.
        memory_error: why there is no memory for what it brings; empty if there is. None: it was granted before.
    """
    brings_bytes = push.how != ABSENT and not push.probe
    expected_nbytes = payload_nbytes([target.nbytes for target in targets]) if brings_bytes else 0
    if nbytes != expected_nbytes:
        text = f"a push of these {len(targets)} slices has {expected_nbytes} bytes, this one has {nbytes}"
        return Refused(push.request, ErrorCode.PROTOCOL_ERROR, text)
    decisions = []
    for target in targets:
        decision = decide(request, push.probe, rank, target)
        if is_apart and decision is not Decision.TAKEN_BEFORE:
            decision = Decision.UNCOUNTED
        elif decision is not Decision.TAKEN_BEFORE:
            answer = _answer_of(decision, push, request, rank, target, merge)
            if answer is not None:
                return _remembered(answer, request, rank, targets)
        decisions.append(decision)
    if memory_error is not None and Decision.STAGE in decisions and (text := memory_error()):
        refused = Refused(push.request, ErrorCode.NOT_ALLOWED, text[:MAX_TEXT_CHARS], targets[0].group.key)
        return _remembered(refused, request, rank, targets)
    if is_full and not all(target.group.log.committed_clock(rank) >= target.clock for target in targets):
        text = "too many requests wait already: try again"
        if Decision.STAGE not in decisions:
            return NotYet(push.request, NotYetReason.BUSY, text)
        return _remembered(Refused(push.request, ErrorCode.NOT_ALLOWED, text), request, rank, targets)
    return decisions


def decide(request: PushRequest, probe: bool, rank: int, target: PushTarget) -> Decision:
    """The row of the table that the push is in, for one target."""
    log = target.group.log
    progress = log.progress_of(rank)
    return _DECISIONS[
        log.status_of(rank, target.clock),
        probe,
        progress.refusal_of(request) is not None,
        progress.is_outdated(request),
    ]


def _answer_of(
    decision: Decision, push: Push | PushBatch, request: PushRequest, rank: int, target: PushTarget, merge: str
) -> Answer | None:
    """The answer that the decision stands for; None if the push may be staged."""
    group = target.group
    if decision is Decision.STAGE:
        mixes = group.log.mixes(target.clock, push.how)
        error = push_error(
            group.key,
            group.dtype,
            push.how,
            has_optimizer=group.optimizer is not None,
            merge=merge,
            own_merge=group.merge,
            mixes=mixes,
        )
        return None if error is None else Refused(request.number, ErrorCode.NOT_ALLOWED, error, group.key)
    if decision is Decision.MISSED:
        text = f"round {target.clock} of {group.key!r} was closed without worker {rank}, which had left the rounds"
        return Refused(request.number, ErrorCode.NOT_ALLOWED, text, group.key, Taken.PART)
    if decision is Decision.REFUSED_BEFORE:
        told = group.log.progress_of(rank).refusal_of(request)
        assert told is not None
        return Refused(request.number, told.error, told.text, group.key)
    next_clock = group.log.staged_clock(rank) + 1
    text = f"push {target.clock} of {group.key!r} by worker {rank} is out of turn, {next_clock} is next"
    return NotYet(request.number, NotYetReason.OUT_OF_TURN, text, group.key, next_clock)


def _remembered(answer: Answer, request: PushRequest, rank: int, targets: Sequence[PushTarget]) -> Answer:
    """The answer as it is sent. A refusal is for good: each target whose turn it was remembers it, because the sender
    gives the clock to another push now; unless a part of the push was taken before, which the sender is told."""
    if isinstance(answer, NotYet):
        return answer
    for target in targets:
        status = target.group.log.status_of(rank, target.clock)
        if status is PushStatus.NEXT:
            target.group.log.refuse(rank, Refusal(request, answer.error, answer.text))
        elif status is PushStatus.KNOWN:
            answer = replace(answer, taken=Taken.PART)
    return answer
