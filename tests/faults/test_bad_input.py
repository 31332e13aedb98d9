"""Whatever arrives on a socket: the sender is told, the daemon lives, and two workers go on with the right sums."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

import kvd
from kvd.config import parse_address
from kvd.protocol.codec import VERSION, decode, encode
from kvd.protocol.messages import (
    Attach,
    Departure,
    Done,
    Epoch,
    ErrorCode,
    Heartbeat,
    Init,
    Join,
    Leave,
    Lookup,
    NotYet,
    NotYetReason,
    Part,
    Publish,
    Pull,
    Push,
    PushBatch,
    Refused,
    SetOptimizer,
    Settings,
    Staged,
    StatusQuery,
    StatusReport,
    Values,
    View,
)
from kvd.protocol.specs import KeySpec
from kvd.testing.cluster import LocalCluster, engine_of
from kvd.transport.base import joined, pieces_of

STRANGER = 0x1234
NO_VIEW = Epoch(0, 0)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, 2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def stores(cluster: LocalCluster) -> list[kvd.KVStore]:
    stores = [cluster.store(node_id=f"worker-{number}") for number in range(2)]
    for handle in [store.init_async("w", np.zeros(3000, np.float32)) for store in stores]:
        handle.wait()
    return stores


def addresses(cluster: LocalCluster) -> list[str]:
    return [cluster.scheduler.address, *[server.address for server in cluster.servers]]


@contextmanager
def busy(stores: list[kvd.KVStore]) -> Iterator[None]:
    """Both workers push all the while, and look at every sum; at the end something must have gone through."""
    stop = threading.Event()
    errors: list[BaseException] = []
    steps = [0, 0]

    def work(number: int) -> None:
        try:
            value = np.empty(3000, np.float32)
            while True:
                going = not stop.is_set()
                value[:] = 1 if going else 0
                total = stores[number].pushpull("w", value.copy())
                assert (total == total[0]).all()
                assert total[0] in (0, 1, 2)
                if total[0] < 2:
                    return
                steps[number] += 1
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
        before = list(steps)
        time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert errors == []
    assert steps[0] > before[0]


class Raw:
    """A plain DEALER."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 5000
        self.socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def say(self, message: Any, *payload: bytes, sender: int = STRANGER) -> None:
        self.send(encode(message, sender, NO_VIEW), *payload)

    def answer(self) -> Any:
        return decode(self.socket.recv_multipart()[0]).message

    def answers(self, message: Any, *payload: bytes, sender: int = STRANGER) -> Any:
        self.say(message, *payload, sender=sender)
        return self.answer()

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_alive(address: str) -> bool:
    with Raw(address) as raw:
        return isinstance(raw.answers(StatusQuery(1)), StatusReport)


HEADER = encode(StatusQuery(7), STRANGER, NO_VIEW)
GARBAGE: dict[str, tuple[tuple[bytes, ...], str]] = {
    "nothing": ((b"",), "header"),
    "noise": ((b"\x00\xff garbage \xfe" * 20,), "header"),
    "truncated": ((HEADER[:-1],), "header"),
    "with more behind it": ((HEADER + b"\x00",), "header"),
    "a map": ((msgpack.packb({"kind": 1}),), "list"),
    "too short": ((msgpack.packb([VERSION, 8]),), "list"),
    "another version": ((msgpack.packb([VERSION + 1, 8, 1, 0, 0, 7]),), "run the same kvd version on every node"),
    "no such kind": ((msgpack.packb([VERSION, 4000, 1, 0, 0, 7]),), "no message has kind 4000"),
    "a negative number": ((msgpack.packb([VERSION, 8, 1, 0, 0, -7]),), "whole number"),
    "a field too many": ((msgpack.packb([VERSION, 8, 1, 0, 0, 7, 7]),), "entries"),
    "an oversized header": ((b"\xc6" + (1 << 20).to_bytes(4, "big") + bytes(1 << 20),), "over the limit"),
    "deeply nested": ((b"\x91" * 60_000,), "header"),
    "three frames": ((HEADER, b"payload", b"more"), "too many frames"),
    "a thousand frames": ((HEADER,) * 1000, "too many frames"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_refused_with_a_text(cluster: LocalCluster, stores: list[kvd.KVStore], what: str) -> None:
    frames, text = GARBAGE[what]
    with busy(stores):
        for address in addresses(cluster):
            with Raw(address) as raw:
                raw.send(*frames)
                refused = raw.answer()
                assert isinstance(refused, Refused)
                assert refused.error is ErrorCode.PROTOCOL_ERROR
                assert text in refused.text
                assert isinstance(raw.answers(StatusQuery(9)), StatusReport)  # the connection is still good


def test_the_log_gets_one_line_of_many(
    cluster: LocalCluster, stores: list[kvd.KVStore], caplog: pytest.LogCaptureFixture
) -> None:
    with LocalCluster(1, 1) as fresh, caplog.at_level(logging.WARNING, logger="kvd.node"):
        for address in addresses(fresh):
            with Raw(address) as raw:
                for _ in range(500):
                    raw.send(b"garbage")
                for _ in range(500):
                    assert isinstance(raw.answer(), Refused)
    lines = [record for record in caplog.records if "invalid frame" in record.getMessage()]
    assert len(lines) == 2


def test_random_bytes_and_changed_messages(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    rng = random.Random(7)
    spec = KeySpec("float32", (3000,), 1 << 20)
    real = [
        encode(message, STRANGER, NO_VIEW)
        for message in (
            Push(3, (Part("w", 0, 1),), 0, 1, True),
            Pull(4, (Part("w", 0, -1),)),
            Init(5, "x", spec, 0),
            Heartbeat("worker", 0),
            SetOptimizer(6, {"name": "SGD", "learning_rate": 0.1}),
        )
    ]
    with busy(stores):
        for address in addresses(cluster):
            with Raw(address) as raw:
                for _ in range(300):
                    header = bytearray(rng.choice(real))
                    for _ in range(rng.randrange(1, 4)):
                        header[rng.randrange(5, len(header))] = rng.randrange(256)
                    if SetOptimizer.KIND in header[:3] and b"SGD" in header:
                        header = bytearray(rng.randbytes(rng.randrange(1, 80)))
                    raw.send(bytes(header), *([rng.randbytes(rng.randrange(200))] if rng.random() < 0.5 else []))
            assert is_alive(address)


def test_strangers_do_not_push(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    value = np.full(3000, 100, np.float32).tobytes()
    with busy(stores):
        for server in cluster.servers:
            with Raw(server.address) as raw:
                for clock in (1, 2, 10**6):
                    refused = raw.answers(Push(clock, (Part("w", 0, clock),), 0, 1, False), value)
                    assert refused.reason is NotYetReason.NOT_ATTACHED
                    assert refused.request == clock
                assert (
                    raw.answers(Publish(5, "w", KeySpec("float32", (1,), 1 << 20))).reason is NotYetReason.NOT_ATTACHED
                )
                assert (
                    raw.answers(Init(6, "mine", KeySpec("float32", (1,), 1 << 20), 0), bytes(4)).reason
                    is NotYetReason.NOT_ATTACHED
                )
                pull = raw.answers(Pull(7, (Part("w", 0, 3),)))
                assert isinstance(pull, NotYet) or pull.error is ErrorCode.KEY_NOT_FOUND
                assert raw.answers(Pull(8, (Part("no such key", 0, -1),))).error is ErrorCode.KEY_NOT_FOUND
                assert raw.answers(Lookup(9, "no such key", False)).error is ErrorCode.KEY_NOT_FOUND


def test_frames_that_are_recorded_and_sent_again_count_once(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    """Every message of a worker to the servers is sent once more from another socket, some before its own answer."""
    engine: Any = engine_of(stores[0])
    transport = engine.transport
    recorded: list[tuple[int, bytes, bytes]] = []
    send = transport.send
    by_incarnation = {member.incarnation: member.address for member in engine.machine.view.servers()}

    def record(peer: Any, header: bytes, payload: Any) -> bool:
        if peer in by_incarnation and isinstance(decode(header).message, Push | PushBatch):
            recorded.append((peer, header, bytes(joined(pieces_of(payload)))))
        return bool(send(peer, header, payload))

    transport.send = record
    replayers = {incarnation: Raw(address) for incarnation, address in by_incarnation.items()}
    try:
        with busy(stores):
            sent = 0
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                while sent < len(recorded):
                    peer, header, payload = recorded[sent]
                    replayers[peer].send(header, payload)
                    sent += 1
                time.sleep(0.001)
            assert sent > 30  # nobody was held up by the repetition
        for peer, header, payload in recorded:
            replayers[peer].send(header, payload)
        first = recorded[0][0]
        kinds = {type(replayers[first].answer()) for _ in range(5)}
        assert kinds & {Done, Staged, Values, Refused}
    finally:
        transport.send = send
        for raw in replayers.values():
            raw.close()
    with busy(stores):
        pass


def test_a_worker_that_sends_the_wrong_bytes_is_refused(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    engine: Any = engine_of(stores[0])
    me = engine.machine.incarnation
    home = engine.machine.view.server_of("w", 0)
    clock = stores[0].clock("w")
    with Raw(engine.machine.view.servers()[home].address) as raw:
        for nbytes in (0, 1, 11_999, 12_001, 100_000):
            push = Push(1 << 40, (Part("w", 0, clock + 1),), 0, 1, False)
            refused = raw.answers(push, bytes(nbytes), sender=me)
            assert refused.error is ErrorCode.PROTOCOL_ERROR
            assert f"has 12000 bytes, this one has {nbytes}" in refused.text
        for wrong in (clock + 2, clock + 1000):
            refused = raw.answers(Push(1 << 41, (Part("w", 0, wrong),), 0, 1, False), bytes(12_000), sender=me)
            assert (refused.reason, refused.next_clock) == (NotYetReason.OUT_OF_TURN, clock + 1)
        refused = raw.answers(Push(1 << 42, (Part("w", 7, clock + 1),), 0, 1, False), bytes(12_000), sender=me)
        assert refused.error is ErrorCode.KEY_NOT_FOUND
    with busy(stores):
        pass


def test_an_answer_that_would_be_too_large_is_refused(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    made = [store.init_async("large", np.zeros(250_000, np.float32)) for store in stores]
    for handle in made:
        handle.wait()
    engine: Any = engine_of(stores[0])
    home = engine.machine.view.server_of("large", 0)
    with busy(stores), Raw(engine.machine.view.servers()[home].address) as raw:
        refused = raw.answers(Pull(5, (Part("large", 0, -1),) * 1024))
        assert isinstance(refused, Refused)
        assert refused.request == 5
        assert "MiB" in refused.text


def test_a_message_to_the_wrong_role(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    scheduler, server = addresses(cluster)[:2]
    with busy(stores):
        with Raw(scheduler) as raw:
            refused = raw.answers(Push(3, (Part("w", 0, 1),), 0, 1, False), bytes(12_000))
            assert (refused.error, refused.request) == (ErrorCode.PROTOCOL_ERROR, 3)
            assert "the scheduler takes no Push" in refused.text
            assert raw.answers(Attach(4, 0)).error is ErrorCode.PROTOCOL_ERROR
        with Raw(server) as raw:
            settings = Settings("", "", -1, 0, 0, 0, 0, 0)
            join = Join(3, "worker", "me", "", "host", 1, -1, settings)
            refused = raw.answers(join)
            assert (refused.error, refused.request) == (ErrorCode.PROTOCOL_ERROR, 3)
            assert "a server takes no Join" in refused.text
            assert raw.answers(Leave(4, Departure.LEFT)).error is ErrorCode.PROTOCOL_ERROR
            raw.say(View(settings, (), ()))  # who is not the scheduler announces nothing
            raw.say(Refused(0, ErrorCode.REPLACED, "go away"))
        assert is_alive(server)


def test_a_joining_node_that_makes_no_sense(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    settings = Settings("", "", -1, 0, 0, 0, 0, 0)
    join = Join(1, "worker", "me", "", "host", 1, -1, settings)
    with busy(stores), Raw(cluster.scheduler.address) as raw:
        for bad, error in (
            (replace(join, role="pirate"), ErrorCode.CONFIG_ERROR),
            (replace(join, node_id=""), ErrorCode.CONFIG_ERROR),
            (replace(join, settings=settings._replace(num_workers=99)), ErrorCode.CONFIG_ERROR),
            (replace(join, settings=settings._replace(mode="chaos")), ErrorCode.CONFIG_ERROR),
            (join, ErrorCode.NOT_ALLOWED),
        ):
            assert raw.answers(bad).error is error
        assert raw.answers(Leave(2, Departure.LEFT)).reason is NotYetReason.NOT_JOINED


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
    """A connection on which the handshake is done: what is sent now is taken for frames."""
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
                assert is_alive(address)
            assert is_alive(address)


def test_port_scanners_that_connect_and_hang_or_go(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    hanging = []
    with busy(stores):
        for address in addresses(cluster):
            for _ in range(30):
                hanging.append(raw_connection(address))
                raw_connection(address).close()
                with raw_connection(address) as half:
                    half.sendall(GREETING[:30])
            assert is_alive(address)
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
            assert is_alive(address)


def test_connections_that_break_in_the_middle_of_a_frame(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    with busy(stores):
        for address in addresses(cluster):
            for _ in range(10):
                with peer(address) as connection:
                    connection.sendall(b"\x01\x05hello\x02" + (1 << 20).to_bytes(8, "big") + b"x" * 50)
            assert is_alive(address)
