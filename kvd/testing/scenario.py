"""Readable scripts for a simulated cluster, one thing per line::

    cluster workers=3 staleness=1 mode=async    settings that differ from the usual ones
    spawn 1 scheduler 2 servers 3 workers       the workers join, without a program of their own
    init w 0.0                                  every worker
    worker 0 push w 1.0                         starts a call and goes on; `workers …`: all that are alive
    advance 30s · kill worker 1 [noticed] · restart worker 1 · pause worker 2 5s · cut worker 1 · heal
    restart scheduler [without record] · start worker 3 mode=async
    expect ok worker 0                          its last call has ended well, or does before its deadline
    expect waiting worker 0                     its last call has not ended
    expect ended worker 0                       it has, by now
    expect error worker 0 NodeLost worker 1     its last call ends with this error, whose text has these words
    expect worker 0 pull w 6.0                  it makes the call, and gets this
    expect barrier done broken: worker 1        what everyone was told who waits there; or `passed`
    expect value w 6.0 · expect clock worker 0 w 2 · expect member worker 1 dead · expect refused worker 3 ConfigError

Calls are: push KEY VALUE, pull KEY, pushpull KEY VALUE, broadcast KEY VALUE, init KEY VALUE, barrier NAME, flush, join,
close, rewind CLOCK, clock KEY, describe KEY, set_optimizer RATE [MOMENTUM], update_optimizer RATE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from kvd.core import requests
from kvd.core.worker.machine import WorkerMachine
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import ABSENT, ASSIGN, Departure, SetOptimizer, UpdateOptimizer
from kvd.testing.checkers import watch_everything
from kvd.testing.process import Process, Ticket
from kvd.testing.settings import Cluster
from kvd.testing.simulator import World
from kvd.testing.workloads import Floats, item

ELEMENTS = 4
STEP_S = 0.5  # what passes while a step that takes no time itself has its effect


class ScenarioError(AssertionError):
    """A line did not come true; the text says which and why."""


@dataclass(slots=True)
class _Last:
    """The last call of a worker."""

    ticket: Ticket
    target: Floats | None


class Scenario:
    """Runs one script."""

    def __init__(self, name: str, text: str, seed: int = 1) -> None:
        self.name = name
        self._lines = text.splitlines()
        self._seed = seed
        self._cluster = Cluster()
        self._world: World | None = None
        self._last: dict[str, _Last] = {}
        self._barriers: dict[str, list[Ticket]] = {}
        self._words: dict[str, Callable[[list[str]], None]] = {
            "cluster": self._set_cluster,
            "spawn": self._spawn,
            "init": lambda words: self._everyone_waits(["init", *words]),
            "worker": lambda words: self._call(f"worker {words[0]}", words[1:]),
            "workers": self._everyone,
            "advance": lambda words: self.world.run(_seconds(words[0])),
            "kill": self._kill,
            "restart": self._restart,
            "start": self._start,
            "pause": lambda words: self.world.pause(f"{words[0]} {words[1]}", _seconds(words[2])),
            "cut": lambda words: self.world.network.cut_off.add(" ".join(words)),
            "heal": lambda words: self.world.network.cut_off.clear(),
            "expect": self._expect,
        }
        self._expectations: dict[str, Callable[[list[str]], None]] = {
            "ok": self._expect_ok,
            "waiting": self._expect_waiting,
            "ended": lambda words: _check(self._last[" ".join(words)].ticket.done, "it still waits"),
            "error": self._expect_error,
            "worker": self._expect_result,
            "barrier": self._expect_barrier,
            "value": self._expect_value,
            "clock": self._expect_clock,
            "member": self._expect_member,
            "refused": self._expect_refused,
        }

    @property
    def world(self) -> World:
        """The cluster, made by the first step that needs it."""
        if self._world is None:
            self._world = World(self._seed, self._cluster)
            watch_everything(self._world)
        return self._world

    def run(self) -> None:
        """Runs every line. Raises ScenarioError for the first that does not come true."""
        for number, line in enumerate(self._lines, 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            try:
                self._words[words[0]](words[1:])
            except Exception as error:
                raise ScenarioError(f"{self.name}:{number}: {line.strip()}: {error or type(error).__name__}") from error

    # ── the cluster ──

    def _set_cluster(self, words: list[str]) -> None:
        self._cluster = replace(self._cluster, **_settings(words))

    def _spawn(self, words: list[str]) -> None:
        counts = {word.rstrip("s"): int(count) for count, word in zip(words[::2], words[1::2], strict=True)}
        self._cluster = replace(self._cluster, servers=counts["server"], workers=counts["worker"])
        self.world.start_all()
        self._everyone_waits(["enter"])

    def _kill(self, words: list[str]) -> None:
        noticed = words[-1] == "noticed"
        self.world.kill(" ".join(words[:-1] if noticed else words), noticed)

    def _restart(self, words: list[str]) -> None:
        if words[0] == "scheduler":
            self.world.start_scheduler(keep_record=words[1:] != ["without", "record"])
            self.world.run(STEP_S)
        elif words[0] == "server":
            self.world.start_server(int(words[1]))
            self.world.run(STEP_S)
        else:
            self.world.start_worker(int(words[1]))
            self._call(" ".join(words), ["enter"])
            self._expect_ok(words)

    def _start(self, words: list[str]) -> None:
        """A worker that insists on settings of its own."""
        name = " ".join(words[:2])
        mine = replace(self._cluster, **_settings(words[2:]))
        self.world.worker_settings[name] = mine.settings()
        self.world.start_worker(int(words[1]))
        self.world.run(STEP_S)

    # ── calls ──

    def _process(self, name: str) -> Process:
        return self.world.processes[name]

    def _everyone(self, words: list[str]) -> None:
        for name, process in list(self.world.processes.items()):
            if isinstance(process.machine, WorkerMachine) and process.alive:
                self._call(name, words)

    def _everyone_waits(self, words: list[str]) -> None:
        self._everyone(words)
        for name, process in self.world.processes.items():
            if isinstance(process.machine, WorkerMachine) and process.alive:
                self._expect_ok(name.split())

    def _call(self, name: str, words: list[str]) -> None:
        process = self._process(name)
        request, target = _request(words, process)
        ticket = self.world.submit(process, request)
        self._last[name] = _Last(ticket, target)
        if isinstance(request, requests.Barrier):
            self._barriers.setdefault(request.name, []).append(ticket)
        if isinstance(request, requests.LeaveRounds):
            self.world.run(STEP_S)

    # ── expectations ──

    def _expect(self, words: list[str]) -> None:
        self._expectations[words[0]](words[1:])

    def _ended(self, name: str) -> _Last:
        last = self._last[name]
        self.world.run(max(0.0, last.ticket.deadline - self.world.now) + 1.0, lambda: last.ticket.done)
        _check(last.ticket.done, f"{name} still waits for its {type(last.ticket.request).__name__}")
        return last

    def _expect_ok(self, words: list[str]) -> None:
        error = self._ended(" ".join(words)).ticket.error
        _check(error is None, f"it ended with {type(error).__name__}: {error}")

    def _expect_waiting(self, words: list[str]) -> None:
        self.world.run(STEP_S)
        last = self._last[" ".join(words)]
        _check(not last.ticket.done, f"it has ended: {last.ticket.error or last.ticket.result}")

    def _expect_error(self, words: list[str]) -> None:
        error = self._ended(" ".join(words[:2])).ticket.error
        _check(type(error).__name__ == words[2], f"it ended with {type(error).__name__}: {error}")
        _check(" ".join(words[3:]) in str(error), f"the error says: {error}")

    def _expect_result(self, words: list[str]) -> None:
        name, call, expected = f"worker {words[0]}", words[1:-1], float(words[-1])
        self._call(name, call)
        last = self._ended(name)
        _check(last.ticket.error is None, f"it ended with {type(last.ticket.error).__name__}: {last.ticket.error}")
        assert last.target is not None
        _check(set(last.target.tolist()) == {expected}, f"it got {sorted(set(last.target.tolist()))}")

    def _expect_barrier(self, words: list[str]) -> None:
        name, outcome, missing = words[0], words[1], " ".join(words[2:])
        tickets = self._barriers.pop(name)
        waiting = [ticket for ticket in tickets if any(ticket is last.ticket for last in self._last.values())]
        self.world.run(self._cluster.call_timeout_s + 1.0, lambda: all(ticket.done for ticket in waiting))
        for ticket in waiting:
            told = getattr(ticket.error, "missing", ())
            if outcome == "passed":
                _check(ticket.done and ticket.error is None, f"{ticket.error}")
            else:
                _check(", ".join(told) == missing, f"it ended with {type(ticket.error).__name__}: {ticket.error}")

    def _expect_value(self, words: list[str]) -> None:
        self.world.run(STEP_S)
        values = set(self.world.value(words[0]).tolist())
        _check(values == {float(words[1])}, f"it is {sorted(values)}")

    def _expect_clock(self, words: list[str]) -> None:
        name = " ".join(words[:2])
        self._call(name, ["clock", words[2]])
        ticket = self._ended(name).ticket
        _check(ticket.result == int(words[3]), f"it is {ticket.result or ticket.error}")

    def _expect_member(self, words: list[str]) -> None:
        """As every server and worker that is alive sees it."""
        self.world.run(STEP_S)
        for process in self.world.processes.values():
            view = getattr(process.machine, "view", None) or getattr(process.machine, "_view", None)
            if process.alive and process.name != "scheduler" and not callable(view) and view is not None:
                member = view.members.get((words[0], int(words[1])))
                state = None if member is None else member.state
                _check(state == words[2], f"{process.name} sees it as {state}")

    def _expect_refused(self, words: list[str]) -> None:
        halted = self._process(" ".join(words[:2])).halted
        _check(type(halted).__name__ == words[2], f"it was told {type(halted).__name__}: {halted}")
        _check(" ".join(words[3:]) in str(halted), f"it was told: {halted}")


def _check(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)


def _seconds(word: str) -> float:
    return float(word.removesuffix("s"))


def _settings(words: list[str]) -> dict[str, Any]:
    """`name=value` as the fields of Cluster have them."""
    kinds = {field.name: type(getattr(Cluster(), field.name)) for field in fields(Cluster)}
    settings: dict[str, Any] = {}
    for word in words:
        name, value = word.split("=")
        settings[name] = value == "true" if kinds[name] is bool else kinds[name](value)
    return settings


def _request(words: list[str], process: Process) -> tuple[requests.Request, Floats | None]:
    """The request of a call, and the array that its result goes to."""
    call, rest = words[0], words[1:]
    plain: dict[str, Callable[[], requests.Request]] = {
        "enter": requests.JoinCluster,
        "barrier": lambda: requests.Barrier(rest[0]),
        "flush": requests.Flush,
        "join": lambda: requests.LeaveRounds(Departure.DONE),
        "close": lambda: requests.LeaveRounds(Departure.LEFT),
        "rewind": lambda: requests.Rewind(int(rest[0])),
        "clock": lambda: requests.ClockOf(rest[0]),
        "describe": lambda: requests.DescribeKey(rest[0]),
        "set_optimizer": lambda: requests.Control(
            (SetOptimizer(0, to_wire(SGD(float(rest[0]), momentum=float("".join(rest[1:2]) or 0)))),)
        ),
        "update_optimizer": lambda: requests.Control(
            (UpdateOptimizer(0, {"learning_rate": float(rest[0])}),), staged_first=True
        ),
    }
    if call in plain:
        return plain[call](), None
    key = rest[0]
    target = np.full(ELEMENTS, np.nan, np.float32)
    if call == "pull":
        return requests.Transfer((item(key, None, target),), push=False, pull=True), target
    source = np.full(ELEMENTS, float(rest[1]), np.float32)
    if call == "init":
        return requests.InitKeys((item(key, source),)), None
    if call == "push":
        return requests.Transfer((item(key, source),), push=True, pull=False), None
    if call == "pushpull":
        return requests.Transfer((item(key, source, target),), push=True, pull=True), target
    if call == "broadcast":
        first = process.name == "worker 0"
        entry = item(key, source if first else None, target)
        return requests.Transfer((entry,), push=True, pull=True, how=ASSIGN if first else ABSENT), target
    raise AssertionError(f"no call is named {call!r}")
