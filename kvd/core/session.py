"""A node's session with the scheduler: join, heartbeats, views, and joining again after the scheduler forgot the node.

The session's state changes only in `SchedulerSession._change`, along TRANSITIONS.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvd.core.machine import SCHEDULER, Connect, Effect, Halt, LogEntry, Received, Send
from kvd.core.membership import ViewState, name_of
from kvd.core.refusals import error_of
from kvd.errors import ConfigError, KvdError, NotAllowed, ProtocolError
from kvd.protocol.messages import (
    NO_PARTITIONS,
    NO_RANK,
    NO_RUN,
    Epoch,
    ErrorCode,
    Heartbeat,
    HeartbeatAck,
    Join,
    KnownPartitions,
    MemberState,
    NotYet,
    NotYetReason,
    Partitions,
    Quiet,
    Refused,
    Settings,
    View,
    ViewChange,
    Welcome,
)

JOIN_REQUEST = 1
SYNCED_REQUEST = 2  # of a server: see Synced
OUT_OF_SYNC_REQUEST = 3
HANDED_OVER_REQUEST = 4
LATE_REQUEST = 5
FIRST_REQUEST = 16  # the session itself uses the numbers below
JOIN_RETRY_S = 0.5
JOIN_SOON_S = 0.1  # after the scheduler said "not yet"
VIEW_INTERVAL_S = 5.0  # an observer, which is told of no views, asks for the newest
VIEW_RETRY_S = 0.1  # it does so earlier when another node has a newer one


class SessionState(Enum):
    """Where a node stands with the scheduler."""

    NOT_STARTED = "not started"
    JOINING = "joining"  # a Join is sent until it is answered
    JOINED = "joined"
    REJOINING = "rejoining"  # the scheduler was restarted and forgot this node
    CLOSED = "closed"  # the node has left
    FAILED = "failed"  # the node cannot go on; `SchedulerSession.failure` says why


class SessionEvent(Enum):
    """What can happen to a session."""

    START = "start"
    WELCOME = "welcome"
    FORGOTTEN = "forgotten"
    CLOSE = "close"
    FAIL = "fail"


# An event that is not in the row of a state is ignored there.
TRANSITIONS: dict[SessionState, dict[SessionEvent, SessionState]] = {
    SessionState.NOT_STARTED: {
        SessionEvent.START: SessionState.JOINING,
        SessionEvent.CLOSE: SessionState.CLOSED,
        SessionEvent.FAIL: SessionState.FAILED,
    },
    SessionState.JOINING: {
        SessionEvent.WELCOME: SessionState.JOINED,
        SessionEvent.FORGOTTEN: SessionState.JOINING,
        SessionEvent.CLOSE: SessionState.CLOSED,
        SessionEvent.FAIL: SessionState.FAILED,
    },
    SessionState.JOINED: {
        SessionEvent.FORGOTTEN: SessionState.REJOINING,
        SessionEvent.CLOSE: SessionState.CLOSED,
        SessionEvent.FAIL: SessionState.FAILED,
    },
    SessionState.REJOINING: {
        SessionEvent.WELCOME: SessionState.JOINED,
        SessionEvent.FORGOTTEN: SessionState.REJOINING,
        SessionEvent.CLOSE: SessionState.CLOSED,
        SessionEvent.FAIL: SessionState.FAILED,
    },
    SessionState.CLOSED: {},
    SessionState.FAILED: {},
}
_RUNNING = (SessionState.JOINED, SessionState.JOINING, SessionState.REJOINING)


class Identity(NamedTuple):
    """Who a node is."""

    role: str
    node_id: str
    incarnation: int
    address: str  # where a server listens; "" for other roles
    host: str
    pid: int
    preferred_rank: int = NO_RANK
    host_name: str = ""  # for people
    key: str = ""  # that a server proves to hold, if it is not that of the whole cluster


class RunKey(NamedTuple):
    """Which run a node wants, or belongs to.

    Attributes:
        run: its number; NO_RUN: the scheduler decides. A server of the cluster keeps it.
        operator: see `Join.operator`.
    """

    job: str = ""
    token: str = ""
    operator: bool = False
    run: int = NO_RUN


ANY_RUN = RunKey()


class _Told(NamedTuple):
    """What a session is told at its start."""

    settings: Settings
    scheduler_address: str
    heartbeat_interval_s: float
    run_key: RunKey


@dataclass(slots=True)
class _Pace:
    """When a session says something."""

    interval_s: float  # between two heartbeats: the scheduler may want fewer than this node was told at its start
    asked_at: float = float("-inf")  # when the latest Heartbeat was sent, which asks for the newest view
    next_send: float = float("-inf")  # when the next Join or Heartbeat is due; the first call of `tick` is at once


class SchedulerSession:
    """Part of servers, workers and observers. An observer joins without being in the view. It
    sends no heartbeats, and asks for the view from time to time.

    Attributes:
        run: the run that this node belongs to; NO_RUN until it is welcomed, and for a server of the cluster.
        why_not_joined: why the scheduler lets this node wait, in its words; "" if it did not say.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        scheduler_address: str,
        heartbeat_interval_s: float,
        run_key: RunKey = ANY_RUN,
    ) -> None:
        self.identity = identity
        self.run = run_key.run
        self.why_not_joined = ""
        self._told = _Told(settings, scheduler_address, heartbeat_interval_s, run_key)
        self.view = ViewState()
        self.rank = identity.preferred_rank
        self.predecessor: MemberState | None = None
        self.joined = False  # the scheduler knows this node; after the end, whether it knew it then
        self.failure: KvdError | None = None
        self.heard = False  # anything at all came from the scheduler
        self.heard_at = 0.0
        self.quiet: tuple[Quiet, ...] = ()
        self._state = SessionState.NOT_STARTED
        self._pace = _Pace(heartbeat_interval_s)
        self._effects: list[Effect] = []

    @property
    def incarnation(self) -> int:
        return self.identity.incarnation

    @property
    def job(self) -> str:
        """The name of the job that this node belongs to, or wants to."""
        return self._told.run_key.job

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def scheduler_address(self) -> str:
        return self._told.scheduler_address

    @property
    def heartbeat_interval_s(self) -> float:
        """Between two heartbeats: as this node was told at its start, or more if the scheduler wants fewer."""
        return self._pace.interval_s

    @property
    def is_closed(self) -> bool:
        """Whether this node has left."""
        return self._state is SessionState.CLOSED

    @property
    def name(self) -> str:
        return name_of(self.identity.role, self.rank) if self.joined else self.identity.role

    def tick(self, now: float) -> list[Effect]:
        """What is due: the first Connect and Join, another Join, or a Heartbeat."""
        effects = self.take_effects()
        if self._change(SessionEvent.START):
            effects.append(Connect(SCHEDULER, self._told.scheduler_address))
            self._pace.next_send = now
        if self._state in _RUNNING and now >= self._pace.next_send:
            if not self.joined:
                effects.append(Send(SCHEDULER, self._join()))
                self._pace.next_send = now + JOIN_RETRY_S
            elif self.identity.role == "observer":
                effects.append(Send(SCHEDULER, self._join()))  # answered with the newest view
                is_settled = self.run != NO_RUN and self.view.knows_all_servers
                self._pace.next_send = now + (VIEW_INTERVAL_S if is_settled else JOIN_RETRY_S)
            else:
                effects.append(Send(SCHEDULER, Heartbeat(self.identity.role, self.rank)))
                self._pace.asked_at = now
                self._pace.next_send = now + self._pace.interval_s
        return effects

    def is_due(self, now: float) -> bool:
        """Whether `tick` has anything to do."""
        return bool(self._effects) or now >= self._pace.next_send

    def next_deadline(self) -> float | None:
        return self._pace.next_send if self._state in _RUNNING else None

    def view_is_old(self, now: float) -> None:
        """Another node has a newer view: an observer asks for it soon."""
        if self.identity.role == "observer":
            self._pace.next_send = min(self._pace.next_send, now + VIEW_RETRY_S)

    def close(self) -> None:
        """This node has left: it sends no more heartbeats."""
        self._change(SessionEvent.CLOSE)

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def receive(self, event: Received, now: float) -> bool:
        """Handles a message from the scheduler. True: the view or this node's place in it may have changed."""
        self.heard = True
        self.heard_at = now
        message = event.message
        if isinstance(message, View):  # that of the cluster may come after the welcome to a run
            counts = event.run == self.run and self.view.scheduler in (0, event.sender)
            return counts and self._take_view(event.epoch, message, now)
        if isinstance(message, ViewChange):
            return event.run == self.run and self._take_change(event.epoch, message, now)
        if isinstance(message, Welcome):
            if self.identity.role == "observer":
                self.view.begin_with(event.sender)
            return self._welcomed(message, event.run, now)
        if isinstance(message, HeartbeatAck):
            self.quiet = message.quiet
            self._pace.interval_s = max(message.interval_s, self._told.heartbeat_interval_s)
        elif isinstance(message, NotYet):
            self._forgotten(message, now)
        elif isinstance(message, Refused):
            self._refused(message)
        return False

    def invalid_frame(self, text: str) -> None:
        """The scheduler sent something that is no message; in place of the answer to a Join, that ends the session."""
        if not self.joined:
            self._fail(ProtocolError(f"the scheduler at {self._told.scheduler_address} cannot be understood: {text}"))

    def handshake_failed(self, error: KvdError) -> None:
        """The scheduler does not accept the key of this node, or has another one than expected."""
        if not self.heard:
            self._fail(error)

    def replaced(self, text: str) -> None:
        """A server says that another process has this one's place, or that its key does not let it in there.

        A scheduler without its record may not know the former.
        """
        self._fail(NotAllowed(text, node=self.name))

    def succeeded_the_dead(self) -> None:
        """A server knew this node's rank before; a scheduler without its record names no predecessor."""
        self.predecessor = self.predecessor or MemberState.DEAD

    def validate(self) -> None:
        """Raises AssertionError if what others read of the session does not fit its state."""
        if self._state in (*_RUNNING, SessionState.NOT_STARTED):
            assert self.joined == (self._state is SessionState.JOINED), f"joined: {self.joined}, {self._state}"
        assert (self.failure is not None) == (self._state is SessionState.FAILED), f"{self._state}: {self.failure!r}"

    def _take_view(self, epoch: Epoch, view: View, now: float) -> bool:
        earlier = self.view.partitions
        return self.view.update(epoch, view) and self._took(earlier, now)

    def _take_change(self, epoch: Epoch, change: ViewChange, now: float) -> bool:
        if not self.joined or not self.view.can_take(epoch, change):
            if self.joined and epoch > self.view.epoch:
                self._pace.next_send = min(self._pace.next_send, max(now, self._pace.asked_at + VIEW_RETRY_S))
            return False
        earlier = self.view.partitions
        return self.view.change(epoch, change) and self._took(earlier, now)

    def _took(self, earlier: Partitions, now: float) -> bool:
        """A newer view is known now; `earlier` are the partitions of the one before."""
        if self.identity.role == "server" and self.joined and self.view.partitions != earlier:
            self._pace.next_send = now  # the scheduler waits for servers to know one change before it makes the next
        return True

    def _welcomed(self, welcome: Welcome, run: int, now: float) -> bool:
        if self._state is SessionState.REJOINING and welcome.rank != self.rank:
            text = f"the scheduler forgot this node and gave its rank to another: it was {self.identity.role} "
            self._fail(NotAllowed(f"{text}{self.rank}, now it would be {welcome.rank}", node="scheduler"))
            return False
        if run != self.run and (not self.joined or self.run == NO_RUN):  # an observer may come before the run begins
            self.run = run
            self.view.forget()  # it may have known the view of the cluster
        if self._change(SessionEvent.WELCOME):
            self.rank = welcome.rank
            self.predecessor = welcome.predecessor or self.predecessor  # one without a record knows of none
            self._pace.next_send = now + self._pace.interval_s
            self._effects.append(LogEntry("info", f"joined as {self.name}", {"node_id": self.identity.node_id}))
        return self.joined

    def _forgotten(self, not_yet: NotYet, now: float) -> None:
        if not_yet.request == JOIN_REQUEST and not self.joined:
            self.why_not_joined = not_yet.text
            self._pace.next_send = min(self._pace.next_send, now + JOIN_SOON_S)
        if not_yet.reason is NotYetReason.NOT_JOINED and self._change(SessionEvent.FORGOTTEN):
            self._pace.next_send = now
            self._effects.append(LogEntry("warning", "the scheduler was restarted and forgot this node; joining again"))

    def _refused(self, refused: Refused) -> None:
        if refused.error is ErrorCode.REPLACED:
            self._fail(NotAllowed(refused.text, node=self.name))
        elif refused.error in (ErrorCode.JOB_ENDED, ErrorCode.JOB_BUSY):
            self._fail(error_of(refused, "scheduler"))
        elif self.joined:
            return  # a late answer to an earlier Join, or the answer to a request of the machine
        elif refused.request == JOIN_REQUEST and refused.error is ErrorCode.CONFIG_ERROR:
            self._fail(ConfigError(refused.text, setting=refused.key))
        elif refused.request == JOIN_REQUEST:
            self._fail(NotAllowed(refused.text, node="scheduler"))
        elif refused.error is ErrorCode.PROTOCOL_ERROR:
            where = self._told.scheduler_address
            self._fail(ProtocolError(f"the scheduler at {where} does not understand this node: {refused.text}"))

    def _change(self, event: SessionEvent) -> bool:
        """Changes the state as TRANSITIONS says; False if the event means nothing in this state."""
        after = TRANSITIONS[self._state].get(event)
        if after is None:
            return False
        self._state = after
        if after in _RUNNING:
            self.joined = after is SessionState.JOINED
        return True

    def _fail(self, error: KvdError) -> None:
        if self._change(SessionEvent.FAIL):
            self.failure = error
            self._effects.append(Halt(error))

    def _join(self) -> Join:
        who = self.identity
        key = self._told.run_key
        known = NO_PARTITIONS
        if who.role == "server" and self.view.partitions:
            servers = tuple(member.incarnation for member in self.view.servers())
            known = KnownPartitions(self.view.partitions, servers)
        return Join(
            JOIN_REQUEST,
            who.role,
            who.node_id,
            who.address,
            who.host,
            who.pid,
            self.rank,
            self._told.settings,
            who.host_name,
            key.job,
            key.token,
            key.operator,
            self.view.runs,
            who.key,
            known,
        )
