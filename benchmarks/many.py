"""What many workers cost the scheduler: they join, meet at a barrier, and are idle. No process is started.

    python -m benchmarks.many --workers 100,1000,4000

The scheduler's machine and its driver are the real ones, and so are the sessions of the nodes; between them are real
frames, which a queue carries in place of sockets. What is counted is the processor time of the scheduler from a frame
that arrives to the frames that leave, decoding and encoding included. Not counted is what libzmq takes to carry them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from benchmarks.arguments import whole_numbers
from kvd.core.machine import SCHEDULER, CallerPeer, Peer, PeerPath, Received, Send, Span
from kvd.core.principals import HOLDER
from kvd.core.scheduler.membership.agreement import SchedulerSettings
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.session import Identity, RunKey, SchedulerSession
from kvd.node.shell.driver import Driver
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import Done, Enter, Heartbeat, Message, Settings
from kvd.transport.base import HeaderOfPath, OnGarbage, OnMessage

HEARTBEAT_INTERVAL_S = 1.0
BARRIER = "user:many"
FIRST_REQUEST = 100
AT_A_TIME = 25  # workers whose joins are on the way at once
PATIENCE_S = 3600.0  # timeouts: the nodes of this process send no heartbeats while others join
LONGEST_INTERVAL_S = 5.0  # between two heartbeats of a worker, with the usual worker_timeout_s of 20

_decode = lru_cache(maxsize=16)(decode)  # many are told the same, one after the other


class Cost(NamedTuple):
    """What something took: of the scheduler's processor time, of the frames that it sent, and how many came in."""

    cpu_s: float
    frames: int
    nbytes: int
    taken: int

    def per(self, count: int) -> Cost:
        return Cost(self.cpu_s / count, *(round(total / count) for total in self[1:]))


class Figures(NamedTuple):
    """Of one number of workers.

    Attributes:
        join: all workers have joined, one after the other, and everyone knows everyone.
        barrier: all have entered, and all are told.
        heartbeats: one of each worker.
        interval_s: between two of a worker.
        all_know_all: whether every worker knows of every other.
    """

    workers: int
    join: Cost
    barrier: Cost
    heartbeats: Cost
    interval_s: float
    all_know_all: bool

    @property
    def idle_share(self) -> float:
        """Of a core, when all workers are idle."""
        return self.heartbeats.cpu_s / self.interval_s


class QueueTransport:
    """Carries frames in this process: what the scheduler sends is put in a queue."""

    def __init__(self) -> None:
        self.sent: deque[tuple[Peer, bytes]] = deque()
        self.frames = self.nbytes = 0
        self.on_message: OnMessage = _nothing

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        self.on_message = on_message

    def listen(self, address: str) -> str:
        return address

    def connect(self, peer: Peer, address: str, key: str = "") -> None:
        raise NotImplementedError("a scheduler connects to nobody")

    def disconnect(self, peer: Peer) -> None:
        raise NotImplementedError("nor does it disconnect")

    def send(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        self.sent.append((peer, header))
        self.frames += 1
        self.nbytes += len(header)
        return True

    def send_with_path(self, peer: Peer, header: HeaderOfPath, payload: Sequence[Span]) -> bool:
        raise NotImplementedError("a scheduler has no links")

    def paths(self) -> Mapping[Peer, PeerPath]:
        return {}

    def close(self, linger_s: float) -> None:
        self.sent.clear()


def _nothing(*_: Any) -> None:
    """Nobody listens yet."""


class Crowd:
    """A scheduler, one server and many workers. To be used on a running loop."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        cluster = Settings("sync", "sum", -1, 2, 1 << 20, workers, 1, 840)
        settings = SchedulerSettings(cluster, HEARTBEAT_INTERVAL_S, PATIENCE_S, PATIENCE_S, break_on_loss=True)
        self._now = asyncio.get_running_loop().time
        self.router = SchedulerRouter(settings, 1, 1, self._now())
        self._transport = QueueTransport()
        self._driver = Driver(self.router, self._transport)
        self._sessions: dict[CallerPeer, SchedulerSession] = {}
        self.answered: set[CallerPeer] = set()
        self._cpu_s = 0.0
        self._taken = 0

    def start(self) -> None:
        self._driver.start()
        self._add("server", 0, RunKey())
        self.deliver()

    def stop(self) -> None:
        self._driver.stop(0.0)

    def _add(self, role: str, rank: int, run_key: RunKey) -> None:
        incarnation = (1 << 60) + rank + (1 << 40 if role == "server" else 0)
        address = "tcp://10.0.0.1:5000" if role == "server" else ""
        identity = Identity(
            role, f"{role}-{rank}.trainers.example", incarnation, address, f"host-{rank}", 1000 + rank, rank
        )
        open_settings = Settings("", "", -1, 0, 0, 0, 0, 0, 0)
        session = SchedulerSession(identity, open_settings, "tcp://scheduler", HEARTBEAT_INTERVAL_S, run_key)
        peer = CallerPeer(incarnation.to_bytes(8, "big"))
        self._sessions[peer] = session
        self._carry(peer, session.tick(self._now()))

    def _carry(self, peer: CallerPeer, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and effect.peer == SCHEDULER:
                self.say(peer, effect.message)

    def say(self, peer: CallerPeer, message: Message) -> None:
        """A node sends this message; the scheduler's time is counted."""
        session = self._sessions[peer]
        header = encode(message, session.incarnation, session.view.epoch, session.run)
        began_s = time.process_time()
        self._transport.on_message(peer, header, None, HOLDER)
        self._cpu_s += time.process_time() - began_s
        self._taken += 1

    def deliver(self) -> None:
        """Hands the nodes all frames, and what they answer to the scheduler, until nothing is on its way."""
        while self._transport.sent:
            peer, header = self._transport.sent.popleft()
            assert isinstance(peer, CallerPeer)
            decoded = _decode(header)
            session = self._sessions[peer]
            if isinstance(decoded.message, Done) and decoded.message.request >= FIRST_REQUEST:
                self.answered.add(peer)
                continue
            session.receive(
                Received(SCHEDULER, decoded.sender, decoded.epoch, decoded.message, run=decoded.run), self._now()
            )
            session.take_effects()

    def take_cost(self) -> Cost:
        """Since it was asked the last time."""
        cost = Cost(self._cpu_s, self._transport.frames, self._transport.nbytes, self._taken)
        self._cpu_s, self._transport.frames, self._transport.nbytes, self._taken = 0.0, 0, 0, 0
        return cost

    def workers_there(self) -> list[CallerPeer]:
        return [peer for peer, session in self._sessions.items() if session.identity.role == "worker"]

    # ── what is measured ──

    async def join(self) -> Cost:
        """All workers join, and are told of each other."""
        self.take_cost()
        for rank in range(self.workers):
            self._add("worker", rank, RunKey(job="many", token="many"))
            if rank % AT_A_TIME == 0:
                self.deliver()
        await self._until_all_know_all()
        return self.take_cost()

    async def _until_all_know_all(self) -> None:
        for _ in range(40):
            self.deliver()
            if self.all_know_all():
                return
            began_s = time.process_time()
            await asyncio.sleep(0.1)  # the driver's timer announces what is left
            self._cpu_s += time.process_time() - began_s

    def all_know_all(self) -> bool:
        """Whether each worker knows the state of each other."""
        return all(len(self._sessions[peer].view.members) == self.workers + 1 for peer in self.workers_there())

    def barrier(self, generation: int) -> Cost:
        self.take_cost()
        self.answered.clear()
        for peer in self.workers_there():
            self.say(peer, Enter(FIRST_REQUEST + generation, BARRIER, generation))
        self.deliver()
        assert len(self.answered) == self.workers, "not all were told that the barrier is reached"
        return self.take_cost()

    def heartbeats(self) -> Cost:
        self.take_cost()
        for peer in self.workers_there():
            self.say(peer, Heartbeat("worker", self._sessions[peer].rank))
        self.deliver()
        return self.take_cost()

    def interval_s(self) -> float:
        wanted_s = max(self._sessions[peer].heartbeat_interval_s for peer in self.workers_there())
        return min(wanted_s, LONGEST_INTERVAL_S)


async def measure(workers: int) -> Figures:
    """The figures of this many workers."""
    crowd = Crowd(workers)
    crowd.start()
    try:
        join = await crowd.join()
        crowd.heartbeats()
        barrier = min([crowd.barrier(generation) for generation in range(3)])
        beats = min([crowd.heartbeats() for _ in range(3)])
        return Figures(workers, join, barrier, beats, crowd.interval_s(), crowd.all_know_all())
    finally:
        crowd.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many", description=__doc__)
    parser.add_argument("--workers", type=whole_numbers, default=(100, 1000))
    arguments = parser.parse_args()
    print(
        f"{'workers':>7} {'join, each':>22} {'all bytes':>10} {'barrier':>9} {'bytes':>10} {'idle':>7} {'interval':>8}"
    )
    for workers in arguments.workers:
        found = asyncio.run(measure(workers))
        if not found.all_know_all:
            sys.exit(f"{workers} workers do not know each other")
        each = found.join.per(workers)
        joins = f"{each.cpu_s * 1e3:>7.2f} ms {each.frames:>4} frames {found.join.nbytes / 1e6:>7.1f} MB"
        barrier = f"{found.barrier.cpu_s:>7.3f} s {found.barrier.nbytes:>10}"
        print(f"{workers:>7} {joins} {barrier} {found.idle_share:>6.1%} {found.interval_s:>6.1f} s")


if __name__ == "__main__":
    main()
