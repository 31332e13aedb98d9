"""The processor time that a step over TCP takes without kvd: ``python -m benchmarks.link_floor``.

Two workers and a server move the bytes of a step and do with them what cannot be left out: each worker sends 102 MB,
the server adds both and sends each the sum, the workers copy it into arrays of theirs. For sealed links each byte is
encrypted by its sender and decrypted by its receiver, with AES-256-GCM in records as large as those of kvd. There are
no messages, keys or rounds: a blocking thread for each direction of each connection, which wakes up as kvd's readers
do. What kvd takes more than that goes to its messages, keys and rounds.

Rounds of both kinds alternate. The time is that of workers and server, user and system, per GB that left or reached a
worker, as in ``benchmarks.compare``. The step's own time says something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.arguments import positive, some_of
from benchmarks.report import print_table, time_text
from kvd.transport.links.sealing import OVERHEAD_BYTES, RECORD_BYTES, SECRET_BYTES
from kvd.transport.links.sockets import WakeUps

Bytes: TypeAlias = NDArray[np.uint8]

KINDS: Final = ("plain", "sealed")
WORKERS: Final = 2
STEP_BYTES: Final = 102_228_128  # pushed by each worker: the tensors of ResNet-50
MESSAGE_BYTES: Final = STEP_BYTES // 8 & ~7  # as large as kvd's, for lists of keys
WARM_UP_STEPS: Final = 2
MESSAGES_IN_MEMORY: Final = 18  # two steps, as a server has them
PATIENCE_S: Final = 60.0
HEAD: Final = b"size"
HEAD_BYTES: Final = len(HEAD)


class Usage(NamedTuple):
    """What a round has taken.

    Attributes:
        server_s, workers_s: processor time per GB, in seconds.
        step_s: the time of a step, in seconds.
    """

    server_s: float
    workers_s: float
    step_s: float


class Pipe:
    """One direction of a connection, which one thread uses.

    Args:
        connection: a blocking socket.
        is_sealed: whether the bytes travel encrypted.
    """

    def __init__(self, connection: socket.socket, *, is_sealed: bool) -> None:
        self._socket = connection
        self._cipher = AESGCM(bytes(SECRET_BYTES)) if is_sealed else None
        self._record = np.empty(RECORD_BYTES + OVERHEAD_BYTES, np.uint8).data
        self._numbers = count()
        self._wake_ups = WakeUps(connection)

    def send(self, data: Bytes) -> None:
        for part in _parts(data):
            if self._cipher is None:
                self._socket.sendall(part)
                continue
            record = self._record[: len(part) + OVERHEAD_BYTES]
            self._cipher.encrypt_into(self._nonce(), part, HEAD, record[HEAD_BYTES:])
            self._socket.sendall(record)

    def receive(self, data: Bytes) -> None:
        """Fill an array. Raises ConnectionError at the end of the stream."""
        for part in _parts(data):
            if self._cipher is None:
                self._fill(part)
                continue
            record = self._record[: len(part) + OVERHEAD_BYTES]
            self._fill(record)
            self._cipher.decrypt_into(self._nonce(), record[HEAD_BYTES:], HEAD, part)

    def _fill(self, memory: memoryview) -> None:
        while len(memory):
            self._wake_ups.come_for(len(memory))
            arrived = self._socket.recv_into(memory)
            if not arrived:
                raise ConnectionError("the other end is gone")
            memory = memory[arrived:]

    def _nonce(self) -> bytes:
        return next(self._numbers).to_bytes(12, "little")


def _parts(data: Bytes) -> Iterator[memoryview]:
    for at in range(0, data.nbytes, RECORD_BYTES):
        yield data.data[at : at + RECORD_BYTES]


def _message_sizes() -> list[int]:
    return [min(MESSAGE_BYTES, STEP_BYTES - at) for at in range(0, STEP_BYTES, MESSAGE_BYTES)]


def _prepare(connection: socket.socket, congestion: str) -> None:
    connection.settimeout(PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _worker(port: int, steps: int, is_sealed: bool, congestion: str, says: Connection) -> None:
    """Push and pull at the server, and say how much processor time that took."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        _prepare(connection, congestion)
        out, into = Pipe(connection, is_sealed=is_sealed), Pipe(connection, is_sealed=is_sealed)
        gradient, values = np.ones(STEP_BYTES, np.uint8), np.zeros(STEP_BYTES, np.uint8)
        payloads = [np.zeros(MESSAGE_BYTES, np.uint8) for _ in range(2)]
        ends = np.cumsum(_message_sizes())

        def push() -> None:
            for end, nbytes in zip(ends, _message_sizes(), strict=True):
                out.send(gradient[end - nbytes : end])

        begun_s = 0.0
        for step in range(WARM_UP_STEPS + steps):
            if step == WARM_UP_STEPS:
                begun_s = _cpu_s()
            pushing = threading.Thread(target=push)
            pushing.start()
            for number, (end, nbytes) in enumerate(zip(ends, _message_sizes(), strict=True)):
                payload = payloads[number % 2][:nbytes]
                into.receive(payload)
                values[end - nbytes : end] = payload
            pushing.join()
        says.send(_cpu_s() - begun_s)


def _serve(connections: Sequence[socket.socket], steps: int, is_sealed: bool) -> tuple[float, float]:
    """Add what the workers push, and send them the sums. Return the processor time, and the time, of all steps."""
    arrived: list[Queue[Bytes]] = [Queue() for _ in connections]
    leaving: list[Queue[Bytes]] = [Queue(2) for _ in connections]
    sizes = _message_sizes() * (WARM_UP_STEPS + steps)

    def memory() -> list[Bytes]:
        return [np.zeros(MESSAGE_BYTES, np.uint8) for _ in range(MESSAGES_IN_MEMORY)]

    def take(connection: socket.socket, queue: Queue[Bytes]) -> None:
        pipe, blocks = Pipe(connection, is_sealed=is_sealed), memory()
        for number, nbytes in enumerate(sizes):
            block = blocks[number % MESSAGES_IN_MEMORY][:nbytes]
            pipe.receive(block)
            queue.put(block)

    def give(connection: socket.socket, queue: Queue[Bytes]) -> None:
        pipe = Pipe(connection, is_sealed=is_sealed)
        for _ in sizes:
            pipe.send(queue.get(timeout=PATIENCE_S))

    threads = [
        threading.Thread(target=work, args=arguments, daemon=True)
        for work, queues in ((take, arrived), (give, leaving))
        for arguments in zip(connections, queues, strict=True)
    ]
    for thread in threads:
        thread.start()
    sums, begun_s, begun = memory(), 0.0, 0.0
    for number, nbytes in enumerate(sizes):
        if number == WARM_UP_STEPS * len(_message_sizes()):
            begun_s, begun = _cpu_s(), time.perf_counter()
        one, other = (queue.get(timeout=PATIENCE_S).view(np.float32) for queue in arrived)
        total = sums[number % MESSAGES_IN_MEMORY][:nbytes]
        np.add(one, other, out=total.view(np.float32))
        for queue in leaving:
            queue.put(total, timeout=PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    return _cpu_s() - begun_s, time.perf_counter() - begun


def measure(steps: int, *, is_sealed: bool, congestion: str = "") -> Usage:
    """Take steps with two workers in processes of their own.

    Args:
        congestion: congestion control of the connections, such as "reno"; "": as the system has it.
    """
    context = multiprocessing.get_context("spawn")
    hears, says = context.Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        arguments: tuple[Any, ...] = (listener.getsockname()[1], steps, is_sealed, congestion, says)
        workers = [context.Process(target=_worker, args=arguments, daemon=True) for _ in range(WORKERS)]
        connections: list[socket.socket] = []
        try:
            for worker in workers:
                worker.start()
            for _ in workers:
                connections.append(listener.accept()[0])
                _prepare(connections[-1], congestion)
            server_s, all_s = _serve(connections, steps, is_sealed)
            workers_s = 0.0
            for _ in workers:
                if not hears.poll(PATIENCE_S):
                    raise TimeoutError("a worker does not end")
                workers_s += hears.recv()
        finally:
            for connection in connections:
                connection.close()
            for worker in workers:
                worker.join(PATIENCE_S)
                worker.kill()
    gigabytes = 2 * WORKERS * STEP_BYTES * steps / 1e9
    return Usage(server_s / gigabytes, workers_s / gigabytes, all_s / steps)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.link_floor", description=__doc__)
    parser.add_argument("--kinds", type=some_of(KINDS), default=KINDS)
    parser.add_argument("--rounds", type=positive(int), default=3, help="how often each kind is measured")
    parser.add_argument("--steps", type=positive(int), default=20, help="steps in each round")
    parser.add_argument(
        "--congestion", default="", help="congestion control of TCP, such as reno; default: the system's"
    )
    options = parser.parse_args(arguments)
    found: dict[str, list[Usage]] = {kind: [] for kind in options.kinds}
    for _ in range(options.rounds):
        for kind, usages in found.items():
            usages.append(measure(options.steps, is_sealed=kind == "sealed", congestion=options.congestion))
    rows = []
    for kind, usages in found.items():
        server_s, workers_s, step_s = (statistics.median(column) for column in zip(*usages, strict=True))
        both = statistics.median(usage.server_s + usage.workers_s for usage in usages)
        rows.append([kind, f"{server_s:.3f}", f"{workers_s:.3f}", f"{both:.3f}", time_text(1e6 * step_s)])
    print_table(Console(), ["links", "server, CPU s/GB", "workers", "all", "a step"], rows)


if __name__ == "__main__":
    main()
