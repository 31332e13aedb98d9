"""Where the scheduler of a job listens, and by which address each host reaches it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from kvd.config import parse_address, tcp_address
from kvd.errors import ConfigError

LOOPBACK_NUMBER = "127.0.0.1"
_LOOPBACK = f"tcp://{LOOPBACK_NUMBER}:0"
_EVERYWHERE, _EVERYWHERE_IPV4 = "tcp://*:0", "tcp://0.0.0.0:0"


class Reach:
    """The addresses of a scheduler on the launcher's host.

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
