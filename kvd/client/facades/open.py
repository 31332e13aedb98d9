"""From a type and settings to a store."""

from __future__ import annotations

from typing import Any

from kvd.client.calls.backend import Backend, StoreType, store_type
from kvd.client.cluster.backend import open_cluster
from kvd.client.cluster.joining import Arrival
from kvd.client.local.backend import open_local
from kvd.client.registry import registered_names
from kvd.config import load
from kvd.errors import ConfigError


def _store_type(name: str) -> StoreType:
    try:
        return store_type(name)
    except ConfigError:
        pass
    return store_type(name, registered_names())  # only now it is worth while to look for entry points


def open_backend(type_name: str, settings: dict[str, Any], arrival: Arrival | None = None) -> Backend:
    """Opens a store in this process, or joins the cluster as a worker.

    Args:
        arrival: how it joins; None: as a worker of the job, which waits for all others.

    Raises:
        ConfigError: the type is unknown, a setting is wrong, or the cluster has another.
        ConnectError, RequestTimeout, NotAllowed: see `Joining.wait`.
        SnapshotError: a snapshot cannot be restored, or none can be taken, as the settings want.
    """
    kind = _store_type(type_name)
    loaded = load(settings, overrides_from="keyword")
    arrival = arrival or Arrival()
    arrival.scheduler_given = loaded.is_given("scheduler")
    backend = open_local(kind, loaded.config) if kind.mode == "" else open_cluster(kind, loaded, arrival)
    config = loaded.config
    if (config.restore != "off" or config.snapshot_every) and arrival.wait_for_workers:
        try:
            backend.snapshots.begin_run().wait()
        except BaseException:
            backend.closing.abandon(failed=True)
            raise
    return backend


def check_backend(backend: object, create: str) -> None:
    """Tell a program that calls the class as it would call `create` what to call.

    Raises:
        TypeError: this is no backend.
    """
    if not isinstance(backend, Backend):
        shown = repr(backend) if isinstance(backend, str) else '"dist_sync"'
        raise TypeError(f"a store is not made by its class: call {create}({shown.replace(chr(39), chr(34))})")
