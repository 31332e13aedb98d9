"""Assignment of ranks to nodes that join."""

from __future__ import annotations

from typing import NamedTuple

from kvd.core.machine import Received
from kvd.core.principals import key_text
from kvd.core.scheduler.membership.agreement import Agreement
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import Roster, Seat
from kvd.protocol.messages import NO_VIEW, ErrorCode, Join, Refused


class Seated(NamedTuple):
    """A node has a seat.

    Attributes:
        is_new: it has just got it; otherwise it has joined before.
        replaced: the seat of the holder that it replaces, if there was one.
    """

    seat: Seat
    is_new: bool
    replaced: Seat | None = None


class RankAssignment:
    """Gives the seats of a roster to nodes that agree with the settings."""

    def __init__(self, agreement: Agreement, roster: Roster, liveness: Liveness) -> None:
        self._agreement = agreement
        self._roster = roster
        self._liveness = liveness

    def seat(self, join: Join, event: Received) -> Seated | Refused:
        """A seat for the sender: the one that it has, or the one that `Roster.rank_for` finds."""
        incarnation, principal = event.sender, event.principal
        seat = self._roster.seat_of(incarnation)
        if seat is not None:
            return Seated(seat, is_new=False)
        own = self._roster.same_process(join, incarnation)
        if own is not None and not self._liveness.known_end(own):
            text = f"this process is {own.name} already: use that store, or close it first; two stores need two jobs"
            return Refused(join.request, ErrorCode.NOT_ALLOWED, text)
        rank = self._roster.rank_for(join, had_it=event.epoch != NO_VIEW)
        if rank is None:
            return Refused(join.request, ErrorCode.NOT_ALLOWED, self._full_text(join.role))
        holder = self._roster.living_holder(join.role, rank)
        if holder is not None and holder.member.principal != principal.name:
            text = (
                f"{holder.name} (node {join.node_id}) is alive, and joined under {key_text(holder.member.principal)}, "
                f"this process under {principal.describe()}: stop the other one, or choose another KVD_NODE_ID"
            )
            return Refused(join.request, ErrorCode.NOT_ALLOWED, text)
        if holder is not None and join.role == "server" and event.epoch != NO_VIEW and self._keeps_copies():
            text = f"another process took the place of {holder.name} while this one was not heard; stop this one"
            return Refused(join.request, ErrorCode.REPLACED, text)
        seat, replaced = self._roster.take_seat(join, rank, incarnation, event.peer, principal.name)
        return Seated(seat, is_new=True, replaced=replaced)

    def _keeps_copies(self) -> bool:
        """Whether a server that is heard again may have missed that its partitions were given to others."""
        return self._agreement.settings.replicas > 1

    def _full_text(self, role: str) -> str:
        settings = self._agreement.settings
        size = settings.num_servers if role == "server" else settings.most_workers
        larger = "--max-workers" if role == "worker" and settings.is_elastic else f"--num-{role}s"
        return (
            f"all {size} {role}s are there: stop one, give this node the KVD_NODE_ID of the one that it "
            f"replaces, or start the scheduler with a larger {larger}"
        )
