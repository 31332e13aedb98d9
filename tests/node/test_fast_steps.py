"""A shorter way for some events of a daemon: on the loop, when nothing else is to be done."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvd.core.machine import CallerPeer, Complete, Effect, Event, JobDone, Received, Send
from kvd.protocol.messages import Done, Epoch
from tests.node.driver_harness import DriverHarness, call, run

PEER = CallerPeer(b"p")


def received(request: int) -> Received:
    return Received(PEER, 1, Epoch(0, 0), Done(request))


class Fast:
    """Takes messages with odd numbers, and ends of jobs that these have caused."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.broken = False

    def __call__(self, event: Event) -> list[Effect] | None:
        if self.broken:
            raise RuntimeError("a bug")
        if isinstance(event, Received) and getattr(event.message, "request", 0) % 2:
            self.events.append(event)
            return [Complete(100)]
        if isinstance(event, JobDone) and event.job == 1:
            self.events.append(event)
            return [Send(PEER, Done(7))]
        return None


def harness_with(fast: Fast, general: list[Event]) -> DriverHarness:
    def react(event: Event) -> list[Effect]:
        general.append(event)
        return []

    return DriverHarness(react, fast_step=fast)


def test_what_it_takes_goes_no_other_way() -> None:
    fast, general = Fast(), []  # type: tuple[Fast, list[Event]]
    harness = harness_with(fast, general)

    async def program() -> None:
        harness.driver.feed(received(1))
        harness.driver.feed(received(2))
        harness.driver.feed(received(3))
        assert fast.events == [received(1), received(3)]
        assert received(2) in general
        assert received(1) not in general
        assert len(harness.completed) == 2

    run(harness, program)


def test_events_that_its_effects_cause_follow_at_once() -> None:
    """The end of a job that it takes, too; and one that it does not take goes the general way."""
    fast, general = Fast(), []  # type: tuple[Fast, list[Event]]
    harness = harness_with(fast, general)

    async def program() -> None:
        stepper = harness.driver.stepper
        jobs = [JobDone(1), JobDone(2), JobDone(1)]

        def completed(_: Complete) -> None:
            for job in jobs:
                stepper.queue(job)

        harness.driver._on_complete = completed
        harness.driver.feed(received(1))
        assert fast.events[1:] == [JobDone(1)]
        assert [event for event in general if isinstance(event, JobDone)] == [JobDone(2), JobDone(1)]
        assert [message for _, message, _ in harness.transport.sent] == [Done(7)]

    run(harness, program)


def test_other_threads_go_the_general_way() -> None:
    fast, general = Fast(), []  # type: tuple[Fast, list[Event]]
    harness = harness_with(fast, general)

    async def program() -> None:
        await asyncio.to_thread(harness.driver.feed, received(1))
        assert fast.events == []
        assert received(1) in general

    run(harness, program)


def test_one_that_raises_ends_no_daemon(caplog: pytest.LogCaptureFixture) -> None:
    fast, general = Fast(), []  # type: tuple[Fast, list[Event]]
    harness = harness_with(fast, general)

    async def program() -> None:
        fast.broken = True
        harness.driver.feed(received(1))
        fast.broken = False
        harness.driver.feed(received(3))
        harness.driver.feed(call(5))
        assert len(fast.events) == 1

    with caplog.at_level(logging.ERROR, logger="kvd.node"):
        run(harness, program)
    assert any("could not be handled" in record.getMessage() for record in caplog.records)


def test_between_two_steps_others_are_kept_out() -> None:
    general: list[Any] = []
    harness = harness_with(Fast(), general)

    async def program() -> None:
        stepper = harness.driver.stepper
        assert stepper.enter()
        harness.driver.feed(received(2))
        await asyncio.to_thread(harness.driver.feed, received(4))
        assert not stepper.enter()
        assert general[1:] == []
        stepper.leave(stepper.now() + 60)
        assert general[1:] == [received(2), received(4)]

    run(harness, program)
