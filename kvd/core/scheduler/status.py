"""What `kvd status` shows of a run."""

from __future__ import annotations

from kvd.core.pseudonyms import pseudonym
from kvd.core.scheduler.barriers.rendezvous import Rendezvous
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import Roster, Seat
from kvd.core.scheduler.placement.partitions import Partitions
from kvd.protocol.messages import LAST_SNAPSHOT

MAX_DIGITS = 18
_OF_SNAPSHOT = ("step", "at", "every")


def run_report(
    roster: Roster, liveness: Liveness, rendezvous: Rendezvous, partitions: Partitions, now: float
) -> dict[str, object]:
    """The nodes, where they meet, and with two replicas who leads what, as plain data ready for JSON."""
    shown: dict[str, object] = {
        "members": [_member(seat, liveness, now) for seat in sorted(roster.seats(), key=lambda seat: seat.place)],
        "missing": roster.missing(),
        "barriers": rendezvous.open(),
        "barrier_waits": rendezvous.describe(now),
        "last_snapshot": _last_snapshot(rendezvous),
    }
    return {**shown, "partitions": partitions.report()} if partitions.count else shown


def _last_snapshot(rendezvous: Rendezvous) -> dict[str, object] | None:
    """The last snapshot that the program has written: after how many steps, when, in seconds since 1970, and the steps
    from one to the next, 0 without a schedule."""
    said = rendezvous.barriers.said(LAST_SNAPSHOT, 0).text.split(" ")
    if len(said) != len(_OF_SNAPSHOT) or not all(text.isdecimal() and len(text) <= MAX_DIGITS for text in said):
        return None
    return dict(zip(_OF_SNAPSHOT, map(int, said), strict=True))


def _member(seat: Seat, liveness: Liveness, now: float) -> dict[str, object]:
    incarnation = seat.member.incarnation
    if seat.member.role == "worker":
        incarnation = pseudonym(incarnation)  # readers are told of it
    return {
        "role": seat.member.role,
        "rank": seat.member.rank,
        "node_id": seat.member.node_id,
        "state": seat.member.state,
        "is_late": seat.is_late,
        "is_new": seat.is_new,  # the rounds have never waited for it
        "address": seat.member.address,
        "host": seat.host,
        "host_name": seat.host_name,
        "pid": seat.pid,
        "incarnation": f"{incarnation:016x}",
        "last_heard_s": liveness.silence_s(seat, now),
        "is_silent": seat.is_living and liveness.is_silent(seat, now),
        "reason": seat.member.reason or liveness.known_end(seat),
        "process_ended": seat.is_living and bool(liveness.known_end(seat)),
        "silent_s": seat.member.last_seen_s,
    }
