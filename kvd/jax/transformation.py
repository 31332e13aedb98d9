"""The mean over workers as a gradient transformation of optax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import io_callback

from kvd.client.facades.blocking import KVStore
from kvd.jax.exchange import tree_of

if TYPE_CHECKING:
    import optax


def mean_over_workers(store: KVStore, prefix: str = "gradient.") -> optax.GradientTransformation:
    """Return a transformation that replaces gradients by their mean over the workers.

    Put it first in a chain: ``optax.chain(kvd.jax.mean_over_workers(kv), optax.adam(1e-3))``. It works inside
    ``jax.jit`` and `jax.lax.scan` on one device, and outside of them. With batches of equal size the step is that of
    one process with the whole batch. All workers make the same steps; the first one makes the keys.

    JAX may return from a jitted step before the step has run. In a loop over `kvd.KVStore.steps`, wait for its result
    (``jax.block_until_ready``) before the loop goes on: a step pushes its gradients before it ends.

    Args:
        store: of type `dist_sync`, or one in this process.
        prefix: the beginning of each key; a second model of the store needs another one.

    Raises:
        ImportError: optax is not installed.
        NotAllowed: the store has no rounds.
        NotAllowed, ShapeMismatch, DtypeMismatch: from ``update``, if the gradients have other leaves than in the first
            step, or unsuitable ones, as in `pushpull`.
    """
    try:
        import optax
    except ModuleNotFoundError as error:
        raise ImportError("kvd.jax.mean_over_workers needs optax: pip install optax") from error
    exchange = tree_of(store, prefix, "mean")

    def init(params: Any) -> Any:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, values, structure = exchange.describe(updates)
        exchange.check(leaves)
        if not leaves:
            return updates, state
        if any(isinstance(value, jax.core.Tracer) for value in values):
            shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
            means = io_callback(exchange.callback(store, leaves), shapes, *values, ordered=True)
        else:
            means = [jax.numpy.asarray(mean) for mean in exchange.run(store, leaves, values)]
        return structure.unflatten(means), state

    return optax.GradientTransformation(init, update)
