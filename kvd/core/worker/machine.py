"""The machine of a worker or an observer: its parts, and the tables of what each call and each answer goes to.

The way of a push or pull:

1. `WorkerMachine.step` takes the program's call; `CallBook.accept` (calls.py) enters it with its deadline.
2. `KeyQueue.enter_transfer` (key_queue.py) starts it, or queues it behind earlier calls on its keys, until the keys are
   known (`KeyDirectory.look_up` in key_directory.py) and their push windows (push_window.py) are open.
3. `Transfer.start` (transfer.py) gives each item its clock (`begin_pushes`, `begin_pulls`), takes the message plans
   (`MessagePlans.of` in message_plans.py), and puts the messages into the outbox.
4. `Outbox.add` (outbox.py) queues them by peer and priority; `Outbox.pump` sends what the credit allows.
5. `WorkerMachine.step` takes the answer; `Asker.answer` (asking.py) settles the request (`Outbox.settle`), and
   `NotYetReactions.postponed` (not_yet.py) has it sent again if the server could not take it yet.
6. `Transfer._answered` copies the values, and after the last answer `_settle` moves the windows on, wakes the calls
   that queue, and tells `CallBook.complete` and, for a push, `OpenPushes.settle` (open_pushes.py), where flushes wait.

An observer is a worker without a rank: it asks, and takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvd.core import requests
from kvd.core.machine import (
    SCHEDULER,
    CensusTaken,
    Effect,
    Event,
    HandshakeFailed,
    InvalidFrame,
    LocalCall,
    Peer,
    Received,
)
from kvd.core.membership import ViewState
from kvd.core.outbox import RETRY_FIRST_S, Entry, Outbox
from kvd.core.places import START, Inheritance, Stopped
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.barriers import BarrierCalls
from kvd.core.worker.calls import CallBook
from kvd.core.worker.captures import Captures
from kvd.core.worker.clocks import WorkerClocks
from kvd.core.worker.connections import Connections
from kvd.core.worker.control import ControlCalls
from kvd.core.worker.deletions import Deletions
from kvd.core.worker.in_flight import COMPLETED, WAITING, InFlight
from kvd.core.worker.init_calls import InitCalls
from kvd.core.worker.key_directory import KeyDirectory
from kvd.core.worker.key_making import KeyMaking
from kvd.core.worker.key_queue import KeyQueue, Start
from kvd.core.worker.keys import KeyState, KeyTable, WorkerKey
from kvd.core.worker.looks import NEVER
from kvd.core.worker.moves import Moves
from kvd.core.worker.not_yet import NotYetReactions
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.predecessor import Predecessor
from kvd.core.worker.readings import Readings
from kvd.core.worker.resting import Resting
from kvd.core.worker.returning import Returning
from kvd.core.worker.servers import Servers
from kvd.core.worker.settings import WorkerSettings
from kvd.core.worker.standing_by import StandingBy
from kvd.core.worker.steps import StepCounter
from kvd.core.worker.transfer import Transfer
from kvd.core.worker.transfer_plans import TransferPlan, TransferPlans
from kvd.core.worker.waits import Waits
from kvd.errors import KvdError
from kvd.protocol.messages import NO_RUN, Epoch, Member, NotYet, WaitNews
from kvd.protocol.messages import Waits as WaitsMessage
from kvd.protocol.specs import KeySpec

__all__ = ["WorkerMachine", "WorkerSettings"]


class _Answers(NamedTuple):
    """Who takes the answers of servers."""

    asker: Asker
    not_yet: NotYetReactions


class WorkerMachine:
    """The state machine of a worker or an observer.

    Attributes:
        due_at: not later than anything is due; in the past until `next_deadline` works it out after a step.
        effects: of the present step, or of `answered`.
        calls_by_number, requests_by_number: those that are not completed or settled. To look at, not to change.
    """

    def __init__(self, settings: WorkerSettings, session: SchedulerSession) -> None:
        self.session = session
        view = session.view
        self.effects: list[Effect] = []  # of the present step
        emit = self.effects.append
        self._outbox = outbox = Outbox(settings.credit_bytes, settings.small_push_bytes)
        self._calls = calls = CallBook(session, outbox, emit)
        self.calls_by_number, self.requests_by_number = calls.open, outbox.open
        servers, pushes = Servers(view), OpenPushes(calls, self._wake)
        self._steps = steps = StepCounter(pushes)
        keys = KeyTable()
        asker = Asker(view, servers, outbox, calls)
        left = Predecessor()
        taking_part = Participation(session, outbox, asker, calls)
        resting = Resting(keys)
        self._control = ControlCalls(calls, pushes, asker, outbox, servers, taking_part, resting, emit)
        self._clocks = WorkerClocks(session, servers, keys, asker, calls, pushes, steps, left, taking_part)
        self._waits = Waits(session, outbox, asker, calls, pushes, settings.notice_s, emit)
        plans = TransferPlans(
            view, keys, settings.credit_bytes, batches=settings.batches and not taking_part.is_observer
        )
        transfer = Transfer(view, servers, plans, taking_part, outbox, asker, calls, pushes, steps, emit, self._wake)
        directory = KeyDirectory(
            session, servers, plans, taking_part, asker, calls, self._clocks, self._wake, self._fail_waiting
        )
        readings = Readings(view, servers, plans, asker, calls, emit)
        making = KeyMaking(view, servers, plans, asker)
        deletions = Deletions(
            view,
            servers,
            keys,
            taking_part,
            asker,
            calls,
            making,
            directory.look_up,
            lambda call, some: self._queue.enter_deletion(call, some),
            self._wake,
        )
        inits = InitCalls(
            session,
            keys,
            taking_part,
            calls,
            directory,
            making,
            self._wake,
            self._fail_waiting,
            deletions.afterwards,
        )
        moves = Moves(view, servers, keys, outbox, calls, asker, transfer.declare, self._control.moved)
        self._connections = Connections(session, servers, moves, outbox, calls, asker, left, resting, emit)
        not_yet = NotYetReactions(keys, outbox, asker, self._connections, transfer)
        self._answers = _Answers(asker, not_yet)
        starters: dict[type[Any], Start] = {
            requests.Transfer: transfer.start,
            requests.Read: readings.read,
            requests.Survey: readings.survey,
            requests.Capture: Captures(asker, calls).start,
            requests.DescribeKey: directory.describe,
            requests.ClockOf: self._clocks.clock_of,
            requests.SliceControl: self._control.slice_control,
            requests.DeleteKeys: deletions.start,
        }
        self._queue = queue = KeyQueue(
            session, servers, keys, calls, pushes, steps, plans, taking_part, starters, directory.look_up
        )
        standing = StandingBy(session, keys, asker, calls, pushes, taking_part, self._clocks, left)
        self._view_followers = (
            self._connections.view_changed,
            queue.servers_changed,
            deletions.servers_changed,
            taking_part.view_changed,
            standing.view_changed,
        )
        self.due_at = 0.0
        self._servers = servers
        self._plans = plans
        self._transfer = transfer
        self._validated = (session, keys, calls, outbox, queue, self._waits, deletions)
        barriers = BarrierCalls(asker, calls)
        returning = Returning(session, servers, keys, asker, calls, pushes, taking_part, self._clocks)
        self._call_table: dict[type[Any], Callable[[InFlight, Any], None]] = {
            requests.Transfer: queue.enter_transfer,
            requests.ListTransfer: queue.enter_transfer,
            requests.Read: queue.enter_items,
            requests.Survey: queue.enter_items,
            requests.StopReading: readings.stop,
            requests.DescribeKey: queue.enter,
            requests.ClockOf: queue.enter,
            requests.SliceControl: queue.enter,
            requests.Capture: queue.enter_items,
            requests.InitKeys: inits.init_keys,
            requests.DeleteKeys: deletions.enter,
            requests.TakeBack: transfer.take_back,
            requests.Flush: pushes.flush,
            requests.Rewind: self._clocks.rewind,
            requests.Resume: self._clocks.resume,
            requests.PassOver: self._clocks.pass_over,
            requests.ComeTo: self._clocks.come_to,
            requests.TakePartAgain: returning.take_part_again,
            requests.StandBy: standing.stand_by,
            requests.Barrier: barriers.enter,
            requests.SaidAt: barriers.said,
            requests.Tell: barriers.tell,
            requests.ToldAt: barriers.told,
            requests.JoinCluster: self._connections.join,
            requests.Depart: taking_part.leave,
            requests.Control: self._control.control,
            requests.SchedulerStatus: self._control.scheduler_status,
            requests.TellScheduler: self._control.tell_scheduler,
        }

    # ── the machine's interface ──

    @property
    def incarnation(self) -> int:
        return self.session.incarnation

    @property
    def run(self) -> int:
        return self.session.run

    @property
    def epoch(self) -> Epoch:
        return self.session.view.epoch

    @property
    def view(self) -> ViewState:
        """The newest view that the scheduler announced."""
        return self.session.view

    def step(self, event: Event, now: float) -> list[Effect]:
        effects = self.effects
        if effects:
            effects.clear()  # a step that raised has left them
        self.due_at = 0.0
        if isinstance(event, Received):
            self._receive(event, now)
        elif isinstance(event, LocalCall):
            self._enter(event, now)
        elif isinstance(event, CensusTaken):
            self._waits.census_taken(event, now)
        elif isinstance(event, InvalidFrame) and event.peer == SCHEDULER:
            self.session.invalid_frame(event.text)
        elif isinstance(event, HandshakeFailed) and event.peer == SCHEDULER:
            self.session.handshake_failed(event.error)
        if self.session.failure is not None:
            self._fail(self.session.failure)
        self._do_what_is_due(now)
        done = effects[:]
        effects.clear()  # drops our references: a buffer is free again when nobody refers to it
        return done

    def _enter(self, event: LocalCall, now: float) -> None:
        call = self._calls.accept(event, now)
        if call.state is WAITING:
            self._waits.note(call)
            request = event.request
            self._call_table[type(request)](call, request)

    def _do_what_is_due(self, now: float) -> None:
        effects = self.effects
        deadlines = self._calls.deadlines
        if deadlines and deadlines[0][0] <= now:
            self._waits.expire(now)
        if now >= self._waits.due_at:
            self._waits.tick(now)
        if self._control.waiting and not self._outbox.unstaged:
            self._control.all_staged()
        if self.session.is_due(now):
            effects += self.session.tick(now)
        effects += self._outbox.due(now)
        effects += self._outbox.pump(now)

    def next_deadline(self) -> float | None:
        due_at = self._waits.due_at
        for at in (self.session.next_deadline(), self._outbox.next_deadline(), self._calls.next_deadline()):
            if at is not None and at < due_at:
                due_at = at
        self.due_at = due_at
        return None if due_at == NEVER else due_at

    # ── small calls, whose bytes the shell sends and takes in itself ──

    def plan_of(self, name: str, spec: KeySpec) -> TransferPlan | None:
        """The plan of calls on a key whose value is one slice, if an earlier call has declared its batch.

        Args:
            spec: of the values.
        """
        plan = self._plans.of_key(name, spec)
        if plan is None or len(plan.messages) != 1 or len(plan.messages[0].slice_ids) != 1:
            return None
        return plan if plan.messages[0].batch else None

    def begin(self, plan: TransferPlan, transfer: requests.Transfer, call: InFlight, now: float) -> Entry | None:
        """Begin a push and pull by a plan that `plan_of` gave, as `step` begins it, without its message: the caller
        sends the same bytes if the entry that this returns is SENT. Otherwise they leave later, as those of any other
        call.

        None: nothing was done. The call must be given to `step`.

        Args:
            transfer: how it is carried out, without items.
            call: with an `owner`, which makes its request.
        """
        message = plan.messages[0]
        if message.declared_to != self._servers.peer_of(message.partition) or now >= self.due_at:
            return None
        if self._control.waiting:  # a probe goes with each push
            return None
        key = plan.keys[0]
        if self.session.failure is not None or plan.is_forgotten or key.state is not KeyState.READY or key.queue:
            return None
        if key.group is not None:
            key.group.part()
        if not self._queue.lets_start(plan, call.place):
            return None
        self._calls.enter(call)
        waits = self._waits
        if waits.next_look > now + waits.soon_s or call.deadline <= now + 2 * waits.soon_s:
            waits.note(call)
        call.plan = plan
        self._transfer.start(call, transfer)
        (entry,) = call.entries
        for at in (now + RETRY_FIRST_S, call.ends_at, waits.due_at):
            if at < self.due_at:
                self.due_at = at
        return entry

    def answered(self, peer: Peer, epoch: Epoch, request: int, nbytes: int, now: float) -> InFlight | None:
        """End a call that was begun by `begin`, as `step` ends it: a server has answered with its value. The caller
        puts the value where it belongs, tells its own caller, and carries out `effects`. None: nothing was done, and
        the answer must be given to `step`."""
        entry = self._outbox.open.get(request)
        if entry is None or entry.peer != peer or epoch > self.session.view.epoch or now >= self.due_at:
            return None
        call: InFlight | None = entry.call
        if call is None or call.owner is None or call.state is COMPLETED or nbytes != entry.topic.nbytes:
            return None
        self._outbox.settle(entry)
        self._calls.close(call)
        call.is_untaken = False
        call.remaining = 0
        self._transfer.settle(call)
        if self._outbox.queued:
            self.effects += self._outbox.pump(now)
        return call

    def take_effects(self) -> list[Effect]:
        """The effects of `answered`, which are mostly none."""
        done = self.effects[:]
        self.effects.clear()
        return done

    def explain(self, now: float, run: int = NO_RUN) -> dict[str, object]:
        return {
            "role": self.session.identity.role,
            "rank": self.session.rank,
            "view": list(self.epoch),
            "step": self._steps.newest,
            "calls_open": len(self._calls),
            "requests_open": len(self._outbox),
            "clocks": self._clocks.explain(),
        }

    @property
    def newest_step(self) -> int:
        """The newest step in which this worker has pushed; 0 before the first. Any thread may ask."""
        return self._steps.newest

    @property
    def open_calls(self) -> int:
        """The number of calls that have not ended. Any thread may ask."""
        return len(self._calls)

    def unreached_servers(self) -> list[Member]:
        """The active servers that this worker has not reached yet."""
        return self._connections.unreached_servers()

    def ranks_taking_part(self) -> tuple[int, ...]:
        """The ranks that take part, as far as this worker knows; it knows of itself before the view says so."""
        ranks = self.view.ranks_taking_part()
        own = {self.session.rank} if self._clocks.in_rounds else set()
        return tuple(sorted(own.union(ranks)))

    @property
    def is_apart(self) -> bool:
        """Whether the rounds go on without this worker: it was lost, or came late, and has yet to take part."""
        return self._clocks.is_apart

    def has_pushed(self, name: str) -> bool:
        """Whether this incarnation has pushed to the key since it took the clock over, or went back."""
        return self._clocks.has_pushed(name)

    def stopped(self) -> Stopped | None:
        """Where the program of a predecessor stopped that did not leave in good order; None without one."""
        return self._clocks.stopped()

    @property
    def has_pushed_in_loops(self) -> bool:
        """Whether an earlier process of this rank has pushed in a loop over steps."""
        stopped = self.stopped()
        return stopped is not None and stopped.place != START

    def inherited(self, name: str) -> Inheritance | None:
        """What a predecessor has left in the key; None without one, or while the key is not known."""
        return self._clocks.inherited(name)

    def validate(self) -> None:
        """Raises AssertionError if an invariant of the state is broken. For simulators and tests."""
        for part in self._validated:
            part.validate()

    # ── messages ──

    def _receive(self, event: Received, now: float) -> None:
        if event.peer == SCHEDULER:
            if self.session.receive(event, now):
                for follow in self._view_followers:
                    follow()
            self.effects += self.session.take_effects()
            if self.session.failure is not None:
                return
        if (
            event.epoch > self.session.view.epoch
            and event.run == self.session.run
            and self.session.view.hear_of(event.epoch)
        ):
            self.session.view_is_old(now)
        message = event.message
        entry = self._outbox.find(getattr(message, "request", 0))
        if entry is None or entry.peer != event.peer:
            if isinstance(message, WaitsMessage | WaitNews):
                self._waits.answered(event, now)
            return
        if isinstance(message, NotYet):
            self._answers.not_yet.postponed(entry, message, now)
        else:
            self._answers.asker.answer(entry, event, now)

    def _fail(self, error: KvdError) -> None:
        """This node cannot go on: every call ends."""
        self.effects += self.session.take_effects()
        self._calls.abandon_all(error)
        self._drop_requests()

    def _drop_requests(self) -> None:
        """This node cannot go on: nothing that it had still to say leaves it."""
        self._outbox.settle_all()

    # ── a key lets calls go on, or fails them ──

    def _wake(self, key: WorkerKey) -> None:
        self._queue.wake(key)

    def _fail_waiting(self, key: WorkerKey, error: KvdError) -> bool:
        return self._queue.fail_waiting(key, error)
