"""What the tests of the launcher use: stand-ins for daemons and workers, and launchers that run beside the test."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from kvd.node.launch import Launch
from kvd.node.parent import ParentWatch

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 30.0

DAEMON = """
import os, signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("up", os.environ["KVD_NODE_ID"], os.environ["KVD_PARENT_PID"], os.environ["KVD_BIND"], flush=True)
if sys.argv[1] == "server" and "SERVER_IS_UP" in os.environ:
    with open(os.environ["SERVER_IS_UP"], "a") as file:
        file.write("x")
if os.environ.get("FAILS") in (sys.argv[1], os.environ["KVD_NODE_ID"]):
    if os.path.exists(os.environ.get("FAILS_IF", "/")):
        sys.exit(int(os.environ["FAILS_WITH"]))
if sys.argv[1] == "scheduler" and "NEVER_READY" not in os.environ:
    with open(sys.argv[sys.argv.index("--ready-file") + 1], "w") as file:
        file.write("tcp://127.0.0.1:12345\\n")
    if name := os.environ.get("NOTIFY_SOCKET"):
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1\\nSTATUS=x", "\\0" + name[1:])
signal.sigwait({signal.SIGTERM})
print("down", os.environ["KVD_NODE_ID"], flush=True)
"""

# A worker that ends before the servers have begun would have them ended before they could say anything.
WAIT_FOR_SERVERS = """
import os, time
while not os.path.exists(up := os.environ["SERVER_IS_UP"]) or os.stat(up).st_size < int(os.environ["KVD_NUM_SERVERS"]):
    time.sleep(0.01)  # this program has no kvd
"""

FAKE_SSH = """
import os, signal, subprocess, sys, threading
host, command = sys.argv[sys.argv.index("--") + 1 :]
if host == "refused":
    print("ssh: connect to host refused port 22: Connection refused", file=sys.stderr)
    sys.exit(255)
if host == "silent":
    open(os.environ["IS_SILENT"], "w").close()
    signal.pause()
if host == "stuck" and command.endswith(" run"):
    with open(os.environ["STUCK"], "a") as file:
        file.write("x")
    signal.pause()
if host == "noisy":
    print("welcome to noisy\\nhave a nice day", end=", ", flush=True)
if host == "closed":
    print("This account is not available.")
    sys.exit(1)
if host == "bare":
    command = "exec /no/such/python x"
if host == "gone":
    os.rmdir(os.environ["FOLDER"])
seen = {"SSH_CONNECTION": "127.0.0.1 50000 127.0.0.1 22", "FAKE_HOST": host}
remote = subprocess.Popen(
    ["/bin/sh", "-c", command], stdin=subprocess.PIPE, cwd="/", env=os.environ | seen, start_new_session=True
)
def pass_on():
    try:
        while data := os.read(0, 4096):
            os.write(remote.stdin.fileno(), data)
        remote.stdin.close()
    except BrokenPipeError:
        pass
threading.Thread(target=pass_on, daemon=True).start()
code = remote.wait()
os._exit(code if code >= 0 else 255)
"""

LAUNCHER = """
import json, os, sys
from kvd.node.launch import Host, Job, RestartRule, run
given = json.loads(sys.argv[1])
given["hosts"] = [Host(*host) for host in given.get("hosts", [])]
given["restarts"] = RestartRule(**given.get("restarts", {}))
def show(node, stream, line):  # from several threads: one write is one line, which print does not promise
    os.write(1, f"{node} {stream} {line.decode()}".encode())
sys.exit(run(Job(**given), show))
"""


class Lines:
    """Collects the output of a job."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, bytes]] = []
        self._changed = threading.Condition()

    def take(self, node: str, stream: str, line: bytes) -> None:
        with self._changed:
            self.all.append((node, stream, line.removesuffix(b"\n")))
            self._changed.notify_all()

    def of(self, node: str) -> list[str]:
        return [line.decode() for name, _stream, line in self.all if name == node]

    def wait_for(self, node: str, line: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: line in self.of(node), DEADLINE_S), self.all


def marked(name: str) -> list[int]:
    """The processes that have the mark in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and f"JOB_MARK={name}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue  # it has ended
    return found


def wait_until_gone(name: str) -> None:
    """Wait until no process with the mark is left."""
    deadline = time.monotonic() + DEADLINE_S
    while left := marked(name):
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        wait_for_end(left[0])


def wait_for_end(pid: int) -> None:
    watch = ParentWatch(pid)
    if watch.descriptor is not None:
        assert select.select([watch.descriptor], [], [], DEADLINE_S)[0], f"process {pid} does not end"
    watch.close()


def python(*code: str) -> list[str]:
    return [sys.executable, "-S", "-c", "\n".join(map(textwrap.dedent, code))]


def shell(code: str) -> list[str]:
    return ["/bin/sh", "-c", code]


def in_thread(launch: Launch) -> Callable[[], int]:
    """Run a job beside the test; the returned function waits for its exit code."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(asyncio.run(launch.run())))
    thread.start()

    def result() -> int:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the job does not end"
        return codes[0]

    return result


def wait_for_line(lines: Lines, node: str, beginning: str) -> str:
    deadline = time.monotonic() + DEADLINE_S
    with lines._changed:
        while True:
            found = next((line for line in lines.of(node) if line.startswith(beginning)), None)
            if found is not None:
                return found
            assert lines._changed.wait(deadline - time.monotonic()), lines.all


class Launcher:
    """A launcher in a process of its own."""

    def __init__(self, mark: dict[str, str], folder: Path, **job: Any) -> None:
        self.mark = mark["JOB_MARK"]
        path = f"{ROOT}{os.pathsep}{ROOT / 'cli'}"
        # A launcher that is killed cannot remove its folder: it lies where pytest removes it.
        environment = {**os.environ, **mark, "PYTHONPATH": path, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, json.dumps({"workers": 2, "servers": 1, **job})],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.out: IO[str] = self.process.stdout
        self.seen: list[str] = []

    def wait_for(self, *lines: str) -> None:
        """Read until all these lines have come."""
        missing = set(lines)
        while missing:
            line = self.out.readline()
            assert line, f"the output ended without {missing}: {self.seen}"
            self.seen.append(line.rstrip("\n"))
            missing.discard(self.seen[-1])

    def end(self) -> tuple[int, list[str]]:
        """Its exit code and all of its output."""
        rest, _ = self.process.communicate(timeout=DEADLINE_S)
        self.seen += rest.splitlines()
        return self.process.returncode, self.seen
