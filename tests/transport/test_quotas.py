"""What peers may make a process keep: bytes that wait, per connection and in all, counted over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from kvd.testing.cluster import wait_until
from kvd.transport.limits import quotas as limits
from kvd.transport.limits.connections import ConnectionState, accepted_at, cut_off, look_at
from kvd.transport.limits.process_memory import Heap, MemoryWatch, ProcessMemory
from kvd.transport.limits.quotas import Quotas

MIB = 1 << 20
LIMIT_BYTES = 100 * MIB


class FakeMemory(ProcessMemory):
    """A process that has as much memory as a test says."""

    resident = 50 * MIB
    unused = 0
    given_back = 0

    def resident_bytes(self) -> int:
        return self.resident

    def heap(self) -> Heap:
        return Heap(self.resident - self.unused, self.unused)

    def give_back(self) -> None:
        self.given_back += 1


class Listener:
    """A port with peers, and the quotas of those that connect to it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._listening = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._listening.getsockname()[1]
        self.now = 0.0
        self.memory = FakeMemory()
        self.quotas = Quotas(MemoryWatch(LIMIT_BYTES, self.memory), lambda: self.now)
        self.quotas.open(self.port)

    def peer(self) -> tuple[socket.socket, socket.socket]:
        """A peer's end of a connection, and ours."""
        theirs = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        ours = self._stack.enter_context(self._listening.accept()[0])
        theirs.settimeout(10)
        ours.setblocking(False)
        return theirs, ours

    def sends(self, theirs: socket.socket, ours: socket.socket, nbytes: int) -> None:
        """The peer sends so many bytes, and libzmq reads them."""
        before = state_of(ours).received
        while state_of(ours).received < before + nbytes:
            theirs.sendall(bytes(min(64 << 10, before + nbytes - state_of(ours).received)))
            self.read(ours)

    @staticmethod
    def read(connection: socket.socket) -> None:
        try:
            while connection.recv(MIB):
                pass
        except BlockingIOError:
            pass

    def watch(self, resident: int) -> None:
        """The quotas are looked at until the memory has stopped growing."""
        self.memory.resident = resident
        for _ in range(2):
            self.now += 1
            self.quotas.watch(is_empty=True)

    def close(self) -> None:
        self.quotas.close()
        self._stack.close()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(limits, "UNREAD_LIMIT_BYTES", 4 * MIB)
    monkeypatch.setattr(limits, "UNREAD_SHARE", 100)
    monkeypatch.setattr(limits, "UNSENT_LIMIT_BYTES", 4 * MIB)
    monkeypatch.setattr(limits, "LOOK_AGAIN_BYTES", MIB)
    monkeypatch.setattr(limits, "LARGE_BYTES", 2 * MIB)
    monkeypatch.setattr(limits, "NOTABLE_BYTES", MIB // 2)
    listener = Listener()
    yield listener
    listener.close()


def state_of(connection: socket.socket) -> ConnectionState:
    state = look_at(connection.fileno())
    assert state is not None
    return state


def is_cut_off(ours: socket.socket) -> bool:
    """Whether our end was shut down, so that libzmq finds its end."""
    try:
        return ours.recv(1) == b""
    except BlockingIOError:
        return False


# ── connections ──


def test_the_connections_to_a_port_are_found_with_what_they_have_carried(listener: Listener) -> None:
    theirs, ours = listener.peer()
    listener.peer()
    theirs.sendall(b"x" * 1000)
    wait_until(lambda: state_of(ours).received == 1000, "1000 bytes have arrived")
    ours.sendall(b"y" * 500)
    wait_until(lambda: state_of(ours).acknowledged == 500, "500 bytes were acknowledged")
    found = {state.descriptor: state for state in accepted_at(listener.port)}
    assert found.keys() >= {ours.fileno()}
    assert len(found) == 2
    assert found[ours.fileno()] == state_of(ours)
    assert state_of(ours).is_idle


def test_only_the_same_connection_is_cut_off() -> None:
    listener = Listener()
    theirs, ours = listener.peer()
    state = state_of(ours)
    assert not cut_off(state._replace(cookie=state.cookie + 1))
    assert not is_cut_off(ours)
    assert cut_off(state)
    assert is_cut_off(ours)
    ours.close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):  # it does not go on sending to nobody
        theirs.sendall(bytes(64 * MIB))
    listener.close()


def test_a_descriptor_that_is_no_connection_is_left_alone() -> None:
    with open("/dev/null") as file:
        assert look_at(file.fileno()) is None
        assert not cut_off(ConnectionState(1, file.fileno(), 0, 0, True))
    assert look_at(1 << 20) is None


# ── unread ──


def test_a_peer_with_too_much_unread_is_cut_off(listener: Listener) -> None:
    theirs, ours = listener.peer()
    listener.sends(theirs, ours, 3 * MIB)
    listener.watch(70 * MIB)
    assert not is_cut_off(ours)
    listener.sends(theirs, ours, 2 * MIB)
    listener.watch(90 * MIB)
    assert is_cut_off(ours)


def test_what_was_handed_out_is_not_unread(listener: Listener) -> None:
    theirs, ours = listener.peer()
    for step in range(4):
        listener.sends(theirs, ours, 3 * MIB)
        assert listener.quotas.received(b"route", 3 * MIB, ours.fileno)
        listener.watch((70 + 20 * step) * MIB)
    assert not is_cut_off(ours)


def test_messages_that_waited_when_their_peer_was_cut_off_are_dropped(listener: Listener) -> None:
    theirs, ours = listener.peer()
    assert listener.quotas.received(b"route", 10, ours.fileno)
    listener.sends(theirs, ours, 5 * MIB)
    listener.watch(90 * MIB)
    assert not listener.quotas.received(b"route", 10, ours.fileno)
    assert not listener.quotas.may_send(b"route")


def test_counting_too_well_is_put_right_at_the_next_look(listener: Listener) -> None:
    theirs, ours = listener.peer()
    listener.sends(theirs, ours, MIB)
    assert listener.quotas.received(b"route", 100 * MIB, ours.fileno)  # it is told much more than has come
    listener.watch(70 * MIB)
    listener.sends(theirs, ours, 5 * MIB)
    listener.watch(90 * MIB)
    assert is_cut_off(ours)


# ── unsent ──


def fill(listener: Listener, ours: socket.socket, nbytes: int, *, lent: bool = False) -> int:
    """Sends answers of 64 KiB until so many bytes are sent or one is refused; returns how many were."""
    sent = 0
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    with suppress(BlockingIOError):
        ours.send(bytes(8 * MIB))  # what the kernel takes is not read by the other end, so it is not acknowledged
    while sent < nbytes and listener.quotas.may_send(b"route"):
        listener.quotas.sent(b"route", 64 << 10, 64 << 10 if lent else 0)
        sent += 64 << 10
    return sent


def test_answers_to_a_peer_that_does_not_read_are_bounded_and_then_it_is_cut_off(listener: Listener) -> None:
    theirs, ours = listener.peer()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    listener.quotas.received(b"route", 10, ours.fileno)
    assert fill(listener, ours, 100 * MIB) < 20 * MIB
    assert not is_cut_off(ours)  # it may read yet
    listener.now += limits.STALLED_LIMIT_S + 1
    assert not listener.quotas.may_send(b"route")
    assert is_cut_off(ours)


def test_a_peer_that_has_read_everything_gets_more_answers(listener: Listener) -> None:
    theirs, ours = listener.peer()
    listener.quotas.received(b"route", 10, ours.fileno)
    for _ in range(200):
        assert listener.quotas.may_send(b"route")
        listener.quotas.sent(b"route", MIB, 0)
        ours.setblocking(True)
        ours.sendall(bytes(64 << 10))  # less than was counted, and all that there is
        theirs.recv(64 << 10, socket.MSG_WAITALL)
        wait_until(lambda: state_of(ours).is_idle, "the kernel has sent everything")


def test_what_is_lent_takes_no_part_of_the_bound(listener: Listener) -> None:
    theirs, ours = listener.peer()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    listener.quotas.received(b"route", 10, ours.fileno)
    assert fill(listener, ours, 50 * MIB, lent=True) >= 50 * MIB


# ── all peers together ──


def test_over_the_memory_limit_the_peer_that_takes_most_goes(listener: Listener) -> None:
    ends = [listener.peer() for _ in range(3)]
    for size, (theirs, ours) in zip((1, 3, 2), ends, strict=True):
        listener.sends(theirs, ours, size * MIB)
    listener.watch((50 + 100 - 13) * MIB)
    assert [is_cut_off(ours) for _, ours in ends] == [False, True, False]


def test_memory_that_was_freed_does_not_count(listener: Listener) -> None:
    theirs, ours = listener.peer()
    listener.sends(theirs, ours, 3 * MIB)
    listener.memory.unused = 60 * MIB
    listener.watch(170 * MIB)
    assert not is_cut_off(ours)


def test_memory_that_peers_do_not_take_costs_them_nothing(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = listener.peer()
    listener.sends(theirs, ours, 100 << 10)
    listener.watch(500 * MIB)
    assert not is_cut_off(ours)
    assert "memory_limit_bytes" in caplog.text


def test_a_reader_that_holds_versions_goes_when_memory_is_short(listener: Listener) -> None:
    theirs, ours = listener.peer()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    listener.quotas.received(b"route", 10, ours.fileno)
    fill(listener, ours, 50 * MIB, lent=True)
    listener.watch(120 * MIB)
    assert not is_cut_off(ours)
    listener.watch(190 * MIB)
    assert is_cut_off(ours)


def test_after_an_attack_its_memory_goes_back(listener: Listener) -> None:
    theirs, ours = listener.peer()
    listener.sends(theirs, ours, 5 * MIB)
    listener.watch(90 * MIB)
    assert is_cut_off(ours)
    for _ in range(100):
        listener.watch(90 * MIB)
    assert listener.memory.given_back == 1


def test_who_leaves_without_its_answers_is_not_worked_for(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOK_AGAIN_MESSAGES", 10)
    (gone, its_end), (_, our_end) = listener.peer(), listener.peer()

    def taken(route: bytes, ours: socket.socket) -> int:
        return sum(listener.quotas.received(route, 10, ours.fileno) for _ in range(100))

    assert taken(b"gone", its_end) == taken(b"here", our_end) == 100
    gone.close()
    its_end.close()
    listener.memory.resident += 20 * MIB
    listener.quotas.watch(is_empty=False)
    assert 10 <= taken(b"gone", its_end) < 20
    for _ in range(3):  # its account is not forgotten while something of it is left
        listener.memory.resident += 20 * MIB
        listener.now += 1
        listener.quotas.watch(is_empty=False)
        assert taken(b"gone", its_end) == 0
    assert taken(b"here", our_end) == 100


@pytest.mark.parametrize("is_empty", [True, False])
def test_accounts_of_connections_that_ended_are_forgotten(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, is_empty: bool
) -> None:
    monkeypatch.setattr(limits, "FIRST_TIDY", 2)
    listener.quotas._tidy_at = 2
    for number in range(20):
        theirs, ours = listener.peer()
        listener.quotas.received(b"%d" % number, 10, ours.fileno)
        theirs.close()
        ours.close()
        listener.now += 1
        listener.quotas.watch(is_empty=is_empty)
    assert len(listener.quotas._accounts) <= 10


def test_the_real_memory_is_known() -> None:
    memory = ProcessMemory()
    assert memory.resident_bytes() == 0  # not before it is opened
    memory.open()
    assert memory.resident_bytes() > 10 * MIB
    assert 0 <= memory.heap().unused_bytes < memory.resident_bytes() * 2
    assert memory.heap().used_bytes > MIB
    memory.give_back()
    memory.close()
    assert memory.resident_bytes() == 0
