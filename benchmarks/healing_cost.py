"""What a training step costs for being able to heal, while nobody dies: ``python -m benchmarks.healing_cost``.

One process trains a small model with BatchNorm by `kvd.torch.DistributedOptimizer` with ``where="workers"``, in turn in
a loop over `kvd.KVStore.steps` and in one over its own `steps`, which passes the state on to restarted workers. The
time between the bodies of two steps is measured, in which the second loop keeps count and copies the buffers. A turn
counts with its median step, a loop with its fastest turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from rich.console import Console
from torch import nn

import kvd
import kvd.torch as kt
from benchmarks import machine
from benchmarks.arguments import positive
from benchmarks.report import print_table

WIDTH: Final = 64
LAYERS: Final = 4


def make_model() -> nn.Sequential:
    """Return layers with BatchNorm, three buffers each."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


class Training:
    """A model in a store of this process.

    Args:
        heals: whether its loop passes the state on.
    """

    def __init__(self, *, heals: bool) -> None:
        self._kv = kvd.create("local")
        self._x = torch.randn(8, WIDTH)
        self._model = model = make_model()
        self._optimizer = kt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.01),
            model.named_parameters(),
            where="workers",
            op="mean",
            store=self._kv,
            module=model,
        )
        self._steps: Callable[[int], Iterable[int]] = self._optimizer.steps if heals else self._kv.steps
        self.medians_us: list[float] = []

    def turn(self, steps: int) -> None:
        """Make so many steps, and note the median of the times between them."""
        between: list[float] = []
        end = time.perf_counter()
        for _ in self._steps(steps):
            between.append(time.perf_counter() - end)
            self._optimizer.zero_grad()
            loss: Any = self._model(self._x).square().mean()
            loss.backward()
            self._optimizer.step()
            end = time.perf_counter()
        self.medians_us.append(statistics.median(between[1:]) * 1e6)  # the first one begins the loop

    def close(self) -> None:
        """Close the store."""
        self._kv.close()


def measure(turns: int, steps: int) -> tuple[float, float]:
    """Return the microseconds between two steps, without and with the state that is passed on."""
    trainings = [Training(heals=False), Training(heals=True)]
    for _ in range(turns):
        for training in trainings:
            training.turn(steps)
    for training in trainings:
        training.close()
    plain, healing = (min(training.medians_us) for training in trainings)
    return plain, healing


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.healing_cost", description=__doc__)
    parser.add_argument("--turns", type=positive(int), default=10, help="of each loop")
    parser.add_argument("--steps", type=positive(int), default=200, help="per turn")
    options = parser.parse_args(arguments)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    torch.set_num_threads(1)
    plain, healing = measure(options.turns, options.steps)
    rows = [
        ["kv.steps", f"{plain:.1f}"],
        [f"optimizer.steps, {LAYERS} BatchNorm layers", f"{healing:.1f}"],
        ["difference", f"{healing - plain:.1f}"],
    ]
    print_table(Console(), ["between two steps", "µs"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
