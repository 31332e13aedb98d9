"""What the update of a round uses, and what it makes."""

from __future__ import annotations

from typing import NamedTuple

from kvd.core.machine import Buffer, Contribution, EncodedValue, ScatterList, Span
from kvd.core.server.groups import FusedGroup
from kvd.optimizer import Optimizer
from kvd.protocol.messages import Given, MergedCoding


class Use(NamedTuple):
    """The optimizer of a round, or how its merged gradient is encoded."""

    optimizer: Optimizer | None
    generation: int
    coding: MergedCoding | None = None


class Made(NamedTuple):
    """The new version; the merged gradient, if it is kept; and what the version was decoded from, if it was encoded."""

    buffer: Buffer | ScatterList
    merged: Span | None = None
    encoded: EncodedValue | None = None


def unchanged(group: FusedGroup) -> Made:
    """The version that a round without a contribution makes."""
    return Made(group.log.current, encoded=group.encoded)


def given_by(contribution: Contribution) -> Given:
    """What a record says of a contribution."""
    rank, clock, _, samples, how, step, place, _ = contribution
    return Given(rank, clock, samples, how, step, place)
