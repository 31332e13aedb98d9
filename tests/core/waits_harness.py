"""A worker machine whose calls wait: servers, threads and the scheduler answer its questions about that."""

from __future__ import annotations

from typing import Any

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Census, CensusTaken, LocalCall, LogEntry, ServerPeer
from kvd.protocol.messages import (
    Absent,
    BarrierWait,
    Heartbeat,
    NodeFact,
    Push,
    Values,
    Wait,
    WaitNews,
    WaitQuery,
    WaitReport,
    Waits,
)
from tests.core.fakes import of, server_id, uint8
from tests.core.worker_harness import ready

ANSWER_S = 60.0
ROUND_S = 1800.0


class WaitingWorker:
    """`held` says which requests wait for whom, `silent` who does not answer, `census` what the threads do."""

    def __init__(self, *keys: str, **more: Any) -> None:
        self.harness = ready(*keys, **more)
        self.held: dict[int, Wait] = {}
        self.barriers: tuple[BarrierWait, ...] = ()
        self.silent: set[Any] = set()
        self.census = CensusTaken(False, 0, ())
        self.reports: list[WaitReport] = []
        self.queries = 0
        self.ended = ""  # how the process of every other node ended
        self.logged: list[str] = []

    # ── calls ──

    def call(self, request: requests.Request, timeout_s: float | None = None) -> int:
        """A call with the default deadlines, or with one that the program chose."""
        if timeout_s is not None:
            return self.harness.call(request, timeout_s)
        self.harness._calls += 1
        self.harness.step(LocalCall(self.harness._calls, request, self.harness.now + ROUND_S, ANSWER_S))
        return self.harness._calls

    def pushpull(self, key: str = "w", timeout_s: float | None = None) -> int:
        item = requests.Item(key, uint8(1), f"source {key}", f"target {key}")
        return self.call(requests.Transfer((item,), push=True, pull=True), timeout_s)

    def error(self, call: int) -> Any:
        return self.harness.error(call)

    def is_open(self, call: int) -> bool:
        return call not in self.harness.done

    # ── the others ──

    def hold(self, kind: type[Any] = Push, rank: int = 1, key: str = "w", clock: int = 1, last: int = 0) -> int:
        """The oldest request of this kind arrives at its server, and waits for a worker."""
        request: int = self.harness.take(kind).message.request  # type: ignore[union-attr]
        self.held[request] = Wait(request, key, clock, (Absent(rank, last),))
        return request

    def answered(self, request: int) -> None:
        """The server of rank 0 answers a pushpull."""
        self.held.pop(request, None)
        self.harness.say(ServerPeer(server_id(0)), Values(request, (1,)), b"a")

    def wait(self, seconds: float) -> None:
        """Lets time pass. Questions are answered at once."""
        end = self.harness.now + seconds
        self._answer()
        while (deadline := self.harness.machine.next_deadline()) is not None and deadline <= end:
            self.harness.wait(max(deadline - self.harness.now, 0.0))
            self._answer()
        self.harness.wait(end - self.harness.now)
        self._answer()

    def news(self, news: WaitNews) -> None:
        """The scheduler says something unasked."""
        self.harness.say(SCHEDULER, news)
        self._answer()

    def _answer(self) -> None:
        harness = self.harness
        while True:
            self.logged += [entry.text for entry in of(LogEntry, harness.effects) if entry.level == "warning"]
            asks_threads = bool(of(Census, harness.effects))
            harness.effects.clear()
            harness.sent[:] = [send for send in harness.sent if not isinstance(send.message, Heartbeat)]
            if asks_threads:
                harness.step(self.census)
            questions = [send for send in harness.sent if isinstance(send.message, WaitQuery | WaitReport)]
            if not questions and not asks_threads:
                return
            for send in questions:
                harness.sent.remove(send)
                if send.peer not in self.silent:
                    self._answer_one(send.peer, send.message)

    def _answer_one(self, peer: Any, question: Any) -> None:
        if isinstance(question, WaitReport):
            self.reports.append(question)
            facts = tuple(NodeFact(role, rank, "b", 4242, 0.4, self.ended) for role, rank in question.nodes)
            self.harness.say(peer, WaitNews(question.request, facts, self.barriers))
        else:
            self.queries += 1
            held = tuple(sorted(self.held))
            self.harness.say(peer, Waits(question.request, held, tuple(self.held[each] for each in held), True))
