"""What the machine itself can do: the bandwidth of its memory, a plain TCP socket, a bare round trip."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.floor import cores_assumed

Arrays: TypeAlias = tuple[NDArray[np.float32], ...]

ARRAY_NBYTES: Final = 64 << 20
MEMORY_REPETITIONS: Final = 7
CHUNK_NBYTES: Final = 1 << 20
STREAM_CHUNKS: Final = 512
STREAM_REPETITIONS: Final = 3
PING_NBYTES: Final = 1024
PINGS: Final = 3000
PATIENCE_S: Final = 30.0


def measure(workers: int) -> dict[str, float]:
    """All limits. Bandwidths count every byte that is read or written, each once.

    Args:
        workers: those of the comparison; with the server they decide how many cores can be busy at once.
    """
    cores = cores_assumed(workers)
    copy_s, add_s = _memory(1)
    all_copy_s, all_add_s = _memory(cores)
    return {
        "copy_gb_s": 2 * ARRAY_NBYTES / copy_s / 1e9,
        "add_gb_s": 3 * ARRAY_NBYTES / add_s / 1e9,
        "cores": cores,
        "all_copy_gb_s": cores * 2 * ARRAY_NBYTES / all_copy_s / 1e9,
        "all_add_gb_s": cores * 3 * ARRAY_NBYTES / all_add_s / 1e9,
        "tcp_gb_s": _with_peer(_swallow, _stream),
        "round_trip_us": _with_peer(_echo, _ping),
    }


def _memory(threads: int) -> tuple[float, float]:
    """Seconds of one copy and of one addition by each thread at once, of arrays that no cache holds; best of several.

    Threads do: NumPy lets go of the interpreter's lock while it copies and adds.
    """
    count = ARRAY_NBYTES // 4
    sets = [tuple(np.full(count, fill, np.float32) for fill in (1, 2, 0)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def together(work: Callable[[Arrays], object]) -> float:
            return min(_seconds(lambda: list(pool.map(work, sets))) for _ in range(MEMORY_REPETITIONS))

        copy_s = together(lambda arrays: np.copyto(arrays[2], arrays[0]))
        add_s = together(lambda arrays: np.add(arrays[0], arrays[1], out=arrays[2]))
    return copy_s, add_s


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _with_peer(answer: Callable[[socket.socket], None], measure_on: Callable[[socket.socket], float]) -> float:
    """Measure on a loopback connection to a process of our own, and end that process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        # Spawned, not forked: this process may have threads.
        peer = multiprocessing.get_context("spawn").Process(target=_peer, args=(listener.getsockname()[1], answer))
        peer.start()
        try:
            connection, _ = listener.accept()
            with connection:
                _prepare(connection)
                return measure_on(connection)
        finally:
            peer.join(PATIENCE_S)
            if peer.is_alive():
                peer.kill()
                peer.join()


def _peer(port: int, answer: Callable[[socket.socket], None]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        _prepare(connection)
        answer(connection)


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _fill(buffer: memoryview, connection: socket.socket) -> bool:
    """Receive a whole buffer; False if the other end closed the connection instead."""
    got = 0
    while got < len(buffer):
        arrived = connection.recv_into(buffer[got:])
        if arrived == 0:
            return False
        got += arrived
    return True


def _swallow(connection: socket.socket) -> None:
    """The other end of a stream: receives chunks, and reports when the whole stream has arrived."""
    chunk = memoryview(bytearray(CHUNK_NBYTES))
    while all(_fill(chunk, connection) for _ in range(STREAM_CHUNKS)):
        connection.sendall(b"!")


def _stream(connection: socket.socket) -> float:
    """GB/s in one direction, the best of several streams."""
    chunk = bytes(CHUNK_NBYTES)

    def stream() -> None:
        for _ in range(STREAM_CHUNKS):
            connection.sendall(chunk)
        connection.recv(1)

    best_s = min(_seconds(stream) for _ in range(STREAM_REPETITIONS))
    return CHUNK_NBYTES * STREAM_CHUNKS / best_s / 1e9


def _echo(connection: socket.socket) -> None:
    """The other end of the round trips."""
    message = memoryview(bytearray(PING_NBYTES))
    while _fill(message, connection):
        connection.sendall(message)


def _ping(connection: socket.socket) -> float:
    """The median time of one small message there and back, in µs."""
    message, answer = bytes(PING_NBYTES), memoryview(bytearray(PING_NBYTES))

    def there_and_back() -> None:
        connection.sendall(message)
        _fill(answer, connection)

    return statistics.median(_seconds(there_and_back) for _ in range(PINGS)) * 1e6
