"""A node's bond with the scheduler: join, heartbeats, views, and joining again when the scheduler forgot us."""

from __future__ import annotations

from typing import NamedTuple

from kvd.core.machine import SCHEDULER, Connect, Effect, Halt, LogEntry, Received, Send
from kvd.core.membership import ViewState, name_of
from kvd.errors import ConfigError, KvdError, NotAllowed, ProtocolError
from kvd.protocol.messages import (
    NO_RANK,
    ErrorCode,
    Heartbeat,
    HeartbeatAck,
    Join,
    NotYet,
    NotYetReason,
    Quiet,
    Refused,
    Settings,
    View,
    Welcome,
)

JOIN_REQUEST = 1
FIRST_REQUEST = 16  # the numbers below are the link's own
JOIN_RETRY_S = 0.5


class Identity(NamedTuple):
    """Who a node is."""

    role: str
    node_id: str
    incarnation: int
    address: str  # where it listens; "" for those that do not
    host: str
    pid: int
    preferred_rank: int = NO_RANK


class SchedulerSession:
    """Held by servers, workers and observers. An observer joins, and sends no heartbeats: it is not in the view."""

    def __init__(
        self, identity: Identity, settings: Settings, scheduler_address: str, heartbeat_interval_s: float
    ) -> None:
        self.identity = identity
        self.incarnation = identity.incarnation
        self.view = ViewState()
        self.rank = identity.preferred_rank
        self.predecessor = ""
        self.joined = False
        self._welcomed = False  # joined at some time, perhaps a scheduler that is no more
        self.failure: KvdError | None = None
        self.heard = False  # anything at all from the scheduler
        self.heard_at = 0.0
        self.quiet: tuple[Quiet, ...] = ()
        self._settings = settings
        self._address = scheduler_address
        self._interval_s = heartbeat_interval_s
        self._next_send: float | None = None  # when the next Join or Heartbeat is due; None: not started
        self._closed = False
        self._effects: list[Effect] = []

    @property
    def name(self) -> str:
        return name_of(self.identity.role, self.rank) if self.joined else self.identity.role

    def tick(self, now: float) -> list[Effect]:
        """What is due: the first Connect and Join, a Join again, or a Heartbeat."""
        effects = self.take_effects()
        if self._closed or self.failure is not None:
            return effects
        if self._next_send is None:
            effects.append(Connect(SCHEDULER, self._address))
            self._next_send = now
        if now >= self._next_send:
            if not self.joined:
                effects.append(Send(SCHEDULER, self._join()))
                self._next_send = now + JOIN_RETRY_S
            elif self.identity.role == "observer":
                self._next_send = now + 3600.0
            else:
                effects.append(Send(SCHEDULER, Heartbeat(self.identity.role, self.rank)))
                self._next_send = now + self._interval_s
        return effects

    def is_due(self, now: float) -> bool:
        """Whether `tick` has anything to do."""
        return bool(self._effects) or self._next_send is None or now >= self._next_send

    def next_deadline(self) -> float | None:
        return None if self._closed or self.failure is not None else self._next_send

    def close(self) -> None:
        """No more heartbeats: this node has left."""
        self._closed = True

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def receive(self, event: Received, now: float) -> bool:
        """Takes what the scheduler says of membership. True: the view is another."""
        self.heard = True
        self.heard_at = now
        message = event.message
        if isinstance(message, View):
            return self.view.update(event.epoch, message)
        if isinstance(message, Welcome):
            if not self.joined:
                if self._welcomed and message.rank != self.rank:
                    text = f"the scheduler forgot this node and gave its rank to another: it was {self.identity.role} "
                    self._fail(NotAllowed(f"{text}{self.rank}, now it would be {message.rank}", node="scheduler"))
                    return False
                self.joined = self._welcomed = True
                self.rank = message.rank
                self.predecessor = message.predecessor or self.predecessor  # one without a record knows of none
                self._next_send = now + self._interval_s
                self._effects.append(LogEntry("info", f"joined as {self.name}", {"node_id": self.identity.node_id}))
            return True
        if isinstance(message, HeartbeatAck):
            self.quiet = message.quiet
        elif isinstance(message, NotYet):
            self._forgotten(message, now)
        elif isinstance(message, Refused):
            self._refused(message)
        return False

    def invalid_frame(self, text: str) -> None:
        """What came instead of a message: if it is the scheduler's answer to the Join, there is no common language."""
        if not self.joined and self.failure is None:
            self._fail(ProtocolError(f"the scheduler at {self._address} cannot be understood: {text}"))

    def replaced(self, text: str) -> None:
        """So a server says: another process has this one's place. A scheduler without its record may not know."""
        if not self._closed and self.failure is None:
            self._fail(NotAllowed(text, node=self.name))

    def _forgotten(self, not_yet: NotYet, now: float) -> None:
        if not_yet.reason is NotYetReason.NOT_JOINED and not self._closed:
            self.joined = False
            self._next_send = now
            self._effects.append(LogEntry("warning", "the scheduler was restarted and forgot this node; joining again"))

    def _refused(self, refused: Refused) -> None:
        if refused.error is ErrorCode.REPLACED and not self._closed:
            self._fail(NotAllowed(refused.text, node=self.name))
        elif refused.request == JOIN_REQUEST and not self.joined:
            if refused.error is ErrorCode.CONFIG_ERROR:
                self._fail(ConfigError(refused.text, setting=refused.key))
            else:
                self._fail(NotAllowed(refused.text, node="scheduler"))
        elif refused.error is ErrorCode.PROTOCOL_ERROR and not self.joined:
            self._fail(ProtocolError(f"the scheduler at {self._address} does not understand this node: {refused.text}"))

    def _fail(self, error: KvdError) -> None:
        self.failure = error
        self._effects.append(Halt(error))

    def _join(self) -> Join:
        who = self.identity
        return Join(JOIN_REQUEST, who.role, who.node_id, who.address, who.host, who.pid, self.rank, self._settings)
