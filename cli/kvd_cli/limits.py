"""Resources that run out in a cluster, from its status: memory, open files, balance of servers, age of snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvd_cli.copies import Report, led_by, partitions_of
from kvd_cli.output import size

NEARLY_FULL: Final = 0.9
"""The share of its memory limit from which a server counts as nearly full."""

FILES_NEARLY_OUT: Final = 0.8
"""The share of its descriptors from which a daemon counts as nearly out of them."""

UNEVEN: Final = 1.5
"""How many times the mean a server may lead."""

_UNEVEN_FROM_BYTES: Final = 4 << 20  # beyond the mean: the balance of small models is of no consequence
_SNAPSHOTS_MISSED: Final = 2


def too_full(report: Report) -> list[str]:
    """Return a line for each daemon that is nearly out of memory or descriptors."""
    return [*_memory(report), *_files(report)]


def _memory(report: Report) -> Iterator[str]:
    for server in _answered(report):
        needed, limit = server.get("memory_of_live_runs_bytes", 0), server.get("memory_limit_bytes", 0)
        if limit and needed >= NEARLY_FULL * limit:
            yield (
                f"memory: server {server['rank']} needs {size(needed)} of its {size(limit)}, and refuses new keys and "
                "rows beyond that. Raise its memory_limit_bytes (KVD_MEMORY_LIMIT_BYTES), add servers, or end jobs "
                "that nobody needs (kvd jobs)."
            )


def _files(report: Report) -> Iterator[str]:
    daemons = [("the scheduler", report), *((f"server {server['rank']}", server) for server in _answered(report))]
    for name, daemon in daemons:
        count, limit = daemon.get("files_open", 0), daemon.get("files_limit", 0)
        if limit and count >= FILES_NEARLY_OUT * limit:
            yield (
                f"files: {name} has {count} of at most {limit} files open, and takes no connections beyond that. Raise "
                "the limit where it is started: LimitNOFILE= in its systemd unit, ulimit -Hn in its shell, or nofile "
                "in /etc/security/limits.conf. Then restart it."
            )


def uneven(report: Report) -> list[str]:
    """Return a line for each server that leads much more than the others."""
    partitions = partitions_of(report)
    shares = {
        server["rank"]: server["bytes_led"]
        for server in _answered(report)
        if not partitions or len(led_by(f"server {server['rank']}", partitions)) == 1
    }
    if len(shares) < 2:
        return []
    mean = sum(shares.values()) / len(shares)
    return [
        f"uneven: server {rank} leads {size(led)}, {led / mean:.1f} times the mean of {len(shares)} servers "
        f"({size(mean)}), so every step waits for it. Keys are spread by slices: lower slice_bytes (KVD_SLICE_BYTES) "
        "for the next job, so that large keys have many, or divide them."
        for rank, led in shares.items()
        if led > UNEVEN * mean and led - mean >= _UNEVEN_FROM_BYTES
    ]


def snapshot_too_old(report: Report) -> list[str]:
    """Return a line if scheduled snapshots of a synchronous job are missing."""
    snapshot, servers = report.get("last_snapshot"), _answered(report)
    if snapshot is None or not snapshot.get("every") or any(server.get("staleness") for server in servers):
        return []
    step, every = max((server.get("step", 0) for server in servers), default=0), snapshot["every"]
    if step - snapshot["step"] < _SNAPSHOTS_MISSED * every + every:
        return []
    return [
        f"snapshot: the last one is of step {snapshot['step']}, and the job is at step {step}, though one is due every "
        f"{every} steps (snapshot_every). If the job ends now, {step - snapshot['step']} steps are lost. The log of "
        "worker 0 says why (no snapshot after step …): see whether snapshot_dir is full, or may not be written."
    ]


def _answered(report: Report) -> list[Report]:
    return [server for server in report.get("servers", ()) if "error" not in server]
