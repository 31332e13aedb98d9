"""What strangers do before, and instead of, a handshake."""

from __future__ import annotations

import itertools
import ssl
import time
from contextlib import ExitStack, suppress

from kvd.protocol.codec import encode
from kvd.protocol.messages import NO_VIEW, StatusQuery
from tests.fuzz.assault import Assault, attack
from tests.fuzz.flood import flood
from tests.fuzz.overhearing import handshake_of
from tests.fuzz.zmtp import SIGNATURE, Wire, frame, greeting, message, old_message, ready

QUERY = encode(StatusQuery(7), 0x1234, NO_VIEW)
HELLO_ENDS_AT = 64 + 202  # with the greeting before it
MECHANISMS = (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"null", b"", b"NULL\0garbage", b"\xff" * 20, b"CURVE" * 4)


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
    with suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    texts = (
        b"GET / HTTP/1.1\r\nHost: kvd\r\n\r\n" * 5,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40),
        outgoing.read(),
        b"SSH-2.0-OpenSSH_9.9\r\n" + bytes(500),
        b"*1\r\n$4\r\nPING\r\n" * 30,
        b"\n" * 200,
    )
    return say_and_go(assault, texts)


def say_and_go(assault: Assault, texts: tuple[bytes, ...]) -> int:
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
    return say_and_go(assault, tuple(text + ready() + message(QUERY) for text in greetings))


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


@attack("HELLO and nothing more")
def hellos(assault: Assault) -> int:
    """The part of a handshake that costs a daemon three times as much as a stranger who has overheard it."""
    target = assault.target
    said = {address: handshake_of(target, address)[:HELLO_ENDS_AT] for address in target.addresses}
    return flood(said, assault.force.peers, assault.force.seconds).begun


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
            time.sleep(pause_s)  # time itself: the pace of the attack
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
        time.sleep(assault.force.seconds)  # time itself: the attack lasts
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
        said = handshake_of(assault.target, heard_at)
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
