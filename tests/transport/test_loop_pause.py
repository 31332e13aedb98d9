"""The loop does not see the links while threads read, and for a moment between two calls."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Iterator

import pytest

from kvd.transport import host
from kvd.transport.links.loop_pause import LoopPause
from tests.transport.host_harness import run, two_nodes
from tests.waiting import eventually


class Watched:
    """A pause of the loop's reading of one eventfd, which is readable."""

    def __init__(self) -> None:
        self.links = select.epoll()
        self.descriptor = os.eventfd(1)
        self.links.register(self.descriptor, select.EPOLLIN)
        self.pause = LoopPause(self.links)
        self.stays = 0
        self.pause.stays = self._note

    def _note(self) -> None:
        self.stays += 1

    def sees(self) -> bool:
        return bool(select.select([self.pause.fileno()], [], [], 0)[0])

    def call(self, *, often: bool) -> None:
        self.pause.begin()
        assert not self.sees()
        self.pause.may_stay = often
        self.pause.end()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.pause.close()
    watched.links.close()
    os.close(watched.descriptor)


def test_pauses_nest(watched: Watched) -> None:
    assert watched.sees()
    watched.pause.begin()
    watched.pause.begin()
    watched.pause.end()
    assert not watched.sees()
    watched.pause.end()
    assert watched.sees()
    assert watched.stays == 0


def test_the_pause_stays_while_calls_follow_each_other(watched: Watched) -> None:
    for _ in range(3):
        watched.call(often=True)
        assert not watched.sees()
    assert watched.stays == 1
    assert not watched.pause.end_if_unused()  # calls were made since it was looked at last
    watched.call(often=True)
    assert not watched.pause.end_if_unused()
    assert not watched.sees()
    assert watched.pause.end_if_unused()
    assert watched.sees()
    watched.call(often=True)
    assert watched.stays == 2


def test_a_call_that_must_not_stay_ends_the_pause(watched: Watched) -> None:
    watched.call(often=True)
    watched.call(often=False)
    assert watched.sees()


def test_a_message_ends_the_stay_before_and_after_the_end_of_the_call(watched: Watched) -> None:
    watched.call(often=True)
    watched.pause.end_stay()
    assert watched.sees()
    watched.pause.begin()
    watched.pause.may_stay = True
    watched.pause.end_stay()  # of another thread: this one reads still
    assert not watched.sees()
    watched.pause.end()
    assert watched.sees()


def test_a_thread_that_reads_for_long_is_not_disturbed(watched: Watched) -> None:
    watched.call(often=True)
    watched.pause.begin()
    assert not watched.pause.end_if_unused()
    assert not watched.pause.end_if_unused()
    watched.pause.end_stay()
    assert not watched.sees()
    watched.pause.end()
    assert watched.sees()
    assert watched.pause.end_if_unused()


def test_nothing_happens_after_the_end() -> None:
    watched = Watched()
    watched.pause.begin()
    watched.pause.close()
    watched.pause.end()
    watched.pause.begin()
    watched.links.close()
    os.close(watched.descriptor)


@pytest.mark.usefixtures("nothing_left_behind", "quick_releases")
def test_the_loop_reads_again_soon_after_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STAY_S", 0.01)

    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            pause = client.transport.reader.pause
            pause.begin()
            pause.may_stay = True
            pause.end()
            assert server.send(server.messages[0][0], b"nobody asked")
            await eventually(lambda: client.messages)
            assert not pause.may_stay

    run(main)


@pytest.mark.usefixtures("nothing_left_behind", "quick_releases")
def test_the_loop_reads_again_as_soon_as_a_message_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STAY_S", 3600.0)

    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            pause = client.transport.reader.pause
            pause.begin()
            pause.may_stay = True
            pause.end()
            await asyncio.sleep(0)
            assert client.send(incarnation, b"question")
            await eventually(lambda: server.messages)
            assert server.send(server.messages[0][0], b"answer")
            await eventually(lambda: client.messages)

    run(main)
