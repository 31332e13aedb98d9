"""Nothing listens anywhere that docs/security.md does not list: its table against the sockets that the kernel shows."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from kvd.node.launch.supervisor import ReadySocket
from tests.cli.running_job import running_job

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
LISTENS, ACCEPTS = "0A", 0x10000

pytestmark = pytest.mark.usefixtures("clean_environment")


def documented() -> set[tuple[str, str]]:
    """(process, socket) of each row: "TCP", "Unix", or the pattern of an abstract name."""
    section = re.search(r"^## What listens where\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    found = set()
    for row in re.findall(r"^\| (.+?) \|$", section[1], re.MULTILINE)[1:]:
        processes, socket, _reached, protected = row.split(" | ")
        assert protected
        abstract = re.search(r"abstract name `(.+?)`", socket)
        kinds = [abstract[1]] if abstract else re.findall(r"\b(?:TCP|Unix)\b", socket)
        assert kinds, row
        found |= {(process.strip("`"), kind) for process in processes.split(", ") for kind in kinds}
    return found


def name_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    for word in ("scheduler", "server", "launch"):
        if word in words:
            return "kvd launch" if word == "launch" else word
    return "worker"


def sockets_of(pid: int) -> set[str]:
    """The sockets of a process that others could connect or send to."""
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(f"/proc/{pid}/fd/{descriptor}")))
        except FileNotFoundError:
            continue  # closed
    found = set()
    for file in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]]
        found |= {"TCP" for row in rows if row[9] in inodes and row[3] == LISTENS}
    for file in ("udp", "udp6", "raw", "raw6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]]
        found |= {file.upper() for row in rows if row[9] in inodes}
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        _address, _count, _protocol, flags, _type, _state, inode, *path = line.split()
        # an accepted connection has the name of its listener, too
        if inode in inodes and path and (int(flags, 16) & ACCEPTS or _type == "0002"):
            found.add(pattern_of(path[0]))
    return found


def pattern_of(name: str) -> str:
    if not name.startswith("@"):
        return "Unix"
    return re.sub(r"[0-9a-f]{16}$", "<random>" if "launch" in name else "<incarnation>", name[1:])


@pytest.mark.parametrize("scheduler", ["tcp", "ipc"])
def test_the_processes_of_a_job_listen_where_the_page_says(scheduler: str, tmp_path: Path) -> None:
    flags = ["-S", f"ipc://{tmp_path}/scheduler.sock"] if scheduler == "ipc" else []
    for job in running_job(tmp_path, *flags):
        names = {pid: name_of(pid) for pid in job.processes()}
        assert set(names.values()) == {"kvd launch", "scheduler", "server", "worker"}
        seen = {(name, kind) for pid, name in names.items() for kind in sockets_of(pid)}
        first = "TCP" if scheduler == "tcp" else "Unix"
        assert seen == {("scheduler", first), ("server", "TCP"), ("server", "kvd/<incarnation>")}
        assert seen <= documented()
        job.end()


def test_the_launcher_listens_until_the_scheduler_is_ready() -> None:
    async def main() -> set[str]:
        before = sockets_of(os.getpid())
        with ReadySocket(asyncio.get_running_loop()):
            return sockets_of(os.getpid()) - before

    [name] = asyncio.run(main())
    rows = {process for process, kind in documented() if kind == name}
    assert rows == {"kvd launch", "kvd demo", "kvd bench"}


def test_the_page_lists_nothing_else() -> None:
    launchers = ("kvd launch", "kvd demo", "kvd bench")
    assert documented() == {
        ("scheduler", "TCP"), ("scheduler", "Unix"), ("server", "TCP"), ("server", "Unix"),
        ("server", "kvd/<incarnation>"), *((name, "kvd-launch-<random>") for name in launchers),
    }  # fmt: skip
