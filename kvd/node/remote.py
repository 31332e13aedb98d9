"""What a launcher runs on another host, through ssh: one process of its job, which does not outlive the connection.

Stdin brings an order, one line of JSON, and then single bytes: signs of life and commands. In between come pieces of
the stdin of the process, each after a byte of its own and its size. When stdin ends, or no byte has come for some time,
the launcher is gone, and the process is ended with all that it has started.

Like `kvd.node.parent`, this file imports the standard library only and is run by its path.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import random
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvd.node.parent import Guard

GREETING: Final = b"kvd is here"
"""Tells the launcher that its order has arrived. A login shell may have written something before."""

ALIVE: Final = b"."
TERMINATE: Final = b"T"
KILL: Final = b"K"
SIGNALS: Final = {TERMINATE: signal.SIGTERM, KILL: signal.SIGQUIT}  # SIGQUIT: a guard kills everything

INPUT: Final = b"I"
"""Begins a piece of stdin: its size follows, then the piece. An empty piece is the end."""

INPUT_SIZE_BYTES: Final = 4
"""Bytes of that size, the most significant one first."""

SILENCE_S: Final = 20.0
"""How long the launcher may say nothing before it counts as gone."""

_TICK_S: Final = 1.0
_READ_BYTES: Final = 64 * 1024

_FIRST_PORT, _FIRST_EPHEMERAL, _PORTS_TRIED = 10_000, 32_768, 50


class Mode(Enum):
    """What this file does."""

    LOOK = "look"
    RUN = "run"


class Line:
    """The connection to the launcher, as a `Guard` watches it.

    Attributes:
        descriptor: becomes readable when something comes, or nothing will come any more.
    """

    def __init__(self, descriptor: int, silence_s: float, stdin: CommandInput | None) -> None:
        self.descriptor: int | None = descriptor
        self._stdin = stdin
        self._unread = b""  # the beginning of a piece of stdin
        self._silence_s = silence_s
        self._heard_at = time.monotonic()
        self._has_ended = False

    def is_gone(self) -> bool:
        """Read what has come, and carry it out. Whether the launcher is gone."""
        while not self._has_ended and self.descriptor is not None and _is_readable(self.descriptor):
            came = os.read(self.descriptor, _READ_BYTES)
            self._heard_at = time.monotonic()
            self._has_ended = not came
            for number in self._carry_out(came):
                os.kill(os.getpid(), number)
        return self._has_ended or time.monotonic() - self._heard_at > self._silence_s

    def _carry_out(self, came: bytes) -> set[int]:
        """Pass on the pieces of stdin. Return the signals that the commands ask for."""
        data, at, numbers = self._unread + came, 0, set()
        while at < len(data):
            byte = data[at : at + 1]
            if byte in SIGNALS:
                numbers.add(int(SIGNALS[byte]))
            if byte != INPUT:
                at += 1
                continue
            begin = at + 1 + INPUT_SIZE_BYTES
            end = begin + int.from_bytes(data[at + 1 : begin], "big")
            if len(data) < max(begin, end):
                break
            if self._stdin is not None:
                self._stdin.put(data[begin:end])
            at = end
        self._unread = data[at:]
        return numbers

    def close(self) -> None:
        """Close the connection on this side."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class CommandInput:
    """The stdin of the command: written in a thread of its own, as fast as the command reads it.

    The launcher bounds how much there is.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="stdin", daemon=True).start()

    def put(self, piece: bytes) -> None:
        """Add a piece; an empty one is the end."""
        self._queue.put(piece)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the command has ended, or closed its stdin
            while piece := self._queue.get():
                _write(self._descriptor, piece)
        os.close(self._descriptor)


def free_port() -> int:
    """Return a TCP port that is free on this host, for a program that listens there later.

    The kernel gives out ports of its ephemeral range in between: the port is below that range, if it can be.
    """
    lowest = _FIRST_EPHEMERAL
    with contextlib.suppress(OSError, ValueError):
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(_FIRST_PORT, lowest)
    for port in [*random.sample(below, min(len(below), _PORTS_TRIED)), 0]:
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("", port))
            return int(tried.getsockname()[1])
    raise OSError("no TCP port is free on this host")


def look(order: dict[str, Any]) -> int:
    """Say how the launcher is connected, which port is free here, and what would keep the job from running here."""
    client, _, own, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    answer = {"launcher": client, "address": own, "port": free_port(), "problem": _problem(order)}
    _write(1, GREETING + json.dumps(answer).encode() + b"\n")
    return 0


def run(order: dict[str, Any]) -> int:
    """Run the command of the order; return its exit code."""
    connection = os.dup(0)  # a duplicate is not inherited by the command
    stdin = None
    if order["takes_stdin"]:
        source, sink = os.pipe()
        stdin = CommandInput(sink)
    else:
        source = os.open(os.devnull, os.O_RDONLY)
    os.dup2(source, 0)
    os.close(source)
    line = Line(connection, float(order["silence_s"]), stdin)
    try:
        os.chdir(order["folder"])
    except OSError as error:
        print(f"error: cannot enter {order['folder']}: {error.strerror}", file=sys.stderr)
        return 126
    with _key_file(order["key"]) as key_settings:
        _write(1, GREETING + b"\n")
        guard = _guard_type()(
            order["command"],
            environment={**os.environ, **order["environment"], **key_settings},
            parent=line,
            grace_s=float(order["grace_s"]),
            on_tick=lambda: None,  # wakes the guard, so that it notices silence
            tick_s=_TICK_S,
        )
        return guard.run()


@contextlib.contextmanager
def _key_file(text: str) -> Iterator[dict[str, str]]:
    """The variables that name a file with the key of the job, which is gone at the end; none without a key."""
    if not text:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="kvd-key-", dir=_runtime_folder()) as folder:  # of mode 0700
        path = os.path.join(folder, "cluster.key")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        yield {"KVD_KEYFILE": path}


def _runtime_folder() -> str | None:
    """This user's folder in memory, if only the user can enter it; None: where temporary files go."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):
        status = os.lstat(folder)
        if stat.S_IMODE(status.st_mode) == 0o700 and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            return folder
    return None


def _problem(order: dict[str, Any]) -> str:
    """What this host lacks; empty if nothing is missing."""
    folder, program = order["folder"], order["command"][0]
    if not os.path.isdir(folder):
        return f"has no folder {folder}"
    path = {**os.environ, **order["environment"]}.get("PATH")
    with contextlib.chdir(folder):  # the program may be named from there
        if shutil.which(program, path=path) is None:
            return f"has no program {program}"
    return ""


def _guard_type() -> type[Guard]:
    """`kvd.node.parent.Guard`, loaded by its path: the packages around it take long to import."""
    spec = importlib.util.spec_from_file_location("kvd_parent", Path(__file__).with_name("parent.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    guard: type[Guard] = module.Guard
    return guard


def _read_order() -> dict[str, Any] | None:
    """The first line of stdin, and not a byte more; None if stdin ends before."""
    line = bytearray()
    while not line.endswith(b"\n"):
        came = os.read(0, 1)
        if not came:
            return None
        line += came
    order: dict[str, Any] = json.loads(line)
    return order


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main(arguments: list[str]) -> int:
    """``look`` or ``run``, with an order on stdin."""
    order = _read_order()
    if order is None:
        return 1  # the launcher has gone already
    return look(order) if Mode(arguments[0]) is Mode.LOOK else run(order)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
