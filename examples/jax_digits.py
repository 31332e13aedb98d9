"""A model in JAX, trained by several workers: a network of two layers for the digits, with optax's Adam.

The gradients are averaged inside the jitted step, and every worker has the optimizer: ::

    kvd launch -n 2 -s 1 -- python examples/jax_digits.py
    python examples/jax_digits.py                                 # one process, with the whole batch
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvd
import kvd.jax
from kvd.data import digits


def start() -> dict[str, Any]:
    """The first weights."""
    first, second = jax.random.split(jax.random.key(0))
    return {
        "hidden": {"w": jax.random.normal(first, (64, 32)) / 8, "b": jnp.zeros(32)},
        "out": {"w": jax.random.normal(second, (32, 10)) / 6, "b": jnp.zeros(10)},
    }


def outputs(params: Any, images: Any) -> Any:
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def train(kv: kvd.KVStore, epochs: int, batch: int) -> float:
    """Trains, and returns the accuracy on the test images. `batch` is that of all workers together."""
    data = digits.load()
    images, labels = data.train_images.reshape(-1, 64), data.train_labels
    optimizer = optax.chain(kvd.jax.mean_over_workers(kv), optax.adam(1e-2))

    def loss(params: Any, images: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(outputs(params, images), labels).mean()

    def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, images, labels), state)
        return optax.apply_updates(params, updates), state

    fast_step = jax.jit(step)
    params = kvd.jax.broadcast(start(), store=kv)
    state = optimizer.init(params)
    per_epoch = len(images) // batch
    for number in range(epochs * per_epoch):
        epoch, place = divmod(number, per_epoch)
        order = np.random.default_rng(epoch).permutation(len(images))
        mine = order[place * batch : (place + 1) * batch][kv.rank :: kv.num_workers]
        params, state = fast_step(params, state, images[mine], labels[mine])
    predicted = outputs(params, data.test_images.reshape(-1, 64)).argmax(axis=1)
    return float((np.asarray(predicted) == data.test_labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=96, help="images per step, of all workers together")
    given = parser.parse_args()
    with kvd.create("dist_sync" if "KVD_SCHEDULER" in os.environ else "local") as kv:
        accuracy = train(kv, given.epochs, given.batch)
        print(f"worker {kv.rank} of {kv.num_workers}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
