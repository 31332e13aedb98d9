"""Connections that speak no ZeroMQ, or break it: the daemon lives, and the workers go on with the right sums."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import kvd
from kvd.config import parse_address
from kvd.testing.cluster import LocalCluster
from tests.faults.bad_input_harness import addresses, busy, is_alive

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Its daemons let in everyone, and give a handshake 1 s, so that a test of that deadline does not take longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvd.transport.zmq.socket_options.HANDSHAKE_LIMIT_MS", 1000)
        with LocalCluster(2, 2, insecure=True) as cluster:
            yield cluster


def raw_connection(address: str) -> socket.socket:
    parsed = parse_address(address)
    if parsed.scheme == "tcp":
        return socket.create_connection((parsed.host, parsed.port), timeout=12)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(12)
    connection.connect(parsed.path)
    return connection


@contextmanager
def peer(address: str) -> Iterator[socket.socket]:
    """A connection after its handshake: the other side reads frames from now on."""
    with raw_connection(address) as connection:
        connection.sendall(GREETING + READY)
        answer = b""
        while b"ROUTER" not in answer:
            received = connection.recv(4096)
            assert received, "the handshake was refused"
            answer += received
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side hangs up, after whatever it has to say."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("what", [b"GET / HTTP/1.1\r\nHost: kvd\r\n\r\n" * 5, b"\x16\x03\x01" + os.urandom(300)])
def test_another_protocol(cluster: LocalCluster, stores: list[kvd.KVStore], what: bytes) -> None:
    with busy(stores):
        for address in addresses(cluster):
            with raw_connection(address) as connection:
                connection.sendall(what)  # to libzmq it looks like the handshake of its first version
                assert is_alive(address, insecure=True)
            assert is_alive(address, insecure=True)


def test_port_scanners_that_connect_and_hang_or_go(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    hanging = []
    with busy(stores):
        for address in addresses(cluster):
            for _ in range(30):
                hanging.append(raw_connection(address))
                raw_connection(address).close()
                with raw_connection(address) as half:
                    half.sendall(GREETING[:30])
            assert is_alive(address, insecure=True)
        assert is_closed(hanging[0])  # the handshake has a deadline
    for connection in hanging:
        connection.close()


def test_a_frame_that_is_too_large_ends_its_connection_only(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    with busy(stores):
        for address in addresses(cluster):
            for length in ((128 << 20) + 1, 1 << 40, (1 << 63) - 1):
                with peer(address) as connection:
                    connection.sendall(b"\x02" + length.to_bytes(8, "big") + b"x" * 100)
                    assert is_closed(connection)
            assert is_alive(address, insecure=True)


def test_connections_that_break_in_the_middle_of_a_frame(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    with busy(stores):
        for address in addresses(cluster):
            for _ in range(10):
                with peer(address) as connection:
                    connection.sendall(b"\x01\x05hello\x02" + (1 << 20).to_bytes(8, "big") + b"x" * 50)
            assert is_alive(address, insecure=True)
