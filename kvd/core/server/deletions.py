"""How keys are deleted: Delete and Drop.

The server of slice 0 of a key decides. Every rank that rounds wait for tells it that it deletes the key; the last one
takes the key away, at once for all. A dead worker is waited for, as in a round, and what a predecessor said does not
count for its successor, unless the key is gone by then. A worker that is told that the key is gone has the other
servers drop their slices of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvd.core.machine import LogEntry, Peer, Received
from kvd.core.membership import name_of
from kvd.core.server.attachments import Attachments
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import forget_state
from kvd.core.server.keys import KeyTable
from kvd.core.server.participants import REMEDIES, Participants
from kvd.core.server.progress import PushRequest
from kvd.core.server.records import Records
from kvd.core.server.waiting import Waiters
from kvd.protocol.messages import (
    MOST_COUNTED,
    Delete,
    Done,
    Drop,
    ErrorCode,
    HoldDropped,
    KeyId,
    NodeName,
    NotYetReason,
    Refused,
)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A Delete that waits for other ranks."""

    peer: Peer
    rank: int
    push: PushRequest  # who asked, and the number of the request
    keys: set[str]  # those that are still here


class Deletions:
    """The keys that some ranks, but not all, have deleted.

    Args:
        give_back: keys are gone: their memory is free.

    Attributes:
        going: keys that all ranks have deleted, while an update of their group is still running. To read only.
    """

    def __init__(
        self,
        table: KeyTable,
        effects: ServerEffects,
        attachments: Attachments,
        participants: Participants,
        waiters: Waiters,
        records: Records,
        elsewhere: Elsewhere,
        give_back: Callable[[], None],
    ) -> None:
        self._table = table
        self._effects = effects
        self._attachments = attachments
        self._participants = participants
        self._waiters = waiters
        self._records = records
        self._elsewhere = elsewhere
        self._give_back = give_back
        self._waiting: dict[PushRequest, _Waiting] = {}
        self._by_key: dict[str, dict[int, _Waiting]] = {}  # key → rank
        self.going: set[str] = set()
        self._unheld = Counter[str]()  # they are gone here, and a backup has yet to hold that
        self._refused: dict[int, PushRequest] = {}  # the latest request of each rank that was refused

    def delete(self, event: Received, message: Delete) -> None:
        rank = self._attachments.rank_of(event, message.request)
        if rank is None:
            return
        request = PushRequest(event.sender, message.request)
        open_ = self._waiting.get(request)
        if open_ is not None:
            open_.peer = event.peer
            return
        if any(key in self._unheld for key, _ in message.keys):
            return  # it is asked again, and this will be done by then
        if any(self._elsewhere.has(event, message.request, key, 0) for key, _ in message.keys):
            return
        here = {key for key, creation in message.keys if self._is_here(key, creation)}
        if not here:
            self._effects.send(event.peer, Done(message.request))
        elif rank not in self._participants.required:
            text = "this worker has left the rounds: it deletes no keys"
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text, message.keys[0].key)
        elif self._was_refused(rank, request):
            text = "this request was refused before: delete the key again"
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text, message.keys[0].key)
        else:
            self._wait(_Waiting(event.peer, rank, request, here))

    def _is_here(self, key: str, creation: int) -> bool:
        made = self._table.live.get(key)
        return made is not None and made.creation == creation

    def _was_refused(self, rank: int, request: PushRequest) -> bool:
        last = self._refused.get(rank)
        return last is not None and last.sender == request.sender and request.number <= last.number

    def _wait(self, waiting: _Waiting) -> None:
        for key in waiting.keys:
            earlier = self._by_key.get(key, {}).get(waiting.rank)
            if earlier is not None:
                self._forget(earlier)  # its sender has given it up
        self._waiting[waiting.push] = waiting
        for key in waiting.keys:
            self._by_key.setdefault(key, {})[waiting.rank] = waiting
        for key in sorted(waiting.keys):
            self._close(key)
        self._fail_blocked()

    def _forget(self, waiting: _Waiting) -> None:
        """Nobody waits for it any more, and what it said does not count."""
        del self._waiting[waiting.push]
        for key in waiting.keys:
            ranks = self._by_key[key]
            del ranks[waiting.rank]
            if not ranks:
                del self._by_key[key]

    def waits_of(self, sender: int) -> Iterator[tuple[int, str, list[int]]]:
        """The sender's requests that wait for other ranks only: number, the first key that waits, and those ranks."""
        for waiting in self._waiting.values():
            if waiting.push.sender == sender and waiting.keys.isdisjoint(self.going):
                key = min(waiting.keys)
                yield waiting.push.number, key, self._missing(key)

    @property
    def blockers(self) -> set[int]:
        """The ranks that others wait for."""
        return {rank for key in self._by_key.keys() - self.going for rank in self._missing(key)}

    # ── all ranks have deleted a key ──

    def _close(self, key: str) -> None:
        """Takes the key away if all ranks have deleted it."""
        ranks, required = self._by_key.get(key, {}), self._participants.required
        if ranks and all(rank in ranks for rank in required):
            self.going.add(key)
            self.advance()

    def advance(self) -> None:
        """A job has ended: the keys that waited for it go."""
        for key in sorted(self.going):
            if self._table.is_quiescent(key) and not self._elsewhere.leaves(self._table.of_key(key)):
                self.going.discard(key)
                records = self.take_away(key)
                gone = [waiting for waiting in self._by_key.pop(key, {}).values() if self._is_over(waiting, key)]
                self._unheld[key] += 1
                self._records.hold_in(records, partial(self._answer, key, gone), partial(self._answer, key, ()))

    def _is_over(self, waiting: _Waiting, key: str) -> bool:
        """The key is gone; whether it was the last one that this Delete waited for."""
        waiting.keys.discard(key)
        if not waiting.keys:
            del self._waiting[waiting.push]
        return not waiting.keys

    def _answer(self, key: str, gone: Sequence[_Waiting]) -> None:
        self._unheld[key] -= 1
        if not self._unheld[key]:
            del self._unheld[key]
        for waiting in gone:
            self._effects.send(waiting.peer, Done(waiting.push.number))

    def take_away(self, key: str) -> list[tuple[int, HoldDropped]]:
        """Removes the slices of a key that was deleted, which are quiescent. Returns what the backups are to hold."""
        slices = self._table.of_key(key)
        name = KeyId(key, slices[0].creation)
        records = [
            (partition, HoldDropped(0, partition, (name,)))
            for partition in sorted({slice_.partition for slice_ in slices})
            if self._records.is_held(partition)
        ]
        self._table.creation = max(self._table.creation, min(slices[0].creation + 1, MOST_COUNTED))
        for group in self._table.remove(key):
            for entry in group.waiting:  # of those that are not waited for: workers that have left the rounds
                text = f"key {key!r} was deleted"
                refusal = Refused(entry.pending.request, ErrorCode.KEY_NOT_FOUND, text, key)
                self._waiters.fail(entry.pending, refusal)
            group.waiting = []
        self._give_back()
        self._effects.emit(forget_state(slices))
        self._effects.emit(LogEntry("debug", f"key {key!r} was deleted"))
        return records

    # ── the other slices ──

    def drop(self, event: Received, message: Drop) -> None:
        if self._attachments.rank_of(event, message.request) is None:
            return
        old = {
            key
            for key, creation in message.keys  # a peer may name a key twice
            if any(slice_.creation <= creation for slice_ in self._table.of_key(key))
        }
        updating = min((key for key in old if not self._table.is_quiescent(key)), default=None)
        if updating is not None:
            text = "a slice is being updated"
            self._effects.not_yet(event.peer, message.request, NotYetReason.UPDATING, text, updating)
            return
        for _, creation in message.keys:
            self._table.creation = max(self._table.creation, min(creation + 1, MOST_COUNTED))  # an Init can carry it
        if any(key in self._unheld for key, _ in message.keys):
            return  # it is asked again, and this will be done by then
        records = [record for key in sorted(old) for record in self.take_away(key)]
        self._unheld.update(old)

        def over() -> None:
            self._unheld.subtract(old)
            self._unheld += Counter[str]()  # without those that are at 0

        def held() -> None:
            over()
            self._effects.send(event.peer, Done(message.request))

        self._records.hold_in(records, held, over)

    # ── the view ──

    def drop_rank(self, rank: int) -> None:
        """Another incarnation has the rank: what the one before said does not count."""
        for waiting in [entry for entry in self._waiting.values() if entry.rank == rank]:
            self._forget(waiting)
        self._refused.pop(rank, None)

    def drop_partition(self, partition: int) -> None:
        """Another server leads it: those who delete its keys ask there."""
        mine = {
            key for key in self._by_key if any(slice_.partition == partition for slice_ in self._table.of_key(key)[:1])
        }
        for waiting in [entry for entry in self._waiting.values() if not entry.keys.isdisjoint(mine)]:
            self._forget(waiting)
        self.going -= mine

    def view_changed(self) -> None:
        """Other ranks take part, or are dead."""
        for key in sorted(self._by_key):
            self._close(key)
        self._fail_blocked()

    def _fail_blocked(self) -> None:
        """Tells those who wait for a dead worker. They have to delete their keys again."""
        if not self._participants.dead:
            return
        for waiting in list(self._waiting.values()):
            for key in sorted(waiting.keys - self.going):
                lost = [rank for rank in self._missing(key) if rank in self._participants.dead]
                if lost:
                    self._refuse(waiting, key, lost)
                    break

    def _missing(self, key: str) -> list[int]:
        return [rank for rank in self._participants.required if rank not in self._by_key[key]]

    def _refuse(self, waiting: _Waiting, key: str, lost: list[int]) -> None:
        nodes = tuple(NodeName("worker", rank) for rank in lost)
        names = ", ".join(name_of(*node) for node in nodes)
        text = f"the deletion of key {key!r} waits for {names}, which died: {REMEDIES}"
        last_seen_s = self._participants.dead[lost[0]]
        request = waiting.push.number
        refusal = Refused(request, ErrorCode.NODE_LOST, text, key, nodes=nodes, last_seen_s=last_seen_s)
        self._effects.send(waiting.peer, refusal)
        self._forget(waiting)
        self._refused[waiting.rank] = waiting.push

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken: a key that all ranks have deleted is about to go, and those
        who wait are noted at their keys."""
        for key, ranks in self._by_key.items():
            assert key in self._table.live, f"ranks delete {key!r}, which is not live"
            assert ranks, f"no rank deletes {key!r}"
            is_going = all(rank in ranks for rank in self._participants.required)
            assert not is_going or key in self.going, f"all ranks have deleted {key!r}, and it is still here"
            for rank, waiting in ranks.items():
                assert waiting.rank == rank, f"worker {rank} did not delete {key!r}"
                assert key in waiting.keys, f"{waiting} does not wait for {key!r}"
        for request, waiting in self._waiting.items():
            assert waiting.push == request, f"{waiting} has another number"
            for key in waiting.keys:
                assert self._by_key[key][waiting.rank] is waiting, f"{waiting} is not noted at {key!r}"
