"""A look at the hosts of a job before it starts: can they be reached, and do they have what the job needs?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvd.errors import ConnectError
from kvd.node.launch.hosts import CONNECT_TIMEOUT_S, LOST, on_host
from kvd.node.parent import exit_code, kill_session, tied
from kvd.node.remote import GREETING, Mode

LIMIT_S: Final = 3.0 * CONNECT_TIMEOUT_S
"""How long a host may take to be reached and to answer."""

AT_ONCE: Final = 32
"""Connections that are made at the same time, each to another host."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a host said of itself.

    Attributes:
        launcher: the number of this host as that host sees it; empty if it does not know.
        address: the number by which this host reached it; empty if it does not know.
        port: a TCP port that is free there.
    """

    launcher: str
    address: str
    port: int


async def look_at(hosts: Sequence[str], ssh: Sequence[str], order: bytes) -> dict[str, Sighting]:
    """Ask all hosts what they see.

    Raises:
        ConnectError: a host cannot be reached, does not answer, or lacks what the order names. The first one ends the
            look at all others.
    """
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(host: str) -> Sighting:
        async with limit:
            return await _look_at(host, ssh, order)

    tasks = {host: asyncio.ensure_future(one(host)) for host in hosts}
    try:
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _look_at(host: str, ssh: Sequence[str], order: bytes) -> Sighting:
    command = tied(on_host(ssh, host, Mode.LOOK))
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise ConnectError(f"cannot start {ssh[0]}: {error.strerror or error}", address=host) from None
    try:
        out, err = await asyncio.wait_for(process.communicate(order), LIMIT_S)
    except TimeoutError:
        raise ConnectError(
            f"host {host} did not answer within {LIMIT_S:g} s: `{ssh[0]} {host} true` has to work without a question",
            address=host,
        ) from None
    finally:
        if process.returncode is None:
            kill_session(process.pid)
            with contextlib.suppress(asyncio.CancelledError):
                await process.wait()
    assert process.returncode is not None
    answer = _answer_in(out)
    if answer is None:
        raise ConnectError(_why(host, ssh, exit_code(process.returncode), err or out), address=host)
    if answer["problem"]:
        raise ConnectError(
            f"host {host} {answer['problem']}: each host needs the same checkout and environment, at the same paths "
            "as this one",
            address=host,
        )
    return Sighting(str(answer["launcher"]), str(answer["address"]), int(answer["port"]))


def _answer_in(out: bytes) -> dict[str, Any] | None:
    """The answer behind the greeting; None if there is none."""
    _before, greeting, rest = out.rpartition(GREETING)
    if not greeting:
        return None
    with contextlib.suppress(ValueError):
        answer = json.loads(rest)
        return answer if isinstance(answer, dict) else None
    return None


def _why(host: str, ssh: Sequence[str], code: int, said: bytes) -> str:
    """Why there is no answer, in words."""
    lines = [line.strip() for line in os.fsdecode(said).splitlines() if line.strip()]
    last = "".join(char for char in lines[-1] if char.isprintable())[:300] if lines else "it said nothing"
    if code == LOST:
        return f"cannot reach host {host}: {last}; `{' '.join(ssh)} {host} true` has to work without a question"
    return (
        f"host {host} cannot run {sys.executable} (exit code {code}): {last}; each host needs the same checkout and "
        "environment, at the same paths as this one"
    )
