"""Clusters with keys of every kind, for the tests of keys: who has which, on which lists, and what clients are told."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvd.config import Role
from kvd.node.keys.keyfiles import new_node_key, public_part, read_key, write_key
from kvd.testing.cluster import ProcessNode, wait_until
from tests.environments import without_settings

DEADLINE_S = 40.0
"""For a client whose own deadline is far longer: it is told why, and does not wait for a timeout."""


def cleaned(**more: str) -> dict[str, str]:
    """The variables of a process without settings of its own."""
    return without_settings(KVD_LOG_FORMAT="text", **more)


def kvd(*arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that would wait for an hour, and asserts its exit code."""
    program = [sys.executable, "-m", "kvd_cli.main", *map(str, arguments), "--timeout", "1h"]
    done = subprocess.run(
        program, env=cleaned(**variables), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == code, done
    return done


class Keys:
    """The keys of single nodes, and the list that allows them.

    Attributes:
        allowed: the list.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.allowed = folder / "allowed.toml"
        self._entries: dict[str, str] = {}
        self._scheduler = ""

    def file(self, name: str) -> str:
        """The key file of a node."""
        return str(self._folder / f"{name}.key")

    def public(self, name: str) -> str:
        """The public key of a node."""
        return read_key(Path(self.file(name))).keypair.public

    def make(self, name: str, *roles: str, jobs: Sequence[str] = ()) -> None:
        """A new key. The first one is the scheduler's."""
        key = new_node_key(name, self._scheduler)
        self._scheduler = self._scheduler or key.keypair.public
        write_key(Path(self.file(name)), key)
        self._entries[name] = public_part(key, roles, jobs)

    def allow(self, *names: str) -> None:
        """Write a list with these keys."""
        self.allowed.write_text("\n".join(self._entries[name] for name in names))


class GuardedCluster:
    """A scheduler and a server with keys of their own, each with the list of allowed keys."""

    def __init__(self, keys: Keys, folder: Path, *, workers: int = 1) -> None:
        self.keys = keys
        self._folder = folder
        self.nodes: dict[str, ProcessNode] = {}
        self.address = self.start("scheduler", "scheduler", num_workers=workers, num_servers=1).address
        self.start("server-0", "server", scheduler=self.address)

    def start(self, name: str, role: Role, **settings: Any) -> ProcessNode:
        own = {"keyfile": self.keys.file(name), "allowed_keys": str(self.keys.allowed), "bind": "tcp://127.0.0.1:0"}
        more = {"heartbeat_interval_s": 0.2, "log_format": "text", **settings}
        self.nodes[name] = ProcessNode(role, {**own, **more}, self._folder, self._folder / f"{name}.log")
        return self.nodes[name]

    def reload(self, says: str) -> None:
        """Send SIGHUP to all daemons, and wait until each has said this once more."""
        before = {name: node.log.read_text().count(says) for name, node in self.nodes.items()}
        for node in self.nodes.values():
            node.process.send_signal(signal.SIGHUP)
        for name, node in self.nodes.items():
            wait_until(lambda n=node, b=before[name]: n.log.read_text().count(says) > b, f"{name} says {says}")  # type: ignore[misc]

    def kvd(self, name: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs a command with the key of a node."""
        return kvd(*arguments, "-S", self.address, "--keyfile", self.keys.file(name), code=code)

    def close(self) -> None:
        for node in reversed(self.nodes.values()):
            node.stop()
