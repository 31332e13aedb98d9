"""One run in the scheduler: membership, deaths and barriers. Pushes and pulls do not need it.

`router` has one of these machines per run, and one for the cluster, in which only servers have seats.

This file is the dispatch table, and turns what its parts find into effects. `roster` has the seats and the states of
their holders, `agreement` the cluster's settings, `liveness` judges by silence, `deaths` declares the dead,
`participation` has the workers that are in the rounds, `barriers` the barriers, `points` those at which the rounds
continue without the workers that wait, `views` publishes each change once it is saved, and `record` is what a successor
starts from.

The way of a death:

1. The shell sees a process end and feeds PeerLost. `membership/deaths.py:Deaths.process_ended` declares a server dead
   at once (go to 3); for a worker, `membership/liveness.py:Liveness.process_ended` notes the reason, and its supervisor
   has the rest of the timeout to start it again.
2. Silence: `membership/deaths.py:Deaths.judge` asks `membership/liveness.py:Liveness.overdue` after each event who has
   been silent for a whole timeout. A server that alone has values, of which there should be two copies, is waited for.
3. `membership/deaths.py:Deaths._declare_dead` changes the state by `membership/roster.py:Roster.transition`.
4. `machine.py:SchedulerMachine._publish` breaks the barriers that the dead worker is missing from, in
   `barriers/barriers.py:Barriers.settle`, and lets others lead what a dead server led, in
   `placement/partitions.py:Partitions.follow`; `membership/views.py:Views.change` takes the new view and withholds
   their answers. An Unsaved goes out, and `router.py:SchedulerRouter._flush` makes one Persist of those of all runs.
5. On Persisted, `membership/views.py:Views.saved` sends the view to all members, then the answers.

The way of a join:

1. `machine.py:SchedulerMachine._join` refuses it if `membership/agreement.py:Agreement.objection` says why.
2. `membership/rank_assignment.py:RankAssignment.seat` asks `membership/roster.py:Roster.rank_for` for a rank, and
   `membership/roster.py:Roster.take_seat` seats the new incarnation.
3. `machine.py:SchedulerMachine._welcome_newcomer` stops the process that it replaces, and withdraws that one from the
   barriers in `barriers/barriers.py:Barriers.withdraw`.
4. `machine.py:SchedulerMachine._publish`, as above; `membership/views.py:Views.when_saved` withholds the Welcome until
   the view is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvd.core.machine import Effect, Event, LogEntry, Peer, PeerLost, Persisted, Received, Send, Unsaved
from kvd.core.membership import in_words, name_of
from kvd.core.placement import initial_shards
from kvd.core.scheduler.barriers.barriers import Barriers, Settled
from kvd.core.scheduler.barriers.deadlocks import WaitReports
from kvd.core.scheduler.barriers.rendezvous import Meeting, Rendezvous
from kvd.core.scheduler.membership.agreement import Agreement, SchedulerSettings
from kvd.core.scheduler.membership.deaths import Deaths
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.participation import Outcome, Participation, Stragglers
from kvd.core.scheduler.membership.rank_assignment import RankAssignment
from kvd.core.scheduler.membership.roster import AS_FOUND, MemberEvent, Roster, Seat
from kvd.core.scheduler.membership.views import Listener, Views
from kvd.core.scheduler.placement.leadership import Leadership
from kvd.core.scheduler.placement.partitions import Partitions, servers_of
from kvd.core.scheduler.runs.phase import IN_WORDS, RunLife
from kvd.core.scheduler.runs.record import Record, RecordCheck
from kvd.core.scheduler.status import run_report
from kvd.protocol.messages import (
    EXIT_BARRIER,
    NO_RANK,
    NO_RUN,
    NO_VIEW,
    PREPARED,
    Departure,
    Done,
    Enter,
    Epoch,
    ErrorCode,
    HandedOver,
    Heartbeat,
    HeartbeatAck,
    Join,
    Late,
    Leave,
    Listen,
    MemberState,
    NotYet,
    NotYetReason,
    OutOfSync,
    Refused,
    RunEntry,
    RunPhase,
    Say,
    StandBy,
    StatusQuery,
    StatusReport,
    Synced,
    TakePart,
    View,
    WaitReport,
    Welcome,
)

__all__ = ["SchedulerMachine", "SchedulerSettings"]

_TOLD = {
    Synced: "has a new backup",
    HandedOver: "was handed over: its backup leads it now, and its leader is the backup",
    OutOfSync: "has lost a backup, which is not in sync",
}


class SchedulerMachine:
    """The state machine of one run. `generation` must be larger than that of any earlier start.

    Args:
        with_workers: whether there are seats for workers.
        phase: what the first node of a run that this scheduler does not know says of it.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        incarnation: int,
        generation: int,
        now: float,
        saved: Mapping[str, object] | None = None,
        *,
        with_workers: bool = True,
        phase: RunPhase = RunPhase.FORMING,
    ) -> None:
        cluster = settings.cluster
        num_workers, most_workers = (cluster.num_workers, cluster.most_workers) if with_workers else (0, 0)
        return_by = now + settings.worker_timeout_s if with_workers else None
        earlier = (
            Record(generation, 0, cluster, (), (), Barriers(), phase) if saved is None else Record.from_plain(saved)
        )
        if with_workers:
            cluster = cluster._replace(replicas=earlier.settings.replicas)  # a run keeps those that it began with
        self.incarnation = incarnation
        self._agreement = Agreement(cluster, earlier.settings)
        self._roster = Roster(
            cluster.num_servers,
            num_workers,
            earlier.seats,
            earlier.replaced,
            shrinks=settings.shrink_on_loss,
            quorum=cluster.quorum,
            most_workers=most_workers,
        )
        self._life = RunLife(earlier.phase, return_by)
        self._partitions = Partitions(cluster.num_servers if with_workers and cluster.replicas > 1 else 0)
        if len(earlier.partitions) == self._partitions.count:
            self._partitions.restore(earlier.partitions)
        else:
            self._roster.forget()
        self._liveness = Liveness(
            self._roster,
            self._partitions,
            settings.heartbeat_interval_s,
            settings.server_timeout_s,
            settings.worker_timeout_s,
            now,
        )
        ranks = RankAssignment(self._agreement, self._roster, self._liveness)
        self._runs: tuple[RunEntry, ...] = ()
        self._rendezvous = Rendezvous(
            self._roster,
            self._liveness,
            earlier.barriers,
            earlier.points,
            breaks_on_loss=settings.break_on_loss,
        )
        self._participation = Participation(
            self._roster, self._agreement, self._rendezvous, Stragglers(self._roster, cluster), self._log
        )
        self._deaths = Deaths(self._roster, self._liveness, self._log, self._publish)
        waits = WaitReports(self._roster, self._liveness, self._rendezvous, incarnation)
        self._views = Views(generation, 0 if saved is None else 1, self._view())
        self._check = RecordCheck(
            Epoch(earlier.generation, earlier.epoch),
            self._views.newest_epoch,
            servers_of(self._roster),
            settings.server_timeout_s,
            now,
        )
        self._leadership = Leadership(
            self._partitions, self._roster, self._liveness, self._views, settings.server_timeout_s, self._check
        )
        self._was_refuted = False
        self._out: list[Effect] = []
        self._handlers: dict[type, Callable[[Received, Any, float], None]] = {
            Join: partial(self._join, ranks),
            Heartbeat: self._heartbeat,
            Leave: self._leave,
            TakePart: self._take_part,
            StandBy: self._stand_by,
            Late: self._late,
            Enter: self._meet,
            StatusQuery: lambda event, query, _now: self._out.append(Send(event.peer, StatusReport(query.request))),
            WaitReport: partial(self._wait_report, waits),
            Say: self._meet,
            Listen: self._meet,
            Synced: self._holds,
            OutOfSync: self._holds,
            HandedOver: self._holds,
        }

    # ── the machine's interface ──

    @property
    def run(self) -> int:
        return NO_RUN

    @property
    def epoch(self) -> Epoch:
        return self._views.epoch

    @property
    def generation(self) -> int:
        return self._views.generation

    @property
    def phase(self) -> RunPhase:
        return self._life.phase

    @property
    def roster(self) -> Roster:
        """Who is where. For reading."""
        return self._roster

    def step(self, event: Event, now: float) -> list[Effect]:
        self._out = []
        if self._liveness.forgive_after_pause(now):
            self._log("warning", "this scheduler was paused; every node has a full timeout from now on")
            self._check.start_over(now)
        if isinstance(event, Received):
            self._receive(event, now)
        elif isinstance(event, Persisted):
            self._out += self._views.saved(event.token, self._listeners(), now)
        elif isinstance(event, PeerLost):
            seat = self._roster.seat_of(event.incarnation)
            self._deaths.process_ended(seat, event.reason, now, may_judge=not self._check.is_open)
        self._check.expire(now)
        if not self._check.is_open:
            self._judge(now)
        if self._views.is_due(now):
            self._out += self._views.announcements(self._listeners(), now)
        return self._out

    def _judge(self, now: float) -> None:
        """Follow what has become due."""
        self._deaths.judge(now)
        if self._liveness.stops_awaiting(now):
            settled = self._rendezvous.settle_barriers()
            if settled or self._rendezvous.has_points_to_settle():
                self._publish(settled)
        self._take_over(now)
        if self._life.expire(self._roster, now):
            self._log("warning", IN_WORDS[self._life.phase])
            self._publish()

    def next_deadline(self) -> float | None:
        if self._check.is_open:
            return self._check.next_deadline()
        deadlines = (
            self._liveness.next_deadline(),
            self._life.next_deadline(self._roster),
            self._leadership.next_deadline(),
            self._views.next_deadline(),
        )
        return min((at for at in deadlines if at is not None), default=None)

    def announce_runs(self, runs: tuple[RunEntry, ...], answers: Sequence[Send] = ()) -> list[Effect]:
        """The runs of the cluster changed: tells its servers once that is saved, and then sends the answers."""
        self._out = []
        self._runs = runs
        self._publish()
        for answer in answers:
            self._out += self._views.when_saved(answer)
        return self._out

    def restore_runs(self, runs: tuple[RunEntry, ...]) -> None:
        """The runs of the record that this scheduler starts from."""
        self._runs = runs
        self._views.announce(self._view())

    @property
    def announced_runs(self) -> tuple[RunEntry, ...]:
        return self._runs

    @property
    def num_workers(self) -> int:
        return self._agreement.settings.num_workers

    @property
    def most_workers(self) -> int:
        return self._agreement.settings.most_workers

    @property
    def takes_newcomers(self) -> bool:
        """Whether workers may join that were not there at its beginning."""
        return self._roster.is_elastic

    def objection(self, join: Join) -> Refused | None:
        """Why this Join cannot be accepted here."""
        return self._agreement.objection(join)

    def told_to(self, role: str) -> View:
        """The newest view on stable storage, as nodes of this role are told of it."""
        return self._views.told_to(role)

    def shown(self, peer: Peer, role: str) -> list[Send]:
        """That view, for one who has no place yet."""
        return self._views.shown(peer, role)

    def seat_servers(self, seats: Iterable[Seat], now: float) -> None:
        """The servers of the cluster take part in this run, which begins: each has the rank that it has there."""
        self._roster.adopt(seats)
        for seat in self._roster.living():
            self._liveness.joined(seat, now)
        self._partitions.begin(servers_of(self._roster), self._views.next_epoch)

    def checking_text(self) -> str:
        """Why nobody can join until it is known that the record is the newest; "" if that is known."""
        return self._check.text() if self._check.is_open else ""

    @property
    def was_refuted(self) -> bool:
        """Whether the record turned out to be too old."""
        return self._was_refuted

    @property
    def is_prepared(self) -> bool:
        """Whether an operator has restored keys here, and nobody has a place yet."""
        return not self._roster.worker_states() and bool(self._rendezvous.barriers.said(PREPARED, 0).text)

    def seems_lost(self) -> bool:
        """Whether no worker is known to be well: each has left, is dead, or its process has ended."""
        workers = [seat for seat in self._roster.living() if seat.member.role == "worker"]
        return all(self._liveness.known_end(seat) for seat in workers)

    def explain(self, now: float, run: int = NO_RUN) -> dict[str, object]:
        own = {"view": list(self.epoch), "settings": self._agreement.settings._asdict()}
        return {
            "role": "scheduler",
            **own,
            "deaths": dict(self._deaths.declared),
            **run_report(self._roster, self._liveness, self._rendezvous, self._partitions, now),
        }

    def watched(self) -> list[tuple[int, str, int]]:
        """(incarnation, host, pid) of the living members, for a shell that can watch their processes."""
        return [(seat.member.incarnation, seat.host, seat.pid) for seat in self._roster.living()]

    def record(self) -> dict[str, object]:
        """All that a successor needs, as plain data."""
        return Record(
            self._views.generation,
            self._views.newest,
            self._agreement.settings,
            list(self._roster.seats()),
            self._roster.replaced(),
            self._rendezvous.barriers,
            self._life.phase,
            self._partitions.saved(),
            self._rendezvous.points,
        ).to_plain()

    @staticmethod
    def check_record(saved: Mapping[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError if this is no record of a scheduler."""
        Record.from_plain(saved)

    # ── messages ──

    def _receive(self, event: Received, now: float) -> None:
        message = event.message
        handler = self._handlers.get(type(message))
        foreign = self._roster.foreign_key(event)
        if foreign:
            self._refuse(event.peer, getattr(message, "request", 0), ErrorCode.NOT_ALLOWED, foreign)
        elif handler is not None:
            handler(event, message, now)
        elif not isinstance(message, NotYet | Refused):
            text = f"the scheduler takes no {type(message).__name__}: send it to a server"
            self._refuse(event.peer, getattr(message, "request", 0), ErrorCode.PROTOCOL_ERROR, text)

    def _join(self, ranks: RankAssignment, event: Received, join: Join, now: float) -> None:
        if self._lost_its_place(event, join.request):
            return
        objection = self._agreement.objection(join) or self._views.objection(join, event.epoch)
        if objection is not None:
            self._out.append(Send(event.peer, objection))
            return
        not_yet = self._not_yet_checked(event, join) or self._leadership.awaits(event, join, now)
        if not_yet is not None:
            self._out.append(Send(event.peer, not_yet))
            return
        self._take_over(now)
        if join.role == "worker":
            if self._agreement.adopt_mode(join.settings):
                self._publish()
            if self._agreement.adopt_merge(join.settings):
                self._publish()
        if join.role == "observer":
            self._out.append(Send(event.peer, Welcome(join.request, NO_RANK, None)))
            self._out += self._views.shown(event.peer, join.role)
            return
        seated = ranks.seat(join, event)
        if isinstance(seated, Refused):
            self._out.append(Send(event.peer, seated))
            return
        seat = seated.seat
        if event.epoch > self.epoch:
            self._views.continue_after(event.epoch)
            self._publish()
        if seated.is_new:
            self._leadership.seated(event)
            self._welcome_newcomer(seat, seated.replaced, now)
        self._heard(seat, event, now)
        welcome = Welcome(join.request, seat.member.rank, seat.told_predecessor)
        newcomer = Listener(event.peer, join.role, event.sender)
        self._out += self._views.when_saved(Send(event.peer, welcome), newcomer)

    def _not_yet_checked(self, event: Received, join: Join) -> NotYet | None:
        """What a node that joins is answered while the record may be too old, or if it has just proved that."""
        if self._is_refuted(event, join.role):
            text = "the record of this scheduler is too old: it asks its nodes"
        else:
            if join.role == "server":
                self._check.heard(self._roster.rank_for(join, had_it=event.epoch != NO_VIEW))
            if not self._check.is_open:
                return None
            text = self._check.text()
        return NotYet(join.request, NotYetReason.BUSY, text)

    def _is_refuted(self, event: Received, role: str) -> bool:
        """Whether the sender has just proved that the record is too old."""
        if not self._leadership.forgets(event, role):
            return False
        self._was_refuted = True
        for rank in range(self._agreement.settings.most_workers):
            self._rendezvous.withdraw(rank)  # who waits asks again once it has joined
        self._log("warning", "the record of this scheduler is too old: asking the nodes for what has changed")
        return True

    def _welcome_newcomer(self, seat: Seat, replaced: Seat | None, now: float) -> None:
        """A new incarnation has this seat: its earlier holder must stop, and waits at no barrier."""
        self._liveness.joined(seat, now)
        if replaced is not None:
            if replaced.peer is not None and replaced.peer != seat.peer:
                self._refuse(replaced.peer, 0, ErrorCode.REPLACED, _replaced_text(replaced.name))
            if seat.member.role == "worker":
                self._rendezvous.withdraw(seat.member.rank)
        if self._participation.returns_at_once(seat) and seat.predecessor is MemberState.LOST:
            seat.predecessor = MemberState.DEAD
        self._log("info", f"{seat.name} joined", node_id=seat.member.node_id, predecessor=seat.told_predecessor or "")
        self._publish()

    def _heartbeat(self, event: Received, heartbeat: Heartbeat, now: float) -> None:
        self._rendezvous.look(now)
        seat = self._sender_seat(event, 0, now)
        if seat is not None:
            self._acknowledge(event.peer, seat, now)
            self._out += self._views.catch_up(Listener(event.peer, seat.member.role, event.sender), event.epoch)

    def _acknowledge(self, peer: Peer, seat: Seat, now: float) -> None:
        interval_s = self._liveness.interval_s(seat.member.role)
        self._out.append(Send(peer, HeartbeatAck(self._liveness.quiet(now), interval_s)))

    def _leave(self, event: Received, leave: Leave, now: float) -> None:
        seat = self._sender_seat(event, leave.request, now)
        if seat is None:
            return
        departure = leave.departure
        if departure is Departure.WITHDRAWN:
            if seat.predecessor is None:
                self._give_back(seat, Send(event.peer, Done(leave.request)))
                return
            departure = AS_FOUND[seat.predecessor]
        if departure is Departure.FAILED:
            self._deaths.process_ended(seat, "its program ended with an error", now)
            self._out.append(Send(event.peer, Done(leave.request)))
            return
        if departure is Departure.LEFT:
            changed = self._roster.transition(seat, MemberEvent.LEFT, "closed")
        else:
            changed = self._roster.transition(seat, MemberEvent.LEFT_ROUNDS)
        if changed:
            if seat.member.role == "worker":
                self._rendezvous.points.withdraw(seat.member.rank)
            self._log("info", f"{seat.name} {in_words(seat.member.state)}")
            self._publish()
        self._out += self._views.when_saved(Send(event.peer, Done(leave.request)))

    def _take_part(self, event: Received, message: TakePart, now: float) -> None:
        seat = self._sender_seat(event, message.request, now)
        if seat is not None:  # who asks again lacks the view that says so, which may be announced later
            self._out += self._views.catch_up(Listener(event.peer, seat.member.role, event.sender), event.epoch)
            self._follow(event.peer, self._participation.take_part(seat, message))

    def _late(self, event: Received, message: Late, now: float) -> None:
        seat = self._sender_seat(event, message.request, now)
        if seat is not None:
            outcome = self._participation.late(seat, message, event.epoch, self._views.newest_epoch, now)
            self._follow(event.peer, outcome)

    def _stand_by(self, event: Received, message: StandBy, now: float) -> None:
        seat = self._sender_seat(event, message.request, now)
        if seat is not None:
            self._follow(event.peer, self._participation.stand_by(seat, event, message))

    def _follow(self, peer: Peer, outcome: Outcome) -> None:
        if outcome.has_changed:
            self._publish()
        if outcome.answer is not None:
            self._out += self._views.when_saved(Send(peer, outcome.answer))

    def _take_over(self, now: float) -> None:
        if self._leadership.complete(now):
            self._log("info", "the servers have told where values are")
            self._publish()

    def _holds(self, event: Received, message: Synced | HandedOver | OutOfSync, now: float) -> None:
        seat = self._sender_seat(event, message.request, now)
        if seat is None:
            return
        if self._leadership.told(seat, event, message):
            self._log("info", f"partition {message.partition} {_TOLD[type(message)]}", said_by=seat.name)
            self._publish()
        self._out += self._views.when_saved(Send(event.peer, Done(message.request)))

    def _give_back(self, seat: Seat, answer: Send) -> None:
        """The seat's first holder gave up joining: the place is free, as if nobody had ever come."""
        self._roster.vacate(seat)
        self._log("info", f"{seat.name} gave up joining; its place is free", node_id=seat.member.node_id)
        self._life.give_back(self._roster)
        self._publish()
        self._out += self._views.when_saved(answer)

    def _meet(self, event: Received, message: Meeting, now: float) -> None:
        seat = self._sender_seat(event, message.request, now)
        if seat is None:
            return
        answer, is_new = self._rendezvous.meet(seat, event.peer, message)
        settled = self._rendezvous.settle_after(message)
        if settled or is_new:
            self._publish(settled)
        if answer is not None:
            self._out += self._views.when_saved(Send(event.peer, answer))

    def _wait_report(self, waits: WaitReports, event: Received, report: WaitReport, now: float) -> None:
        seat = self._sender_seat(event, report.request, now)
        if seat is not None and seat.member.role == "worker":
            self._out += waits.take(seat, event, report, self._views.newest_epoch, now)

    # ── who sent it ──

    def _sender_seat(self, event: Received, request: int, now: float) -> Seat | None:
        """The seat of a member, which was just heard. Anyone else is told to stop, or to join. While the record is
        checked, a member gets no answer except to heartbeats, and asks again."""
        if self._lost_its_place(event, request):
            return None
        seat = self._roster.seat_of(event.sender)
        if seat is not None and not self._is_refuted(event, seat.member.role):
            if self._is_checked(seat, event, now):
                self._heard(seat, event, now)
                return seat
            return None
        message, is_news = event.message, self._check.is_news(event)  # then it may have taken its place since
        if isinstance(message, Heartbeat) and self._roster.has_seat(message.role, message.rank) and not is_news:
            text = _replaced_text(name_of(message.role, message.rank))
            self._refuse(event.peer, request, ErrorCode.REPLACED, text)
        else:
            text = "the scheduler does not know this node"
            self._out.append(Send(event.peer, NotYet(request, NotYetReason.NOT_JOINED, text)))
        return None

    def _is_checked(self, seat: Seat, event: Received, now: float) -> bool:
        """Whether the record counts, now that this member was heard, which knows no later view."""
        if seat.member.role == "server":
            self._check.heard(seat.member.rank)
        if not self._check.is_open:
            return True
        self._liveness.heard(seat, now)
        if isinstance(event.message, Heartbeat):
            self._acknowledge(event.peer, seat, now)
        return False

    def _lost_its_place(self, event: Received, request: int) -> bool:
        """Tells a process whose place another one has to stop."""
        place = self._roster.lost_place(event.sender)
        if place is not None:
            self._refuse(event.peer, request, ErrorCode.REPLACED, _replaced_text(place))
        return place is not None

    def _heard(self, seat: Seat, event: Received, now: float) -> None:
        self._liveness.heard(seat, now)
        is_awaited = self._leadership.heard(seat, event)
        is_back = self._roster.heard(seat, event.peer)
        if is_back:
            self._log("warning", f"{seat.name} is back")
            self._participation.is_back(seat)
        if is_back or is_awaited:
            self._publish()

    # ── publication ──

    def _publish(self, settled: list[Settled] | None = None) -> None:
        """The view changed, or barriers were settled: saves it now, and announces it when it is saved."""
        answers = self._participation.settle_points()
        if settled is None:
            settled = self._rendezvous.settle_barriers()
        for line in self._partitions.follow(servers_of(self._roster), self._views.next_epoch):
            self._log("info", line)
        exit_passed = any(barrier.name == EXIT_BARRIER and not barrier.verdict.missing for barrier in settled)
        if self._life.observe(self._roster, exit_passed=exit_passed):
            self._log("info", IN_WORDS[self._life.phase])
        for barrier in settled:
            if barrier.verdict.missing:
                self._log("warning", f"barrier {barrier.name!r} broke", missing=list(barrier.verdict.missing))
            answers += barrier.answers()
        is_new = self._partitions.awaits(self._views.next_epoch)
        token = self._views.change(self._view(), answers, is_new=is_new)
        self._out.append(Unsaved(token))

    def _listeners(self) -> list[Listener]:
        """The nodes that are told of views."""
        return [
            Listener(seat.peer, seat.member.role, seat.member.incarnation)
            for seat in self._roster.seats()
            if seat.peer is not None
        ]

    def _view(self) -> View:
        settings = self._agreement.settings
        shards = initial_shards(settings.num_shards, settings.num_servers) if settings.num_servers else ()
        members = tuple(seat.member for seat in self._roster.seats())
        return View(settings, members, shards, self._runs, self._partitions.public())

    def validate(self) -> None:
        """Raises AssertionError if an invariant of the state is broken. For simulators and tests."""
        self._views.validate()
        self._roster.validate()
        self._rendezvous.validate()
        self._partitions.validate(servers_of(self._roster))

    # ── words ──

    def _refuse(self, peer: Peer, request: int, error: ErrorCode, text: str) -> None:
        self._out.append(Send(peer, Refused(request, error, text)))

    def _log(self, level: str, text: str, **fields: object) -> None:
        self._out.append(LogEntry(level, text, fields))


def _replaced_text(place: str) -> str:
    return f"another process took the place of {place}; stop this one"
