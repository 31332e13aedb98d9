"""Checks of this host for running a worker: open files, shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvd.node.daemon.identity import host_id
from kvd.node.daemon.process_limits import descriptors
from kvd_cli.copies import Report

FILES_OF_A_WORKER: Final = 64
FILES_PER_SERVER: Final = 8
"""A program has some files open, a worker some connections and memory files for each server."""


def advice_for_this_host(report: Report) -> list[str]:
    """Return a line for each resource that nodes of this cluster would lack on this host."""
    return [*_files(report), *_shared_memory(report)]


def _files(report: Report) -> Iterator[str]:
    servers = sum(member["role"] == "server" for member in report["members"])
    needed, (_, limit) = FILES_OF_A_WORKER + FILES_PER_SERVER * servers, descriptors()
    if limit and limit < needed:
        yield (
            f"files: a program that is started here may open {limit} files, and a worker of {servers} servers needs up "
            f"to {needed}. Raise the limit: ulimit -n {max(1024, needed)} in this shell, or nofile in "
            "/etc/security/limits.conf."
        )


def _shared_memory(report: Report) -> Iterator[str]:
    if not any(member.get("host") == host_id() for member in report["members"]):
        return
    from kvd.transport.memory.segments import Arena  # `kvd --help` needs no arrays

    arena = Arena(1 << 30)
    try:
        if not arena.usable:
            yield (
                f"shared memory: processes of this host cannot share any ({arena.problem}), so large values are "
                "copied. It takes Linux 5.1, memfd_create (a seccomp profile may forbid it), and free memory."
            )
    finally:
        arena.close()
