"""Addresses: where sockets listen and what they connect to."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Literal

from kvd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """Address that a socket listens on or connects to.

    Attributes:
        scheme: ``"tcp"`` or ``"ipc"``.
        host: for tcp: a name or a number, IPv6 without brackets.
        port: for tcp: 0 is any free port.
        path: for ipc: one that begins with ``@`` is an abstract name.
    """

    scheme: Literal["tcp", "ipc"]
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_wildcard(self) -> bool:
        """Return whether the address stands for all addresses of the machine."""
        return self.scheme == "tcp" and self.host in ("*", "0.0.0.0", "::")

    @property
    def is_local(self) -> bool:
        """Return whether only processes on this machine can reach the address."""
        if self.scheme == "ipc" or self.host in ("localhost", "lo"):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name may resolve to anything tomorrow

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        return tcp_address(self.host, self.port)


def tcp_address(host: str, port: int | str) -> str:
    """Return the text of a tcp address, with brackets around an IPv6 host."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def parse_address(text: str) -> Address:
    """Read ``tcp://HOST:PORT``, ``tcp://[IPV6]:PORT`` or ``ipc://PATH``.

    Raises:
        ConfigError: it is none of these.
    """
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "tcp":
        host, port = host_and_port(rest)
        return Address("tcp", host=host, port=port)
    if separator and scheme == "ipc":
        # the kernel has room for 107 bytes and a zero byte
        if 0 < len(os.fsencode(rest)) <= 107 and "\0" not in rest:
            return Address("ipc", path=rest)
        raise ConfigError("the path after ipc:// must have 1 to 107 bytes")
    raise ConfigError("an address is tcp://HOST:PORT or ipc://PATH")


def host_and_port(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        ConfigError: it is neither.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Za-z.%_-]*:[0-9A-Za-z:.%_-]*)\]|([0-9A-Za-z_.*-]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ConfigError("expected HOST:PORT with a port from 0 to 65535 (an IPv6 host in brackets)")
    return match[1] or match[2], int(match[3])
