"""The store for programs that run an event loop: `await kvd.aio.create(...)`. Each
method of `kvd.KVStore` is a coroutine of the same name here."""

from kvd.client.facades.aio import KVStore, create

__all__ = ["KVStore", "create"]
