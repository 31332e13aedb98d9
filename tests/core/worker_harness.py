"""A worker machine whose scheduler and servers are played by the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvd.core import requests
from kvd.core.machine import Complete, Effect, LocalCall, Received, Send, Tick
from kvd.core.pseudonyms import public_view
from kvd.core.worker.machine import WorkerMachine, WorkerSettings
from kvd.protocol.messages import (
    NO_KEY,
    NO_RANK,
    Attach,
    DeclareBatch,
    Done,
    Epoch,
    ErrorCode,
    KeyInfo,
    Lookup,
    Made,
    Member,
    MemberState,
    NotYet,
    NotYetReason,
    Partition,
    Push,
    Refused,
    Settings,
    Staged,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import (
    cluster,
    from_scheduler,
    member,
    members,
    of,
    padded_bytes,
    server_id,
    session,
    uint8,
    view,
    welcome,
)
from tests.core.small_calls_harness import SmallCallSteps


class Harness:
    """`sent` holds the sends that no test has taken yet. Attaches are answered at once."""

    def __init__(
        self,
        rank: int = 0,
        *,
        servers: int = 1,
        settings: Settings | None = None,
        predecessor: str = "",
        role: str = "worker",
        credit: int = 1 << 20,
        joined: bool = True,
        small: int = -1,
        batches: bool = False,
        small_calls: SmallCallSteps | None = None,
    ) -> None:
        self.small_calls = small_calls
        self.settings = settings or cluster(2, servers)
        self.machine = WorkerMachine(
            WorkerSettings(credit, small_push_bytes=small, batches=batches), session(role, rank)
        )
        self.members: dict[tuple[str, int], Member] = {(m.role, m.rank): m for m in members(2, servers)}
        self.partitions: tuple[Partition, ...] = ()
        if self.settings.replicas > 1:
            self.partitions = tuple(
                [Partition(rank, (rank + 1) % servers, NO_RANK, server_id(rank)) for rank in range(servers)]
            )
        self.epoch = 0
        self.now = 0.0
        self.sent: list[Send] = []
        self.effects: list[Effect] = []
        self.done: dict[int, Complete] = {}
        self._calls = 0
        self.attach = True
        self.step(Tick())
        if joined:
            self.step(welcome(-1 if role == "observer" else rank, predecessor))
            self.look()
            self.sent.clear()

    def step(self, event: Any) -> list[Effect]:
        if self.small_calls is None:
            effects = self.machine.step(event, self.now)
        else:
            effects = self.small_calls.step(self.machine, event, self.now)
        self.machine.validate()
        self.machine.next_deadline()  # every shell asks
        self.effects += effects
        for complete in of(Complete, effects):
            assert complete.call not in self.done, "a call is answered once"
            self.done[complete.call] = complete
        for send in of(Send, effects):
            if isinstance(send.message, Attach) and self.attach:
                effects = effects + self.say(send.peer, Done(send.message.request))
            else:
                self.sent.append(send)
        return effects

    @property
    def planned(self) -> int:
        """How many of the open calls were begun by plans."""
        return sum(call.plan is not None for call in self.machine.calls_by_number.values())

    def wait(self, seconds: float) -> list[Effect]:
        """Lets time pass. The machine is woken at its deadlines."""
        effects: list[Effect] = []
        end = self.now + seconds
        while (deadline := self.machine.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            effects += self.step(Tick())
        self.now = end
        return effects + self.step(Tick())

    def look(self, *changed: Member) -> list[Effect]:
        for entry in changed:
            self.members[entry.role, entry.rank] = entry
        self.epoch += 1
        told = replace(view(self.settings, self.members.values()), partitions=self.partitions)
        return self.step(from_scheduler(public_view(told), (1, self.epoch)))

    def say(self, peer: Any, message: Any, payload: bytes | None = None) -> list[Effect]:
        nbytes = 0 if payload is None else len(payload)
        sender = peer if isinstance(peer, int) else 1
        return self.step(Received(peer, sender, Epoch(1, 1), message, payload, nbytes))

    # ── calls ──

    def call(self, request: requests.Request, timeout_s: float = 60.0) -> int:
        self._calls += 1
        self.step(LocalCall(self._calls, request, self.now + timeout_s))
        return self._calls

    def push(
        self, *keys: str, timeout_s: float = 60.0, pull: bool = False, spec: KeySpec | None = None, **more: Any
    ) -> int:
        items = tuple(
            requests.Item(key, spec or uint8(1), f"source {key}", f"target {key}" if pull else None) for key in keys
        )
        return self.call(requests.Transfer(items, push=True, pull=pull, **more), timeout_s)

    def pull(self, *keys: str, timeout_s: float = 60.0, spec: KeySpec | None = None, **more: Any) -> int:
        items = tuple(requests.Item(key, spec or uint8(1), None, f"target {key}") for key in keys)
        return self.call(requests.Transfer(items, push=False, pull=True, **more), timeout_s)

    def result(self, call: int) -> Any:
        complete = self.done[call]
        assert complete.error is None, complete.error
        return complete.result

    def error(self, call: int) -> Any:
        return self.done[call].error

    # ── what was sent ──

    def take(self, kind: type[Any]) -> Send:
        """Takes the oldest send of a message of this kind."""
        send = next(send for send in self.sent if isinstance(send.message, kind))
        self.sent.remove(send)
        return send

    def waiting(self, kind: type[Any]) -> list[Any]:
        return [send.message for send in self.sent if isinstance(send.message, kind)]

    def clocks(self, kind: type[Any] = Push) -> list[tuple[str, int, int]]:
        """Key, slice and clock of every part in the messages of this kind in `sent`."""
        return [tuple(part[:3]) for message in self.waiting(kind) for part in message.parts]

    # ── answers ──

    def reply(self, send: Send, message: Any, payload: bytes | None = None) -> list[Effect]:
        return self.say(send.peer, message(send.message.request), payload)  # type: ignore[union-attr]

    def found(self, spec: KeySpec | None = None, creation: int = 0) -> None:
        """Answers the oldest Lookup: all its keys are live, with this spec."""
        send = self.take(Lookup)
        lookup = send.message
        assert isinstance(lookup, Lookup)
        self.say(send.peer, KeyInfo(lookup.request, (Made(spec or uint8(1), creation),), (0,) * len(lookup.keys)))

    def missing(self) -> None:
        """Answers the oldest Lookup: none of its keys is live."""
        send = self.take(Lookup)
        lookup = send.message
        assert isinstance(lookup, Lookup)
        self.say(send.peer, KeyInfo(lookup.request, (), (NO_KEY,) * len(lookup.keys)))

    def know(self, *keys: str, spec: KeySpec | None = None) -> None:
        """Makes the keys known to the worker."""
        for key in keys:
            call = self.call(requests.DescribeKey(key))
            self.found(spec)
            assert self.result(call) == (spec or uint8(1))

    def declared(self) -> DeclareBatch:
        """Answers Done to the oldest DeclareBatch."""
        send = self.take(DeclareBatch)
        self.reply(send, Done)
        assert isinstance(send.message, DeclareBatch)
        return send.message

    def staged(self) -> list[Effect]:
        """Answers Staged to the oldest push, which stays in `sent`."""
        send = next(send for send in self.sent if isinstance(send.message, Push))
        return self.reply(send, Staged)

    def settle(self) -> list[Effect]:
        """Answers Done to the oldest push."""
        return self.reply(self.take(Push), Done)

    def values(self, kind: type[Any], versions: tuple[int, ...], *parts: bytes) -> list[Effect]:
        send = self.take(kind)
        message = Values(send.message.request, versions)  # type: ignore[union-attr]
        return self.say(send.peer, message, padded_bytes(parts))

    def postpone(self, kind: type[Any], reason: NotYetReason, **more: Any) -> list[Effect]:
        send = self.take(kind)
        return self.say(send.peer, NotYet(send.message.request, reason, "because", **more))  # type: ignore[union-attr]

    def refuse(self, kind: type[Any], error: ErrorCode, **more: Any) -> list[Effect]:
        send = self.take(kind)
        return self.say(send.peer, Refused(send.message.request, error, "because", **more))  # type: ignore[union-attr]

    # ── replicas ──

    def lead(self, partition: int, rank: int, lineage: int | None = None) -> list[Effect]:
        """The next view names another leader, and no backup."""
        partitions = list(self.partitions)
        before = partitions[partition]
        partitions[partition] = Partition(rank, NO_RANK, NO_RANK, before.lineage if lineage is None else lineage)
        self.partitions = tuple(partitions)
        return self.look()

    def fail_over(self, rank: int, state: str = "dead") -> list[Effect]:
        """The server is gone. The backups of its partitions lead them, where there are any."""
        self.partitions = tuple(
            [
                entry._replace(leader=entry.backup, backup=NO_RANK)
                if entry.leader == rank and entry.backup != NO_RANK
                else entry._replace(backup=NO_RANK if entry.backup == rank else entry.backup)
                for entry in self.partitions
            ]
        )
        gone = self.members["server", rank]
        return self.look(gone._replace(state=MemberState(state), reason="no heartbeat", last_seen_s=5.0))

    def key_in(self, partition: int) -> str:
        """The name of a key whose first slice is in this partition."""
        names = [f"k{number}" for number in range(99)]
        return next(name for name in names if self.machine.view.partition_of(name, 0) == partition)

    def restart_server(self, rank: int = 0, life: int = 1) -> list[Effect]:
        return self.look(member("server", rank, life=life))


def ready(*keys: str, **more: Any) -> Harness:
    harness = Harness(**more)
    harness.know(*(keys or ("w",)))
    return harness


S0, S1, S2 = (server_id(rank) for rank in range(3))


def replicated(servers: int = 3, **more: Any) -> Harness:
    """Server n leads partition n, and the next one is its backup."""
    return Harness(servers=servers, settings=cluster(2, servers, replicas=2), **more)


def knowing(*partitions: int, spec: KeySpec | None = None, **more: Any) -> tuple[Harness, list[str]]:
    """With a key in each of these partitions."""
    harness = replicated(**more)
    names = [harness.key_in(partition) for partition in partitions]
    harness.know(*names, spec=spec)
    return harness, names


def number(send: Send) -> int:
    """Of the request that it is."""
    message: Any = send.message
    return int(message.request)
