"""JAX through a store: sums and means of trees of arrays, outside of ``jax.jit`` and inside it.

`pushpull` exchanges a tree between two jitted functions. `mean_over_workers` is an optax transformation for the
gradients in a jitted step. `broadcast` gives all workers the start of worker 0. Each leaf is a key: the prefix, and the
path of the leaf joined by dots, as in ``"gradient.dense.kernel"``. A synchronous store is needed (`dist_sync`), or one
in this process, and no optimizer on the servers: it would update the keys instead of handing the sums through.

A failed call inside ``jax.jit`` shows as a ``JaxRuntimeError`` with the text of the error, because JAX passes no other
exceptions on. The store keeps the error itself: the next call on these keys, `kvd.KVStore.flush` or
`kvd.KVStore.close` raises it with its type and attributes.
"""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("kvd.jax needs JAX: pip install jax optax") from error

from kvd.jax.exchange import broadcast, pushpull
from kvd.jax.transformation import mean_over_workers

__all__ = ["pushpull", "broadcast", "mean_over_workers"]
