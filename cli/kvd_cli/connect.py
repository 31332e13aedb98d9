"""How commands reach a cluster: as an observer without a rank, or as a worker for the duration of the command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from kvd.client.cluster.observer import Observer
from kvd.client.facades.blocking import KVStore, leave_at_once, visit
from kvd_cli.options import current
from kvd_cli.patience import told_when_slow


@contextlib.contextmanager
def observer() -> Iterator[Observer]:
    """A connection that sees everything and joins nothing.

    Raises:
        ConnectError: no scheduler answers, or its host is not known.
    """
    config = current().load_client().config
    with told_when_slow(config):
        cluster = Observer(config)
    with cluster:
        yield cluster


@contextlib.contextmanager
def as_worker() -> Iterator[KVStore]:
    """A worker of the cluster, in the cluster's mode. It leaves without waiting for the others."""
    loaded = current().load_client()
    given = {name: getattr(loaded.config, name) for name, origin in loaded.origin.items() if origin != "default"}
    given.setdefault(
        "join_timeout_s", loaded.config.request_timeout_s
    )  # nobody waits at a prompt as long as a job does
    with told_when_slow(loaded.config):
        store = visit("dist", lambda line: click.echo(line, err=True), **given)
    store.set_barrier_before_exit(False)
    try:
        yield store
    except BaseException:
        leave_at_once(store)  # a refused command is not a dead worker
        raise
    store.close()
