"""Commands and records in the executor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvd.core.machine import (
    Effect,
    Event,
    InRun,
    JobDone,
    LocalCall,
    Persist,
    Persisted,
    Run,
    Span,
)
from kvd.errors import NotAllowed
from kvd.node.jobs import JobRunner
from kvd.protocol.messages import Epoch
from tests.node.driver_harness import DriverHarness, call, run, until


def test_a_command_that_raises_system_exit_fails() -> None:
    def end(body: bytes) -> bytes:
        raise SystemExit(3)

    def react(event: Event) -> list[Effect]:
        return [InRun(4, Epoch(1, 2), [Run(9, "end", Span(None, 0, 0))])] if isinstance(event, LocalCall) else []

    async def program() -> None:
        harness.driver.feed(call(1))
        await until(lambda: any(isinstance(event, JobDone) for event in harness.machine.events))
        (done,) = [event for event in harness.machine.events if isinstance(event, JobDone)]
        assert (done.job, done.run) == (9, 4)
        assert isinstance(done.error, NotAllowed)
        assert "SystemExit" in str(done.error)

    with ThreadPoolExecutor(1) as executor:
        harness = DriverHarness(react, new_runner=lambda: JobRunner({"end": end}), executor=executor)
        run(harness, program)


@pytest.mark.parametrize("fails", [False, True])
def test_records_are_saved_in_the_background(fails: bool) -> None:
    saved: list[Any] = []

    def save(record: Any) -> None:
        if fails:
            raise OSError("disk full")
        saved.append(record)

    def react(event: Event) -> list[Effect]:
        return [Persist(4, {"a": 1})] if isinstance(event, LocalCall) else []

    async def program() -> None:
        harness.driver.feed(call(1))
        if fails:
            await until(lambda: harness.halts)
            assert "disk full" in str(harness.halts[0])
            assert Persisted(4) not in harness.machine.events
        else:
            await until(lambda: Persisted(4) in harness.machine.events)
            assert saved == [{"a": 1}]

    with ThreadPoolExecutor(1) as executor:
        harness = DriverHarness(react, executor=executor, persist=save)
        run(harness, program)
