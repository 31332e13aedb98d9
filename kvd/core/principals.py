"""Who is at the other end of a connection, as its key says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KeyRole(StrEnum):
    """What the holder of a key may be. An operator ends jobs and daemons, and may do all that a worker may."""

    SCHEDULER = "scheduler"
    SERVER = "server"
    WORKER = "worker"
    OBSERVER = "observer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, eq=False)
class Principal:
    """The holder of a key. There is one object per entry of the list of allowed keys, so `is` compares them.

    Attributes:
        name: of the key, for people; "" for holders of the cluster's key.
        roles: what the holder may be.
        jobs: patterns (as of `fnmatch`) of the names of the jobs that a worker or observer may be part of.
        key: the public key in Z85; "" if connections are not checked.
    """

    name: str
    roles: frozenset[KeyRole]
    jobs: tuple[str, ...] = ("*",)
    key: str = ""

    def describe(self) -> str:
        """For messages: which key this is."""
        return key_text(self.name)


def key_text(name: str) -> str:
    """A key by its name, for messages; "" is that of the cluster."""
    return f"key {name!r}" if name else "the cluster's key"


HOLDER = Principal("", frozenset(KeyRole))
"""Who holds the cluster's key, and everyone if connections are not checked (``--insecure``): may be anything."""
