"""The command lines with which a launcher runs `kvd.node.remote` on other hosts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvd.node import remote
from kvd.node.remote import SILENCE_S, Mode

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
