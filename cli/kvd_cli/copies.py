"""Partitions and their copies, from the status of a cluster with ``replicas = 2``.

A partition is the part of the keys that one server leads and another one backs up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Report = Mapping[str, Any]


class Partition(NamedTuple):
    """Servers of a partition, by name.

    Attributes:
        backup: the server with every committed push, too; None if there is none.
        syncing: the server that is being sent a copy to become the backup.
        successor: the backup, when it is about to lead.
    """

    number: int
    leader: str
    backup: str | None
    syncing: str | None
    successor: str | None = None


def partitions_of(report: Report) -> list[Partition]:
    """Return the partitions that the scheduler reports; none with one replica."""
    return [
        Partition(entry["partition"], entry["leader"], entry["backup"], entry["syncing"], entry.get("successor"))
        for entry in report.get("partitions", ())
    ]


def numbers_of(partitions: Sequence[Partition]) -> str:
    """Return the names of partitions: ``partition 1``, ``partitions 0, 2``."""
    return f"partition{'s'[: len(partitions) > 1]} {', '.join(str(partition.number) for partition in partitions)}"


def led_by(name: str, partitions: Sequence[Partition]) -> list[int]:
    """Return the numbers of the partitions that a server leads."""
    return [partition.number for partition in partitions if partition.leader == name]


def columns_of(server: Report, partitions: Sequence[Partition]) -> list[str]:
    """Return the columns of a server: the partitions that it leads and backs up."""
    name = f"server {server['rank']}"
    leads = [str(number) for number in led_by(name, partitions)]
    backs_up = [
        f"{partition.number}{_movement(name, partition)}"
        for partition in partitions
        if name in (partition.backup, partition.syncing)
    ]
    return [", ".join(leads) or "-", ", ".join(backs_up) or "-"]


def _movement(name: str, partition: Partition) -> str:
    if partition.successor == name:
        return " (about to lead)"
    return "" if partition.backup == name else " (copying)"


def notes_of(server: Report, partitions: Sequence[Partition]) -> list[str]:
    """Return notes from a server's own report."""
    notes = []
    leads = led_by(f"server {server['rank']}", partitions)
    told = server.get("leads", leads)
    if partitions and sorted(told) != leads:  # it has not heard of the newest view, or we have not
        notes.append(f"says that it leads {', '.join(map(str, sorted(told))) or 'nothing'}")
    waiting = server.get("records_waiting", 0)
    if waiting:
        notes.append(f"{waiting} record{'s'[: waiting > 1]} on the way to the backup")
    return notes


def differences(report: Report) -> list[str]:
    """Return a line for each server with a backup that has diverged."""
    return [
        _difference(f"server {server['rank']}", server["slices_that_differed"], server["last_difference"])
        for server in report.get("servers", ())
        if server.get("slices_that_differed")
    ]


def _difference(leader: str, count: int, last: Mapping[str, Any]) -> str:
    return (
        f"not the same: {count} slice{'s'[: count > 1]} led by {leader} had other bytes at the backup, last on "
        f"{last['backup']}: {last['text']}. It was sent a new copy. Which of the two was right is not known: what is "
        "led counts. Check the memory of both hosts, and that all servers run the same versions of kvd and NumPy."
    )


def failed_copies(report: Report) -> list[str]:
    """Return a line for each server that cannot hold a partition."""
    return [
        f"no copy: {failure['server']} cannot back up partition {failure['partition']}, which server {server['rank']} "
        f"leads: {failure['why']}. It is tried again in {failure['again_s']:g} s."
        for server in report.get("servers", ())
        for failure in server.get("not_backed_up", ())
    ]


def lost(partitions: Sequence[Partition], gone: Sequence[str]) -> list[Partition]:
    """Return the lost partitions: their leader is `gone`, and there is no backup."""
    return [partition for partition in partitions if partition.leader in gone and partition.backup is None]


def degraded_advice(partitions: Sequence[Partition], gone: Sequence[str]) -> list[str]:
    """Return a line for each living server that holds the only copy of some partitions."""
    alone: dict[str, list[Partition]] = {}
    for partition in partitions:
        if partition.backup is None and partition.leader not in gone:
            alone.setdefault(partition.leader, []).append(partition)
    return [_degraded(leader, theirs, gone) for leader, theirs in alone.items()]


def _degraded(leader: str, partitions: Sequence[Partition], gone: Sequence[str]) -> str:
    verb = "have" if len(partitions) > 1 else "has"
    pronoun = "they" if len(partitions) > 1 else "it"
    syncing = sorted({partition.syncing for partition in partitions if partition.syncing is not None})
    if syncing:
        remedy = f"A copy is being sent to {', '.join(syncing)}; the job continues meanwhile."
    elif gone:
        remedy = f"Start {' or '.join(gone)} again: it is sent a copy while the job continues."
    else:
        remedy = "A copy is made as soon as another server is there."
    return (
        f"degraded: {numbers_of(partitions)} of the keys {verb} one copy, on {leader}; if that server dies, "
        f"{pronoun} {'are' if len(partitions) > 1 else 'is'} lost. {remedy}"
    )
