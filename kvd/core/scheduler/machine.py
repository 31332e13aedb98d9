"""The scheduler: who is in, with which rank, who is dead and why, and where the barriers stand.

It is needed for membership and barriers, not for pushes and pulls. A change of the view is persisted before it is
announced; a scheduler that is started anew takes its nodes back, from its record or from their own word.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvd.core.machine import Effect, Event, LogEntry, Peer, PeerLost, Persist, Persisted, Received, Send
from kvd.core.membership import ACTIVE, DEAD, DONE, GONE, LEFT, name_of
from kvd.core.placement import initial_shards
from kvd.core.scheduler.barriers import Barriers, Settled, Verdict
from kvd.protocol.messages import (
    BIGGEST,
    MAX_MEMBERS,
    NO_RANK,
    Departure,
    Done,
    Enter,
    Epoch,
    ErrorCode,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Member,
    MemberState,
    Message,
    NodeName,
    NotYet,
    NotYetReason,
    Quiet,
    Refused,
    Settings,
    StatusQuery,
    StatusReport,
    View,
    Welcome,
)

MAX_REPLACED = 1024  # incarnations remembered that lost their place
MODES = ("", "sync", "async")
MERGES = ("", "sum", "mean", "weighted")


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What a scheduler is told: the cluster's settings ("" and 0: the first node to say decides) and its patience."""

    cluster: Settings
    heartbeat_interval_s: float
    server_timeout_s: float
    worker_timeout_s: float
    break_on_loss: bool  # a dead worker breaks the barriers that it is missing from


@dataclass(slots=True)
class _Seat:
    """One rank of one role, and its latest holder."""

    member: Member
    host: str
    pid: int
    heard: float
    peer: Peer | None = None
    predecessor: str = ""
    ended: str = ""  # what is known of the end of its process, before it is declared dead


class SchedulerMachine:
    """The state machine of the scheduler. `generation` must be larger than that of any earlier start."""

    def __init__(
        self,
        settings: SchedulerSettings,
        incarnation: int,
        generation: int,
        now: float,
        saved: Mapping[str, object] | None = None,
    ) -> None:
        self.incarnation = incarnation
        self._settings = settings
        self._cluster = settings.cluster
        self._generation = generation
        self._epoch = 0  # of the newest view
        self._persisted = 0  # epoch of the newest view on stable storage: the one that may be told
        self._seats: dict[tuple[str, int], _Seat] = {}
        self._barriers = Barriers()
        self._replaced: OrderedDict[int, str] = OrderedDict()  # incarnation → the name of the place that it lost
        self._unsaved: dict[int, View] = {}  # epoch → the view that is being saved
        self._withheld: dict[int, list[Effect]] = {}  # epoch → answers that wait for its persistence
        self._last_step = now
        self._out: list[Effect] = []
        self._announced = self._view()
        if saved is not None:
            self._restore(saved, now)

    # ── the machine's interface ──

    @property
    def epoch(self) -> Epoch:
        return Epoch(self._generation, self._persisted)

    def step(self, event: Event, now: float) -> list[Effect]:
        self._out = []
        self._forgive_if_late(now)
        if isinstance(event, Received):
            self._receive(event, now)
        elif isinstance(event, Persisted):
            self._announce(event.token)
        elif isinstance(event, PeerLost):
            self._lose(event, now)
        self._judge(now)
        return self._out

    def next_deadline(self) -> float | None:
        alive = [seat for seat in self._seats.values() if seat.member.state in (ACTIVE, DONE)]
        if not alive:
            return None
        return min(seat.heard + self._timeout_s(seat.member.role) for seat in alive)

    def explain(self, now: float) -> dict[str, object]:
        members = []
        for seat in sorted(self._seats.values(), key=lambda seat: (seat.member.role, seat.member.rank)):
            member = seat.member
            members.append(
                {
                    "role": member.role,
                    "rank": member.rank,
                    "node_id": member.node_id,
                    "state": member.state,
                    "address": member.address,
                    "host": seat.host,
                    "pid": seat.pid,
                    "incarnation": f"{member.incarnation:016x}",
                    "last_heard_s": round(now - seat.heard, 3),
                    "reason": member.reason or seat.ended,
                    "silent_s": member.last_seen_s,
                }
            )
        return {
            "role": "scheduler",
            "view": list(self.epoch),
            "settings": self._cluster._asdict(),
            "members": members,
            "missing": [
                name_of(role, rank)
                for role, count in (("server", self._cluster.num_servers), ("worker", self._cluster.num_workers))
                for rank in range(count)
                if (role, rank) not in self._seats
            ],
            "barriers": self._barriers.open(),
        }

    def watched(self) -> list[tuple[int, str, int]]:
        """(incarnation, host, pid) of the living, for a shell that can see their processes."""
        return [
            (seat.member.incarnation, seat.host, seat.pid)
            for seat in self._seats.values()
            if seat.member.state in (ACTIVE, DONE)
        ]

    # ── messages ──

    def _receive(self, event: Received, now: float) -> None:
        message = event.message
        lost_place = self._replaced.get(event.sender)
        if lost_place is not None and isinstance(message, Join | Heartbeat | Leave | Enter):
            text = f"another process took the place of {lost_place}; stop this one"
            self._refuse(event.peer, message, ErrorCode.REPLACED, text)
        elif isinstance(message, Join):
            self._join(event, message, now)
        elif isinstance(message, StatusQuery):
            self._out.append(Send(event.peer, StatusReport(message.request)))
        elif isinstance(message, Heartbeat | Leave | Enter):
            seat = self._seat_of(event.sender)
            if seat is None:
                self._turn_away(event, message)
                return
            self._hear(seat, event.peer, now)
            if isinstance(message, Heartbeat):
                self._out.append(Send(event.peer, HeartbeatAck(self._quiet(now))))
                if event.epoch < self.epoch:
                    self._out.append(Send(event.peer, self._announced))
            elif isinstance(message, Leave):
                self._leave(seat, event.peer, message, now)
            else:
                self._enter(seat, event.peer, message)
        elif not isinstance(message, NotYet | Refused):
            text = f"the scheduler takes no {type(message).__name__}: send it to a server"
            self._refuse(event.peer, message, ErrorCode.PROTOCOL_ERROR, text)

    def _turn_away(self, event: Received, message: Heartbeat | Leave | Enter) -> None:
        """Someone without a seat: either its place was given to another incarnation, or the scheduler forgot it."""
        if isinstance(message, Heartbeat) and (message.role, message.rank) in self._seats:
            text = f"another process took the place of {name_of(message.role, message.rank)}; stop this one"
            self._out.append(Send(event.peer, Refused(0, ErrorCode.REPLACED, text)))
        else:
            request = 0 if isinstance(message, Heartbeat) else message.request
            text = "the scheduler does not know this node"
            self._out.append(Send(event.peer, NotYet(request, NotYetReason.NOT_JOINED, text)))

    def _join(self, event: Received, join: Join, now: float) -> None:
        error = self._disagreement(join)
        if error is not None:
            self._out.append(Send(event.peer, error))
            return
        if self.epoch < event.epoch < (BIGGEST, 0):
            # It knows a later view than this scheduler, which was started without the record of an earlier one.
            self._generation = event.epoch.generation + 1
            self._change()
        if join.role == "observer":
            self._out.append(Send(event.peer, Welcome(join.request, NO_RANK, "")))
            self._out.append(Send(event.peer, self._announced))
            return
        seat = self._seat_of(event.sender)
        if seat is None:
            seat = self._seat_for(event, join, now)
            if seat is None:
                return
        self._hear(seat, event.peer, now)
        self._after_persist(Send(event.peer, Welcome(join.request, seat.member.rank, seat.predecessor)))

    def _disagreement(self, join: Join) -> Refused | None:
        """Takes over what the cluster leaves open; refuses what differs from it."""
        if join.role not in ("server", "worker", "observer"):
            text = f"a node joins as server, worker or observer, not {join.role!r}"
            return Refused(join.request, ErrorCode.CONFIG_ERROR, text, key="role")
        if join.role != "observer" and not join.node_id:
            return Refused(join.request, ErrorCode.CONFIG_ERROR, "a node needs a node_id", key="node_id")
        for field, word, words in (("mode", join.settings.mode, MODES), ("merge", join.settings.merge, MERGES)):
            if word not in words:
                text = f"{field} is {' or '.join(words[1:])}, not {word!r}"
                return Refused(join.request, ErrorCode.CONFIG_ERROR, text, key=field)
        wanted, have = join.settings, self._cluster
        for field, told, mine in zip(Settings._fields, wanted, have, strict=True):
            open_value = -1 if field == "staleness" else type(told)()
            if told in (open_value, mine):
                continue
            if mine == open_value and field != "staleness":
                continue
            if field == "staleness" and have.mode == "":
                continue
            text = f"this node wants {field}={told!r}, the cluster has {mine!r}: start it with the cluster's setting"
            return Refused(join.request, ErrorCode.CONFIG_ERROR, text, key=field)
        if join.role == "worker":
            self._adopt(wanted)
        return None

    def _adopt(self, wanted: Settings) -> None:
        have = self._cluster
        if have.mode == "" and wanted.mode != "":
            self._cluster = have = have._replace(mode=wanted.mode, staleness=wanted.staleness)
            self._change()
        if have.merge == "" and wanted.merge != "":
            self._cluster = have._replace(merge=wanted.merge)
            self._change()

    def _seat_for(self, event: Received, join: Join, now: float) -> _Seat | None:
        """A seat for a new incarnation: its own by node id, else the rank it asks for, else the first that is free."""
        rank = self._rank_for(join)
        if rank is None:
            size = self._cluster.num_servers if join.role == "server" else self._cluster.num_workers
            text = (
                f"all {size} {join.role}s are there: stop one, give this node the KVD_NODE_ID of the one that it "
                f"replaces, or start the scheduler with a larger --num-{join.role}s"
            )
            self._out.append(Send(event.peer, Refused(join.request, ErrorCode.NOT_ALLOWED, text)))
            return None
        place = (join.role, rank)
        old = self._seats.get(place)
        predecessor = ""
        if old is not None:
            state = old.member.state
            predecessor = LEFT if state == LEFT else DONE if state in (DONE, GONE) else DEAD
            self._replaced[old.member.incarnation] = name_of(*place)
            while len(self._replaced) > MAX_REPLACED:
                self._replaced.popitem(last=False)
            if old.peer is not None and old.peer != event.peer:
                text = f"another process took the place of {name_of(*place)}; stop this one"
                self._out.append(Send(old.peer, Refused(0, ErrorCode.REPLACED, text)))
            if join.role == "worker":
                self._barriers.withdraw(rank)
        member = Member(join.role, rank, join.node_id, event.sender, join.address, ACTIVE, "", 0.0)
        seat = self._seats[place] = _Seat(member, join.host, join.pid, now, event.peer, predecessor)
        self._out.append(
            LogEntry("info", f"{name_of(*place)} joined", {"node_id": join.node_id, "predecessor": predecessor})
        )
        self._change()
        return seat

    def _rank_for(self, join: Join) -> int | None:
        size = self._cluster.num_servers if join.role == "server" else self._cluster.num_workers
        holders = {rank: seat.member for (role, rank), seat in self._seats.items() if role == join.role}
        for rank, member in holders.items():
            if member.node_id == join.node_id:
                return rank
        ranks = range(size)
        if join.rank in ranks and (join.rank not in holders or holders[join.rank].state == LEFT):
            return join.rank
        free = [rank for rank in ranks if rank not in holders]
        left = [rank for rank in ranks if rank in holders and holders[rank].state == LEFT]
        dead = [rank for rank in ranks if rank in holders and holders[rank].state in (DEAD, GONE)]
        candidates = free or left or dead
        return candidates[0] if candidates else None

    def _leave(self, seat: _Seat, peer: Peer, leave: Leave, now: float) -> None:
        if leave.departure is Departure.FAILED:
            self._lose(PeerLost(seat.member.incarnation, "its program ended with an error"), now)
            self._out.append(Send(peer, Done(leave.request)))
            return
        state = LEFT if leave.departure is Departure.LEFT else DONE
        if seat.member.state not in (LEFT, state):  # a "done" that comes after "left" was under way for long
            seat.member = seat.member._replace(state=state, reason="closed" if state is LEFT else "")
            self._out.append(LogEntry("info", f"{name_of(seat.member.role, seat.member.rank)} is {state}"))
            self._change()
        self._after_persist(Send(peer, Done(leave.request)))

    def _enter(self, seat: _Seat, peer: Peer, enter: Enter) -> None:
        if seat.member.role != "worker":
            self._refuse(peer, enter, ErrorCode.NOT_ALLOWED, "only workers meet at barriers")
            return
        answer = self._barriers.enter(enter.name, enter.generation, seat.member.rank, peer, enter.request)
        if isinstance(answer, Verdict):
            self._after_persist(Send(peer, self._verdict(enter.request, enter.name, answer)))
        elif isinstance(answer, str):
            self._refuse(peer, enter, ErrorCode.NOT_ALLOWED, answer)
        else:
            settled = self._settled_barriers()
            if settled:
                self._change(settled)

    def _verdict(self, request: int, name: str, verdict: Verdict) -> Message:
        if not verdict.missing:
            return Done(request)
        nodes = tuple(NodeName("worker", rank) for rank in verdict.missing)
        names = ", ".join(name_of(*node) for node in nodes)
        text = f"barrier {name!r} cannot be reached: {names} died before it; restart the dead, or the job"
        return Refused(request, ErrorCode.BARRIER_BROKEN, text, nodes=nodes)

    def _settled_barriers(self) -> list[Settled]:
        """The barriers that are released or broken by what has just changed."""
        workers = {rank: seat.member for (role, rank), seat in self._seats.items() if role == "worker"}
        required = [
            rank for rank in range(self._cluster.num_workers) if rank not in workers or workers[rank].state != LEFT
        ]
        dead = [rank for rank, member in workers.items() if member.state in (DEAD, GONE)]
        return self._barriers.settle(required, dead if self._settings.break_on_loss else ())

    def _tell(self, barriers: list[Settled]) -> None:
        for settled in barriers:
            if settled.verdict.missing:
                self._out.append(
                    LogEntry("warning", f"barrier {settled.name!r} broke", {"missing": list(settled.verdict.missing)})
                )
            for peer, request in settled.waiting:
                self._after_persist(Send(peer, self._verdict(request, settled.name, settled.verdict)))

    # ── life and death ──

    def _hear(self, seat: _Seat, peer: Peer, now: float) -> None:
        seat.heard = now
        seat.peer = peer
        if seat.member.state in (DEAD, GONE):  # it was paused or cut off, and nobody took its place
            state = ACTIVE if seat.member.state == DEAD else DONE
            seat.member = seat.member._replace(state=state, reason="", last_seen_s=0.0)
            self._out.append(LogEntry("warning", f"{name_of(seat.member.role, seat.member.rank)} is back"))
            self._change()

    def _judge(self, now: float) -> None:
        for seat in self._seats.values():
            limit = self._timeout_s(seat.member.role)
            if seat.member.state in (ACTIVE, DONE) and now - seat.heard >= limit:
                self._declare_dead(seat, seat.ended or f"no heartbeat for {limit:g} s", now)

    def _lose(self, event: PeerLost, now: float) -> None:
        """A process has ended. A server is dead at once; a worker may be started anew until its timeout."""
        seat = self._seat_of(event.incarnation)
        if seat is None or seat.member.state not in (ACTIVE, DONE):
            return
        if seat.member.role == "server":
            self._declare_dead(seat, event.reason, now)
        else:
            seat.ended = event.reason
            wait_s = max(0.0, seat.heard + self._settings.worker_timeout_s - now)
            name = name_of(seat.member.role, seat.member.rank)
            text = f"{name}: {event.reason}; it has {wait_s:.1f} s to be started anew"
            self._out.append(LogEntry("warning", text, {"node_id": seat.member.node_id}))

    def _declare_dead(self, seat: _Seat, reason: str, now: float) -> None:
        silence_s = round(now - seat.heard, 3)
        state = GONE if seat.member.state == DONE else DEAD
        seat.member = seat.member._replace(state=state, reason=reason[:80], last_seen_s=silence_s)
        self._out.append(
            LogEntry("warning", f"{name_of(seat.member.role, seat.member.rank)} is dead", {"reason": reason})
        )
        self._change()

    def _forgive_if_late(self, now: float) -> None:
        """After a pause of its own the scheduler cannot know who was silent: everyone gets a full time anew."""
        if now - self._last_step > 2 * self._settings.heartbeat_interval_s and self._seats:
            deadline = self.next_deadline()
            if deadline is not None and now - deadline > self._settings.heartbeat_interval_s:
                for seat in self._seats.values():
                    seat.heard = now
                self._out.append(
                    LogEntry("warning", "this scheduler was paused; it gives everyone a full timeout anew")
                )
        self._last_step = now

    def _quiet(self, now: float) -> tuple[Quiet, ...]:
        limit = 2 * self._settings.heartbeat_interval_s
        return tuple(
            Quiet(seat.member.role, seat.member.rank, round(now - seat.heard, 3))
            for seat in self._seats.values()
            if seat.member.state in (ACTIVE, DONE) and now - seat.heard > limit
        )

    # ── the view ──

    def _change(self, settled: list[Settled] | None = None) -> None:
        """The view is another, or barriers are settled: persist it, then announce it."""
        self._epoch += 1
        self._tell(self._settled_barriers() if settled is None else settled)
        if len(self._seats) > MAX_MEMBERS:
            self._out.append(LogEntry("error", f"more than {MAX_MEMBERS} nodes cannot be announced"))
        self._unsaved[self._epoch] = self._view()
        self._out.append(Persist(self._epoch, self.record()))

    def _announce(self, epoch: int) -> None:
        if epoch <= self._persisted:
            return
        self._persisted = epoch
        self._announced = self._unsaved[epoch]
        self._unsaved = {number: view for number, view in self._unsaved.items() if number > epoch}
        if epoch == self._epoch:
            for seat in self._seats.values():
                if seat.peer is not None:
                    self._out.append(Send(seat.peer, self._announced))
        for waiting in sorted(number for number in self._withheld if number <= epoch):
            self._out.extend(self._withheld.pop(waiting))

    def _after_persist(self, effect: Effect) -> None:
        """Sends now what depends on nothing unsaved, else when the newest view is saved."""
        if self._epoch <= self._persisted:
            self._out.append(effect)
            if isinstance(effect, Send) and isinstance(effect.message, Welcome):
                self._out.append(Send(effect.peer, self._announced))
        else:
            self._withheld.setdefault(self._epoch, []).append(effect)

    def _view(self) -> View:
        shards: tuple[int, ...] = ()
        if self._cluster.num_servers:
            shards = initial_shards(self._cluster.num_shards, self._cluster.num_servers)
        return View(self._cluster, tuple(seat.member for seat in self._seats.values()), shards)

    def record(self) -> dict[str, object]:
        """What a successor needs: plain data."""
        return {
            "generation": self._generation,
            "epoch": self._epoch,
            "settings": list(self._cluster),
            "seats": [[list(seat.member), seat.host, seat.pid, seat.predecessor] for seat in self._seats.values()],
            "replaced": [[incarnation, name] for incarnation, name in self._replaced.items()],
            "barriers": self._barriers.record(),
        }

    @staticmethod
    def check_record(saved: Mapping[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError if this is no record of a scheduler."""
        if saved["generation"] < 1 or len(saved["settings"]) != len(Settings._fields):
            raise ValueError("generation or settings are not as a scheduler writes them")
        for fields, _host, _pid, _predecessor in saved["seats"]:
            _member(fields)
        OrderedDict(saved.get("replaced", ()))
        Barriers(saved.get("barriers", ()))

    def _restore(self, saved: Mapping[str, object], now: float) -> None:
        settings, seats = saved["settings"], saved["seats"]
        assert isinstance(settings, list)
        assert isinstance(seats, list)
        earlier = Settings(*settings)
        if self._cluster.mode == "":
            self._cluster = self._cluster._replace(mode=earlier.mode, staleness=earlier.staleness)
        if self._cluster.merge == "":
            self._cluster = self._cluster._replace(merge=earlier.merge)
        for fields, host, pid, predecessor in seats:
            member = _member(fields)
            size = self._cluster.num_servers if member.role == "server" else self._cluster.num_workers
            if member.rank < size:
                self._seats[member.role, member.rank] = _Seat(member, host, pid, now, None, predecessor)
        self._replaced = OrderedDict(saved.get("replaced", ()))  # type: ignore[call-overload]
        self._barriers = Barriers(saved.get("barriers", ()))  # type: ignore[arg-type]
        self._epoch = self._persisted = 1
        self._announced = self._view()

    def _seat_of(self, incarnation: int) -> _Seat | None:
        return next((seat for seat in self._seats.values() if seat.member.incarnation == incarnation), None)

    def _timeout_s(self, role: str) -> float:
        return self._settings.server_timeout_s if role == "server" else self._settings.worker_timeout_s

    def _refuse(self, peer: Peer, message: Message, error: ErrorCode, text: str) -> None:
        request = getattr(message, "request", 0)
        self._out.append(Send(peer, Refused(request, error, text)))

    def validate(self) -> None:
        """No view counts as saved that was not made yet."""
        assert self._persisted <= self._epoch, f"view {self._persisted} is saved, the latest is {self._epoch}"


def _member(fields: list[Any]) -> Member:
    """A member as a record has it; ValueError or TypeError if it is none."""
    member = Member(*fields)
    return member._replace(state=MemberState(member.state))
