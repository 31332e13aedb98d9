"""Several hosts on this machine: network namespaces on one bridge, 10.0.0.1, 10.0.0.2 …, each with its own loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from kvd.node.parent import kill_session
from kvd.testing.cluster import wait_until

DEADLINE_S: Final = 60.0

SETUP: Final = """
set -e
mount -t tmpfs none /run
mkdir -p /run/sshd
ip link set lo up
ip link add lan type bridge
ip link set lan up
ip address add 10.0.0.1/24 dev lan
for i in $(seq 2 "$1"); do
    unshare -n sleep infinity &
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
    ip link add "host$i" type veth peer name eth0 netns $!
    ip link set "host$i" master lan up
    nsenter -t $! -n sh -c "ip link set lo up && ip address add 10.0.0.$i/24 dev eth0 && ip link set eth0 up"
    echo $!
done
read end || true
kill $(jobs -p)
"""


def missing_for_lan() -> str:
    """What this machine lacks for a `Lan`; empty if nothing is missing."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"this needs {tool} (util-linux, iproute2)"
    trial = "ip link add lan type bridge && ip link add veth0 type veth peer name veth1 && mount -t tmpfs none /run"
    if subprocess.run([*_unshare(), "sh", "-c", trial], capture_output=True, check=False).returncode:
        return "the kernel does not let this user make network namespaces with bridges"
    return ""


def lan_or_skip(size: int) -> Lan:
    """Skips the test where there can be no network namespaces."""
    missing = missing_for_lan()
    if missing:
        pytest.skip(missing)
    return Lan(size)


class Lan:
    """The hosts 1 to `size`. Entering sets them up; at the end, everything that runs on them is killed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pids: list[int] = []

    def __enter__(self) -> Lan:
        self._holder = subprocess.Popen(
            [*_unshare(), "bash", "-c", SETUP, "bash", str(self._size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        self._pids = [self._holder.pid]
        for _ in range(2, self._size + 1):
            line = self._holder.stdout.readline()
            assert line, "the namespaces were not made"
            self._pids.append(int(line))
        return self

    def __exit__(self, *_: Any) -> None:
        for host in range(1, self._size + 1):
            for pid in self.processes(host):
                if pid not in self._pids:
                    subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)
        kill_session(self._holder.pid)
        self._holder.communicate()

    def on(self, host: int, *command: str) -> list[str]:
        """A command that runs `command` on a host, in the folder in which it is started."""
        user = [] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]
        return ["nsenter", "-t", str(self._pids[host - 1]), *user, "-n", "-m", f"--wd={os.getcwd()}", *command]

    def processes(self, host: int) -> list[int]:
        """The processes on a host."""
        wanted = os.readlink(f"/proc/{self._pids[host - 1]}/ns/net")
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == wanted:
                    found.append(int(entry))
            except OSError:
                continue  # it has ended, or is not ours
        return found

    def wait_until_only(self, host: int, names: set[str]) -> None:
        """Wait until nothing runs on a host but these programs."""

        def left() -> set[str]:
            pids = [pid for pid in self.processes(host) if pid not in self._pids]
            return {name for pid in pids if (name := _program(pid)) and name not in names}

        wait_until(lambda: not left(), f"nothing but {names} runs on host {host}", DEADLINE_S)

    def cut_off(self, host: int) -> None:
        """Take the host off the network; nobody is told."""
        subprocess.run(self.on(1, "ip", "link", "set", f"host{host}", "down"), check=True)

    def join(self, host: int) -> None:
        """Put a host that was cut off back on the network."""
        subprocess.run(self.on(1, "ip", "link", "set", f"host{host}", "up"), check=True)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _unshare() -> list[str]:
    # -m: what is mounted on /run is gone with the last process
    return ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "-n", "-m", "--propagation", "private"]
