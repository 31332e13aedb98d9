"""The scheduler's record: all that its successor needs, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvd.core.scheduler.barriers import Barriers
from kvd.core.scheduler.roster import Seat
from kvd.protocol.messages import Member, MemberState, RunPhase, Settings


class Record(NamedTuple):
    """What a scheduler persists at each change."""

    generation: int
    epoch: int
    settings: Settings
    seats: Sequence[Seat]
    replaced: Sequence[tuple[int, str]]
    barriers: Barriers
    phase: RunPhase

    def to_plain(self) -> dict[str, object]:
        """Ready for JSON; a copy, which later changes do not touch."""
        return {
            "generation": self.generation,
            "epoch": self.epoch,
            "settings": list(self.settings),
            "seats": [
                [list(seat.member), seat.host, seat.pid, seat.predecessor or "", seat.host_name] for seat in self.seats
            ],
            "replaced": [list(entry) for entry in self.replaced],
            "barriers": self.barriers.record(),
            "phase": self.phase.value,
        }

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> Record:
        """The record that `to_plain` wrote.

        Raises:
            ValueError, KeyError, TypeError: this is no record of a scheduler.
        """
        if saved["generation"] < 1 or len(saved["settings"]) != len(Settings._fields):
            raise ValueError("generation or settings are not as a scheduler writes them")
        return cls(
            saved["generation"],
            saved["epoch"],
            Settings(*saved["settings"]),
            [_seat(*entry) for entry in saved["seats"]],
            [(incarnation, name) for incarnation, name in saved["replaced"]],
            Barriers(saved["barriers"]),
            RunPhase(saved["phase"]),
        )


def _seat(fields: Sequence[Any], host: str, pid: int, predecessor: str, host_name: str = "") -> Seat:
    member = Member(*fields)
    member = member._replace(state=MemberState(member.state))
    return Seat(member, host, pid, None, MemberState(predecessor) if predecessor else None, host_name)
