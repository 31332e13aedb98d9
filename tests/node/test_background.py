"""Commands and records in the executor."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvd.core.machine import (
    Effect,
    Event,
    InRun,
    Job,
    JobDone,
    ListRows,
    LocalCall,
    Peer,
    Persist,
    Persisted,
    PersistFailed,
    ReadRows,
    Run,
    Send,
    ServerPeer,
    Span,
    TableVersion,
)
from kvd.errors import NotAllowed
from kvd.node.jobs.runner import JobRunner
from kvd.node.shell.background import FEW_IDS_NBYTES
from kvd.node.storage import records
from kvd.protocol.messages import NO_RUN, Done, Epoch
from kvd.transport.links.write_coalescing import WriteCoalescing
from tests.node.driver_harness import DriverHarness, call, run
from tests.waiting import eventually


def test_a_command_that_raises_system_exit_fails() -> None:
    def end(body: bytes) -> bytes:
        raise SystemExit(3)

    def react(event: Event) -> list[Effect]:
        return [InRun(4, Epoch(1, 2), [Run(9, "end", Span(None, 0, 0))])] if isinstance(event, LocalCall) else []

    async def program() -> None:
        harness.driver.feed(call(1))
        await eventually(lambda: any(isinstance(event, JobDone) for event in harness.machine.events))
        (done,) = [event for event in harness.machine.events if isinstance(event, JobDone)]
        assert (done.job, done.run) == (9, 4)
        assert isinstance(done.error, NotAllowed)
        assert "SystemExit" in str(done.error)

    with ThreadPoolExecutor(1) as executor:
        harness = DriverHarness(react, new_runner=lambda: JobRunner({"end": end}), executor=executor)
        run(harness, program)


IDS = Span(bytes(FEW_IDS_NBYTES), 0, FEW_IDS_NBYTES)
MANY_IDS = Span(bytes(FEW_IDS_NBYTES + 8), 0, FEW_IDS_NBYTES + 8)
VERSION = TableVersion(1, 0, 0)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (ReadRows(7, "t", 0, VERSION, (IDS,)), ["send", "job", "written"]),
        (ReadRows(7, "t", 0, VERSION, (MANY_IDS,)), ["send", "written", "job"]),
        (ReadRows(7, "t", 0, VERSION, (IDS, IDS)), ["send", "written", "job"]),
        (ListRows(7, "t", 0, 0, 0, False, 1), ["send", "written", "job"]),
    ],
    ids=["few rows", "many rows", "few rows for many", "another job"],
)
def test_an_answer_waits_for_a_short_read_and_for_nothing_else(
    job: Job, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    holding = WriteCoalescing()

    class Runner(JobRunner):
        def run(self, job: Job, run: int = NO_RUN) -> JobDone:
            log.append("job")
            return JobDone(7, None)

    class AllHeld:
        def write_held(self) -> None:
            log.append("written")

    def send(peer: Peer, header: bytes, payload: Any) -> bool:
        assert holding.is_on
        log.append("send")
        holding.held(AllHeld())
        return True

    def react(event: Event) -> list[Effect]:
        return [InRun(4, Epoch(1, 2), [Send(ServerPeer(5), Done(5)), job])] if isinstance(event, LocalCall) else []

    async def program() -> None:
        monkeypatch.setattr(harness.transport, "send", send)
        harness.driver.feed(call(1))
        assert log == expected
        assert not holding.is_on

    harness = DriverHarness(react, new_runner=Runner, holding=holding)
    run(harness, program)


def test_records_are_saved_one_after_the_other_and_only_the_newest_of_those_that_wait() -> None:
    saved: list[Any] = []
    goes_on = threading.Event()

    def save(record: Any) -> None:
        saved.append(record)
        goes_on.wait(30)

    async def program() -> None:
        harness.driver.feed(call(1))
        await eventually(lambda: saved)
        for number in (2, 3, 4):
            harness.driver.feed(call(number))
        assert not persisted(harness)
        goes_on.set()
        await eventually(lambda: Persisted(4) in harness.machine.events)
        assert saved == [{"call": 1}, {"call": 4}]
        assert persisted(harness) == [1, 4]

    with ThreadPoolExecutor(4) as executor:
        harness = DriverHarness(persisting, executor=executor, persist=save)
        run(harness, program)


def test_a_record_that_cannot_be_saved_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(records, "FIRST_PAUSE_S", 0.01)
    tried: list[Any] = []

    def save(record: Any) -> None:
        tried.append(record)
        if len(tried) < 4:
            raise OSError("disk full")

    async def program() -> None:
        harness.driver.feed(call(1))
        await eventually(lambda: PersistFailed("disk full") in harness.machine.events)
        harness.driver.feed(call(2))
        await eventually(lambda: Persisted(2) in harness.machine.events)
        assert tried[-1] == {"call": 2}  # the newest
        assert harness.machine.events.count(PersistFailed("disk full")) == 1
        assert not harness.halts

    with caplog.at_level(logging.WARNING, logger="kvd.node"), ThreadPoolExecutor(1) as executor:
        harness = DriverHarness(persisting, executor=executor, persist=save)
        run(harness, program)
    first, last = caplog.messages
    assert first.startswith("the state cannot be saved (disk full): free space in state_dir")
    assert last == "the state can be saved again"


def persisting(event: Event) -> list[Effect]:
    """The record after each call has the token of its number."""
    return [Persist(event.call, {"call": event.call})] if isinstance(event, LocalCall) else []


def persisted(harness: DriverHarness) -> list[int]:
    return [event.token for event in harness.machine.events if isinstance(event, Persisted)]
