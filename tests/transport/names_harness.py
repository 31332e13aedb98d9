"""A name server of a test: addresses by name, which may change."""

from __future__ import annotations

import socket
from typing import Any

DOMAIN = ".example"


class Names:
    """Stands in for `socket.getaddrinfo`, for names that end in `DOMAIN`.

    Attributes:
        known: addresses in numbers, by name.
    """

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: str, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if not host.endswith(DOMAIN):
            return self._real(host, port, *args, **kwargs)
        numbers = self.known.get(host, [])
        if not numbers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for number in numbers for found in self._real(number, port, *args, **kwargs)]
