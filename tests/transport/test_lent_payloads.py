"""Payloads that a program keeps: nothing but their end, or that of their process, lets their memory be used again."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvd.core.machine import Peer, ServerPeer
from kvd.transport.memory.offered import MapBudget
from kvd.transport.memory.remote_segments import (
    Children,
    LinkSocket,
    RemoteSegments,
    _after_fork_in_parent,
    _before_fork,
    _lending,
    reference_to,
)
from kvd.transport.memory.segments import Bytes
from tests.transport.host_harness import Node, connected, run
from tests.transport.link_harness import MIB, End, block_of, pair, pattern, spans, until
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def lent_array(left: End, right: End, nbytes: int = MIB) -> Bytes:
    """What the program of `right` keeps of a block of `left`."""
    assert left.send(b"h", block_of(left, nbytes))
    until(lambda: right.messages, right)
    payload = right.messages.pop()[1]
    assert payload is not None
    reference = reference_to(payload[8:])
    assert reference is not None
    reference.lend()
    return np.frombuffer(payload, np.uint8)[8:]


@contextmanager
def forked() -> Iterator[None]:
    """A child that does nothing, and ends at the end of the block."""
    waiting, stop = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(stop)
        os.read(waiting, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(stop)
        os.close(waiting)
        os.waitpid(child, 0)


def test_memory_of_this_process_is_not_lent() -> None:
    with pair(0) as (left, right):
        for body in (bytes(1000), bytes(MIB)):
            assert left.send(b"h", body)
            until(lambda: right.messages, right, left)
            payload = right.messages.pop()[1]
            assert payload is not None
            assert reference_to(payload) is None


def test_a_lent_payload_is_over_with_its_last_view() -> None:
    with pair() as (left, right):
        array = lent_array(left, right)
        assert left.link.leases == 1
        view = array[1000:2000].view(np.float32)
        owner: Any = view.base
        reference = reference_to(owner.base)
        assert reference is not None
        del array, owner
        assert not reference.is_over()
        del view
        assert reference.is_over()
        right.link.release_gone()
        until(lambda: not left.link.leases, left)


def test_a_child_keeps_what_was_lent_when_it_was_forked() -> None:
    with pair() as (left, right):
        array = lent_array(left, right)
        with forked():
            del array
            right.link.release_gone()
            later = lent_array(left, right)  # which the child does not have
            del later
            right.link.release_gone()
            until(lambda: left.link.leases == 1, left)
            for _ in range(20):
                right.link.release_gone()
                left.read()
            assert left.link.leases == 1
            assert right.link.has_unreleased
        right.link.release_gone()
        until(lambda: not left.link.leases, left)
        assert not right.link.has_unreleased
        assert left.garbage == []


def test_a_child_keeps_what_was_lent_when_its_parent_has_closed_the_link() -> None:
    with pair() as (left, right):
        array = lent_array(left, right)
        with forked():
            del array
            right.close()
            for _ in range(20):
                left.read()
            assert left.link.leases == 1
            assert not left.link.has_ended
        until(lambda: left.link.has_ended, left)
        assert left.link.leases == 0


def test_the_end_of_a_child_does_not_end_the_link_of_its_parent() -> None:
    with pair() as (left, right):
        array = lent_array(left, right)
        with forked(), forked():
            pass
        assert right.send(b"still there")
        until(lambda: left.messages, left)
        assert left.link.leases == 1
        assert array.tobytes() == pattern(MIB).tobytes()[8:]
        del array
        right.link.release_gone()
        until(lambda: not left.link.leases, left)


def test_without_a_pipe_what_a_child_has_is_never_released(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(flags: int) -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    with pair() as (left, right):
        array = lent_array(left, right)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pipe2", none_left)
            with forked():
                pass
        del array
        right.link.release_gone()
        for _ in range(20):
            left.read()
        assert left.link.leases == 1


def test_no_link_begins_while_a_child_is_forked() -> None:
    """A fork goes through all links: one that comes meanwhile would end it in the middle."""
    made = threading.Event()
    ends = socket.socketpair()

    def make() -> None:
        RemoteSegments(LinkSocket(ends[0]), MapBudget())
        made.set()

    maker = threading.Thread(target=make)
    _before_fork()
    try:
        maker.start()
        assert not made.wait(0.1)
    finally:
        _after_fork_in_parent()
    maker.join()
    assert made.is_set()
    ends[1].close()


def test_a_signal_handler_may_fork_while_its_thread_lends() -> None:
    with pair() as (left, right):
        array = lent_array(left, right)
        with _lending, forked():
            assert array.tobytes() == pattern(MIB).tobytes()[8:]


def test_two_threads_may_see_at_once_that_children_have_ended() -> None:
    reading, writing = os.pipe()
    children = Children(reading)
    assert not children.have_ended()
    os.close(writing)
    closed = os.open(os.devnull, os.O_WRONLY)
    os.dup2(closed, reading)  # a read fails as if the other one had just closed it
    os.close(closed)
    assert children.have_ended()


def test_a_small_part_of_a_buffer_is_copied_where_buffers_hold_many_keys() -> None:
    with pair() as (left, right):
        block = block_of(left, 2 * MIB)
        whole = spans(block)[0]
        left.arena.copies_parts = True
        assert left.link.send(b"half", [whole._replace(nbytes=MIB)])
        assert left.link.send(b"less", [whole._replace(nbytes=MIB - 8)])
        pieces = [whole._replace(offset=8 * place, nbytes=8) for place in range(4096)]
        assert left.link.send(b"pieces", pieces)
        until(lambda: len(right.messages) == 3, right)
        before = right.bodies()
        block[:] = 0  # a server never writes to a version; here it shows what was copied
        half, less, many = right.bodies()
        assert half == bytes(MIB)
        assert (less, many) == (before[1], before[2])
        assert less == pattern(2 * MIB)[: MIB - 8].tobytes()


def test_payloads_of_an_earlier_link_stay_as_they_are() -> None:
    async def main() -> None:
        async with connected(Node(), Node()) as (client, server, incarnation):
            address = server.transport._listener.address
            caller = await client_of(client, server, incarnation)
            kept = []
            for number in range(3):
                block = server.transport.arena.allocate(MIB)
                assert block is not None
                block[:] = pattern(MIB, number)
                assert server.send(caller, b"value", block)
                del block
                await eventually(lambda: client.messages)
                kept.append(client.messages.pop()[2])
                client.transport.connect(incarnation, address)  # as after a view in which the server was dead
                await client.decided()
                caller = await client_of(client, server, incarnation)
            others = [server.transport.arena.allocate(MIB) for _ in range(50)]
            for other in others:
                assert other is not None
                other[:] = 0
            assert [bytes(body or b"") for body in kept] == [pattern(MIB, n).tobytes() for n in range(len(kept))]
            assert server.leases() == len(kept)
            kept.clear()
            await eventually(lambda: len(server.transport.reader.links) == 1)
            assert server.leases() == 0

    run(main)


async def client_of(client: Node, server: Node, incarnation: ServerPeer) -> Peer:
    """The name that the server has for the client, over its newest link."""
    assert client.send(incarnation, b"hello")
    await eventually(lambda: server.messages)
    return server.messages.pop()[0]
