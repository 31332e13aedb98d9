"""What strangers do with frames and commands, once a handshake is over or before."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from tests.fuzz.assault import Assault, attack
from tests.fuzz.handshakes import QUERY, say_and_go
from tests.fuzz.zmtp import COMMAND, LONG, MORE, Wire, command, frame, greeting, message, metadata, ready

SIZES = ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, (128 << 20) + 1, 128 << 20, (128 << 20) - 1, 1 << 32, 0)
PIECE = bytes(64 << 10)


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
                while sent < assault.force.nbytes and wire.send(block):
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
    return say_and_go(assault, tuple(greeting() + command(b"READY", body) + message(QUERY) for body in bodies))


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
            sent, count = 0, count + 1
            while sent < assault.force.nbytes and wire.send(block):
                sent += len(block)
                count += 200
            if number % 2:
                wire.reset()
    return count
