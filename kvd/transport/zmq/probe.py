"""Why a node does not answer: a handshake of its own with the node's address tells.

ZeroMQ tries a failed handshake again for ever, in silence. Here one is made whose end is watched.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvd.config import Address, parse_address, tcp_address
from kvd.transport.finding import Finding, Outcome
from kvd.transport.reaching import UnknownNameError, connect_to_any, number_of
from kvd.transport.zmq.curve import Curve

_GREETING_BYTES: Final = 64
_OPENING: Final = b"\xff" + bytes(8) + b"\x7f\x03"
"""Signature and version. With a mechanism that does not suit it, a socket hangs up before it names its own."""

_MECHANISM: Final = slice(12, 32)
_TRIES: Final = 2  # a node that is being restarted may break one off

_ASK_FOR_A_PAGE: Final = b"GET / HTTP/1.0\r\n\r\n"
_LINE_BYTES: Final = 64
_SERVICES: Final = {
    b"HTTP/": "a web server (HTTP)",
    b"<": "a web server (HTTP)",
    b"SSH-": "an SSH server",
    b"-ERR": "a Redis server",
    b"-DENIED": "a Redis server",
    b"-NOAUTH": "a Redis server",
    b"\x15\x03": "a server with TLS",
    b"220": "a mail or FTP server",
}
"""First bytes of what services say, of themselves or to a line that they do not understand."""


def try_handshake(address: str, curve: Curve | None, key: str = "", timeout_s: float = 1.0) -> Finding:
    """Make a handshake with the node at an address. Blocks for up to four times `timeout_s`, and for the name server.

    Args:
        address: of the node.
        curve: the keys of this node; None: it uses none.
        key: the public key that the other side should hold, as in `Curve.secure_connection`.
        timeout_s: seconds for each of the steps.
    """
    try:
        connection = _connected(parse_address(address), timeout_s)
    except UnknownNameError as error:
        return Finding(Outcome.UNKNOWN_NAME, _words_of(error))
    except (ConnectionRefusedError, FileNotFoundError) as error:
        return Finding(Outcome.REFUSED, _words_of(error))
    except OSError as error:
        return Finding(Outcome.NO_ANSWER, _words_of(error))
    with connection:
        came = _answer_to(connection, _OPENING, _GREETING_BYTES, timeout_s)
        number = _number_of(connection, address)
    if not came:
        return _who_is_silent(address, timeout_s)
    if not came.startswith(b"\xff"):
        return Finding(Outcome.NOT_ZMQ, _service_that_says(came))
    if len(came) < _GREETING_BYTES:
        return Finding(Outcome.NO_ANSWER, "it broke the connection off")
    mechanism = came[_MECHANISM].rstrip(b"\0")
    if mechanism not in (b"NULL", b"CURVE"):
        return Finding(Outcome.NOT_ZMQ, "another program of ZeroMQ")
    if curve is None:
        return Finding(Outcome.WITH_KEYS if mechanism == b"CURVE" else Outcome.SUCCEEDED)
    if mechanism == b"NULL":
        return Finding(Outcome.WITHOUT_KEYS)
    return Finding(_curve_handshake(number, curve, key, timeout_s))


def _words_of(error: OSError) -> str:
    return error.strerror or str(error)


def _connected(where: Address, timeout_s: float) -> socket.socket:
    if where.scheme == "tcp":
        return connect_to_any(where.host, where.port, timeout_s)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect("\0" + where.path[1:] if where.path.startswith("@") else where.path)
    except OSError:
        connection.close()
        raise
    return connection


def _number_of(connection: socket.socket, address: str) -> str:
    """The address at the other end of a connection to an address, in numbers."""
    if connection.family == socket.AF_UNIX:
        return address
    with suppress(OSError):  # the other side has hung up
        where = connection.getpeername()
        return tcp_address(number_of(where), where[1])
    return address


def _answer_to(connection: socket.socket, said: bytes, most: int, timeout_s: float) -> bytes:
    """What comes over a connection after something was said, up to `most` bytes."""
    received = b""
    until = time.monotonic() + timeout_s
    with suppress(OSError):  # what has come by now counts
        connection.sendall(said)
        while len(received) < most and (left_s := until - time.monotonic()) > 0:
            connection.settimeout(left_s)
            came = connection.recv(most - len(received))
            if not came:
                break
            received += came
    return received


def _who_is_silent(address: str, timeout_s: float) -> Finding:
    """Find out what accepts connections and does not greet.

    Many services wait for a line first. A request for a web page makes most of them say something typical.
    """
    where = parse_address(address)
    came = b""
    if where.scheme == "tcp":
        with suppress(OSError), _connected(where, timeout_s) as connection:
            came = _answer_to(connection, _ASK_FOR_A_PAGE, _LINE_BYTES, timeout_s)
    if came and not came.startswith(b"\xff"):
        return Finding(Outcome.NOT_ZMQ, _service_that_says(came))
    return Finding(Outcome.NO_ANSWER, "it accepts connections, and says nothing")


def _service_that_says(came: bytes) -> str:
    """What a program is that begins with these bytes."""
    for beginning, name in _SERVICES.items():
        if came.startswith(beginning):
            return name
    line = came.splitlines()[0][:40].decode("ascii", "replace")
    return f"a program that says {''.join(char for char in line if char.isprintable())!r}"


def _curve_handshake(number: str, curve: Curve, key: str, timeout_s: float) -> Outcome:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.setsockopt(zmq.IPV6, int("[" in number))
    curve.secure_connection(dealer, key)
    monitor = dealer.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    broken_off = 0
    until = time.monotonic() + 2 * timeout_s
    try:
        dealer.connect(number)
        while (left_s := until - time.monotonic()) > 0 and broken_off < _TRIES:
            if not monitor.poll(int(left_s * 1000)):
                break
            happened = parse_monitor_message(monitor.recv_multipart())["event"]
            if happened == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return Outcome.SUCCEEDED
            if happened == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return Outcome.NOT_ADMITTED
            broken_off += 1
    finally:
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close()
        context.term()
    return Outcome.OTHER_KEY if broken_off == _TRIES else Outcome.NO_ANSWER
