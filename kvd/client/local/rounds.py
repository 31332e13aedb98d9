"""Rounds, barriers, other nodes and the end, in a store without a cluster: there is nobody to wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.backend import Node
from kvd.client.calls.handle import Handle
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.local.keys import LocalKeys
from kvd.client.local.snapshots import LocalSnapshots
from kvd.errors import NotAllowed


class LocalRounds:
    """Every push is a round of its own. Arguments are checked as with a cluster.

    Args:
        type_name: the type of the store, for the text of an error.
    """

    def __init__(self, keys: LocalKeys, steps: ProgramSteps, type_name: str) -> None:
        self._keys = keys
        self._steps = steps
        self._type_name = type_name

    def flush(self, timeout: float | None) -> Handle:
        self._keys.check_open()
        _check_timeout(timeout)
        return self._keys.answered(self._keys.raise_unobserved)

    def barrier(self, name: str, timeout: float | None) -> Handle:
        self._keys.check_open()
        checks.barrier_name("user", name)
        _check_timeout(timeout)
        return Handle.of(None)

    def meet(self, name: str, says: str | None) -> Handle:
        self._keys.check_open()
        checks.barrier_name("kvd:meet", name)
        return Handle.of(says or "")

    def join(self, until: object = None) -> Handle:
        self._keys.check_open()
        if until is not None:
            checks.barrier_name("until", until, "the point until which join waits")
            self._steps.point()
        return Handle.of(None)

    def rewind(self, clock: int) -> Handle:
        self._keys.check_open()
        checks.clock_number(clock)
        raise NotAllowed(f"a {self._type_name} store has no steps to go back to: load a checkpoint instead")

    def resume(self) -> Handle:
        self._keys.check_open()
        self._steps.check_may_resume()
        return Handle.of(None)

    def clock(self, key: Any) -> Handle:
        return self.version(key)

    def version(self, key: Any) -> Handle:
        self._keys.check_open()
        name = self._keys.written.name(key)
        return self._keys.answered(lambda: self._keys.version(name))


class NoNodes:
    """There are no servers, no scheduler and no other workers."""

    def __init__(self, keys: LocalKeys) -> None:
        self._keys = keys

    def send_command(self, head: int | str, body: bytes | str) -> Handle:
        self._keys.check_open()
        checks.command_head(head)
        checks.command_body(body)
        return Handle.of([])  # one answer per server, and no server to say that it has no such controller

    def dead_nodes(self, timeout_s: float) -> Sequence[Node]:
        self._keys.check_open()
        return []

    def is_scheduler_dead(self, timeout_s: float) -> bool:
        return False

    def most_nodes(self) -> Mapping[str, int]:
        return {"server": 0, "worker": 1}

    def push_staleness(self) -> Handle:
        self._keys.check_open()
        return Handle.of({})

    def late_workers(self) -> tuple[str, ...]:
        return ()

    def gone_workers(self) -> dict[int, bool]:
        return {}


class LocalClosing:
    """There is nothing to leave, but a snapshot to wait for."""

    def __init__(self, keys: LocalKeys, snapshots: LocalSnapshots, steps: ProgramSteps) -> None:
        self._keys = keys
        self._snapshots = snapshots
        self._steps = steps

    def begin_close(self, barrier: bool) -> Handle:
        self._keys.check_open()
        self._steps.ended()
        return Handle.of(None)

    def end_close(self, leaving: Handle) -> None:
        self._snapshots.wait()
        self._keys.close()
        self._keys.raise_unobserved()

    def abandon(self, *, failed: bool) -> None:
        self._snapshots.give_up()
        self._keys.close()
        self._keys.forget_unobserved()

    def withdraw(self) -> None:
        self._keys.close()


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None:
        checks.seconds(timeout)
