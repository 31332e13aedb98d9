"""kvd and its peers, as commands that print rows."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import EARLIER, KVD
from benchmarks.processes import GRACE_S, Finished, run
from benchmarks.rows import Row, from_objects, parse
from kvd import KVStore
from kvd_cli.bench_work import IN_FLIGHT_NAME, WORK

ROOT: Final = Path(__file__).resolve().parent.parent
PEERS_DIR: Final = ROOT.parent / "shared" / "peers"
PEER_ENVIRONMENTS: Final = {"mxnet": "mxnet", "gloo": "torch", "redis": "redis"}
"""The peers, and the name of the package and of the Python environment that each lives in."""

PEER_WORKS: Final = tuple(name for name in WORK if name != IN_FLIGHT_NAME)
KEPT_LINES: Final = 5
VERSION_LIMIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work each start does, with how many processes, and how long it may take."""

    works: tuple[str, ...]
    workers: int
    servers: int
    seconds: float
    repetitions: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one start of a system. A failed start has no rows.

    Attributes:
        roles: what kvd says about its own processes; empty for a peer.
        failure: what went wrong, in words; empty if nothing did.
        complaints: the last lines of what a failed one wrote to standard error.
        cores_gb_s: GB/s from core to core before and after it, as far as that is known (`benchmarks.distance`).
    """

    rows: list[Row]
    roles: list[dict[str, Any]]
    failure: str = ""
    complaints: str = ""
    cores_gb_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class System:
    """One way to run kvd, or a peer.

    Attributes:
        modes: the optimizers that it can have on its servers.
        works: what it can do; None: everything.
        command: what starts it, without the effort.
        tree: of an earlier kvd: the folder that it was checked out to.
    """

    name: str
    modes: tuple[str, ...]
    works: tuple[str, ...] | None
    command: tuple[str, ...]
    tree: Path | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is the kvd that is measured; an earlier one is measured against, like a peer."""
        return self.name.startswith(KVD)

    @property
    def is_kvd(self) -> bool:
        """Whether this is any kvd, which is started by `kvd bench`."""
        return self.is_ours or self.tree is not None

    def does(self, effort: Effort, mode: str) -> bool:
        """Whether this system does any of these works."""
        return mode in self.modes and bool(self._works_of(effort))

    def start(self, effort: Effort, mode: str, round_number: int) -> Outcome:
        """Start it, wait for its end, and read its output."""
        command = [*self.command, *self._flags(effort, mode)]
        finished = run(command, effort.limit_s + GRACE_S, _environment(self.tree or ROOT) if self.is_kvd else None)
        if finished.code is None:
            return Outcome([], [], f"it was not ready after {effort.limit_s:g} s")
        if finished.code != 0:
            last = "\n".join(finished.complaints.splitlines()[-KEPT_LINES:])
            return Outcome([], [], f"it ended with code {finished.code}", last)
        rows, roles = self._read(finished, mode, round_number)
        return Outcome(rows, roles, "" if rows else "it printed no row")

    def _works_of(self, effort: Effort) -> list[str]:
        return [name for name in effort.works if self.works is None or name in self.works]

    def _flags(self, effort: Effort, mode: str) -> list[str]:
        flags = {
            "--only": ",".join(self._works_of(effort)),
            "--mode": mode,
            "--workers": effort.workers,
            "--servers": effort.servers,
            "--seconds": effort.seconds,
            "--repetitions": effort.repetitions,
        }
        if not self.is_kvd:
            flags["--limit"] = effort.limit_s
        return [str(word) for pair in flags.items() for word in pair]

    def _read(self, finished: Finished, mode: str, round_number: int) -> tuple[list[Row], list[dict[str, Any]]]:
        if not self.is_kvd:
            rows, _ = parse(finished.output, self.name, mode, round_number)
            return rows, []
        try:
            report = json.loads(finished.output)
            objects, roles = list(report["rows"]), list(report["roles"])
        except (ValueError, KeyError, TypeError):
            return [], []
        start = {"system": self.name, "mode": mode, "round": round_number}
        return from_objects(objects, self.name, mode, round_number), [{**start, **role} for role in roles]


KVD_WAYS: Final = {
    "auto": (KVD, ("--transport", "auto")),
    "tcp": (f"{KVD} tcp", ("--transport", "tcp")),
    "sealed": (f"{KVD} sealed", ("--transport", "tcp", "--tcp-links", "always")),
    "curve": (f"{KVD} curve", ("--transport", "tcp", "--tcp-links", "off")),
    "insecure": (f"{KVD} insecure", ("--transport", "tcp", "--tcp-links", "always", "--insecure")),
    "zmq": (f"{KVD} zmq", ("--transport", "tcp", "--tcp-links", "off", "--insecure")),
    "ipc": (f"{KVD} ipc", ("--transport", "ipc")),
    "bound": (f"{KVD} bound", ("--transport", "auto", "--bound")),
    "copy-free": (f"{KVD} copy-free", ("--transport", "auto", "--copy-free")),
    "bound-copy-free": (f"{KVD} bound copy-free", ("--transport", "auto", "--bound", "--copy-free")),
}
"""Ways to run kvd → the name of the system and the flags of `kvd bench`: its defaults (shared memory on one host), TCP
or ipc sockets alone, TCP as between hosts in its four forms (links and ZeroMQ alone, encrypted and not), and its
defaults with gradients in the arrays of `kv.bind`, with values by `copy=False`, and with both."""


def kvd_systems(ways: Iterable[str], modes: tuple[str, ...]) -> tuple[list[System], list[str]]:
    """kvd run in these ways, and a note about each way that cannot be run."""
    systems, advice = [], []
    for way in ways:
        name, flags = KVD_WAYS[way]
        if "--bound" in flags and not KVStore.is_capable("bind"):
            advice.append(f"{name} is left out: this version of kvd has no kv.bind")
            continue
        command = (sys.executable, "-m", "kvd_cli.main", "bench", "-o", "json", *flags)
        systems.append(System(name, modes, None, command))
    return systems, advice


def earlier_systems(tree: Path, systems: Iterable[System]) -> list[System]:
    """The same ways to run kvd, with the code of an earlier checkout."""
    return [replace(system, name=f"{EARLIER} {system.name}", tree=tree) for system in systems]


def peer_systems(names: Iterable[str], folder: Path, modes: tuple[str, ...]) -> tuple[list[System], list[str]]:
    """The peers that can be run here, and a note about how to get each of the others."""
    script = folder / "run.py"
    if not script.exists():
        return [], [
            f"kvd is measured alone: {folder} has no run.py of the peers; name their directory with --peers-dir"
        ]
    systems, advice = [], []
    for name in names:
        if peer_is_ready(name):
            # Only MXNet has an optimizer on its servers; the others would repeat the same in every mode.
            known_modes = modes if name == "mxnet" else ("none",)
            systems.append(System(name, known_modes, PEER_WORKS, (sys.executable, str(script), name)))
        else:
            advice.append(f"{name} is left out: it is not installed; {folder / 'setup.sh'} does that")
    return systems, advice


def peer_is_ready(name: str) -> bool:
    """Whether this peer has been set up."""
    if name == "redis" and shutil.which("redis-server") is None:
        return False
    return _peer_python(name).exists()


def peer_version(name: str) -> str:
    """The version of a peer that is ready; empty if it does not say."""
    if name == "redis":
        words = run(["redis-server", "--version"], VERSION_LIMIT_S).output.split()
        return next((word.removeprefix("v=") for word in words if word.startswith("v=")), "")
    ask = f"import importlib.metadata as m; print(m.version({PEER_ENVIRONMENTS[name]!r}))"
    return run([str(_peer_python(name)), "-c", ask], VERSION_LIMIT_S).output.strip()


def _peer_python(name: str) -> Path:
    home = Path(os.environ.get("KVD_PEERS", Path.home() / ".cache" / "kvd-peers"))
    return home / PEER_ENVIRONMENTS[name] / "bin" / "python"


def _environment(tree: Path) -> dict[str, str]:
    """Our environment with this tree first in the path: it is measured, whatever kvd is installed or lies in the
    current folder."""
    paths = [str(tree), str(tree / "cli"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
