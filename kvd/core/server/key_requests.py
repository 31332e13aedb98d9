"""Which keys are live: Publish, Lookup, ListKeys. Worker 0 makes keys and publishes them; the others wait for that."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.core.machine import Peer, Received
from kvd.core.membership import in_words
from kvd.core.server.attachments import Attachments
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.key_creation import ListRefusals
from kvd.core.server.keys import KeyTable
from kvd.core.server.lookups import WaitingLookup, WaitingLookups
from kvd.core.server.participants import Participants
from kvd.core.server.records import Records
from kvd.core.session import SchedulerSession
from kvd.core.shares import owner_of
from kvd.protocol.messages import (
    NO_KEY,
    ErrorCode,
    HoldPublished,
    KeyId,
    KeyInfo,
    KeyList,
    ListKeys,
    Lookup,
    Made,
    MemberState,
    NodeName,
    NotYetReason,
    Publish,
    Refused,
)

KEYS_OF_A_RECORD = 50  # whatever their lengths
INFO_BYTES = 48 << 10  # of the 64 KiB of a header, for the specs and places of a KeyInfo


class KeyRequests:
    """The keys whose slice 0 this server leads: it is the one that knows whether they are live."""

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        effects: ServerEffects,
        attachments: Attachments,
        participants: Participants,
        records: Records,
        elsewhere: Elsewhere,
    ) -> None:
        self._view = session.view
        self._table = table
        self._effects = effects
        self._attachments = attachments
        self._participants = participants
        self._records = records
        self._elsewhere = elsewhere
        self._lookups = WaitingLookups(table.live)

    def publish(self, event: Received, publish: Publish) -> None:
        rank = self._attachments.rank_of(event, publish.request)
        if rank is None:
            return
        if any(self._elsewhere.has(event, publish.request, entry.key, 0) for entry in publish.keys):
            return
        refused = ListRefusals()
        new: dict[int, list[KeyId]] = {}
        for place, (key, number) in enumerate(publish.keys):
            made = self._table.slices.get((key, 0))
            if (
                rank != 0
                or made is None
                or number >= len(publish.specs)
                or (made.spec, made.creation) != (publish.specs[number], publish.creation)
            ):
                refused.add(place, ErrorCode.NOT_ALLOWED, "only worker 0 publishes, and only what it made", key)
            elif key not in self._table.live:
                new.setdefault(made.partition, []).append(KeyId(key, made.creation))
        messages = [
            (partition, HoldPublished(0, partition, tuple(keys[first : first + KEYS_OF_A_RECORD])))
            for partition, keys in new.items()
            for first in range(0, len(keys), KEYS_OF_A_RECORD)
        ]

        published = [key for keys in new.values() for key in keys]
        self._table.publishing.update(published)

        def held() -> None:
            self._table.publishing.subtract(published)
            self._go_live(published)
            self._effects.send(event.peer, refused.answer(publish.request))

        self._records.hold_in(messages, held)

    def _go_live(self, keys: Sequence[KeyId]) -> None:
        for key, creation in keys:
            made = self._table.slices.get((key, 0))
            if made is not None and made.creation == creation and key not in self._table.live:
                self._table.live[key] = Made(made.spec, creation)
                for lookup in self._lookups.published(key):
                    self._answer(lookup.peer, lookup.request, lookup.keys)

    def lookup(self, event: Received, lookup: Lookup) -> None:
        if any(self._elsewhere.has(event, lookup.request, key, 0) for key in lookup.keys):
            return
        waiting = WaitingLookup(event.peer, lookup.request, lookup.keys, owner_of(event))
        if not lookup.wait or not waiting.move_on(self._table.live):
            self._answer(event.peer, lookup.request, lookup.keys)
        elif self._lookups.add(waiting):
            self.fail_lookups_without_rank_0()
        else:
            text = "look-ups of too many keys wait already"
            self._effects.not_yet(event.peer, lookup.request, NotYetReason.BUSY, text)

    def _answer(self, peer: Peer, request: int, keys: Sequence[str]) -> None:
        """What is known of the keys, or of as many of them as fit into a header."""
        different: dict[Made, int] = {}
        places: list[int] = []
        room = INFO_BYTES
        for key in keys:
            made = self._table.live.get(key)
            if made is not None and made not in different:
                room -= 9 * len(made.spec.shape) + 42  # at most, as msgpack
                if places and room < 0:
                    break
                different[made] = len(different)
            places.append(NO_KEY if made is None else different[made])
        self._effects.send(peer, KeyInfo(request, tuple(different), tuple(places)))

    def drop_partition(self, partition: int) -> None:
        """Another server leads it: those who wait for its keys ask there."""
        self._lookups.drop(lambda key: self._view.partition_of(key, 0) == partition)

    def lookups_of(self, peer: Peer) -> list[tuple[str, int]]:
        """The look-ups of this peer that wait, as (key, request)."""
        return self._lookups.of(peer)

    @property
    def awaited_key(self) -> str | None:
        """A key that workers or readers wait for until worker 0 has made it; None if none does."""
        return self._lookups.first_key()

    def fail_lookups_without_rank_0(self) -> None:
        """Worker 0 makes the keys: if it is gone, nobody waits for them any longer."""
        member = self._view.worker(0)
        if member is None:
            return
        is_lost = member.state is MemberState.DEAD and 0 in self._participants.dead
        if not is_lost and member.state not in (MemberState.LEFT, MemberState.GONE, MemberState.LOST):
            return
        nodes = (NodeName("worker", 0),)
        for lookup in self._lookups.give_up():
            key = lookup.key
            text = f"key {key!r} was not made: worker 0, which makes the keys, {in_words(member.state)}; restart it"
            lost_s = member.last_seen_s
            refusal = Refused(lookup.request, ErrorCode.NODE_LOST, text, key, nodes=nodes, last_seen_s=lost_s)
            self._effects.send(lookup.peer, refusal)

    def list(self, event: Received, query: ListKeys) -> None:
        entries, more = self._table.page(query.after)
        self._effects.send(event.peer, KeyList(query.request, entries, more))

    def validate(self) -> None:
        """Raises AssertionError if an invariant of the look-ups that wait is broken."""
        self._lookups.validate()
