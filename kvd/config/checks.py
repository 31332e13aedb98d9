"""Checks of settings that must agree, or that are more than a number or a word.

Each check gets the values it compares, and yields for each problem the setting to change and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvd.config.addresses import parse_address
from kvd.config.values import KiB, size_text
from kvd.errors import ConfigError

Problem = tuple[str, str]


def address_problems(scheduler: str, bind: str) -> Iterator[Problem]:
    """Check the addresses. An empty `bind` is the default."""
    for name, text in (("scheduler", scheduler), ("bind", bind)):
        try:
            address = parse_address(text) if text or name == "scheduler" else None
        except ConfigError as error:
            yield name, f"{name} = {text!r}: {error}"
            return
        if name == "scheduler" and address is not None and address.scheme == "tcp":
            if address.port == 0:
                yield name, f"scheduler = {text!r}: nobody can find port 0; name the port, or give port 0 to bind"
            if address.is_wildcard:
                yield name, f"scheduler = {text!r}: name the address that others connect to; give {text} to bind"


def size_problems(*, slice_bytes: int, credit_bytes: int, memory_limit_bytes: int) -> Iterator[Problem]:
    """Check the sizes."""
    if slice_bytes % 64:
        better = max(4 * KiB, slice_bytes // 64 * 64)
        yield "slice_bytes", f"slice_bytes = {slice_bytes} is not a multiple of 64: {better} is"
    if credit_bytes < slice_bytes:
        yield (
            "credit_bytes",
            f"credit_bytes = {size_text(credit_bytes)} does not let one slice through: "
            f"set it to slice_bytes = {size_text(slice_bytes)} or more",
        )
    if 0 < memory_limit_bytes < credit_bytes:
        yield (
            "memory_limit_bytes",
            f"memory_limit_bytes = {size_text(memory_limit_bytes)} is less than one worker may have in flight: "
            f"set it to credit_bytes = {size_text(credit_bytes)} or more, or to 0 for the default",
        )


def time_problems(
    *,
    heartbeat_interval_s: float,
    server_timeout_s: float,
    worker_timeout_s: float,
    request_timeout_s: float,
    round_timeout_s: float,
) -> Iterator[Problem]:
    """Check the intervals and timeouts."""
    beat = heartbeat_interval_s
    for name, limit in (("server_timeout_s", server_timeout_s), ("worker_timeout_s", worker_timeout_s)):
        if limit < 2 * beat:
            yield (
                name,
                f"{name} = {limit:g} would take one late heartbeat for a death: set it to {2 * beat:g} or more "
                f"(two heartbeats, heartbeat_interval_s = {beat:g})",
            )
        if request_timeout_s <= limit + beat:
            yield (
                "request_timeout_s",
                f"request_timeout_s = {request_timeout_s:g} ends before a death is known: set it to more than "
                f"{limit + beat:g} ({name} + heartbeat_interval_s)",
            )

    if round_timeout_s < request_timeout_s:
        yield (
            "round_timeout_s",
            f"round_timeout_s = {round_timeout_s:g} is shorter than request_timeout_s = {request_timeout_s:g}: other "
            f"workers need at least the time of a server; set it to {request_timeout_s:g} or more",
        )


def identity_problems(node_id: str) -> Iterator[Problem]:
    """Check the name of this node. An empty name was not given."""
    if node_id and not re.fullmatch(r"[!-~]{1,128}", node_id):
        yield "node_id", f"node_id = {node_id!r}: use up to 128 printable ASCII characters without spaces"


def job_problems(job: str) -> Iterator[Problem]:
    """Check the name of the job."""
    if not re.fullmatch(r"[A-Za-z0-9_.+:-]{1,64}(@[0-9a-f]{1,16})?", job):
        yield "job", f"job = {job!r}: use 1 to 64 letters, digits and the characters . _ + : -"


def key_problems(*, keyfile: str, allowed_keys: str, insecure: bool) -> Iterator[Problem]:
    """Check that the settings about keys do not contradict each other."""
    for name, file in (("keyfile", keyfile), ("allowed_keys", allowed_keys)):
        if insecure and file:
            yield (
                name,
                f"{name} = {file!r}, and insecure is set, which turns keys off: leave out one of the two",
            )


def metrics_problems(bind: str, token_file: str, *, insecure: bool) -> Iterator[Problem]:
    """Beyond this host, metrics need a token."""
    if not bind:
        if token_file:
            yield "metrics_bind", f"metrics_token_file = {token_file!r} needs an address: set metrics_bind to HOST:PORT"
        return
    try:
        address = parse_address(f"tcp://{bind}")
    except ConfigError:
        yield "metrics_bind", f"metrics_bind = {bind!r}: an address is HOST:PORT, such as 127.0.0.1:9190"
        return
    if not (address.is_local or token_file or insecure):
        yield (
            "metrics_token_file",
            f"metrics_bind = {bind!r} can be reached from other hosts: name a file with a token in metrics_token_file, "
            "or listen at 127.0.0.1",
        )


def replica_problems(*, replicas: int, num_servers: int) -> Iterator[Problem]:
    """Check that there are servers enough for the copies. 0 servers: their number is unknown here."""
    if 0 < num_servers < replicas:
        servers = "1 server" if num_servers == 1 else f"{num_servers} servers"
        yield (
            "replicas",
            f"replicas = {replicas} needs at least {replicas} servers, one for each copy, and there is {servers}: set "
            f"num_servers = {replicas} or more, or replicas = {num_servers}",
        )


def snapshot_problems(snapshot_dir: str, snapshot_every: int, restore: str) -> Iterator[Problem]:
    """Check that snapshots have a folder."""
    given = [("snapshot_every", str(snapshot_every))] if snapshot_every else []
    given += [("restore", restore)] if restore != "off" else []
    for name, value in given if not snapshot_dir else ():
        yield "snapshot_dir", f"{name} = {value} needs a folder: set snapshot_dir to the one that has the snapshots"


def loss_problems(*, on_worker_loss: str, num_workers: int) -> Iterator[Problem]:
    """Check that others remain if a worker is lost. 0 workers: their number is unknown here."""
    if on_worker_loss == "shrink" and num_workers == 1:
        yield (
            "on_worker_loss",
            "on_worker_loss = shrink needs at least 2 workers, since the others go on without one that died, and there "
            "is 1 worker: set num_workers = 2 or more (or max_workers, if others join later), or on_worker_loss = wait",
        )


def elastic_problems(*, num_workers: int, max_workers: int) -> Iterator[Problem]:
    """The workers with which a job begins are among those that it may have. With 0 workers, their number is not known
    here."""
    if 0 < max_workers < num_workers:
        yield (
            "max_workers",
            f"max_workers = {max_workers} is less than num_workers = {num_workers}, with which the job begins: set it "
            f"to {num_workers} or more, or to 0 if no worker joins later",
        )


def quorum_problems(
    *, quorum: int, quorum_grace_s: float, num_workers: int, staleness: int | None, round_timeout_s: float
) -> Iterator[Problem]:
    """Check the quorum against the number of workers. 0 workers: their number is unknown here."""
    if not quorum:
        return
    if 0 < num_workers < quorum:
        yield (
            "quorum",
            f"quorum = {quorum} is more than num_workers = {num_workers}: set it to {num_workers - 1} or less; 0 waits "
            "for all workers",
        )
    if staleness is not None:
        yield (
            "quorum",
            f"quorum = {quorum} is about the rounds of dist_sync, and staleness = {staleness} about workers that have "
            "none: leave out one of the two",
        )
    if quorum_grace_s >= round_timeout_s:
        yield (
            "quorum_grace_s",
            f"quorum_grace_s = {quorum_grace_s:g} is not shorter than round_timeout_s = {round_timeout_s:g}, after "
            "which calls end that wait for a worker: the rounds would never go on without it",
        )
