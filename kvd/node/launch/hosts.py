"""The hosts of a job: their names, the processes on each, the ssh commands for them, and the scheduler's addresses.

A launcher runs `kvd.node.remote` on other hosts.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.config import parse_address, tcp_address
from kvd.errors import ConfigError
from kvd.node import remote
from kvd.node.remote import SILENCE_S, Mode

_HOST: Final = re.compile(
    r"(?P<name>(?:[A-Za-z0-9_.+-]+@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[0-9A-Za-z_.-]+)?\]))"
    r"(?::(?P<slots>[0-9]{1,4}))?"
)


@dataclass(frozen=True, slots=True)
class Host:
    """A host, and how many workers it takes.

    Attributes:
        name: as ssh takes it: ``trainer-b``, ``user@10.0.0.2``, ``fe80::1``.
        slots: at least 1.
    """

    name: str
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs.

    Attributes:
        host: its name; empty: the host of the launcher.
        local_rank: the number of the worker on its host.
        local_workers: how many workers of the job its host has.
    """

    host: str
    local_rank: int
    local_workers: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``HOST[:SLOTS],…``, such as ``a,b:2,user@c:4,[fe80::1]:2``.

    Raises:
        ConfigError: it is something else, or names a host twice.
    """
    hosts: list[Host] = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        slots = 1 if match is None or match["slots"] is None else int(match["slots"])
        if match is None or match["name"].startswith("-") or slots < 1:
            raise ConfigError(
                f"hosts = {text!r}: {part.strip()!r} is not HOST or HOST:SLOTS with at least one slot; "
                "write a,b:2 for one worker on a and two on b (an IPv6 number in brackets)"
            )
        name = match["name"].replace("[", "").replace("]", "")
        if name in {host.name for host in hosts}:
            raise ConfigError(f"hosts = {text!r}: {name} is named twice; give it the sum of the slots, {name}:2")
        hosts.append(Host(name, slots))
    return tuple(hosts)


class Placement:
    """Which process of a job runs on which host. Ranks that follow each other share a host."""

    def __init__(self, hosts: Sequence[Host], workers: int) -> None:
        self._hosts = [host.name for host in hosts] or [""]
        self._workers: list[Place] = []
        for host in hosts or [Host("", workers)]:
            count = min(host.slots, workers - len(self._workers))
            self._workers += [Place(host.name, number, count) for number in range(count)]

    def worker(self, rank: int) -> Place:
        """Where the worker of this rank runs."""
        return self._workers[rank]

    def server(self, index: int) -> str:
        """The host of this server: the hosts take turns. Empty: that of the launcher."""
        return self._hosts[index % len(self._hosts)]


SSH: Final = ("ssh",)
CONNECT_TIMEOUT_S: Final = 10

OPTIONS: Final = {
    "BatchMode": "yes",  # an ssh that asks a question would wait for ever
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": "5",  # a host that is cut off: ssh ends after three of these
    "ServerAliveCountMax": "3",
    "ClearAllForwardings": "yes",
    "ControlMaster": "no",  # a connection that stays in the background would hold our pipes open
    "RemoteCommand": "none",
}

LOST: Final = 255
"""The exit code of an ssh whose connection ended."""


def on_host(ssh: Sequence[str], host: str, mode: Mode) -> list[str]:
    """The command that runs `kvd.node.remote` on a host, with the interpreter and the checkout of this process.

    Nothing that is secret may be in it: every user of both hosts sees command lines. The order goes through stdin.
    """
    options = [f"-o{name}={value}" for name, value in OPTIONS.items()]
    program = [sys.executable, "-I", "-S", str(Path(remote.__file__).resolve()), mode.value]
    return [*ssh, "-T", *options, "--", host, f"exec {shlex.join(program)}"]


def order(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    grace_s: float,
    key: str = "",
    *,
    takes_stdin: bool = False,
) -> bytes:
    """What a host is told on stdin.

    Args:
        command: program and arguments.
        environment: variables that are added to those of the host.
        folder: where the command runs.
        grace_s: how long the command may take to end after SIGTERM when the connection is lost.
        key: the content of a key file, which the host keeps in a private file as long as the command runs; "": none.
        takes_stdin: whether the stdin of the command follows through the connection; if not, it is empty.
    """
    fields = {
        "command": list(command),
        "environment": dict(environment),
        "folder": folder,
        "grace_s": grace_s,
        "silence_s": SILENCE_S,
        "key": key,
        "takes_stdin": takes_stdin,
    }
    return json.dumps(fields).encode() + b"\n"


LOOPBACK_NUMBER = "127.0.0.1"
_LOOPBACK = f"tcp://{LOOPBACK_NUMBER}:0"
_EVERYWHERE, _EVERYWHERE_IPV4 = "tcp://*:0", "tcp://0.0.0.0:0"


class Reach:
    """Addresses of a scheduler on the launcher's host: where it listens, and the address by which each host reaches it.

    Each host sees the launcher's host under the number from which its connection came: that is a number under which it
    reaches the launcher's host. A host that sees a loopback is this host itself.

    Attributes:
        bind: where the scheduler listens.
    """

    def __init__(self, given: str, seen: Mapping[str, str]) -> None:
        """
        Args:
            given: the address that the job was told to use; empty: none.
            seen: for each host the number of the launcher's host as that host sees it; empty: it does not know.

        Raises:
            ConfigError: no address suits all hosts.
        """
        self._given = given
        self._seen = seen
        self._outside = [number for number in dict.fromkeys(seen.values()) if not _is_loopback(number)]
        self.bind = given or self._find()

    def scheduler(self, host: str, listening: str) -> str:
        """The address by which a host reaches the scheduler.

        Args:
            host: its name; empty: that of the launcher.
            listening: where the scheduler listens now.
        """
        if self._given or not self._outside:
            return listening
        number = self._seen.get(host, self._outside[0])
        return tcp_address(self._outside[0] if _is_loopback(number) else number, parse_address(listening).port)

    def worker(self, host: str, address: str) -> str:
        """The address by which the other hosts reach a worker.

        Args:
            host: on which it runs; empty: on that of the launcher.
            address: the number by which the launcher reaches that host; empty: not known.
        """
        if _is_loopback(self._seen.get(host, LOOPBACK_NUMBER)):
            return self._outside[0] if self._outside else LOOPBACK_NUMBER
        return address or host.rpartition("@")[2]

    def _find(self) -> str:
        if not self._outside:
            return _LOOPBACK
        unknown = [host for host, number in self._seen.items() if not number]
        if unknown:
            raise ConfigError(
                f"the ssh to {unknown[0]} does not tell by which address that host reaches this one (SSH_CONNECTION): "
                "give --scheduler tcp://ADDRESS:PORT with an address of this host that all hosts reach",
                setting="scheduler",
            )
        if len(self._outside) == 1 and "%" not in self._outside[0]:  # behind it is an interface of the other host
            return tcp_address(self._outside[0], 0)
        return _EVERYWHERE if any(":" in number for number in self._outside) else _EVERYWHERE_IPV4


def _is_loopback(number: str) -> bool:
    try:
        return ipaddress.ip_address(number).is_loopback
    except ValueError:
        return False
