"""Readable scripts for a simulated cluster, one thing per line::

    cluster staleness=1 mode=async replicas=2   settings that differ from the defaults
    spawn 1 scheduler 2 servers 3 workers       the workers join, without a program of their own
    init w 0.0                                  every worker
    worker 0 push w 1.0                         starts a call and goes on; `workers …`: all that are alive
    wait worker 0                               its program waits for its last call, and does nothing else
    advance 30s · kill worker 1 [noticed] · restart worker 1 [alone] · pause worker 2 5s · cut worker 1 · heal
    kill server 0 [noticed] · restart server 0 · pause server 0 5s · cut server 0
    restart scheduler [without record] · start worker 3 mode=async
    expect ok worker 0                          its last call has ended well, or does before its deadline
    expect waiting worker 0                     its last call has not ended
    expect ended worker 0                       it has, by now
    expect uncounted worker 0                   it has ended well, and its push does not count
    expect step worker 0 now 7                  what its take_part_again was told; or `later`, `over`
    expect error worker 0 NodeLost worker 1     its last call ends with this error, whose text has these words
    expect worker 0 pull w 6.0                  it makes the call, and gets this
    expect barrier done broken: worker 1        what everyone who waits there was told; or `passed`
    expect partition 0 led by server 1          as every living node sees it, before long; without a backup
    expect partition 0 led by server 1 backed by server 0
    expect value w 6.0 · expect clock worker 0 w 2 · expect member worker 1 dead · expect refused worker 3 ConfigError

Calls are: enter, push KEY VALUE [in STEP], pull KEY, pushpull KEY VALUE, broadcast KEY VALUE, init KEY VALUE [MERGE],
barrier NAME [in STEP], take_part_again [in FIRST END], flush, join, close, withdraw, rewind CLOCK, clock KEY,
describe KEY, set_optimizer RATE [MOMENTUM], update_optimizer RATE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvd.core.worker.machine import WorkerMachine
from tests.simulator.checkers import watch_everything
from tests.simulator.scenario.calls import LatestCalls
from tests.simulator.scenario.expectations import STEP_S, Expectations
from tests.simulator.scenario.words import changed, seconds_of
from tests.simulator.settings import ClusterSettings
from tests.simulator.simulator import World


class ScenarioError(AssertionError):
    """A line did not come true; the text says which and why."""


class Scenario:
    """One script; `run` runs it."""

    def __init__(self, name: str, text: str, seed: int = 1) -> None:
        self.name = name
        self._lines = text.splitlines()
        self._seed = seed
        self._cluster = ClusterSettings()
        self._run: Run | None = None

    def run(self) -> None:
        """Runs every line. Raises ScenarioError for the first that does not come true."""
        for number, line in enumerate(self._lines, 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            try:
                self._run_line(words)
            except Exception as error:
                raise ScenarioError(f"{self.name}:{number}: {line.strip()}: {error or type(error).__name__}") from error

    def _run_line(self, words: list[str]) -> None:
        """`cluster` and `spawn` come before everything else, since they say what the cluster is."""
        if words[0] == "cluster":
            self._cluster = changed(self._cluster, words[1:])
            return
        if words[0] == "spawn":
            counts = {word.rstrip("s"): int(count) for count, word in zip(words[1::2], words[2::2], strict=True)}
            self._cluster = replace(self._cluster, servers=counts["server"], workers=counts["worker"])
        if self._run is None:
            self._run = Run(World(self._seed, self._cluster))
        self._run.line(words)


class Run:
    """A script that is being run in a world."""

    def __init__(self, world: World) -> None:
        watch_everything(world)
        self._world = world
        self._calls = LatestCalls(world)
        self._expectations = Expectations(world, self._calls)
        self._words: dict[str, Callable[[list[str]], None]] = {
            "spawn": self._spawn,
            "init": lambda words: self._everyone_waits(["init", *words]),
            "worker": lambda words: self._calls.make(f"worker {words[0]}", words[1:]),
            "workers": self._everyone,
            "wait": lambda words: self._calls.wait(" ".join(words)),
            "advance": lambda words: world.run(seconds_of(words[0])),
            "kill": self._kill,
            "restart": self._restart,
            "start": self._start,
            "pause": lambda words: world.pause(f"{words[0]} {words[1]}", seconds_of(words[2])),
            "cut": lambda words: world.network.cut_off.add(" ".join(words)),
            "heal": lambda words: world.network.cut_off.clear(),
            "expect": self._expectations.check,
        }

    def line(self, words: list[str]) -> None:
        """Runs one line; AssertionError if it does not come true."""
        self._words[words[0]](words[1:])

    def _spawn(self, words: list[str]) -> None:
        self._world.start_all()
        self._everyone_waits(["enter"])

    def _kill(self, words: list[str]) -> None:
        noticed = words[-1] == "noticed"
        self._world.kill(" ".join(words[:-1] if noticed else words), noticed)

    def _restart(self, words: list[str]) -> None:
        if words[0] == "scheduler":
            self._world.start_scheduler(keep_record=words[1:] != ["without", "record"])
            self._world.run(STEP_S)
        elif words[0] == "server":
            self._world.start_server(int(words[1]))
            self._world.run(STEP_S)
        else:
            self._world.start_worker(int(words[1]))
            self._world.run(STEP_S)
            if words[2:] != ["alone"]:  # it may enter later
                self._calls.make(" ".join(words), ["enter"])
                self._expectations.check(["ok", *words])

    def _start(self, words: list[str]) -> None:
        """Starts a worker that insists on settings of its own."""
        self._world.worker_settings[" ".join(words[:2])] = changed(self._world.cluster, words[2:]).wire()
        self._world.start_worker(int(words[1]))
        self._world.run(STEP_S)

    def _everyone(self, words: list[str]) -> None:
        for name in self._living_workers():
            self._calls.make(name, words)

    def _everyone_waits(self, words: list[str]) -> None:
        self._everyone(words)
        for name in self._living_workers():
            self._expectations.check(["ok", *name.split()])

    def _living_workers(self) -> list[str]:
        return [
            name
            for name, process in self._world.processes.items()
            if isinstance(process.machine, WorkerMachine) and process.alive
        ]
