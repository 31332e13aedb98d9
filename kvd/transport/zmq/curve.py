"""CURVE on the ZeroMQ sockets of a node: how they prove who they are, and whom they let in.

CurveZMQ (rfc.zeromq.org/spec/26) encrypts each connection with keys that live no longer than it. A client has to know
the public key of the socket that it connects to: who does not cannot even say hello. Then the client proves its own
key, and `KeyCheck` decides whether that key may come in.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from kvd.core.principals import Principal

_Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")

Admit: TypeAlias = Callable[[str], Principal | None]
"""Who holds this public key; None: a key that may not come in. Called on any thread."""


@dataclass(frozen=True, slots=True)
class Keypair:
    """The two keys of a node, each in Z85 (40 characters)."""

    public: str
    secret: str = field(repr=False)


def new_keypair() -> Keypair:
    """A random pair of keys."""
    public, secret = zmq.curve_keypair()
    return Keypair(public.decode(), secret.decode())


def is_key(text: str) -> bool:
    """Whether this is the Z85 form of 32 bytes."""
    if _Z85_KEY.fullmatch(text) is None:
        return False
    try:
        return len(z85.decode(text)) == 32
    except struct.error:  # five characters stand for four bytes, and could stand for more
        return False


def public_key_of(secret: str) -> str:
    """The public key that belongs to a secret one."""
    return zmq.curve_public(secret.encode()).decode()


def fingerprint(public: str) -> str:
    """A public key, shortened for people who compare two of them."""
    return f"{public[:8]}…"


@dataclass(frozen=True, slots=True)
class Curve:
    """The keys of one node.

    Attributes:
        own: proves who this node is.
        expected: the public key of the nodes that announce none of their own: the scheduler, and in a cluster with one
            key for all every server.
        announced: the public key by which others recognise this node; "": `expected`.
        admit: whom this node lets in.
        origin: for people, where the keys come from.
        everyone: who each of those is who come in; None: that depends on their key.
    """

    own: Keypair
    expected: str
    announced: str
    admit: Admit
    origin: str
    everyone: Principal | None = None

    def secure_listener(self, socket: zmq.Socket[bytes]) -> None:
        """Lets in only those that `KeyCheck` accepts. It has to run before the socket is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self.own.secret.encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvd")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a check, nobody comes in

    def secure_connection(self, socket: zmq.Socket[bytes], key: str) -> None:
        """Connects only to a socket that holds `key`; "": `expected`."""
        socket.curve_serverkey = (key or self.expected).encode()
        socket.curve_publickey = self.own.public.encode()
        socket.curve_secretkey = self.own.secret.encode()

    def principal_of(self, frame: zmq.Frame) -> Principal | None:
        """Who sent this frame, which `KeyCheck` let in; None if the key is not allowed any more."""
        return self.everyone or self.admit(str(frame.get("User-Id")))

    def still_admits(self, principal: Principal) -> bool:
        """Whether the key that this principal came in with is still allowed, and means what it meant."""
        return self.everyone is not None or self.admit(principal.key) is principal


class KeyCheck:
    """Answers libzmq's question whether a key may come in (ZAP, rfc.zeromq.org/spec/27), in a thread of its own: a
    handshake does not wait for a busy loop.

    Messages of a connection carry its key as ``User-Id``.
    """

    def __init__(self, context: zmq.Context[Any], admit: Admit) -> None:
        self._admit = admit
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("kvd", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this public key may come in: `zmq.auth.CurveCallback`'s form."""
        return self._admit(key.decode()) is not None

    def stop(self) -> None:
        """Ends the thread. It has to, before the context is closed."""
        self._authenticator.stop()
