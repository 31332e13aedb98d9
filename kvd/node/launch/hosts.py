"""The hosts of a job: how they are named, and which process runs on which."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvd.errors import ConfigError

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
