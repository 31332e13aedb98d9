"""The store for programs that run an event loop: `await kvd.aio.create(...)`. See `kvd.client.facades.aio`."""

from kvd.client.facades.aio import KVStore, create

__all__ = ["KVStore", "create"]
