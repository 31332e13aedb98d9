"""Environment variables other than settings: systemd, colours, launchers, and the environment of child processes."""

from __future__ import annotations

import os
import pwd
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from kvd.config.values import read_integer

RANKS_OF_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE"),  # torchrun, kvd launch
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""The variables in which launchers give a process its rank and the number of processes."""


@dataclass(frozen=True, slots=True)
class SystemdEnvironment:
    """Variables that systemd passes to a service of ``Type=notify``.

    Attributes:
        notify_socket: path of the socket, or ``@`` and its abstract name; empty if nobody listens.
        watchdog_usec: microseconds of silence after which systemd kills the service; 0 if it is not watched.
    """

    notify_socket: str = ""
    watchdog_usec: int = 0


def systemd_environment(environ: Mapping[str, str] | None = None, *, pid: int | None = None) -> SystemdEnvironment:
    """Read ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``. Unreadable values count as unset.

    Args:
        environ: the variables; None means those of this process.
        pid: the process that asks; None means this one. A watchdog for another process does not count.
    """
    environ = os.environ if environ is None else environ
    usec = read_integer(environ.get("WATCHDOG_USEC", "")) or 0
    watched = environ.get("WATCHDOG_PID", "").strip()
    if watched and watched != str(os.getpid() if pid is None else pid):
        usec = 0
    socket = environ.get("NOTIFY_SOCKET", "")
    return SystemdEnvironment(socket if socket[:1] in ("/", "@") else "", max(0, usec))


def credentials_directory(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder with the credentials that systemd gave this service, or None."""
    environ = os.environ if environ is None else environ
    folder = environ.get("CREDENTIALS_DIRECTORY", "").strip()
    return Path(folder) if folder else None


def config_home(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return this user's folder for settings by the XDG Base Directory Specification, or None without a home folder."""
    environ = os.environ if environ is None else environ
    given = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(given):  # the specification says to ignore others
        return Path(given)
    home = environ.get("HOME", "")
    if not home:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # as in a container that runs under a number
            return None
    return Path(home) / ".config" if os.path.isabs(home) else None


def child_environment(changes: Mapping[str, str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a child process: this process's with `changes`, without those of systemd for this one."""
    environ = os.environ if environ is None else environ
    own = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    return {name: value for name, value in environ.items() if name not in own} | dict(changes)


def shared_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables by which programs are found, for a host with the same folders."""
    environ = os.environ if environ is None else environ
    names = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    return {name: environ[name] for name in names if name in environ}


def rank_variables(
    *, rank: int | None, world_size: int, local_rank: int, local_world_size: int | None
) -> dict[str, str]:
    """Return the variables by which torch and similar programs find their rank, without the unknown ones.

    Args:
        rank: of the worker; None: not known.
        world_size: number of workers in the job; 0: not known.
        local_rank: number of the worker on its host.
        local_world_size: number of workers on its host; None: not known.
    """
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size or None,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def local_world_size(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of workers on this host, as the launcher has set it in ``LOCAL_WORLD_SIZE``; 1 without it."""
    environ = os.environ if environ is None else environ
    return max(1, read_integer(environ.get("LOCAL_WORLD_SIZE", "")) or 1)


def torch_rendezvous(address: str, port: int) -> dict[str, str]:
    """Return the variables by which the workers of a job meet in ``torch.distributed``.

    Args:
        address: of the host of rank 0.
        port: free on that host.
    """
    # An outer torchrun says that its own store is in use already; nobody would listen at the port.
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def rank_contradictions(rank: int, num_workers: int, environ: Mapping[str, str] | None = None) -> dict[str, int]:
    """Return the variables of a launcher that contradict a worker's place in its store, with their values.

    Programs read one launcher's variables, those of torch first. So do we: the first rank that is a number counts,
    together with the size from the same launcher.

    Args:
        rank: of the worker.
        num_workers: in the job.
        environ: the variables; None: those of this process.
    """
    environ = os.environ if environ is None else environ
    for rank_name, size_name in RANKS_OF_LAUNCHERS:
        said = read_integer(environ.get(rank_name, ""))
        if said is None or said < 0:
            continue
        size = read_integer(environ.get(size_name, ""))
        found = {rank_name: said} if said != rank else {}
        return found | ({size_name: size} if size is not None and size != num_workers else {})
    return {}


def with_unset(environ: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with those of `additions` that are unset or empty in them."""
    return {**environ, **{name: value for name, value in additions.items() if not environ.get(name, "").strip()}}


def program_command(arguments: Sequence[str] | None = None, most_chars: int = 200) -> str:
    """Return the command line of this Python program, such as ``python train.py``, to be shown.

    Args:
        arguments: of the interpreter, with its name; ``None``: those of this process.
        most_chars: what is longer is shortened to the program.

    Returns:
        "" if there is no program that could be started again: an interactive interpreter, a notebook, ``python -c``.
    """
    name, *given = sys.orig_argv if arguments is None else arguments
    at = 0
    while at < len(given) and given[at].startswith("-") and given[at] not in ("-", "-m") and given[at][:2] != "-c":
        at += 2 if given[at] in ("-W", "-X") else 1
    rest = given[at:]
    program = rest[:2] if rest[:1] == ["-m"] else rest[:1]
    is_shell = program and Path(program[-1]).name in ("ipykernel_launcher", "ipython", "ipython3", "jupyter")
    if not Path(name).name.startswith("python") or not program or program[0][:2] in ("-", "-c") or is_shell:
        return ""
    whole = shlex.join(["python", *given])
    return whole if len(whole) <= most_chars else f"{shlex.join(['python', *program])[:most_chars]} …"


def python_path(environ: Mapping[str, str] | None = None) -> str:
    """Return this process's ``PYTHONPATH``; empty if unset."""
    environ = os.environ if environ is None else environ
    return environ.get("PYTHONPATH", "")


def terminal_colour(environ: Mapping[str, str] | None, stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that shows colours, and ``NO_COLOR`` is unset.

    Args:
        environ: the variables; None means those of this process.
        stream: the output; None stands for a closed stream, as in Python.
    """
    environ = os.environ if environ is None else environ
    if stream is None or stream.closed or environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return stream.isatty()
