"""A scheduler machine; the tests play its nodes."""

from __future__ import annotations

from typing import Any

from kvd.core.machine import Effect, PeerLost, Persisted, Received, ServerPeer, Tick, Unsaved
from kvd.core.scheduler.machine import SchedulerMachine, SchedulerSettings
from kvd.protocol.messages import Epoch, Heartbeat, Join, Settings
from tests.core.fakes import OPEN, cluster, of, one, said, worker_id
from tests.core.known_views import KnownViews

BARE = cluster(mode="", merge="")


class Harness:
    """A scheduler whose nodes are named by their incarnation. With `hold`, its records are not saved yet.

    Effects show whole views in place of changes.
    """

    def __init__(
        self, settings: Settings = BARE, *, saved: Any = None, generation: int = 1, incarnation: int = 1, **more: Any
    ) -> None:
        limits = {"heartbeat_interval_s": 1.0, "server_timeout_s": 5.0, "worker_timeout_s": 20.0, "break_on_loss": True}
        self.machine = SchedulerMachine(
            SchedulerSettings(settings, **(limits | more)), incarnation, generation, 0.0, saved
        )
        self.now = 0.0
        self.hold = False
        self.disk: Any = None
        self._token = 0
        self._views = KnownViews()

    def step(self, event: Any) -> list[Effect]:
        effects = self.machine.step(event, self.now)
        self.machine.validate()
        for unsaved in of(Unsaved, effects):
            self.disk = self.machine.record()
            self._token = unsaved.token
            if not self.hold:
                effects = effects + self.machine.step(Persisted(unsaved.token), self.now)
                self.machine.validate()
        return self._views.whole(effects)

    def saved(self) -> list[Effect]:
        """The records that were held back are saved."""
        effects = self.machine.step(Persisted(self._token), self.now)
        self.machine.validate()
        return self._views.whole(effects)

    def say(self, who: int, message: Any, *, peer: Any = None, view: tuple[int, int] = (0, 0)) -> list[Effect]:
        peer = ServerPeer(who) if peer is None else peer  # a node is known by its incarnation here
        return self.step(Received(peer, who, Epoch(*view), message))

    def join(self, role: str, who: int, node_id: str, *, rank: int = -1, settings: Settings = OPEN) -> list[Effect]:
        return self.say(who, Join(1, role, node_id, "", "host", 70 + who % 10 + who // 100 % 10 * 100, rank, settings))

    def worker(self, rank: int, life: int = 0) -> list[Effect]:
        return self.join("worker", worker_id(rank, life), f"worker-{rank}")

    def beat(self, rank: int, life: int = 0) -> list[Effect]:
        return self.say(worker_id(rank, life), Heartbeat("worker", rank), view=self.machine.epoch)

    def kill(self, who: int, reason: str = "exit 1") -> list[Effect]:
        """The process ends and is not restarted before its timeout; the others live on."""
        effects = self.step(PeerLost(who, reason))
        start = self.now
        for seconds in (4, 8, 12, 16):
            self.now = start + seconds
            for seat in self.machine.roster.seats():
                if seat.is_living and seat.member.incarnation != who:
                    effects += self.say(seat.member.incarnation, Heartbeat(*seat.place))
        self.now = start + 20
        return effects + self.step(Tick())

    def states(self) -> dict[str, str]:
        members: Any = self.machine.explain(self.now)["members"]
        return {f"{member['role']} {member['rank']}": member["state"] for member in members}


def answer(effects: list[Effect], kind: Any) -> Any:
    return one([message for message in said(effects) if isinstance(message, kind)])
