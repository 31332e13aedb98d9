"""A group of CPU devices compared with the bare model on the whole batch: ``python -m benchmarks.group_step``.

Both compute outputs, loss and gradients of the same batches, in turn, with the same number of threads in all. The
ratio of a round is the median step of the group by the median step of the bare model; shown is the median round.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from kvd import parallel

CLASSES = 10


class Work(NamedTuple):
    """One model in both spellings, and the shape of a sample."""

    module: Callable[[], torch.nn.Module]
    layers: parallel.Sequential
    sample: tuple[int, ...]
    batch: int


WORK = {
    "mlp": Work(
        lambda: torch.nn.Sequential(
            torch.nn.Linear(784, 512),
            torch.nn.ReLU(),
            torch.nn.Linear(512, 512),
            torch.nn.ReLU(),
            torch.nn.Linear(512, CLASSES),
        ),
        parallel.Sequential(
            parallel.Dense(512),
            parallel.ReLU(),
            parallel.Dense(512),
            parallel.ReLU(),
            parallel.Dense(CLASSES),
            parallel.SoftmaxCrossEntropy(),
        ),
        (784,),
        1024,
    ),
    "convolutions": Work(
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 7 * 7, CLASSES),
        ),
        parallel.Sequential(
            parallel.Conv2D(16, 3, stride=2, padding=1),
            parallel.ReLU(),
            parallel.Conv2D(32, 3, stride=2, padding=1),
            parallel.ReLU(),
            parallel.Flatten(),
            parallel.Dense(CLASSES),
            parallel.SoftmaxCrossEntropy(),
        ),
        (1, 28, 28),
        512,
    ),
}


class Figures(NamedTuple):
    """Medians over the rounds: seconds per step of both, and their ratio, that with its least and its largest."""

    work: str
    kind: str
    bare_s: float
    group_s: float
    ratio: float
    ratio_min: float
    ratio_max: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.group_step", description=__doc__)
    parser.add_argument("--devices", type=int, default=4, help="CPU devices in the group")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0: its default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="per round and side")
    parser.add_argument("--device", default="cpu", help='"cuda:0": a group of one GPU beside the bare model on it')
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    devices = ["cpu"] * options.devices if options.device == "cpu" else [options.device]
    figures = [
        measure(name, work, kind, devices, options.rounds, options.steps)
        for name, work in WORK.items()
        for kind in (("TorchModel", "Sequential") if options.device == "cpu" else ("TorchModel",))
    ]
    if options.json:
        about = {"machine": machine.describe(), "threads": torch.get_num_threads(), "devices": devices}
        print(json.dumps({**about, "figures": [entry._asdict() for entry in figures]}))
    else:
        _show(figures, devices)
    return 0


def measure(name: str, work: Work, kind: str, devices: list[str], rounds: int, steps: int) -> Figures:
    """The figures of one model, bare and in the group, in turn."""
    bare, grouped = _sides(work, kind, devices)
    for side in (bare, grouped):
        _seconds(side, 3)
    times = [(_seconds(bare, steps), _seconds(grouped, steps)) for _ in range(rounds)]
    ratios = [second / first for first, second in times]
    return Figures(
        name,
        kind,
        statistics.median(first for first, _ in times),
        statistics.median(second for _, second in times),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def _sides(work: Work, kind: str, devices: list[str]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A step of bare torch on the whole batch, and one of the group."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(work.batch, *work.sample)).astype(np.float32)
    y = generator.integers(0, CLASSES, work.batch)
    torch.manual_seed(0)
    made = work.module()
    module = copy.deepcopy(made).to("cpu" if devices[0].startswith("cpu") else devices[0])
    loss = torch.nn.CrossEntropyLoss()

    def bare() -> None:
        where = next(module.parameters()).device
        module.zero_grad()
        loss(module(torch.from_numpy(x).to(where)), torch.from_numpy(y).to(where)).backward()
        if where.type == "cuda":
            torch.cuda.synchronize(where)

    model: parallel.Model = parallel.TorchModel(made, loss) if kind == "TorchModel" else work.layers
    group = parallel.DataParallelExecutorGroup(
        model, devices, [parallel.DataDesc("data", x.shape)], [parallel.DataDesc("label", y.shape, "int64")]
    )
    if isinstance(model, parallel.Sequential):
        group.set_params(model.initialize(x.shape))
    batch = parallel.DataBatch([x], [y])
    return bare, lambda: group.forward_backward(batch)


def _seconds(step: Callable[[], Any], count: int) -> float:
    """The median of this many steps."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _show(figures: Sequence[Figures], devices: Sequence[str]) -> None:
    table = Table(title=f"{len(devices)} × {devices[0]}, {torch.get_num_threads()} threads")
    for column in ("model", "as", "torch, ms", "group, ms", "ratio", "min to max"):
        table.add_column(column, justify="left" if column in ("model", "as") else "right")
    for entry in figures:
        table.add_row(
            entry.work,
            entry.kind,
            f"{entry.bare_s * 1e3:.2f}",
            f"{entry.group_s * 1e3:.2f}",
            f"{entry.ratio:.3f}",
            f"{entry.ratio_min:.3f} to {entry.ratio_max:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
