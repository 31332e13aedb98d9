"""Why a node does not answer: a handshake of its own with the node's address tells.

ZeroMQ tries a failed handshake again for ever, in silence. Here one is made whose end is watched.
"""

from __future__ import annotations

import socket as plain
import time
from enum import Enum
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvd.config import parse_address
from kvd.transport.curve import Curve

_GREETING_BYTES: Final = 64
_OPENING: Final = b"\xff" + bytes(8) + b"\x7f\x03"
"""Signature and version. With a mechanism that does not suit it, a socket hangs up before it names its own."""

_MECHANISM: Final = slice(12, 32)
_TRIES: Final = 2  # a node that is being restarted may break one off


class Outcome(Enum):
    """How a handshake went."""

    NO_ANSWER = "nothing listens there, or it says nothing"
    SUCCEEDED = "each side accepts the other's key"
    NOT_ZMQ = "something else than ZeroMQ listens there"
    WITHOUT_KEYS = "the other side uses no keys, this one does"
    WITH_KEYS = "the other side uses keys, this one does not"
    OTHER_KEY = "the other side holds another key than the one that this side expects"
    NOT_ADMITTED = "the other side does not let this key in"


def try_handshake(address: str, curve: Curve | None, key: str = "", timeout_s: float = 1.0) -> Outcome:
    """Makes a handshake with the node at an address. Blocks for up to three times `timeout_s`.

    Args:
        curve: the keys of this node; None: it uses none.
        key: the public key that the other side should hold, as in `Curve.secure_connection`.
    """
    mechanism = _mechanism_of(address, timeout_s)
    if mechanism is None:
        return Outcome.NO_ANSWER
    if mechanism not in (b"NULL", b"CURVE"):
        return Outcome.NOT_ZMQ
    if curve is None:
        return Outcome.WITH_KEYS if mechanism == b"CURVE" else Outcome.SUCCEEDED
    if mechanism == b"NULL":
        return Outcome.WITHOUT_KEYS
    return _curve_handshake(address, curve, key, timeout_s)


def _mechanism_of(address: str, timeout_s: float) -> bytes | None:
    """The security mechanism that the greeting of a ZeroMQ socket names (rfc.zeromq.org/spec/37); b"" if it is none;
    None if nothing comes."""
    where = parse_address(address)
    received = b""
    until = time.monotonic() + timeout_s
    try:
        with _connected(where.scheme, where.host, where.port, where.path, timeout_s) as connection:
            connection.sendall(_OPENING)
            while len(received) < _GREETING_BYTES and (left_s := until - time.monotonic()) > 0:
                connection.settimeout(left_s)
                came = connection.recv(_GREETING_BYTES - len(received))
                if not came:
                    break
                received += came
    except OSError:
        pass  # what has come by now counts
    if not received:
        return None
    if not received.startswith(b"\xff"):
        return b""
    return received[_MECHANISM].rstrip(b"\0") if len(received) == _GREETING_BYTES else None


def _connected(scheme: str, host: str, port: int, path: str, timeout_s: float) -> plain.socket:
    if scheme == "tcp":
        return plain.create_connection((host, port), timeout_s)
    connection = plain.socket(plain.AF_UNIX, plain.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect("\0" + path[1:] if path.startswith("@") else path)
    except OSError:
        connection.close()
        raise
    return connection


def _curve_handshake(address: str, curve: Curve, key: str, timeout_s: float) -> Outcome:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.setsockopt(zmq.IPV6, int("[" in address))
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
        dealer.connect(address)
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
