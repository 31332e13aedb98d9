"""What a jitted JAX step costs with and without kvd: ``python -m benchmarks.jax_step``.

Two workers and a server train the same network in the same processes, in turn: with `kvd.jax.mean_over_workers` inside
``jax.jit``, with `kvd.jax.pushpull` between two jitted functions, and without any exchange. A turn counts once, with
its median step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from rich.console import Console

import kvd
from benchmarks import machine
from benchmarks.arguments import positive, some_of
from benchmarks.report import print_table
from kvd.testing.cluster import LocalCluster

WORKS: Final = {"small": (64, 128, 10), "mlp": (784, 1536, 1408, 10)}
"""Widths of the layers."""

BATCH: Final = 64  # samples per worker
SYSTEMS: Final = {
    "alone": "without an exchange",
    "between": "kvd.jax.pushpull between two jitted functions",
    "inside": "kvd.jax.mean_over_workers inside jax.jit",
}
WORKER: Final = "from benchmarks.jax_step import work; work()"


def work() -> None:
    """Measure in one of the workers, and print the milliseconds of a step of each turn."""
    options = json.loads(sys.argv[1])
    with kvd.create("dist_sync") as kv:
        found = {name: turns_of(kv, name, options["turns"], options["steps"]) for name in options["works"]}
    if kv.rank == 0:
        print("FIGURES " + json.dumps(found), flush=True)


def turns_of(kv: kvd.KVStore, name: str, turns: int, steps: int) -> dict[str, list[float]]:
    """Return the milliseconds of the median step in each turn, by system."""
    import jax
    import jax.numpy as jnp
    import optax

    import kvd.jax

    x, y = jnp.ones((BATCH, WORKS[name][0])), jnp.ones((BATCH, WORKS[name][-1]))
    adam = optax.adam(1e-3)
    chained = optax.chain(kvd.jax.mean_over_workers(kv, f"{name}.inside."), adam)
    params = [
        {"w": jnp.asarray(np.random.default_rng(0).normal(size=shape) / 30, jnp.float32), "b": jnp.zeros(shape[1])}
        for shape in pairwise(WORKS[name])
    ]

    def loss(params: Any) -> Any:
        outputs = x
        for layer in params:
            outputs = jnp.tanh(outputs @ layer["w"] + layer["b"])
        return ((outputs - y) ** 2).mean()

    def updated(optimizer: Any) -> Callable[[Any, Any, Any], Any]:
        def apply(gradients: Any, params: Any, state: Any) -> Any:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        return apply

    inside, alone = updated(chained), updated(adam)
    gradients_of, apply = jax.jit(jax.grad(loss)), jax.jit(alone)
    steps_of: dict[str, Callable[[Any, Any], Any]] = {
        "alone": jax.jit(lambda params, state: alone(jax.grad(loss)(params), params, state)),
        "inside": jax.jit(lambda params, state: inside(jax.grad(loss)(params), params, state)),
        "between": lambda params, state: apply(
            kvd.jax.pushpull(gradients_of(params), store=kv, op="mean", prefix=f"{name}.between."), params, state
        ),
    }
    states = {"alone": adam.init(params), "between": adam.init(params), "inside": chained.init(params)}
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for turn in range(turns + 1):  # the first one compiles, and does not count
        for system, step in steps_of.items():
            kv.barrier(f"{name} {turn} {system}")
            taken = []
            for _ in range(steps):
                begun = time.perf_counter()
                jax.block_until_ready(step(params, states[system]))
                taken.append((time.perf_counter() - begun) * 1e3)
            if turn:
                times[system].append(statistics.median(taken))
    return times


def measure(works: Sequence[str], turns: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Return the figures of worker 0, by work and system."""
    with LocalCluster(2, 1, processes=True) as cluster:
        options = json.dumps({"works": list(works), "turns": turns, "steps": steps})
        workers = [cluster.script(WORKER, number, options) for number in range(2)]
        try:
            outputs = [worker.communicate()[0].decode() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    for line in "".join(outputs).splitlines():
        if line.startswith("FIGURES "):
            found: dict[str, dict[str, list[float]]] = json.loads(line.removeprefix("FIGURES "))
            return found
    raise SystemExit("no figures: " + "\n".join(outputs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jax_step", description=__doc__)
    parser.add_argument("--turns", type=positive(int), default=8, help="of each system")
    parser.add_argument("--steps", type=positive(int), default=20, help="per turn")
    parser.add_argument("--only", type=some_of(tuple(WORKS)), default=list(WORKS), help="which networks")
    options = parser.parse_args(arguments)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    for name, times in measure(options.only, options.turns, options.steps).items():
        between = min(times["between"])
        rows = [
            [SYSTEMS[system], f"{min(of):.2f}", f"{statistics.median(of):.2f}", f"{min(of) / between:.2f}"]
            for system, of in times.items()
        ]
        print(f"{name}: layers of {WORKS[name]}, batch {BATCH}, 2 workers, 1 server")
        print_table(Console(), ["step", "fastest turn, ms", "median turn, ms", "beside pushpull"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
