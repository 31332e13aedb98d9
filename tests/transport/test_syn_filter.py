"""Whose connections the kernel refuses, tried with real ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvd.transport.limits.connection_rate_limit import ANYWHERE, THIS_HOST, Place, place_of
from kvd.transport.limits.connections import listening_at
from kvd.transport.limits.syn_filter import MAX_REFUSED, SynFilter

REFUSED_S = 0.3  # without an answer; the kernel tries again after a second
DEADLINE_S = 20.0
OTHERS = [Place(bytes([198, 51, 100, number])) for number in range(100)]
OTHERS += [place_of(f"2001:db8:{number:x}::1") for number in range(100)]


class Listener:
    """Listens at an address, with a filter."""

    def __init__(self, host: str) -> None:
        self._stack = ExitStack()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = self._stack.enter_context(socket.create_server((host, 0), family=family))
        self.host, self.port = host, self.socket.getsockname()[1]
        self.filter = SynFilter(self.socket.fileno())

    def connect(self, source: str = "", timeout_s: float = DEADLINE_S) -> socket.socket:
        bound = (source, 0) if source else None
        connection = socket.create_connection((self.host, self.port), timeout_s, source_address=bound)
        return self._stack.enter_context(connection)

    def refuses(self, source: str = "") -> bool:
        try:
            self.connect(source, REFUSED_S)
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self.filter.close()
        self._stack.close()


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    listener = Listener(request.param)
    yield listener
    listener.close()


def test_it_is_found_by_its_port(listener: Listener) -> None:
    listener.connect()  # a connection is no listener
    found = listening_at(listener.port)
    assert listener.socket.fileno() in found
    assert len(found) == 2  # the filter has its own
    listener.filter.close()
    assert listening_at(listener.port) == [listener.socket.fileno()]


def test_a_place_is_refused_until_it_is_not(listener: Listener) -> None:
    place = place_of(listener.host)
    listener.connect()
    listener.filter.refuse([place])
    assert listener.refuses()
    listener.filter.refuse([*OTHERS, place])
    assert listener.refuses()
    listener.filter.refuse([])
    listener.connect()


def test_others_are_not_refused(listener: Listener) -> None:
    listener.filter.refuse(OTHERS)
    listener.connect()


@pytest.mark.parametrize("everyone", [[ANYWHERE], [*OTHERS, ANYWHERE], [Place(bytes(4))] * (MAX_REFUSED + 1)])
def test_all_are_refused(listener: Listener, everyone: list[Place]) -> None:
    listener.filter.refuse(everyone)
    assert listener.refuses()


def test_every_address_of_this_host_is_refused_with_it() -> None:
    listener = Listener("127.0.0.1")
    listener.filter.refuse([THIS_HOST])
    assert listener.refuses("127.3.2.1")
    listener.close()


def test_an_address_that_is_not_this_host_is_refused_alone() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.99", 9))  # sends nothing
            own = probe.getsockname()[0]
        except OSError:
            own = "127.0.0.1"
    if own.startswith("127."):
        pytest.skip("this host has no other address")
    listener = Listener("0.0.0.0")
    listener.host = own
    listener.filter.refuse([THIS_HOST, *OTHERS])
    listener.connect()
    listener.filter.refuse([place_of(own)])
    assert listener.refuses()
    listener.host = "127.0.0.1"
    listener.connect()
    listener.close()


def test_connections_go_on_while_their_place_is_refused(listener: Listener) -> None:
    before = listener.connect()
    ours, _ = listener.socket.accept()
    listener.filter.refuse(OTHERS)  # a connection inherits the filter that it came through
    between = listener.connect()
    theirs, _ = listener.socket.accept()
    listener.filter.refuse([place_of(listener.host)])
    for one, other in ((before, ours), (ours, before), (between, theirs), (theirs, between)):
        one.sendall(b"hello")
        assert other.recv(5, socket.MSG_WAITALL) == b"hello"
    before.close()
    assert ours.recv(1) == b""
    ours.close()
    theirs.close()
