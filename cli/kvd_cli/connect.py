"""How commands reach a cluster: as an observer without a rank, or as a worker for the duration of the command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvd_cli.options import current
from kvd_cli.patience import told_when_slow

if TYPE_CHECKING:  # `kvd --help` needs no client
    from kvd.client.cluster.observer import Observer
    from kvd.client.facades.blocking import KVStore


@contextlib.contextmanager
def observer() -> Iterator[Observer]:
    """A connection that sees everything and joins nothing.

    Raises:
        ConnectError: no scheduler answers, or its host is not known.
    """
    from kvd.client.cluster.observer import Observer

    config = current().load_client().config
    with told_when_slow(config):
        cluster = Observer(config)
    with cluster:
        yield cluster


@contextlib.contextmanager
def as_worker() -> Iterator[KVStore]:
    """A worker of the cluster, in the cluster's mode. It leaves without waiting for the others."""
    from kvd.client.facades.blocking import create, leave_at_once

    loaded = current().load_client()
    given = {name: getattr(loaded.config, name) for name, origin in loaded.origin.items() if origin != "default"}
    with told_when_slow(loaded.config):
        store = create("dist", **given)
    store.set_barrier_before_exit(False)
    try:
        yield store
    except BaseException:
        leave_at_once(store)  # a refused command is not a dead worker
        raise
    store.close()
