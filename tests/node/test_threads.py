"""One thread at a time steps the machine; the loop carries out what belongs to it."""

from __future__ import annotations

import asyncio
import logging
import select
import threading
import time
from collections.abc import Sequence

import pytest

from kvd.core.machine import (
    CallerPeer,
    Complete,
    Connect,
    Effect,
    Event,
    InvalidFrame,
    JobDone,
    LocalCall,
    Peer,
    PeerLost,
    Persisted,
    Received,
    Send,
    ServerPeer,
    Span,
    Tick,
)
from kvd.errors import KvdError
from kvd.node.shell.threads import LinkWaiter
from kvd.protocol.messages import Done, Epoch
from kvd.testing.cluster import wait_until
from tests.node.driver_harness import DriverHarness, call, run
from tests.waiting import eventually, wait_until_inside

PEER = CallerPeer(b"p")


def test_a_call_whose_step_raises_is_completed_with_the_error() -> None:
    def react(event: Event) -> list[Effect]:
        if isinstance(event, LocalCall) and event.call == 1:
            raise ZeroDivisionError("oops")
        return [Complete(event.call, "fine")] if isinstance(event, LocalCall) else []

    async def program() -> None:
        harness.driver.feed(call(1))
        harness.driver.feed(call(2))
        assert [entry.call for entry in harness.completed] == [1, 2]
        assert isinstance(harness.completed[0].error, KvdError)
        assert "oops" in str(harness.completed[0].error)
        assert harness.completed[1].result == "fine"

    harness = DriverHarness(react)
    run(harness, program)


@pytest.mark.parametrize("broken", [Received, Tick, InvalidFrame, JobDone, Persisted, PeerLost])
def test_the_node_survives_any_step_that_raises(broken: type, caplog: pytest.LogCaptureFixture) -> None:
    def react(event: Event) -> list[Effect]:
        if isinstance(event, broken):
            raise RuntimeError("a bug")
        return [Complete(event.call)] if isinstance(event, LocalCall) else []

    async def program() -> None:
        for event in (
            Received(PEER, 1, Epoch(0, 0), Done(1)),
            Tick(),
            InvalidFrame(PEER, "x"),
            JobDone(1),
            Persisted(1),
            PeerLost(1, "gone"),
            call(5),
        ):
            harness.driver.feed(event)
        assert harness.completed == [Complete(5)]
        assert harness.halts == []

    harness = DriverHarness(react)
    with caplog.at_level(logging.ERROR, logger="kvd.node"):
        run(harness, program)
    assert any("could not be handled" in record.getMessage() for record in caplog.records)


def test_one_thread_at_a_time_and_every_event_once() -> None:
    def react(event: Event) -> list[Effect]:
        time.sleep(0.0001)  # time itself: the threads meet
        return [Complete(event.call)] if isinstance(event, LocalCall) else []

    async def program() -> None:
        def feed(first: int) -> None:
            for number in range(first, first + 200):
                harness.driver.feed(call(number))

        await asyncio.gather(*[asyncio.to_thread(feed, first) for first in (0, 1000, 2000)])
        await eventually(lambda: len(harness.completed) == 600)
        numbers = [entry.call for entry in harness.completed]
        for first in (0, 1000, 2000):
            mine = [number for number in numbers if first <= number < first + 200]
            assert mine == list(range(first, first + 200))

    harness = DriverHarness(react)
    run(harness, program)


def test_effects_for_the_loop_are_carried_out_there_in_order() -> None:
    def react(event: Event) -> list[Effect]:
        if not isinstance(event, LocalCall):
            return []
        if event.call % 10 == 0:
            return [Connect(ServerPeer(event.call), "somewhere"), Send(PEER, Done(event.call))]
        return [Send(PEER, Done(event.call))]

    async def program() -> None:
        def feed() -> None:
            for number in range(100):
                harness.driver.feed(call(number))

        await asyncio.to_thread(feed)
        await eventually(lambda: len(harness.transport.sent) == 100)
        assert [message.request for _, message, _ in harness.transport.sent] == list(range(100))
        assert set(harness.transport.threads) == {threading.get_ident()}
        for number in range(0, 100, 10):
            connected = harness.transport.log.index(("connect", number))
            assert harness.transport.log[connected + 1] == ("send", Done(number))

    harness = DriverHarness(react)
    run(harness, program)


def test_a_step_on_the_loop_waits_for_the_effects_of_earlier_ones_elsewhere() -> None:
    def react(event: Event) -> list[Effect]:
        if not isinstance(event, LocalCall):
            return []
        connect: list[Effect] = [Connect(ServerPeer(1), "somewhere")] if event.call == 1 else []
        return [*connect, Send(PEER, Done(event.call))]

    async def program() -> None:
        other = threading.Thread(target=harness.driver.feed, args=(call(1),))
        other.start()
        other.join()  # without a turn of the loop
        harness.driver.feed(call(2))
        assert [message.request for _, message, _ in harness.transport.sent] == [1, 2]

    harness = DriverHarness(react)
    run(harness, program)


def test_an_event_that_finds_the_lock_taken_after_the_last_step_is_not_left_behind() -> None:
    def react(event: Event) -> list[Effect]:
        return [Complete(event.call)] if isinstance(event, LocalCall) else []

    def feed_elsewhere() -> None:
        other = threading.Thread(target=harness.driver.feed, args=(call(2),))
        other.start()
        other.join()

    async def program() -> None:
        machine, next_deadline = harness.machine, harness.machine.next_deadline

        def feeding() -> float | None:
            machine.next_deadline = next_deadline  # type: ignore[method-assign]
            feed_elsewhere()
            return next_deadline()

        machine.next_deadline = feeding  # type: ignore[method-assign]
        harness.driver.feed(call(1))
        assert [entry.call for entry in harness.completed] == [1, 2]

    harness = DriverHarness(react)
    run(harness, program)


def test_stopping_waits_for_effects_that_another_thread_carries_out() -> None:
    sending, may_send = threading.Event(), threading.Event()
    log = []

    def react(event: Event) -> list[Effect]:
        return [Send(PEER, Done(1))] if isinstance(event, LocalCall) else []

    def send(peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        sending.set()
        assert may_send.wait(10)
        wait_until_inside(threading.main_thread(), "stop")
        log.append("sent")
        return True

    async def program() -> None:
        other = threading.Thread(target=harness.driver.feed, args=(call(1),))
        other.start()
        assert sending.wait(10)
        may_send.set()
        harness.driver.stop(0)
        other.join(10)
        assert log == ["sent", "closed"]

    harness = DriverHarness(react)
    harness.transport.send = send  # type: ignore[method-assign]
    harness.transport.close = lambda linger_s: log.append("closed")  # type: ignore[method-assign]
    run(harness, program)


class FakeLinks:
    """The part of a transport that a waiting thread uses."""

    def __init__(self) -> None:
        self.has_links = True
        self.reader = self.pause = self
        self.log: list[str] = []
        self.polls = 0

    def begin(self) -> None:
        self.log.append("pause")

    def end(self) -> None:
        self.log.append("resume")

    def wait(self, timeout_s: float, wake_fd: int) -> bool:
        self.polls += 1
        ready, _, _ = select.select([wake_fd], [], [], min(timeout_s, 10.0))
        return not ready


class Flag:
    """Something awaited, or an interrupt."""

    came = False
    is_done = False

    def done(self) -> bool:
        return self.is_done


def waiter_with(links: FakeLinks) -> LinkWaiter:
    return LinkWaiter(links)  # type: ignore[arg-type]


def test_a_waiting_thread_pauses_the_loop_and_resumes_it_when_the_call_ends() -> None:
    links, awaited = FakeLinks(), Flag()
    waiter = waiter_with(links)
    thread = threading.Thread(target=waiter.wait, args=(awaited, None, Flag()))
    thread.start()
    wait_until(lambda: links.polls, "the thread reads")
    waiter.wait(awaited, None, Flag())  # another thread reads already
    assert links.log == ["pause"]
    awaited.is_done = True
    waiter.wake()
    thread.join(10)
    assert links.log == ["pause", "resume"]
    waiter.close()
    waiter.nudge()  # after the end it does nothing


@pytest.mark.parametrize("reason", ["time", "interrupt", "links"])
def test_a_waiting_thread_gives_up(reason: str) -> None:
    links, interrupt = FakeLinks(), Flag()
    interrupt.came = reason == "interrupt"
    links.has_links = reason != "links"
    waiter = waiter_with(links)
    waiter.wait(Flag(), 0.01 if reason == "time" else None, interrupt)
    assert links.log == ["pause", "resume"]
    waiter.close()


def test_a_waiting_thread_resumes_the_loop_if_a_delivery_raises() -> None:
    def fail(timeout_s: float, wake_fd: int) -> bool:
        raise RuntimeError("a bug")

    links = FakeLinks()
    links.wait = fail  # type: ignore[method-assign]
    waiter = waiter_with(links)
    with pytest.raises(RuntimeError, match="a bug"):
        waiter.wait(Flag(), None, Flag())
    assert links.log == ["pause", "resume"]
    waiter.close()


def test_a_nudge_ends_one_poll() -> None:
    links, awaited = FakeLinks(), Flag()
    waiter = waiter_with(links)
    thread = threading.Thread(target=waiter.wait, args=(awaited, None, Flag()))
    thread.start()
    for polls in (1, 2):
        wait_until(lambda polls=polls: links.polls >= polls, f"poll {polls} begins")  # type: ignore[misc]
        waiter.nudge()
    wait_until(lambda: links.polls >= 3, "the second poll ends")
    awaited.is_done = True
    waiter.wake()
    thread.join(10)
    assert links.polls == 3
    waiter.close()


def test_a_call_that_ends_on_the_reading_thread_does_not_nudge_it() -> None:
    links, awaited = FakeLinks(), Flag()
    waiter = waiter_with(links)

    def deliver(timeout_s: float, wake_fd: int) -> bool:
        awaited.is_done = True
        waiter.wake()
        ready, _, _ = select.select([wake_fd], [], [], 0)
        assert not ready
        return True

    links.wait = deliver  # type: ignore[method-assign]
    waiter.wait(awaited, None, Flag())
    assert links.log == ["pause", "resume"]
    waiter.close()


def test_between_two_steps_others_are_kept_out() -> None:
    general: list[Event] = []

    def react(event: Event) -> list[Effect]:
        general.append(event)
        return []

    harness = DriverHarness(react)

    async def program() -> None:
        stepper = harness.driver.stepper
        assert stepper.enter()
        harness.driver.feed(call(2))
        await asyncio.to_thread(harness.driver.feed, call(4))
        assert not stepper.enter()
        assert general[1:] == []
        stepper.leave(stepper.now() + 60)
        assert general[1:] == [call(2), call(4)]

    run(harness, program)
