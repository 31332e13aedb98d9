"""From a type and settings to a store."""

from __future__ import annotations

from typing import Any

from kvd.client.calls.backend import Backend, store_type
from kvd.client.cluster.backend import open_cluster
from kvd.client.cluster.joining import Arrival
from kvd.client.local.backend import open_local
from kvd.config import load


def open_backend(type_name: str, settings: dict[str, Any], arrival: Arrival | None = None) -> Backend:
    """Opens a store in this process, or joins the cluster as a worker.

    Args:
        arrival: how it joins; None: as a worker of the job, which waits for all others.

    Raises:
        ConfigError: the type is unknown, a setting is wrong, or the cluster has another.
        ConnectError, RequestTimeout, NotAllowed: see `Joining.wait`.
    """
    kind = store_type(type_name)
    loaded = load(settings, overrides_from="keyword")
    return open_local(kind, loaded.config) if kind.mode == "" else open_cluster(kind, loaded, arrival or Arrival())
