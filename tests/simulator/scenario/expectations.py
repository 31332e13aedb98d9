"""What a script expects: each expectation runs the world until it can be decided."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.membership import ViewState, name_of
from kvd.core.requests import Return, Returned, UncountedVersions
from kvd.core.server.router import ServerRouter
from kvd.core.worker.machine import WorkerMachine
from kvd.protocol.messages import NO_RANK
from tests.simulator.scenario.calls import LatestCall, LatestCalls
from tests.simulator.simulator import World

STEP_S = 0.5  # passes before something that takes little time is looked at
SETTLED_S = 10.0  # until a partition has its backup, once a death is known


class Expectations:
    """Checks the words after `expect`."""

    def __init__(self, world: World, calls: LatestCalls) -> None:
        self._world = world
        self._calls = calls
        self._checks: dict[str, Callable[[list[str]], None]] = {
            "ok": self._ok,
            "waiting": self._waiting,
            "uncounted": self._uncounted,
            "step": self._step,
            "together": self._together,
            "ended": lambda words: _check(calls.of(" ".join(words)).call.done, "it still waits"),
            "error": self._error,
            "worker": self._result,
            "barrier": self._barrier,
            "value": self._value,
            "clock": self._clock,
            "member": self._member,
            "partition": self._partition,
            "refused": self._refused,
        }

    def check(self, words: list[str]) -> None:
        """AssertionError if it does not come true."""
        self._checks[words[0]](words[1:])

    def _ended(self, name: str) -> LatestCall:
        latest = self._calls.of(name)
        call = latest.call
        self._world.run(max(0.0, call.deadline - self._world.clock.now) + 1.0, lambda: call.done)
        _check(call.done, f"{name} still waits for its {type(call.request).__name__}")
        return latest

    def _ok(self, words: list[str]) -> None:
        error = self._ended(" ".join(words)).call.error
        _check(error is None, f"it ended with {type(error).__name__}: {error}")

    def _uncounted(self, words: list[str]) -> None:
        call = self._ended(" ".join(words)).call
        _check(isinstance(call.result, UncountedVersions), f"it ended with {call.result or call.error}")

    def _step(self, words: list[str]) -> None:
        """The latest call of a worker, a take_part_again, ended so: `now 7`, `later`, `over`."""
        call = self._ended(" ".join(words[:2])).call
        told = call.result
        _check(isinstance(told, Returned), f"it ended with {call.error}")
        shown = f"now {told.step}" if told.how is Return.NOW else told.how.name.lower()
        _check(shown == " ".join(words[2:]), f"it was told {shown}")

    def _together(self, words: list[str]) -> None:
        """The latest call of a worker, a join_until, ended, and all go on with this step."""
        call = self._ended(" ".join(words[:2])).call
        _check(call.result == int(words[2]), f"it ended with {call.error or call.result}")

    def _waiting(self, words: list[str]) -> None:
        self._world.run(STEP_S)
        call = self._calls.of(" ".join(words)).call
        _check(not call.done, f"it has ended: {call.error or call.result}")

    def _error(self, words: list[str]) -> None:
        error = self._ended(" ".join(words[:2])).call.error
        _check(type(error).__name__ == words[2], f"it ended with {type(error).__name__}: {error}")
        _check(" ".join(words[3:]) in str(error), f"the error says: {error}")

    def _result(self, words: list[str]) -> None:
        name, call, expected = f"worker {words[0]}", words[1:-1], float(words[-1])
        self._calls.make(name, call)
        self._ok(name.split())
        target = self._calls.of(name).target
        assert target is not None
        _check(set(target.tolist()) == {expected}, f"it got {sorted(set(target.tolist()))}")

    def _barrier(self, words: list[str]) -> None:
        name, outcome, missing = words[0], words[1], " ".join(words[2:])
        calls = self._calls.take_barrier(name)
        timeout_s = self._world.cluster.timeouts.call_timeout_s
        self._world.run(timeout_s + 1.0, lambda: all(call.done for call in calls))
        for call in calls:
            told = getattr(call.error, "missing", ())
            if outcome == "passed":
                _check(call.done and call.error is None, f"{call.error}")
            else:
                _check(", ".join(told) == missing, f"it ended with {type(call.error).__name__}: {call.error}")

    def _value(self, words: list[str]) -> None:
        self._world.run(STEP_S)
        values = set(self._world.value(words[0]).tolist())
        _check(values == {float(words[1])}, f"it is {sorted(values)}")

    def _clock(self, words: list[str]) -> None:
        name = " ".join(words[:2])
        self._calls.make(name, ["clock", words[2]])
        call = self._ended(name).call
        _check(call.result == int(words[3]), f"it is {call.result or call.error}")

    def _member(self, words: list[str]) -> None:
        """As every server and worker that is alive sees it."""
        self._world.run(STEP_S)
        for name, view in self._views():
            member = view.members.get((words[0], int(words[1])))
            state = None if member is None else member.state
            _check(state == words[2], f"{name} sees it as {state}")

    def _partition(self, words: list[str]) -> None:
        """As every server and worker that is alive sees it, once a death is known and what it takes has been copied."""
        number, wanted = int(words[0]), " ".join(words[1:])
        timeouts = self._world.cluster.timeouts
        limit_s = timeouts.server_timeout_s + SETTLED_S
        self._world.run(limit_s, lambda: all(_told_of(number, view) == wanted for _, view in self._views()))
        for name, view in self._views():
            told = _told_of(number, view)
            _check(told == wanted, f"{name} sees it {told}")

    def _views(self) -> list[tuple[str, ViewState]]:
        """The newest view of each server and worker that is alive, with its name."""
        return [
            (process.name, machine.view if isinstance(machine, WorkerMachine) else machine.latest().session.view)
            for process in self._world.processes.values()
            if process.alive and isinstance(machine := process.machine, WorkerMachine | ServerRouter)
        ]

    def _refused(self, words: list[str]) -> None:
        halted = self._world.processes[" ".join(words[:2])].halted
        _check(type(halted).__name__ == words[2], f"it was told {type(halted).__name__}: {halted}")
        _check(" ".join(words[3:]) in str(halted), f"it was told: {halted}")


def _told_of(partition: int, view: ViewState) -> str:
    """Who leads a partition and who backs it up, as a script says it."""
    backup = view.backup_of(partition)
    backed = "" if backup == NO_RANK else f" backed by {name_of('server', backup)}"
    return f"led by {name_of('server', view.leader_of(partition))}{backed}"


def _check(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)
