"""A scheduler and a server with a run of job "train", senders with keys of all roles, and a sample of every message."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from kvd.core.access import JOINS, Row, Standing, is_allowed
from kvd.core.machine import (
    SCHEDULER,
    Apply,
    CallerPeer,
    Create,
    Effect,
    InRun,
    JobDone,
    Load,
    LogEntry,
    Peer,
    Persist,
    Persisted,
    Received,
    Send,
    Tick,
)
from kvd.core.placement import shard_of
from kvd.core.principals import HOLDER, KeyRole, Principal
from kvd.core.scheduler.machine import SchedulerSettings
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.server.router import ServerRouter, ServerSettings
from kvd.protocol import messages as m
from kvd.protocol.messages import NO_RUN, NO_VIEW, Epoch, ErrorCode, NotYet, NotYetReason, Refused
from kvd.protocol.specs import Initial, KeySpec, TableSpec
from tests.core.fakes import OPEN, cluster, members, read, server_id, session, view, worker_id

JOB, TOKEN = "train-7", "secret-token"
NOT_ALLOWED = (ErrorCode.NOT_ALLOWED, ErrorCode.PROTOCOL_ERROR)


def key(name: str, *roles: KeyRole, jobs: tuple[str, ...] = ("*",)) -> Principal:
    return Principal(name, frozenset(roles), jobs)


ALICE = key("alice", KeyRole.WORKER, jobs=("train-*",))
BOB = key("bob", KeyRole.WORKER, jobs=("train-*",))
CAROL = key("carol", KeyRole.WORKER)
DAVE = key("dave", KeyRole.WORKER, jobs=("serve-*", "train"))
OLGA = key("olga", KeyRole.OBSERVER, jobs=("train-*",))
OSKAR = key("oskar", KeyRole.OBSERVER, jobs=("serve-*",))
SERVER = key("rack", KeyRole.SERVER)
OPERATOR = key("ops", KeyRole.OPERATOR, jobs=())
NOBODY = key("nobody")
SENDER = CallerPeer(b"sender")


@dataclass(frozen=True)
class Sender:
    """Who sends a message.

    Attributes:
        attached: it has joined and attached under its key.
        named: the scheduler let it in under its key.
        steals: its incarnation belongs to the holder of another key, who has joined and attached.
        leads: it leads the partition of the records.
    """

    name: str
    principal: Principal
    incarnation: int
    attached: bool = False
    named: bool = False
    steals: bool = False
    leads: bool = False
    peer: Peer = SENDER


SENDERS = [
    Sender("a worker that has attached", ALICE, worker_id(0), attached=True, named=True),
    Sender("a worker that has joined", BOB, worker_id(1), named=True),
    Sender("a worker's key, not joined", CAROL, 901),
    Sender("another worker's key under an incarnation that has attached", CAROL, worker_id(0), steals=True),
    Sender("the cluster's key under an incarnation that has attached", HOLDER, worker_id(0), steals=True),
    Sender("a worker's key of other jobs", DAVE, 902),
    Sender("an observer's key", OLGA, 903),
    Sender("an observer's key under an incarnation that has attached", OLGA, worker_id(0), steals=True),
    Sender("an observer's key of other jobs", OSKAR, 904),
    Sender("a server's key", SERVER, 905),
    Sender("an operator's key", OPERATOR, 906),
    Sender("the cluster's key, not joined", HOLDER, 907),
    Sender("a key without a role", NOBODY, 908),
]
OF_SERVERS = [
    Sender("a server that has joined", SERVER, server_id(0), named=True),
    Sender("a worker's key under the incarnation of a server", CAROL, server_id(0), steals=True),
    Sender("the cluster's key under the incarnation of a server", HOLDER, server_id(0), steals=True),
]
LEADERS = [
    Sender("the server that leads the partition", SERVER, server_id(1), named=True, leads=True),
    Sender("a server that leads another partition", SERVER, server_id(2), named=True),
    Sender("another server's key under the incarnation of the leader", key("other rack", KeyRole.SERVER), server_id(1)),
    Sender("the cluster's key under the incarnation of the leader", HOLDER, server_id(1)),
]

SPEC = KeySpec("uint8", (1,), 4096)


def install_of(request: int, key: str) -> m.Install:
    """A new slice of one byte, of partition 1."""
    use = m.OptimizerUse(0, 0, (), 0, ())
    image = m.SliceImage(key, 0, 0, 0, m.Origin(worker_id(0), 2, 0, 0), use, 0, 0, 0, False, (), (), (0, 0))
    return m.Install(request, 1, (SPEC,), (None,), (image,))


TABLE = KeySpec("float32", (1,), 4096, table=TableSpec(10, Initial("Zeros"), 8))

SAMPLES: dict[type[Any], Any] = {
    type(message): message
    for message in (
        m.Join(1, "worker", "node", "tcp://sender", "host", 7, -1, OPEN, job=JOB, token=TOKEN),
        m.Welcome(1, 0, None),
        m.View(cluster(), (), ()),
        m.ViewChange(1),
        m.Heartbeat("worker", 0),
        m.HeartbeatAck(()),
        m.Leave(30, m.Departure.DONE),
        m.Synced(30, 0, 1),
        m.OutOfSync(30, 0, 1),
        m.HandedOver(30, 0, 1),
        m.Late(30, (0,)),
        m.TakePart(30, m.Taking.OUT),
        m.StandBy(30, "until:a", 0, 5, m.Standing.WAITS),
        m.Together(30, 5, True),
        m.Enter(30, "user:a", 0),
        m.Say(30, "user:a", 0, "note"),
        m.Listen(30, "user:a", 0),
        m.Said(30, True, "note"),
        m.StatusQuery(30),
        m.StatusReport(30),
        m.EndRun(30, JOB),
        m.Shutdown(30, True),
        m.Done(30),
        m.NotYet(30, NotYetReason.BUSY, "text"),
        m.Refused(30, ErrorCode.NOT_ALLOWED, "text"),
        m.Attach(30, 0),
        m.Init(30, (SPEC,), (m.NewSlice("v", 0, 0),)),
        m.Publish(30, (SPEC,), (m.NewKey("w", 0),)),
        m.Lookup(30, ("w",), False),
        m.KeyInfo(30, (), (m.NO_KEY,)),
        m.Outdated(30, 1),
        m.Delete(30, (m.KeyId("none", 0),)),
        m.Drop(30, (m.KeyId("none", 0),)),
        m.ClockQuery(30, "w"),
        m.Clocks(30, 0, 0, 0, 0),
        m.Activate(30, "w", 0),
        m.WhereAre(30),
        m.TheyAre(30, 0, 0),
        m.StepInto(30, 0, 0),
        m.ComeTo(30, 0),
        m.TakeStep(30, 0, 4, m.NO_STEP),
        m.StepIs(30, m.StepsLeft.NONE, m.NO_STEP),
        m.Rest(30),
        m.OfferState(30, m.NO_STATE),
        m.GiveState(30, 1, (0,)),
        m.WantState(30, 4),
        m.StateGiven(30, 1, 0, 1, 8),
        m.StatePart(30, 1, 0, 1, 8, 0),
        m.FetchPart(30, 1, 0, 0),
        m.StateGone(30, m.Gone.AGAIN),
        m.Push(30, (m.Part("w", 0, 1),), m.ADD, 1, False, probe=True),
        m.Staged(30),
        m.Pull(30, (m.Part("w", 0, m.ANY_CLOCK),)),
        m.PullRows(30, m.Part("w", 0, m.ANY_CLOCK)),
        m.ListRows(30, "w", 0, m.ALL_ROWS, -1, False),
        m.RowList(30, 1, False),
        m.Values(30, (1,)),
        m.Uncounted(30),
        m.DeclareBatch(30, 1, (m.SliceId("w", 0),)),
        m.PushBatch(30, 1, 1, m.ADD, 1, False, probe=True),
        m.PullBatch(30, 1, 0),
        m.SetOptimizer(30, None),
        m.UpdateOptimizer(30, {}),
        m.OptimizerQuery(30),
        m.CompressorQuery(30, ["fp16", {}]),
        m.OptimizerIs(30, None),
        m.FetchState(30, "w", 0),
        m.State(30, 0, ()),
        m.StoreState(30, "w", 0, 0, ()),
        m.Command(30, "ping"),
        m.CommandResult(30),
        m.ListKeys(30, ""),
        m.KeyList(30, (), False),
        m.WaitQuery(30),
        m.Waits(30, (), (), True),
        m.WaitReport(30, (), (), False, 1, 0, ()),
        m.WaitNews(30),
        m.Survey(30, ()),
        m.Surveyed(30, 0, 0, 0, True, 0),
        m.ReadSlices(30, 1, 0, False, (m.SliceId("w", 0),)),
        m.ReadDone(30, 1),
        m.Capture(30, 1, 0, m.CaptureWhen.AS_IT_IS, (m.SliceId("w", 0),)),
        m.Captured(30, ((),), (None,), (m.CapturedSlice(0, 0, 0, 0, 0),), ()),
        m.FetchCaptured(30, 1, (m.SliceId("w", 0),)),
        m.CaptureDone(30, 1),
        m.StartHolding(30, 1, 0),
        install_of(30, "s"),
        m.HoldRows(30, 1, m.SliceId("r", 0, 0), 1, 0),
        m.InstallRows(30, 1, m.SliceId("t", 0, 0), TABLE),
        m.Hold(30, 1, (m.SliceId("r", 0),), 1, (m.Given(0, 1, 1, m.ADD, 0, 0),), False, None, 0),
        m.HoldPublished(30, 1, (m.KeyId("r", 0),)),
        m.HoldDropped(30, 1, (m.KeyId("r", 0),)),
        m.HoldActivated(30, 1, m.SliceId("r", 0), 0, 1, 2),
        m.HoldPlace(30, 1, 0, 0),
        m.HoldChange(30, 1, {}, (m.LaterSlice("r", 0, 0, 1),)),
        m.HoldState(30, 1, m.SliceId("r", 0), worker_id(0), 3, 0, ()),
        m.HoldOptimizer(30, 1, None, None, 1),
        m.HoldLoop(30, 1, 0, 4, 0, 1, (m.HeldStep(0, 0),), ()),
        m.HoldReady(30, 1),
        m.Compare(30, 1, 0, 0, (m.CheckedSlice("r", 0, 0, 0, 0, 0),)),
    )
}


def flat(effects: list[Effect]) -> list[Effect]:
    """The effects, those of runs included."""
    found: list[Effect] = []
    for effect in effects:
        found += effect.effects if isinstance(effect, InRun) else [effect]
    return found


class SchedulerWorld:
    """A scheduler whose server and workers have joined: alice has rank 0, bob rank 1. Records are saved at once."""

    def __init__(self) -> None:
        settings = SchedulerSettings(cluster(3, 2), 1.0, 5.0, 20.0, break_on_loss=True)
        self.router = SchedulerRouter(settings, 1, 1, 0.0)
        self.disk: Any = None
        self.join("server", server_id(0), SERVER)
        self.join("server", server_id(1), SERVER)
        self.join("worker", worker_id(0), ALICE)
        self.run = self.router.runs.entries()[0].run
        self.join("worker", worker_id(1), BOB)
        self.say(server_id(1), m.Leave(9, m.Departure.LEFT), SERVER, CallerPeer(b"gone"))  # its place is free

    def restart(self, record: Any) -> None:
        """The scheduler starts again, from this record."""
        settings = SchedulerSettings(cluster(3, 2), 1.0, 5.0, 20.0, break_on_loss=True)
        self.router = SchedulerRouter(settings, 2, int(record["generation"]) + 1, 0.0, record)

    def states(self) -> dict[str, m.MemberState]:
        machine = self.router.machine_of(self.run)
        assert machine is not None
        return {seat.name: seat.member.state for seat in machine.roster.seats()}

    def step(self, event: Any) -> list[Effect]:
        effects: list[Effect] = []
        events = [event]
        while events:
            for effect in flat(self.router.step(events.pop(), 0.0)):
                if isinstance(effect, Persist):
                    self.disk = effect.record
                    events.append(Persisted(effect.token))
                effects.append(effect)
            self.router.validate()
        return effects

    def join(self, role: str, who: int, principal: Principal, **more: Any) -> list[Effect]:
        fields = {"node_id": f"node-{who}", "job": JOB, "token": TOKEN, "pid": who} | more
        join = SAMPLES[m.Join].__class__(
            1, role, fields["node_id"], "", "host", fields["pid"], -1, OPEN, job=fields["job"], token=fields["token"]
        )
        return self.say(who, join, principal, CallerPeer(b"%d" % who))

    def say(
        self, who: int, message: Any, principal: Principal, peer: Peer, run: int = NO_RUN, epoch: Epoch = NO_VIEW
    ) -> list[Effect]:
        return self.step(Received(peer, who, epoch, message, run=run, principal=principal))


class ServerWorld:
    """A server with a run of three workers: alice has attached as rank 0 and made key "w"; bob has joined as rank 1.

    There are two replicas. This server leads partition 0, with all keys but two; it holds partition 1 for server 1, who
    leads it, with key "r". Server 2 leads the last partition.
    """

    RUN = 7

    def __init__(self) -> None:
        settings = cluster(3, 3, replicas=2)
        node = session("server", 0)
        self.router = ServerRouter(ServerSettings(1 << 20, True), node, "tcp://scheduler", 1.0)
        self.step(Tick())
        entry = m.RunEntry(self.RUN, JOB, TOKEN, m.RunPhase.RUNNING, 3)
        *servers, alice, bob = members(2, 3)
        servers = [who._replace(principal="rack") for who in servers]
        workers = [alice._replace(principal="alice"), bob._replace(principal="bob")]
        self.told(m.Welcome(1, 0, None), NO_RUN)
        whole = view(settings, servers)
        self.told(m.View(whole.settings, whole.members, whole.shards, (entry,)), NO_RUN)
        self.told(m.Welcome(1, 0, None), self.RUN)
        self.settings, self.members = settings, [*servers, *workers]
        self.told(self.view(self.members), self.RUN)
        for message in (
            m.Attach(1, 0),
            m.Init(2, (SPEC,), (m.NewSlice("w", 0, 0),)),
            m.Publish(3, (SPEC,), (m.NewKey("w", 0),)),
            m.DeclareBatch(4, 1, (m.SliceId("w", 0),)),
            m.OfferState(5, 4),
        ):
            self.say(worker_id(0), message, ALICE, CallerPeer(b"alice"), b"\0")
        for record in (m.StartHolding(1, 1, 0), install_of(2, "r")):
            self.say(server_id(1), record, SERVER, CallerPeer(b"server 1"), b"\0")

    def view(self, who: list[m.Member]) -> m.View:
        """Of these members: the second server leads the keys "r" and "s", the third one none."""
        others = {shard_of(key, 0, self.settings.num_shards) for key in ("r", "s")}
        shards = tuple([int(shard in others) for shard in range(self.settings.num_shards)])
        lineages = [server_id(rank) for rank in range(3)]
        rows = [m.Partition(rank, 0 if rank == 1 else -1, -1, lineage) for rank, lineage in enumerate(lineages)]
        return replace(view(self.settings, who), shards=shards, partitions=tuple(rows))

    def told(self, message: Any, run: int, change: int = 1) -> list[Effect]:
        """The scheduler says something."""
        return self.step(Received(SCHEDULER, 1, Epoch(1, change), message, run=run))

    def step(self, event: Any) -> list[Effect]:
        effects = flat(self.router.step(event, 0.0))
        self.router.validate()
        for effect in list(effects):
            if isinstance(effect, Create):
                made = [read(first.source) for first in effect.slices]
                effects += self.step(JobDone(effect.job, made, run=self.RUN))
            elif isinstance(effect, Apply | Load):
                effects += self.step(JobDone(effect.job, b"\0", run=self.RUN))
        return effects

    def say(
        self, who: int, message: Any, principal: Principal, peer: Peer, payload: bytes = b"", run: int = RUN
    ) -> list[Effect]:
        carries = isinstance(message, m.Init | m.Install | m.Hold)
        event = Received(
            peer, who, Epoch(1, 1), message, payload if carries else None, len(payload) * carries, run, principal
        )
        return self.step(event)


def message_of(row: Row, kind: type[Any]) -> Any:
    """A sample of this kind, as it is meant in this row."""
    message = SAMPLES[kind]
    role = next((role for role, join in JOINS.items() if join is row), None)
    if role is None:
        return message
    return m.Join(1, role, f"node of {role}", "tcp://sender", "host", 7, -1, OPEN, job=JOB, token=TOKEN)


def is_expected(row: Row, sender: Sender) -> bool:
    """Whether the table lets this sender do that."""
    if not is_allowed(sender.principal, row, JOB):
        return False
    if row.standing is Standing.NOTHING:
        return True
    return (
        not sender.steals
        and {
            Standing.JOINED: sender.named,
            Standing.ATTACHED: sender.attached,
            Standing.ATTACHED_OR_OPERATOR: sender.attached or KeyRole.OPERATOR in sender.principal.roles,
            Standing.NAMED: sender.named,
            Standing.LEADER: sender.leads,
            Standing.SCHEDULER: False,
            Standing.NOBODY: False,
        }[row.standing]
    )


REFUSALS = re.compile(
    "allows to be|joined under|commands come from|only the scheduler|takes no|another node has this incarnation"
)


def is_kept_out(effects: list[Effect], sender: Sender) -> bool:
    """Whether the message did nothing but tell its sender that it may not send it, or nothing at all."""
    return all(
        isinstance(effect, LogEntry)
        or (isinstance(effect, Send) and effect.peer == sender.peer and tells_to_keep_out(effect.message))
        for effect in effects
    )


def tells_to_keep_out(answer: m.Message) -> bool:
    """Whether the answer says that the sender may not send that."""
    if isinstance(answer, NotYet):
        return answer.reason in (NotYetReason.NOT_ATTACHED, NotYetReason.NOT_JOINED, NotYetReason.ELSEWHERE)
    return isinstance(answer, Refused) and (
        answer.error is ErrorCode.REPLACED or (bool(REFUSALS.search(answer.text)) and answer.error in NOT_ALLOWED)
    )
