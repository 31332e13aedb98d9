"""The calls that a script makes: words become requests, and the latest call of each worker is remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvd.core import requests
from kvd.core.places import START, PlaceKind, place_of
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import ABSENT, ASSIGN, Departure, SetOptimizer, UpdateOptimizer
from tests.simulator.process import PendingCall
from tests.simulator.simulator import World
from tests.simulator.workloads.steps import Floats, item

ELEMENTS = 4
LEAVE_S = 0.5  # passes after a worker has left the rounds


@dataclass(slots=True)
class LatestCall:
    """The latest call of a worker, and the array that its result goes to."""

    call: PendingCall
    target: Floats | None


class LatestCalls:
    """Makes calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._latest: dict[str, LatestCall] = {}
        self._barriers: dict[str, list[PendingCall]] = {}

    def make(self, name: str, words: list[str]) -> None:
        """Starts a call of a worker."""
        request, target = _request(words, name)
        self._world.processes[name].calls.waiting.leave()
        call = self._world.submit(self._world.processes[name], request)
        self._latest[name] = LatestCall(call, target)
        if isinstance(request, requests.Barrier):
            self._barriers.setdefault(request.name, []).append(call)
        if isinstance(request, requests.Depart):
            self._world.run(LEAVE_S)

    def wait(self, name: str) -> None:
        """From now on, the worker's program waits for its latest call, and does nothing else."""
        self._world.processes[name].calls.waiting.enter(self._latest[name].call)

    def of(self, name: str) -> LatestCall:
        """The latest call of a worker."""
        return self._latest[name]

    def take_barrier(self, name: str) -> list[PendingCall]:
        """The calls at this barrier that are still the latest of their worker; once."""
        latest = [entry.call for entry in self._latest.values()]
        return [call for call in self._barriers.pop(name) if call in latest]


def _loop(words: list[str]) -> requests.Loop | None:
    """`in 0 10`: a loop from step 0 on, before step 10; no words: none."""
    return requests.Loop(int(words[1]), int(words[2])) if words else None


def _place(words: list[str]) -> int:
    """`in 7`: step 7 of the loops; no words: before them."""
    return place_of(PlaceKind.STEP, int(words[1])) if words else START


def _request(words: list[str], worker: str) -> tuple[requests.Request, Floats | None]:
    """The request of a call, and the array that its result goes to."""
    call, rest = words[0], words[1:]
    plain: dict[str, Callable[[], requests.Request]] = {
        "enter": requests.JoinCluster,
        "barrier": lambda: requests.Barrier(rest[0], place=_place(rest[1:])),
        "flush": requests.Flush,
        "join": lambda: requests.Depart(Departure.DONE),
        "join_until": lambda: requests.StandBy(f"until:{rest[0]}", int(rest[1])),  # after so many steps
        "come_to": lambda: requests.ComeTo(place_of(PlaceKind.OUTSIDE, int(rest[0]))),
        "withdraw": lambda: requests.Depart(Departure.WITHDRAWN),
        "close": lambda: requests.Depart(Departure.LEFT),
        "take_part_again": lambda: requests.TakePartAgain(_loop(rest)),
        "rewind": lambda: requests.Rewind(int(rest[0])),
        "clock": lambda: requests.ClockOf(rest[0]),
        "describe": lambda: requests.DescribeKey(rest[0]),
        "delete": lambda: requests.DeleteKeys(tuple(rest)),
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
        made = item(key, source)
        assert made.spec is not None
        return requests.InitKeys((made._replace(spec=replace(made.spec, merge="".join(rest[2:]))),)), None
    if call == "push":
        return requests.Transfer((item(key, source),), push=True, pull=False, place=_place(rest[2:])), None
    if call == "pushpull":
        return requests.Transfer((item(key, source, target),), push=True, pull=True), target
    if call == "broadcast":
        first = worker == "worker 0"
        entry = item(key, source if first else None, target)
        return requests.Transfer((entry,), push=True, pull=True, how=ASSIGN if first else ABSENT), target
    raise AssertionError(f"no call is named {call!r}")
