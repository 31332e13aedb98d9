"""Slices rest while another server is sent them; and what happens when that is broken off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvd.core.machine import Effect, Export, Received, Send, ServerPeer
from kvd.protocol.messages import (
    NO_RANK,
    Done,
    Epoch,
    ErrorCode,
    FetchState,
    HoldOptimizer,
    Install,
    Partition,
    Refused,
    State,
    Synced,
)
from tests.core.fakes import cluster, from_scheduler, member, one, said, server_id, view
from tests.core.server_harness import Harness

OTHER = ServerPeer(server_id(1))


class Leader(Harness):
    """Server 0, which leads partition 0, beside server 1."""

    def __init__(self) -> None:
        super().__init__(cluster(2, 2, replicas=2))
        self.members["server", 1] = member("server", 1)
        self.sees(syncing=NO_RANK)
        seen = self.machine.session.view
        self.key = next(key for key in map(str, range(99)) if seen.partition_of(key, 0) == 0)
        self.init(self.key, b"\0")

    def sees(self, syncing: int) -> list[Effect]:
        """A view in which the server of this rank is syncing partition 0."""
        self.epoch += 1
        rows = Partition(0, NO_RANK, syncing, server_id(0)), Partition(1, NO_RANK, NO_RANK, server_id(1))
        told = replace(view(self.settings, self.members.values()), partitions=rows)
        return self.step(from_scheduler(told, (1, self.epoch)))

    def answers_all(self, effects: list[Effect], refuses: type[Any] | None = None) -> list[Effect]:
        """The other server holds all records that it is sent, but for those of one kind. Returns all effects."""
        effects = list(effects)
        for effect in effects:
            if isinstance(effect, Send) and effect.peer == OTHER:
                message: Any = effect.message
                answer: Any = Done(message.request)
                if isinstance(message, refuses or ()):
                    answer = Refused(message.request, ErrorCode.NOT_ALLOWED, "no optimizer is called 'mine'")
                effects += self.step(Received(OTHER, OTHER, Epoch(1, self.epoch), answer))
        return effects


def test_a_copy_that_is_broken_off_lets_other_jobs_end() -> None:
    """No round is closed while the state of a slice's optimizer is read."""
    leader = Leader()
    leader.hold = True
    leader.say(0, FetchState(leader.request(), leader.key, 0))
    leader.sees(syncing=1)
    leader.sees(syncing=NO_RANK)
    leader.push(0, 1, key=leader.key)
    leader.push(1, 1, key=leader.key)
    assert [type(job) for job in leader.jobs] == [Export]
    leader.hold = False
    effects = leader.finish(one(leader.jobs))
    assert one(of_kind(effects, State)).step == 7
    assert leader.value(leader.key) == b"\2"


def test_who_refuses_the_last_records_does_not_become_the_backup() -> None:
    told = {}
    for refuses in (None, HoldOptimizer):
        leader = Leader()
        effects = leader.answers_all(leader.sees(syncing=1), refuses)
        assert of_kind(effects, Install), effects
        assert of_kind(effects, HoldOptimizer), effects
        told[refuses] = of_kind(effects + leader.step(None, now=5.0), Synced)
    assert len(told[None]) > 0
    assert told[HoldOptimizer] == []


def of_kind(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [message for message in said(effects) if isinstance(message, kind)]
