"""What a server tells a worker whose calls wait: which of its requests wait for nothing but other workers, and whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvd.core.machine import Peer, Received
from kvd.core.server.attachments import Attachments
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, Waiting
from kvd.core.server.keys import KeyTable
from kvd.core.server.participants import Participants
from kvd.protocol.messages import MAX_ABSENT, MAX_HELD, MAX_WAITS, Absent, Wait, WaitQuery, Waits

DETAIL_BYTES = 16 << 10  # of a header, for the details


class WaitAnswers:
    """Answers WaitQuery. It reads the state of the other parts, and changes nothing."""

    def __init__(
        self,
        table: KeyTable,
        effects: ServerEffects,
        attachments: Attachments,
        participants: Participants,
        lookups: Callable[[Peer], list[tuple[str, int]]],
        deletions: Callable[[int], Iterable[tuple[int, str, list[int]]]],
        states: Callable[[int], Iterable[tuple[int, str, list[int]]]],
    ) -> None:
        self._table = table
        self._effects = effects
        self._attachments = attachments
        self._participants = participants
        self._lookups = lookups
        self._deletions = deletions
        self._states = states

    def answer(self, event: Received, query: WaitQuery) -> None:
        rank = self._attachments.find(event.sender)
        found = {} if rank is None else self._of_worker(event.sender, rank)
        for key, request in self._lookups(event.peer) if rank != 0 else ():
            found[request] = Wait(request, key, 0, (Absent(0, 0),))
        for request, key, ranks in self._deletions(event.sender):
            found[request] = Wait(request, key, 1, tuple(Absent(other, 0) for other in ranks[:MAX_ABSENT]))
        for request, title, ranks in self._states(event.sender):
            found[request] = Wait(request, title, 0, tuple(Absent(other, 0) for other in ranks[:MAX_ABSENT]))
        held = sorted(found)
        details = []
        room = DETAIL_BYTES
        for request in held[:MAX_WAITS]:
            wait = found[request]
            room -= 4 * len(wait.key) + 20 * (len(wait.absent) + 1)  # at most, as msgpack
            if room < 0:
                break
            details.append(wait)
        shown = tuple(held[:MAX_HELD])
        self._effects.send(event.peer, Waits(query.request, shown, tuple(details), len(shown) == len(held)))

    def _of_worker(self, sender: int, rank: int) -> dict[int, Wait]:
        """The sender's requests of which every open part waits for other workers, by number."""
        found: dict[int, Wait] = {}
        others: set[int] = set()  # part of it is under way
        for group in self._table.groups.values():
            mine = [waiting for waiting in group.waiting if _is_of(waiting, sender)]
            absent = self._absent(group, rank) if mine else ()
            for waiting in mine:
                request = waiting.pending.request
                if not absent:
                    others.add(request)
                elif request not in found:
                    key = group.key if waiting.slice is None else waiting.slice.key
                    found[request] = Wait(request, key, max(waiting.clock, 1), absent)
        return {request: wait for request, wait in found.items() if request not in others}

    def _absent(self, group: FusedGroup, rank: int) -> tuple[Absent, ...]:
        """The other workers that the group's next round waits for; nobody while it is updated."""
        if not group.is_quiescent or group.working:
            return ()
        blockers = [other for other in self._participants.blockers(group) if other != rank]
        return tuple(Absent(other, group.log.progress_of(other).staged) for other in blockers[:MAX_ABSENT])


def _is_of(waiting: Waiting, sender: int) -> bool:
    return waiting.pending.sender == sender and not waiting.pending.closed
