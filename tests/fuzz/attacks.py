"""What strangers do to a port: one function per kind. Each gives the number of attacks that it has made.

Everything here is bytes over plain sockets, so it means the same to daemons with keys and without: with keys, nothing
after the greeting may get through.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random

from kvd.protocol.codec import encode
from kvd.protocol.messages import NO_VIEW, StatusQuery
from tests.fuzz.making import Maker
from tests.fuzz.target import Target
from tests.fuzz.zmtp import (
    COMMAND,
    LONG,
    MORE,
    SIGNATURE,
    Wire,
    command,
    dealer,
    frame,
    greeting,
    message,
    metadata,
    old_message,
    ready,
)

QUERY = encode(StatusQuery(7), 0x1234, NO_VIEW)
MECHANISMS = (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"null", b"", b"NULL\0garbage", b"\xff" * 20, b"CURVE" * 4)
SIZES = ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, (128 << 20) + 1, 128 << 20, (128 << 20) - 1, 1 << 32, 0)
PIECE = bytes(64 << 10)


@dataclass(frozen=True)
class Force:
    """How hard an attack is.

    Attributes:
        rounds: how often it is made at each address.
        peers: how many connections it holds at the same time, where that is what it does.
        seconds: how long it goes on, where that is what it does.
        bytes: how much it sends, where that is what it does.
    """

    rounds: int = 1
    peers: int = 40
    seconds: float = 1.0
    bytes: int = 4 << 20


@dataclass(frozen=True)
class Assault:
    """What an attack works with."""

    target: Target
    random: Random
    force: Force

    def addresses(self) -> Iterator[str]:
        """Each address of the target, as often as the force says."""
        for _ in range(self.force.rounds):
            yield from self.target.addresses

    @contextmanager
    def peer(self, address: str, identity: bytes = b"") -> Iterator[Wire]:
        """A peer without a key after its handshake, as far as it got: nowhere, if the target asks for keys."""
        with dealer(address, identity) as wire:
            yield wire


Attack = Callable[[Assault], int]
STRANGERS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Puts a function into the table."""

    def enter(function: Attack) -> Attack:
        STRANGERS[name] = function
        return function

    return enter


# ── other protocols, and none ──


@attack("random bytes")
def random_bytes(assault: Assault) -> int:
    count = 0
    for address in assault.addresses():
        for start in (b"", SIGNATURE, greeting(), greeting() + ready()):
            with Wire(address) as wire:
                wire.send(start + assault.random.randbytes(assault.random.randrange(1, 3000)))
                count += 1
    return count


@attack("other protocols: HTTP, TLS, SSH, Redis")
def other_protocols(assault: Assault) -> int:
    outgoing = ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="kvd")
    try:
        hello.do_handshake()
    except ssl.SSLWantReadError:
        pass
    texts = (
        b"GET / HTTP/1.1\r\nHost: kvd\r\n\r\n" * 5,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40),
        outgoing.read(),
        b"SSH-2.0-OpenSSH_9.9\r\n" + bytes(500),
        b"*1\r\n$4\r\nPING\r\n" * 30,
        b"\n" * 200,
    )
    return _say_and_go(assault, texts)


def _say_and_go(assault: Assault, texts: tuple[bytes, ...]) -> int:
    """Says each text on a connection of its own, looks for an answer, and hangs up."""
    count = 0
    for address in assault.addresses():
        for text in texts:
            with Wire(address) as wire:
                wire.send(text)
                wire.read(timeout_s=0.005)
                count += 1
    return count


# ── the handshake ──


@attack("greetings of other versions, mechanisms and roles")
def wrong_greetings(assault: Assault) -> int:
    versions = ((0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 9), (4, 1), (255, 255))
    greetings = [greeting(*version) for version in versions]
    greetings += [greeting(mechanism=name, as_server=role) for name in MECHANISMS for role in (0, 1, 255)]
    greetings += [
        b"\xff" + (1 << 62).to_bytes(8, "big") + b"\x7f" + bytes([3, 1]),
        b"\xff" + bytes(8) + b"\x7e" + bytes(60),
    ]
    return _say_and_go(assault, tuple(text + ready() + message(QUERY) for text in greetings))


@attack("half handshakes")
def half_handshakes(assault: Assault) -> int:
    whole, count = greeting() + ready(), 0
    with ExitStack() as held:
        for address in assault.addresses():
            for length in range(0, len(whole), 3):
                wire = Wire(address)
                wire.send(whole[:length])
                count += 1
                if length % 2:
                    wire.close()  # the others hang on until the end
                else:
                    held.callback(wire.close)
    return count


@attack("slow writers")
def slow_writers(assault: Assault) -> int:
    """Handshakes and frames that arrive byte by byte, a second apart if there is the time."""
    begun = greeting() + ready() + message(QUERY) * 10
    pause_s = min(1.0, assault.force.seconds / 10)
    with ExitStack() as held:
        wires = [held.enter_context(Wire(address)) for address in assault.addresses() for _ in range(4)]
        heads = [assault.random.choice((0, 10, 63, 64, 80, 92)) for _ in wires]
        for wire, head in zip(wires, heads, strict=True):
            wire.send(begun[:head])
        until = time.monotonic() + assault.force.seconds
        for place in range(100):
            for wire, head in zip(wires, heads, strict=True):
                wire.send(begun[head + place : head + place + 1])
            if time.monotonic() > until:
                break
            time.sleep(pause_s)
    return len(wires)


@attack("idle peers")
def idle_peers(assault: Assault) -> int:
    """As many connections as the force has, that say nothing, or nothing after the handshake."""
    texts = (b"", greeting()[:20], greeting() + ready())
    with ExitStack() as held:
        wires = []
        for number, address in zip(range(assault.force.peers), itertools.cycle(assault.target.addresses), strict=False):
            wires.append(held.enter_context(Wire(address)))
            wires[-1].send(texts[number % len(texts)])
        time.sleep(assault.force.seconds)
    return len(wires)


@attack("connect and reset")
def resets(assault: Assault) -> int:
    count = 0
    for address in assault.addresses():
        for number in range(assault.force.peers):
            wire = Wire(address)
            if number % 3:
                wire.send(greeting()[: number % 64] if number % 3 == 1 else greeting() + ready() + message(QUERY))
            wire.reset()
            count += 1
    return count


@attack("old versions of the protocol")
def old_versions(assault: Assault) -> int:
    """ZMTP 1.0 and 2.0, which know no keys: a daemon that asks for one must not go back to them."""
    texts = (
        b"\x01\x00" + old_message(QUERY) * 20,
        b"\x06\x00name!" + old_message(QUERY, b"payload"),
        SIGNATURE + b"\x00" + b"\x01\x00" + old_message(QUERY),
        SIGNATURE + b"\x01\x05" + frame(b"") + message(QUERY),
        SIGNATURE + b"\x01\x05" + frame(b"name") + message(QUERY) * 20,
    )
    count = 0
    for address in assault.addresses():
        for text in texts:
            with Wire(address) as wire:
                wire.send(text)
                if assault.target.is_closed:
                    assert b"role" not in wire.read_until(b"}", timeout_s=0.05), "a stranger got an answer"
                count += 1
    return count


@attack("replayed handshakes")
def replayed_handshakes(assault: Assault) -> int:
    """All that a real peer said, again: to the same daemon and to others, whole and in parts."""
    count = 0
    for heard_at in assault.target.addresses:
        said = assault.target.overheard(heard_at)
        for address in assault.addresses():
            for length in {len(said), len(said) // 2, 64, max(64, len(said) - 7)}:
                with Wire(address) as wire:
                    for piece in (said[:64], said[64:length]):
                        wire.send(piece)
                        answer = wire.read(timeout_s=0.01)
                    if assault.target.is_closed:
                        assert b"\x05READY" not in answer, "a replayed handshake was accepted"
                    count += 1
    return count


@attack("reflected handshakes")
def reflected_handshakes(assault: Assault) -> int:
    """Whatever a daemon says is said back to it, or to another daemon."""
    count = 0
    addresses = assault.target.addresses
    for address in assault.addresses():
        for other in {address, addresses[count % len(addresses)]}:
            with Wire(address) as one, ExitStack() as held:
                back = one if other == address else held.enter_context(Wire(other))
                until = time.monotonic() + 0.05
                while time.monotonic() < until and (heard := one.read(timeout_s=0.02)):
                    back.send(heard)
                    if back is not one:
                        one.send(back.read(timeout_s=0.02))
                count += 1
    return count


# ── frames and commands ──


@attack("giant sizes")
def giant_sizes(assault: Assault) -> int:
    """Frames that say they have up to 2⁶⁴ − 1 bytes, as the first thing, as a handshake, and later."""
    count = 0
    for address in assault.addresses():
        for size in SIZES:
            for flags in (0, MORE, LONG, COMMAND, COMMAND | MORE, 0xF8):
                with Wire(address) as wire:
                    wire.send(greeting() + frame(b"\x05READY" + bytes(50), flags | LONG, declared=size))
                    count += 1
            with assault.peer(address) as wire:
                wire.send(frame(bytes(100), assault.random.choice((0, MORE, COMMAND)) | LONG, declared=size))
                count += 1
    return count


@attack("one message without an end")
def endless_message(assault: Assault) -> int:
    """Frame after frame of one message, of 64 KiB and of none."""
    count = 0
    for address in assault.addresses():
        for body in (PIECE, b""):
            with assault.peer(address) as wire:
                one = frame(body, MORE)
                block = one * max(1, len(PIECE) // len(one))
                sent = 0
                while sent < assault.force.bytes and wire.send(block):
                    sent += len(block)
                count += 1
    return count


@attack("commands: giant, short, unknown, out of turn")
def commands(assault: Assault) -> int:
    random = assault.random
    said = [
        command(b"PING", b"\0\1" + bytes(4000)),
        command(b"PING", b"\xff\xff" + random.randbytes(16)),
        command(b"PING", b"\0"),
        command(b"PING"),
        command(b"PONG", bytes(60_000)),
        command(b"PONG"),
        command(b"SUBSCRIBE", b"topic" * 50),
        command(b"CANCEL"),
        command(b"ERROR", b"\xff" + b"short"),
        command(b"ERROR", bytes([4]) + b"text"),
        command(b"READY", metadata(Socket_Type=b"DEALER", Identity=b"another")),
        command(b"HELLO", bytes(200)),
        command(b"INITIATE", bytes(257)),
        command(b"MESSAGE", bytes(33)),
        command(b"UNKNOWN" * 30, b"x"),
        command(b"PING", b"\0\1", name_nbytes=255),
        command(b"", b""),
        frame(b"", COMMAND),
        frame(b"\4PING\0\1", COMMAND | MORE),
        frame(PIECE, COMMAND),
        frame(b"x", 0xFF & ~LONG),
    ]
    count = 0
    for address in assault.addresses():
        for text in said:
            for begun in (greeting(), greeting() + ready()):
                with Wire(address) as wire:
                    wire.send(begun + text + message(QUERY) + text)
                    count += 1
        with assault.peer(address) as wire:
            for text in said[:9]:
                wire.send(text)
            wire.read(timeout_s=0.005)
            count += 1
    return count


@attack("properties of the handshake")
def properties(assault: Assault) -> int:
    """READY with types, names and lengths of every kind."""
    bodies = [
        metadata(Socket_Type=kind)
        for kind in (b"REP", b"PUB", b"ROUTER", b"REQ", b"SUB", b"PAIR", b"STREAM", b"SERVER", b"", b"x" * 300)
    ]
    bodies += [
        metadata(Socket_Type=b"DEALER") * 500,
        metadata(**{"x" * 255: b"y" * 60_000}, Socket_Type=b"DEALER"),
        metadata(Identity=b"twice") + metadata(Socket_Type=b"DEALER", Identity=b"again"),
        b"\x0bSocket-Type\xff\xff\xff\xffDEALER",
        b"\x0bSocket-Type\x7f\xff\xff\xff",
        b"\xffSocket-Type",
        b"\x00\x00\x00\x00\x00",
        b"",
    ]
    return _say_and_go(assault, tuple(greeting() + command(b"READY", body) + message(QUERY) for body in bodies))


@attack("names chosen by the peer")
def chosen_names(assault: Assault) -> int:
    """Routing ids: the longest, too long ones, those that look like the daemon's own, and each twice."""
    count = 0
    for address in assault.addresses():
        numbers = [assault.random.getrandbits(32).to_bytes(4, "big") for _ in range(8)]
        names = [b"a", b"\0", b"x" * 255, b"x" * 256, b"x" * 4000, bytes(5), *(b"\0" + number for number in numbers)]
        with ExitStack() as held:
            for name in [*names, *names]:
                wire = held.enter_context(Wire(address))
                wire.send(greeting() + ready(identity=name) + message(QUERY) + ready(identity=b"\0" + numbers[0]))
                count += 1
            wires = [held.enter_context(Wire(address)) for _ in range(3)]
            for wire in wires:
                wire.send(greeting() + ready(identity=None) + message(QUERY))
    return count


# ── messages ──


@attack("messages that are none")
def no_messages(assault: Assault) -> int:
    count = 0
    for address in assault.addresses():
        with assault.peer(address) as wire:
            for parts in (
                (b"",),
                (b"", b""),
                (QUERY, b"payload", b"more"),
                (assault.random.randbytes(80),),
                (QUERY,) * 300,
            ):
                for _ in range(20):
                    wire.send(message(*parts))
                    count += 1
            wire.read(timeout_s=0.01)
    return count


@attack("answers that nobody reads")
def slow_readers(assault: Assault) -> int:
    """Questions as fast as they are taken, no answer read; then the connection is reset, or closed."""
    count = 0
    block = message(QUERY) * 200
    for number, address in enumerate(assault.addresses()):
        with assault.peer(address) as wire:
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.socket.settimeout(0.2)
            sent = 0
            while sent < assault.force.bytes and wire.send(block):
                sent += len(block)
                count += 200
            if number % 2:
                wire.reset()
    return count


@attack("messages with arbitrary fields, of runs that are over")
def arbitrary_messages(assault: Assault) -> int:
    """Every kind of message from nobody, for no run or one that is long gone."""
    maker = Maker(assault.random)
    count = 0
    for address in assault.addresses():
        with assault.peer(address) as wire:
            for _ in range(assault.force.peers * 5):
                wire.send(message(*arbitrary_message(maker)))
                count += 1
            wire.read(timeout_s=0.01)
    return count


def arbitrary_message(maker: Maker) -> list[bytes]:
    raise NotImplementedError
