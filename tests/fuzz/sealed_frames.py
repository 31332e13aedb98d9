"""What holders of a key do with the frames of CurveZMQ: in the handshake, with the boxes, and with what is in them."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

from kvd.protocol.codec import encode
from kvd.protocol.messages import ANY_CLOCK, NO_VIEW, Part, Pull
from tests.fuzz.assault import Assault, sealed_attack
from tests.fuzz.curve import CurveDealer, RefusedError
from tests.fuzz.handshakes import QUERY
from tests.fuzz.job import QUIET_KEY
from tests.fuzz.wire_frames import odd_properties
from tests.fuzz.zmtp import COMMAND, MORE, command, frame, greeting, metadata

QUESTION = b"\0" + QUERY  # with its flags, as it is in a box
NO_NONCE = (1 << 64) - 1


# ── the handshake ──


@sealed_attack("properties of a handshake with a key")
def sealed_properties(assault: Assault) -> int:
    """INITIATE with types, names and lengths of every kind."""
    count = 0
    for address in assault.addresses():
        for properties in odd_properties():
            with suppress(RefusedError), assault.holder(address, properties=properties) as wire:
                wire.send(wire.message(QUERY))
                wire.read(timeout_s=0.005)
            count += 1
    return count


@sealed_attack("properties without an end")
def endless_properties(assault: Assault) -> int:
    """INITIATE with as many and as long properties as the force has bytes, small and large ones."""
    count = 0
    for address in assault.addresses():
        nbytes = min(assault.force.nbytes, 100 << 20)
        small = b"".join(b"\3" + number.to_bytes(3, "big") + bytes(4) for number in range(nbytes // 8))
        for properties in (small, metadata(x=bytes(nbytes))):
            with suppress(RefusedError), assault.holder(address, properties=properties + metadata(Socket_Type=b"REQ")):
                pass
            count += 1
    return count


@sealed_attack("many handshakes, with as many properties as there may be")
def largest_handshakes(assault: Assault) -> int:
    """Each as large as a frame may be, all connections at the same time."""
    count = 0
    small = b"".join(b"\3" + number.to_bytes(3, "big") + bytes(4) for number in range(31_000))
    for address in assault.addresses():
        with ExitStack() as stack:
            for _ in range(min(assault.force.peers, 200)):
                with suppress(RefusedError, OSError):  # others were cut off meanwhile
                    wire = assault.holder(address, properties=small + metadata(Socket_Type=b"REQ"))
                    stack.enter_context(wire)
                count += 1
    return count


@sealed_attack("handshakes again, over a connection that has had one")
def handshakes_again(assault: Assault) -> int:
    count = 0
    for address in assault.addresses():
        for kind in range(6):
            with assault.holder(address) as wire:
                again = frame(wire.initiate, COMMAND)
                said = (
                    again,
                    again * 100,
                    frame(wire.initiate),
                    wire.frame(wire.initiate, COMMAND),
                    greeting(mechanism=b"CURVE"),
                    command(b"HELLO", b"\1\0" + bytes(192)),
                )[kind]
                wire.send(wire.message(QUERY) + said + wire.message(QUERY))
                wire.read(timeout_s=0.005)
                count += 1
            with suppress(RefusedError), assault.holder(address) as wire:  # what one said, as another one
                wire.send(again + wire.message(QUERY))
                count += 1
    return count


@sealed_attack("routing ids chosen by holders of a key")
def chosen_names(assault: Assault) -> int:
    """The longest, too long ones, those that look like the daemon's own, and each twice."""
    count = 0
    for address in assault.addresses():
        own = [b"\0" + assault.random.randbytes(4) for _ in range(8)]
        with ExitStack() as held:
            for name in [b"a", b"\0", b"x" * 255, b"x" * 256, b"x" * 4000, bytes(5), *own] * 2:
                with suppress(RefusedError):
                    wire = held.enter_context(assault.holder(address, name))
                    wire.send(wire.message(QUERY))
                count += 1
    return count


@sealed_attack("many peers with a key: idle, reset, and gone")
def many_holders(assault: Assault) -> int:
    count = 0
    per_address = max(3, assault.force.peers // 20)
    for address in assault.addresses():
        with ExitStack() as held:
            for number in range(per_address):
                wire = held.enter_context(assault.holder(address))
                count += 1
                if number % 3:
                    wire.send(wire.message(QUERY))
                if number % 3 == 1:
                    wire.reset()
    return count


# ── boxes ──


@sealed_attack("messages replayed, left out and reordered")
def nonces(assault: Assault) -> int:
    """The connection ends with the first one whose number is not higher than the one before."""
    count = 0
    for address in assault.addresses():
        for nonce_of in (lambda last: last, lambda last: last - 1, lambda _: 0, lambda _: 1):
            with assault.holder(address) as wire:
                wire.send(wire.message(QUERY) + wire.message(QUERY))
                wire.send(frame(wire.sealed(QUESTION, nonce=nonce_of(wire.nonce))))
                assert wire.is_hung_up(), "a message was taken twice"
                count += 1
        with assault.holder(address) as wire:
            first, second = wire.message(QUERY), wire.message(QUERY)
            wire.send(second + first)
            assert wire.is_hung_up(), "messages were taken in another order"
        with assault.holder(address) as wire:
            wire.send(frame(wire.sealed(QUESTION, nonce=NO_NONCE)))
            wire.send(wire.message(QUERY))
            assert wire.is_hung_up(), "a message was taken behind the last number"
            count += 2
    return count


@sealed_attack("messages reflected, and those of other connections")
def reflected_messages(assault: Assault) -> int:
    count = 0
    for address in assault.addresses():
        with assault.holder(address) as wire, assault.holder(address) as other:
            wire.send(wire.message(QUERY))
            heard = wire.hear_raw()
            other.send(other.message(QUERY))
            other.hear_raw()
            wire.send(frame(heard))
            other.send(wire.message(QUERY))
            assert wire.is_hung_up(), "what a daemon said was taken from a peer"
            assert other.is_hung_up(), "what one peer said was taken from another"
            count += 2
    return count


@sealed_attack("boxes that do not open")
def damaged_boxes(assault: Assault) -> int:
    count = 0
    for address in assault.addresses():
        for place in (0, 7, 8, 15, 16, 31, 32, 40, -1):
            with assault.holder(address) as wire:
                box = bytearray(wire.sealed(QUESTION))
                box[place] ^= 1 << assault.random.randrange(8)
                wire.send(frame(bytes(box)))
                # The number is part of what seals the box; the flags of the frame around it mean nothing.
                assert wire.is_hung_up(), f"a box was opened whose byte {place} had changed"
                count += 1
        for length in (0, 1, 8, 9, 16, 32, 33, 40):
            for flags in (0, MORE, COMMAND):
                with assault.holder(address) as wire:
                    wire.send(frame(wire.sealed(QUESTION)[:length], flags))
                    wire.read(timeout_s=0.005)
                    count += 1
        with assault.holder(address) as wire:
            wire.send(frame(wire.sealed(b"")))  # not even flags
            wire.read(timeout_s=0.005)
            count += 1
    return count


@sealed_attack("messages without a box, from a holder of a key")
def unsealed_messages(assault: Assault) -> int:
    count = 0
    for address in assault.addresses():
        for plain in (frame(QUERY), frame(QUERY, COMMAND), frame(b"", MORE), command(b"PING", b"\0\0" + bytes(16))):
            with assault.holder(address) as wire:
                wire.send(wire.message(QUERY) + plain)
                assert wire.is_hung_up(), "a frame was taken that was not sealed"
                count += 1
    return count


# ── what is in them ──


@sealed_attack("pings, pongs and subscriptions without an end")
def command_floods(assault: Assault) -> int:
    """No answer is read. Pings come with the longest context, and a time to live that is over at once."""
    bodies = (
        (b"\4PING\0\1" + bytes(16), COMMAND),
        (b"\4PING\xff\xff" + bytes(300), COMMAND),
        (b"\4PONG" + bytes(16), COMMAND),
        (b"\x09SUBSCRIBE" + bytes(200), COMMAND),
        (b"\x06CANCEL", COMMAND | MORE),
        (b"\4JOIN" + bytes(100), COMMAND),
    )
    count = 0
    for address in assault.addresses():
        for body, flags in bodies:
            with assault.holder(address) as wire:
                count += _flood(assault, wire, body, flags)
    return count


def _flood(assault: Assault, wire: CurveDealer, body: bytes, flags: int) -> int:
    wire.socket.settimeout(0.5)
    sent = count = 0
    until = time.monotonic() + assault.force.seconds
    while sent < assault.force.nbytes and time.monotonic() < until:
        block = b"".join(wire.frame(body, flags) for _ in range(200))
        if not wire.send(block):
            break
        sent += len(block)
        count += 200
    return count


@sealed_attack("values that nobody reads, asked for frame by frame")
def unread_values(assault: Assault) -> int:
    """Pulls of the same slice; the connection stays open for a while."""
    count, run = 0, assault.target.run()
    for address in assault.addresses():
        with assault.holder(address) as wire:
            wire.socket.settimeout(0.5)
            until = time.monotonic() + assault.force.seconds
            for number in range(assault.force.nbytes >> 10):
                pull = Pull(number, (Part(QUIET_KEY, 0, ANY_CLOCK),))
                if time.monotonic() > until or not wire.send(wire.message(encode(pull, 0x1234, NO_VIEW, run))):
                    break
                count += 1
            time.sleep(assault.force.seconds)  # time itself: the attack lasts
    return count


@sealed_attack("slow writers with a key")
def slow_writers(assault: Assault) -> int:
    """Messages that arrive byte by byte, and one that stops in the middle of each box."""
    pause_s = min(1.0, assault.force.seconds / 10)
    with ExitStack() as held:
        wires = [held.enter_context(assault.holder(address)) for address in assault.addresses() for _ in range(4)]
        texts = [wire.message(QUERY) for wire in wires]
        until = time.monotonic() + assault.force.seconds
        for place in range(min(map(len, texts)) - 1):
            for wire, text in zip(wires, texts, strict=True):
                wire.send(text[place : place + 1])
            if time.monotonic() > until:
                break
            time.sleep(pause_s)  # time itself: the pace of the attack
    return len(wires)
