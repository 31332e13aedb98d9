"""Who may send what: the one table of it, for the scheduler and for the servers.

A row says which role the sender's key must have, and what the sender must be besides. The keys are checked here, before
a message reaches a machine. What a sender is besides, only a machine knows, and checks whatever the key is: that it has
joined under its key (`kvd.core.scheduler.machine`), has attached under its key (`kvd.core.server.attachments`), or is
at the other end of the connection to the scheduler (`kvd.core.server.machine`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, get_args

from kvd.core.machine import LogEntry, Received
from kvd.core.principals import KeyRole, Principal
from kvd.protocol import messages as m

LOG_INTERVAL_S = 10.0  # between two lines about refusals of one key
MAX_REMEMBERED = 4096  # decisions, and keys whose refusals were logged

ANY_KEY = frozenset(KeyRole)
SERVERS = frozenset({KeyRole.SERVER})
WORKERS = frozenset({KeyRole.WORKER, KeyRole.OPERATOR})
READERS = frozenset({KeyRole.OBSERVER, KeyRole.WORKER, KeyRole.OPERATOR})
OPERATORS = frozenset({KeyRole.OPERATOR})
NODES = SERVERS | WORKERS
OF_ALL_JOBS = frozenset({KeyRole.SCHEDULER, KeyRole.SERVER, KeyRole.OPERATOR})  # roles that no patterns restrict


class Standing(Enum):
    """What a sender must be, besides what its key says."""

    NOTHING = "—"
    JOINED = "has joined under this key"
    ATTACHED = "has attached under this key"
    ATTACHED_OR_OPERATOR = "has attached under this key, unless the key is an operator's"
    NAMED = "the scheduler let it in under this key"
    LEADER = "leads the partition in the newest view, under this key"
    SCHEDULER = "is the scheduler that this server connected to"
    NOBODY = "nobody sends this here"


class Row(NamedTuple):
    """One thing to do, and who may.

    Attributes:
        doing: what it is, for people: "join as a server".
        kinds: the messages that do it.
        keys: the sender's key needs one of these roles.
    """

    doing: str
    kinds: tuple[type[Any], ...]
    keys: frozenset[KeyRole]
    standing: Standing


JOINS = {
    "server": Row("join as a server", (m.Join,), SERVERS, Standing.NOTHING),
    "worker": Row("join as a worker", (m.Join,), WORKERS, Standing.NOTHING),
    "observer": Row("join as an observer", (m.Join,), READERS, Standing.NOTHING),
}
_MALFORMED_JOIN = Row("join", (m.Join,), ANY_KEY, Standing.NOTHING)  # refused for its role, whatever the key

_ASKED_OF_THE_SCHEDULER = (
    Row("stay, and leave", (m.Heartbeat, m.Leave), NODES, Standing.JOINED),
    Row("take part after a loss, or later than others", (m.TakePart,), WORKERS, Standing.JOINED),
    Row("wait for all at a point", (m.StandBy,), WORKERS, Standing.JOINED),
    Row("say who holds a partition", (m.Synced, m.OutOfSync, m.HandedOver), SERVERS, Standing.JOINED),
    Row("say which workers are late", (m.Late,), SERVERS, Standing.JOINED),
    Row(
        "meet at barriers, and ask who is missing",
        (m.Enter, m.Say, m.Listen, m.WaitReport),
        WORKERS,
        Standing.JOINED,
    ),
    Row("ask the scheduler for its status", (m.StatusQuery,), ANY_KEY, Standing.NOTHING),
    Row("end a job", (m.EndRun,), OPERATORS, Standing.NOTHING),
    Row("end the daemons", (m.Shutdown,), OPERATORS, Standing.NOTHING),
)

_ASKED_OF_A_SERVER = (
    Row("attach to a server", (m.Attach,), WORKERS, Standing.NAMED),
    Row("make, delete and publish keys", (m.Init, m.Publish, m.Delete, m.Drop), WORKERS, Standing.ATTACHED),
    Row(
        "push, and pull at a clock",
        (m.Push, m.PushBatch, m.PullBatch, m.DeclareBatch),
        WORKERS,
        Standing.ATTACHED,
    ),
    Row("list the rows of a table", (m.ListRows,), WORKERS, Standing.ATTACHED),
    Row(
        "go on after a predecessor, or after a loss",
        (m.ClockQuery, m.Activate, m.ComeTo, m.WhereAre, m.StepInto),
        WORKERS,
        Standing.ATTACHED,
    ),
    Row("share steps", (m.TakeStep, m.Rest), WORKERS, Standing.ATTACHED),
    Row(
        "pass on the state of a program",
        (m.OfferState, m.WantState, m.StatePart, m.FetchPart),
        WORKERS,
        Standing.ATTACHED,
    ),
    Row(
        "set, change, save and load the optimizer",
        (m.SetOptimizer, m.UpdateOptimizer, m.FetchState, m.StoreState),
        WORKERS,
        Standing.ATTACHED,
    ),
    Row("ask which compressors a server knows", (m.CompressorQuery,), WORKERS, Standing.ATTACHED),
    Row("run a command", (m.Command,), WORKERS, Standing.ATTACHED_OR_OPERATOR),
    Row(
        "read values and keys",
        (m.Pull, m.PullRows, m.Lookup, m.ListKeys, m.OptimizerQuery, m.Survey, m.ReadSlices, m.ReadDone, m.WaitQuery),
        READERS,
        Standing.NOTHING,
    ),
    Row(
        "capture values with the optimizer's states",
        (m.Capture, m.FetchCaptured, m.CaptureDone),
        OPERATORS,
        Standing.NOTHING,
    ),
    Row("ask a server for its status", (m.StatusQuery,), READERS, Standing.NOTHING),
    Row(
        "have records held",
        (
            m.StartHolding,
            m.Install,
            m.InstallRows,
            m.Hold,
            m.HoldRows,
            m.HoldPublished,
            m.HoldDropped,
            m.HoldActivated,
            m.HoldPlace,
            m.HoldChange,
            m.HoldState,
            m.HoldOptimizer,
            m.HoldLoop,
            m.HoldReady,
            m.Compare,
        ),
        SERVERS,
        Standing.LEADER,
    ),
    Row(
        "tell a server what the scheduler decided",
        (m.Welcome, m.View, m.ViewChange, m.HeartbeatAck, m.Shutdown, m.Done, m.NotYet, m.Refused),
        ANY_KEY,
        Standing.SCHEDULER,
    ),
)


def _completed(rows: Iterable[Row], joins: Iterable[Row]) -> tuple[Row, ...]:
    """The rows, and one more for all messages that are in none of them: answers, and what goes to another role."""
    given = (*joins, *rows)
    taken = {kind for row in given for kind in row.kinds}
    rest = tuple(kind for kind in get_args(m.Message) if kind not in taken)
    return (*given, Row("send anything else", rest, ANY_KEY, Standing.NOBODY))


ROWS: dict[KeyRole, tuple[Row, ...]] = {
    KeyRole.SCHEDULER: _completed(_ASKED_OF_THE_SCHEDULER, JOINS.values()),
    KeyRole.SERVER: _completed(_ASKED_OF_A_SERVER, ()),
}
_BY_KIND = {
    receiver: {kind: row for row in rows for kind in row.kinds if kind is not m.Join or receiver is KeyRole.SERVER}
    for receiver, rows in ROWS.items()
}


def row_of(message: m.Message, receiver: KeyRole) -> Row:
    """The row of a message to a scheduler or a server."""
    if isinstance(message, m.Join) and receiver is KeyRole.SCHEDULER:
        return JOINS.get(message.role, _MALFORMED_JOIN)
    return _BY_KIND[receiver][type(message)]


def is_allowed(principal: Principal, row: Row, job: str | None) -> bool:
    """Whether the holder of this key may do that in this job; None: it is about no job."""
    roles = principal.roles & row.keys
    if job is None or row.keys == ANY_KEY or roles & OF_ALL_JOBS:
        return bool(roles)
    return bool(roles) and any(fnmatchcase(job, pattern) for pattern in principal.jobs)


def may_operate(principal: Principal) -> bool:
    """Whether the holder of this key acts as an operator."""
    return KeyRole.OPERATOR in principal.roles


class Doorkeeper:
    """Checks the keys of those who send messages to a daemon.

    Args:
        receiver: the role of the daemon.
    """

    def __init__(self, receiver: KeyRole) -> None:
        self._receiver = receiver
        self._allowed: set[tuple[Principal, type[Any], str | None]] = set()  # what was found to be allowed
        self._logged_at: dict[Principal, float] = {}

    def objection(self, event: Received, job: str | None) -> str:
        """Why the message is refused, for its sender; "" if its key allows it.

        Args:
            job: the name of the job that it is about; None: of no job.
        """
        message, principal = event.message, event.principal
        asked = (principal, type(message), job)
        if asked in self._allowed:
            return ""
        row = row_of(message, self._receiver)
        if not is_allowed(principal, row, job):
            return _text(principal, row, job)
        if not isinstance(message, m.Join):  # whose row its role decides
            if len(self._allowed) >= MAX_REMEMBERED:
                self._allowed.clear()
            self._allowed.add(asked)
        return ""

    def log_entry(self, event: Received, text: str, now: float) -> LogEntry | None:
        """A line about a refusal; None if there was one about this key not long ago."""
        logged_at = self._logged_at.get(event.principal)
        if logged_at is not None and now < logged_at + LOG_INTERVAL_S:
            return None
        if len(self._logged_at) >= MAX_REMEMBERED:
            self._logged_at.clear()
        self._logged_at[event.principal] = now
        return LogEntry("warning", "refused a message", {"message": type(event.message).__name__, "reason": text})


def _text(principal: Principal, row: Row, job: str | None) -> str:
    """Which key it is, what it may be, what it would have to be, and what to do."""
    roles = " and ".join(sorted(principal.roles)) or "nothing"
    have = f"{principal.describe()} allows to be {roles}"
    needed = " or ".join(sorted(row.keys))
    if not principal.roles & row.keys or job is None:
        return f"{have}, and to {row.doing} takes {needed}: use such a key, or have the role added to this one"
    patterns = ", ".join(principal.jobs) or "none"
    return f"{have} of jobs {patterns}, and this is job {job!r}: use a key of that job, or have it added to this one"


def table(receiver: KeyRole) -> str:
    """The table for people, in Markdown."""
    lines = ["| to do this | a sender needs a key of | and besides | messages |", "|---|---|---|---|"]
    for row in ROWS[receiver]:
        keys = "any role" if row.keys == ANY_KEY else ", ".join(sorted(row.keys))
        nobody = row.standing is Standing.NOBODY
        kinds = "all others" if nobody else ", ".join(f"`{kind.__name__}`" for kind in row.kinds)
        lines.append(f"| {row.doing} | {'—' if nobody else keys} | {row.standing.value} | {kinds} |")
    return "\n".join(lines)
