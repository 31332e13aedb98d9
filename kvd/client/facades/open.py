"""From a type and settings to a backend."""

from __future__ import annotations

from typing import Any

from kvd.client.calls.backend import Backend, store_type
from kvd.client.cluster.values import DistBackend
from kvd.client.local.values import LocalBackend
from kvd.config import load


def open_backend(type_name: str, settings: dict[str, Any]) -> Backend:
    """Makes the store; for the `dist_*` types this joins the cluster."""
    kind = store_type(type_name)
    loaded = load(settings, overrides_from="keyword")
    if kind.mode == "":
        return LocalBackend(kind, loaded.config.merge)
    return DistBackend(kind, loaded)
