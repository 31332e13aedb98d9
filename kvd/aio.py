"""The store for programs that run an event loop: `await kvd.aio.create(...)`. See `kvd.client.aio`."""

from kvd.client.aio import KVStore, create

__all__ = ["KVStore", "create"]
