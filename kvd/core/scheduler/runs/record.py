"""The scheduler's record: all that its successor needs, as plain data. What is read is checked like a peer's message.

A wrong number would otherwise go into every view, and every node would refuse the views, for good.

`Saving` has the changes that are not on stable storage yet. `RecordCheck` has the doubt whether the record that a
scheduler restarts from is the newest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from kvd.core.machine import Persist, Received
from kvd.core.membership import name_of
from kvd.core.scheduler.barriers.barriers import MAX_NAMES, Barriers
from kvd.core.scheduler.barriers.points import MAX_POINTS, NOT_KNOWN, Points
from kvd.core.scheduler.membership.agreement import MERGES, MODES, NODES, size_problem
from kvd.core.scheduler.membership.roster import AS_FOUND, MAX_REPLACED, Seat
from kvd.core.scheduler.membership.views import MOST_TOLD
from kvd.core.scheduler.placement.partitions import Entry, Holder, Incarnation
from kvd.errors import ProtocolError
from kvd.protocol.codec import check_for
from kvd.protocol.messages import (
    MAX_MEMBERS,
    MAX_RUNS,
    MOST_COUNTED,
    Epoch,
    Key,
    Limit,
    Member,
    MemberState,
    Name,
    Number,
    RunEntry,
    RunPhase,
    Settings,
    Text,
)

# Of a record: what a scheduler counts on from at most, and as many starts after that as there may ever be.
MOST_GENERATION = MOST_TOLD["server"] + (1 << 32)

_SETTINGS = check_for(Settings)
_MEMBER = check_for(Member)
_NAME = check_for(Name)
_NUMBER = check_for(Number)
_INCARNATION = check_for(Incarnation)
_GENERATION = check_for(Annotated[int, Limit(1, MOST_GENERATION)])
_RUN = check_for(RunEntry)
_REPLACED = check_for(Annotated[tuple[tuple[Incarnation, Name], ...], Limit(0, MAX_REPLACED)])
_RANKS = Annotated[tuple[Number, ...], Limit(1, MAX_MEMBERS)]
_TOLD = Annotated[tuple[tuple[Number, Number, Number, _RANKS], ...], Limit(0, MAX_MEMBERS)]  # see Barriers.record
_BARRIERS = check_for(Annotated[tuple[tuple[Key, Number, _TOLD, Text, Text], ...], Limit(0, MAX_NAMES)])
_STEPS = Annotated[tuple[Annotated[int, Limit(NOT_KNOWN, MOST_COUNTED)], ...], Limit(0, MAX_POINTS)]
_POINTS = check_for(Annotated[tuple[tuple[Key, _STEPS, _TOLD], ...], Limit(0, MAX_POINTS)])  # see Points.record
_LATEST = check_for(Annotated[tuple[Incarnation, ...], Limit(0, MAX_MEMBERS)])
_STATE = Member._fields.index("state")  # a record has its value
_WITHOUT_NOTES = 3  # fields of a barrier in the record of an earlier kvd

Partitions: TypeAlias = Sequence[tuple[Entry, Epoch]]  # see kvd.core.scheduler.placement.partitions.Partitions.saved
_HOLDER = tuple[Number, Incarnation]
_ENTRY = tuple[_HOLDER, _HOLDER | None, _HOLDER | None, Incarnation, _HOLDER | None]
_WITHOUT_SUCCESSOR = 4  # fields of a partition in the record of an earlier kvd
_PARTITIONS = check_for(Annotated[tuple[tuple[_ENTRY, Epoch], ...], Limit(0, MAX_MEMBERS)])


@dataclass(frozen=True, slots=True)
class Record:
    """What a scheduler persists at each change."""

    generation: int
    epoch: int
    settings: Settings
    seats: Sequence[Seat]
    replaced: Sequence[tuple[int, str]]
    barriers: Barriers
    phase: RunPhase
    partitions: Partitions = ()
    points: Points = field(default_factory=Points)

    def to_plain(self) -> dict[str, object]:
        """Ready for JSON; a copy, which later changes do not touch."""
        return {
            "generation": self.generation,
            "epoch": self.epoch,
            "settings": list(self.settings),
            "seats": [
                [
                    _plain(seat.member),
                    seat.host,
                    seat.pid,
                    str(seat.predecessor or ""),
                    seat.host_name,
                    seat.came_in,
                    int(seat.is_new),
                ]
                for seat in self.seats
            ],
            "replaced": [list(entry) for entry in self.replaced],
            "barriers": self.barriers.record(),
            "phase": self.phase.value,
            "partitions": [_plain_partition(*saved) for saved in self.partitions],
            "points": self.points.record(),
            "latest_at_point": self.points.latest,
        }

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> Record:
        """The record that `to_plain` wrote.

        Raises:
            ValueError, KeyError, TypeError: this is no record of a scheduler, or has what no scheduler writes.
        """
        try:
            record = cls(
                _GENERATION(saved["generation"]),  # type: ignore[arg-type]
                _NUMBER(saved["epoch"]),  # type: ignore[arg-type]
                _SETTINGS(_padded(saved["settings"], Settings)),  # type: ignore[arg-type]
                [_seat(*entry) for entry in _list(saved["seats"], MAX_MEMBERS)],
                list(_REPLACED(saved["replaced"])),  # type: ignore[call-overload]
                Barriers(_barriers(saved["barriers"])),
                RunPhase(saved["phase"]),
                _partitions(saved.get("partitions", [])),  # an earlier kvd has none
                _points(saved.get("points", []), saved.get("latest_at_point", [])),  # nor these
            )
        except ProtocolError as error:
            raise ValueError(str(error)) from None
        record._check()
        return record

    def _check(self) -> None:
        """Raises ValueError if the parts do not fit each other."""
        settings, phase = self.settings, self.phase
        if settings.mode not in MODES or settings.merge not in MERGES or phase is RunPhase.GONE:
            raise ValueError(f"no run has mode {settings.mode!r}, merge {settings.merge!r} and phase {phase!r}")
        if problem := size_problem(settings):
            raise ValueError(problem[1])
        _check_once("a place", [seat.place for seat in self.seats])
        holders = [seat.member.incarnation for seat in self.seats]
        _check_once("an incarnation", holders + [loser for loser, _ in self.replaced])
        self._check_partitions()

    def _check_partitions(self) -> None:
        if self.partitions and len(self.partitions) != self.settings.num_servers:
            raise ValueError(f"{len(self.partitions)} partitions do not fit {self.settings.num_servers} servers")
        seats = {seat.member.rank: seat for seat in self.seats if seat.member.role == "server"}
        for entry, _ in self.partitions:
            helpers = [holder for holder in (entry.backup, entry.syncing) if holder is not None]
            _check_once("a server of a partition", [holder.rank for holder in (entry.leader, *helpers)])
            if entry.successor is not None and (entry.successor != entry.backup or entry.syncing is not None):
                raise ValueError(f"{entry.successor} of a partition cannot be its next leader")
            leader = seats.get(entry.leader.rank)  # it may have given its seat back
            if leader is not None and leader.member.incarnation != entry.leader.incarnation:
                raise ValueError(f"{entry.leader} of a partition is not at its place")
            for holder in helpers:
                seat = seats.get(holder.rank)
                if seat is None or not seat.is_living or seat.member.incarnation != holder.incarnation:
                    raise ValueError(f"{holder} of a partition is not at its place")


def check_cluster(saved: Mapping[str, Any]) -> None:
    """The records of a cluster and its runs, in one.

    Raises:
        ValueError, KeyError, TypeError: this is no record of a scheduler, or has what no scheduler writes.
    """
    records = [Record.from_plain(saved["cluster"])]
    entries = _list(saved["runs"], MAX_RUNS)
    for entry in entries:
        record = None if entry["record"] is None else Record.from_plain(entry["record"])
        phase = RunPhase.GONE if record is None else record.phase
        try:
            _RUN([entry["run"], entry["job"], entry["token"], phase.value, entry["num_workers"]])
            _INCARNATION(entry["run"])
            _NAME(entry.get("begun_by", ""))  # an earlier kvd has none
        except ProtocolError as error:
            raise ValueError(str(error)) from None
        if record is not None:
            records.append(record)
            if entry["num_workers"] != record.settings.num_workers:
                raise ValueError(f"run {entry['run']:x} has two numbers of workers")
    _check_once("a run", [entry["run"] for entry in entries])
    newest = max(record.generation for record in records)
    if type(saved["generation"]) is not int or saved["generation"] != newest:
        raise ValueError(f"its generation is {saved['generation']!r}, and that of its newest view {newest}")


def _plain(member: Member) -> list[object]:
    plain: list[object] = [*member]
    plain[_STATE] = member.state.value
    return plain


def _seat(
    member: object,
    host: object,
    pid: object,
    predecessor: str,
    host_name: object = "",
    came_in: object = 0,
    is_new: object = 0,
) -> Seat:
    checked: Any = _MEMBER(_padded(member, Member))
    if checked.role not in NODES or not checked.incarnation or checked.last_seen_s < 0:
        raise ValueError(f"no node is {checked.role!r} {checked.rank} with incarnation {checked.incarnation}")
    earlier = None if predecessor == "" else MemberState(predecessor)
    if earlier is not None and earlier not in AS_FOUND:
        raise ValueError(f"no predecessor is {earlier}")
    number: Any = _NUMBER(pid)
    name: Any = _NAME(host)
    place: Any = _NUMBER(came_in)
    return Seat(checked, name, number, None, earlier, str(_NAME(host_name)), bool(_NUMBER(is_new)), came_in=place)


def _padded(value: object, kind: type[Settings] | type[Member]) -> list[Any]:
    """The fields of a tuple; those that the record of an earlier kvd lacks have their defaults."""
    fields = _list(value, len(kind._fields))
    defaults = list(kind._field_defaults.values())
    missing = len(kind._fields) - len(fields)
    return fields + defaults[len(defaults) - missing :] if 0 < missing <= len(defaults) else fields


def _plain_partition(entry: Entry, since: Epoch) -> list[object]:
    return [[list(field) if isinstance(field, Holder) else field for field in entry], list(since)]


def _partitions(value: object) -> Partitions:
    entries = [_list(saved, 2) for saved in _list(value, MAX_MEMBERS)]
    padded = [[[*entry[0], None] if _has_no_successor(entry) else entry[0], *entry[1:]] for entry in entries if entry]
    checked: Any = _PARTITIONS(padded)
    return [
        (Entry(_holder(leader), _holder(backup), _holder(syncing), lineage, _holder(successor)), since)
        for (leader, backup, syncing, lineage, successor), since in checked
    ]


def _has_no_successor(saved: list[Any]) -> bool:
    return type(saved[0]) is list and len(saved[0]) == _WITHOUT_SUCCESSOR


def _holder(fields: Any) -> Any:
    return fields and Holder(*fields)


def _barriers(value: object) -> Sequence[Any]:
    entries = [
        [*entry, "", ""] if len(_list(entry, 5)) == _WITHOUT_NOTES else entry for entry in _list(value, MAX_NAMES)
    ]
    checked: Any = _BARRIERS(entries)
    _check_once("a barrier", [name for name, *_ in checked])
    for name, _, told, *_ in checked:
        _check_once(f"a rank at barrier {name!r}", [rank for rank, *_ in told])
    return list(checked)


def _points(value: object, latest: object) -> Points:
    checked: Any = _POINTS(value)
    _check_once("a point", [name for name, *_ in checked])
    for name, _, told in checked:
        _check_once(f"a rank at point {name!r}", [rank for rank, *_ in told])
    if len(checked) + sum(len(released) for _, released, _ in checked) > MAX_POINTS:
        raise ValueError(f"there are more than {MAX_POINTS} points")
    incarnations: Any = _LATEST(latest)
    return Points(checked, incarnations)


def _list(value: object, most: int) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise ValueError(f"a list of at most {most} entries is missing")
    return value


def _check_once(what: str, values: Collection[object]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{what} is there twice")


MAX_UNDER_WAY = 256  # records that may be told of one by one: the shell saves only the newest of those that wait


class Saving:
    """The changes of all runs that are not on stable storage yet.

    One record has all runs: one Persist may save several changes.

    Attributes:
        problem: why records cannot be saved; "" if they can.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._changed: dict[int, int] = {}  # by run: the newest token of its machine, not yet in a record
        self._under_way: dict[int, dict[int, int]] = {}  # by the token of a Persist: the changes that it saves
        self._last_token = 0

    @property
    def is_due(self) -> bool:
        return bool(self._changed)

    def changed(self, run: int, token: int) -> None:
        """The machine of this run waits until its record is saved; `token` is its own."""
        self._changed[run] = token

    def begin(self, record: Mapping[str, object]) -> Persist:
        """Saves this record, which has all changes so far."""
        self._last_token += 1
        self._under_way[self._last_token], self._changed = self._changed, {}
        if len(self._under_way) > MAX_UNDER_WAY:
            first, second, *_ = self._under_way
            self._under_way[second] = self._under_way.pop(first) | self._under_way[second]
        return Persist(self._last_token, record)

    def saved(self, token: int) -> dict[int, int]:
        """The record with this token is saved, and so is what came before. By run: the newest token of its machine."""
        self.problem = ""
        newest: dict[int, int] = {}
        for earlier in [earlier for earlier in self._under_way if earlier <= token]:
            newest.update(self._under_way.pop(earlier))
        return newest

    def failed(self, why: str) -> None:
        """Records cannot be saved, until one is."""
        self.problem = why


class RecordCheck:
    """Check of the record that a scheduler restarts from: it may have been put back from an earlier time.

    Every view is recorded before it is announced. A node that knows a later view than the record therefore proves that
    the record is too old, and the scheduler then asks its nodes, as if there were no record.

    Until every server of the record was heard, or is overdue since this start, the record is only a claim. The
    scheduler acknowledges heartbeats and does nothing else: no view is announced, nobody joins, no death counts, no
    barrier is settled. Pushes and pulls continue with the views that the nodes have.

    Args:
        recorded: the newest view of the record.
        began: the first view of this scheduler.
        servers: ranks of the servers in the record.
        timeout_s: seconds until a silent server is overdue.
    """

    def __init__(self, recorded: Epoch, began: Epoch, servers: Iterable[int], timeout_s: float, now: float) -> None:
        self.began = began
        self._recorded = recorded
        self._awaited = set(servers)
        self._timeout_s = timeout_s
        self._until = now + timeout_s

    @property
    def is_open(self) -> bool:
        """Whether a server of the record has yet to be heard."""
        return bool(self._awaited)

    def text(self) -> str:
        """The reason why nobody can join yet."""
        names = ", ".join(name_of("server", rank) for rank in sorted(self._awaited))
        return f"waiting to hear from {names}: the record of this scheduler may be too old"

    def next_deadline(self) -> float | None:
        """When the silent servers are overdue; None if all were heard."""
        return self._until if self._awaited else None

    def heard(self, rank: int | None) -> None:
        """Record that a process with this server's place was heard."""
        self._awaited.discard(-1 if rank is None else rank)

    def start_over(self, now: float) -> None:
        """Give every server a full timeout: this scheduler was paused."""
        self._until = now + self._timeout_s

    def expire(self, now: float) -> None:
        """Stop waiting for servers that are overdue."""
        if now >= self._until:
            self._awaited.clear()

    def is_news(self, event: Received) -> bool:
        """Return whether the sender knows a view of an earlier scheduler that is later than the record."""
        return self._recorded < event.epoch < self.began or (self.is_open and event.epoch > self._recorded)

    def is_refuted(self, event: Received, role: str) -> bool:
        """Return whether the sender, which has a seat or may join in this role, proves that the record is too old."""
        return self.is_news(event) and event.epoch.generation <= MOST_TOLD.get(role, 0)

    def give_up(self) -> None:
        """Nothing counts any more of what the record says: the nodes are asked."""
        self._recorded = self.began
        self._awaited.clear()
