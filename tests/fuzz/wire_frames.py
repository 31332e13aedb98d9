"""What strangers do with frames and commands, once a handshake is over or before; and some of it with a key."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from random import Random

from tests.fuzz.assault import Assault, attack
from tests.fuzz.handshakes import QUERY, say_and_go
from tests.fuzz.zmtp import COMMAND, LONG, MORE, Dealer, Wire, command, frame, greeting, message, metadata, ready

SIZES = ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, (128 << 20) + 1, 128 << 20, (128 << 20) - 1, 1 << 32, 0)
PIECE = bytes(64 << 10)


# ── frames and commands ──


@attack("giant sizes")
def giant_sizes(assault: Assault) -> int:
    """Frames that say they have up to 2⁶⁴ − 1 bytes, as the first thing, and as a handshake."""
    count = 0
    for address in assault.addresses():
        for size in SIZES:
            for flags in (0, MORE, LONG, COMMAND, COMMAND | MORE, 0xF8):
                with Wire(address) as wire:
                    wire.send(greeting() + frame(b"\x05READY" + bytes(50), flags | LONG, declared=size))
                    count += 1
    return count


@attack("giant sizes after the handshake", by_holders=True)
def giant_sizes_later(assault: Assault) -> int:
    count = 0
    for address in assault.addresses():
        for size in SIZES:
            with assault.peer(address) as wire:
                flags = assault.random.choice((0, MORE, COMMAND)) | LONG
                wire.send(wire.frame(bytes(100), flags, declared=size))
                count += 1
    return count


@attack("one message without an end", by_holders=True)
def endless_message(assault: Assault) -> int:
    """Frame after frame of one message, of 1 MiB, of 100 bytes and of none."""
    count = 0
    for address in assault.addresses():
        for nbytes in (1 << 20, 100, 0):
            with assault.peer(address) as wire:
                send_without_end(assault, wire, nbytes, assault.force.nbytes)
                count += 1
    return count


@attack("20 messages without an end", by_holders=True)
def endless_messages(assault: Assault) -> int:
    """Of 20 peers, at the same time."""
    count = 0
    for address in assault.addresses():
        with ExitStack() as held:
            wires = [held.enter_context(assault.peer(address)) for _ in range(20)]
            share = assault.force.nbytes // len(wires)
            with ThreadPoolExecutor(len(wires)) as pool:
                for wire in wires:
                    pool.submit(send_without_end, assault, wire, 64 << 10, share)
            count += len(wires)
    return count


def send_without_end(assault: Assault, wire: Dealer, frame_nbytes: int, nbytes: int) -> None:
    """Frames of one message, until there have been so many bytes on the wire, or nothing more is taken."""
    body = bytes(frame_nbytes)
    until = time.monotonic() + 10 * assault.force.seconds
    while nbytes > 0 and time.monotonic() < until:
        block = b"".join(wire.frame(body, MORE) for _ in range(max(1, 100_000 // (frame_nbytes + 50))))
        if not wire.send(block):
            return
        nbytes -= len(block)


@attack("commands: giant, short, unknown, out of turn")
def commands(assault: Assault) -> int:
    """In place of a handshake, and right after it."""
    count = 0
    for address in assault.addresses():
        for body, flags in odd_commands(assault.random):
            text = frame(body, flags)
            for begun in (greeting(), greeting() + ready()):
                with Wire(address) as wire:
                    wire.send(begun + text + message(QUERY) + text)
                    count += 1
    return count


@attack("commands instead of messages", by_holders=True)
def commands_later(assault: Assault) -> int:
    """After the handshake: each on a connection of its own, and the first ones, that end none, on the same."""
    count = 0
    for address in assault.addresses():
        said = odd_commands(assault.random)
        for body, flags in said:
            with assault.peer(address) as wire:
                wire.send(wire.message(QUERY) + wire.frame(body, flags) + wire.message(QUERY))
                wire.read(timeout_s=0.005)
                count += 1
        with assault.peer(address) as wire:
            for body, flags in said[:9]:
                wire.send(wire.frame(body, flags))
            wire.read(timeout_s=0.005)
            count += 1
    return count


def odd_commands(random: Random) -> list[tuple[bytes, int]]:
    """As bodies and flags of frames."""

    def named(name: bytes, body: bytes = b"", name_nbytes: int | None = None) -> tuple[bytes, int]:
        return bytes([len(name) if name_nbytes is None else name_nbytes]) + name + body, COMMAND

    return [
        named(b"PING", b"\0\1" + bytes(4000)),
        named(b"PING", b"\xff\xff" + random.randbytes(16)),
        named(b"PING", b"\0"),
        named(b"PING"),
        named(b"PONG", bytes(60_000)),
        named(b"PONG"),
        named(b"SUBSCRIBE", b"topic" * 50),
        named(b"CANCEL"),
        named(b"JOIN", b"group"),
        named(b"LEAVE", bytes(300)),
        named(b"ERROR", b"\xff" + b"short"),
        named(b"ERROR", bytes([4]) + b"text"),
        named(b"READY", metadata(Socket_Type=b"DEALER", Identity=b"another")),
        named(b"HELLO", bytes(200)),
        named(b"WELCOME", bytes(160)),
        named(b"INITIATE", bytes(257)),
        named(b"MESSAGE", bytes(33)),
        named(b"UNKNOWN" * 30, b"x"),
        named(b"PING", b"\0\1", 255),
        named(b""),
        (b"", COMMAND),
        (b"\4PING\0\1", COMMAND | MORE),
        (PIECE, COMMAND),
        (b"x", 0xFF & ~LONG),
    ]


@attack("properties of the handshake")
def properties(assault: Assault) -> int:
    """READY with types, names and lengths of every kind."""
    return say_and_go(
        assault, tuple(greeting() + command(b"READY", body) + message(QUERY) for body in odd_properties())
    )


def odd_properties() -> list[bytes]:
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
    return bodies


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


@attack("messages that are none", by_holders=True)
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
                    wire.send(wire.message(*parts))
                    count += 1
            wire.read(timeout_s=0.01)
    return count


@attack("answers that nobody reads", by_holders=True)
def slow_readers(assault: Assault) -> int:
    """Questions as fast as they are taken, no answer read; then the connection is reset, or closed."""
    count = 0
    for number, address in enumerate(assault.addresses()):
        with assault.peer(address) as wire:
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.socket.settimeout(0.2)
            sent, count = 0, count + 1
            until = time.monotonic() + 10 * assault.force.seconds
            while sent < assault.force.nbytes and time.monotonic() < until:
                block = b"".join(wire.message(QUERY) for _ in range(200))
                if not wire.send(block):
                    break
                sent += len(block)
                count += 200
            if number % 2:
                wire.reset()
    return count
