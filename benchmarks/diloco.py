"""Bytes that DiLoCo sends to reach the loss of a synchronous training: ``python -m benchmarks.diloco``.

Four workers train the transformer of ``examples/gpt.py`` twice, with the same batches per step and worker. The
synchronous training merges the gradients of each step and updates with AdamW in the workers, as DDP does. With DiLoCo
(`kvd.torch.LocalSGD`) each worker trains alone with AdamW, and all exchange their weights once in ``--every`` steps; a
third training also compresses the differences that workers send to 8 bits. All have the same constant rate. All values
travel over TCP. The bytes are those that the kernel has carried on all connections of worker 0, both ways. The losses
are those of a fixed part of the text that no worker trains with; they are the same in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console

import kvd
import kvd.torch as kt
from benchmarks import machine
from benchmarks.arguments import new_file, positive
from benchmarks.report import print_table
from examples import gpt
from kvd.testing.cluster import LocalCluster
from kvd.transport.limits.connections import DESCRIPTORS, look_at
from kvd_cli.bench_svg import Series, chart, decades, linear

SYNCHRONOUS: Final = "synchronous"
DILOCO: Final = "DiLoCo"
COMPRESSED: Final = "DiLoCo int8"
EVALUATED: Final = 256  # pieces of text
HEADINGS: Final = ("training", "steps", "loss", "MB of worker 0", "of the synchronous")
WORKER: Final = "import sys; from benchmarks import diloco; diloco.work(sys.argv[1])"


@dataclass(frozen=True)
class Work:
    """What is trained, and how.

    Attributes:
        kind: `SYNCHRONOUS`, `DILOCO` or `COMPRESSED`.
        steps: of each worker.
        every: steps between two exchanges, and between two points of the curve.
        batch: pieces of text for each step and worker.
    """

    kind: str
    steps: int
    every: int
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    rate: float = 3e-3
    batch: int = 8
    context: int = 48
    width: int = 48
    layers: int = 2
    heads: int = 4
    seed: int = 0


class Point(NamedTuple):
    """A point of a curve: the step, the bytes until then, and the loss in nats per character."""

    step: int
    nbytes: int
    loss: float


class Training:
    """A worker's model, batches and measurements."""

    def __init__(self, kv: kvd.KVStore, work: Work) -> None:
        torch.set_num_threads(1)
        text = gpt.corpus()
        end = int((1 - gpt.HELD_OUT) * len(text))
        self._text = text[:end]
        self._held_out = gpt.batch_of(text[end:], EVALUATED, work.context, work.seed)
        torch.manual_seed(work.seed)
        self.model = gpt.GPT(work.width, work.layers, work.heads, work.context)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), work.rate)
        self._kv = kv
        self._work = work

    def backward(self, step: int) -> None:
        """Set the gradients of one step, and its learning rate."""
        work = self._work
        for group in self.optimizer.param_groups:
            group["lr"] = work.rate * min(1.0, (step + 1) / gpt.WARM_UP)
        self.optimizer.zero_grad()
        pieces = gpt.batch_of(self._text, work.batch, work.context, work.seed, step, self._kv.rank)
        gpt.loss_of(self.model, pieces).backward()  # type: ignore[no-untyped-call]

    def measure(self, step: int) -> None:
        """Let worker 0 print a point of the curve, if one is due after this step."""
        made = step + 1
        if self._kv.rank == 0 and (made % self._work.every == 0 or made == self._work.steps):
            nbytes = carried_bytes()
            with torch.no_grad():
                loss = gpt.loss_of(self.model, self._held_out).item()
            print(json.dumps(Point(made, nbytes, loss)), flush=True)


def work(described: str) -> None:
    """Train as one worker of the job; worker 0 prints the points."""
    wanted = Work(**json.loads(described))
    with kvd.create("dist_sync") as kv:
        training = Training(kv, wanted)
        if wanted.kind == SYNCHRONOUS:
            _train_together(kv, training, wanted.steps)
        else:
            _train_apart(kv, training, wanted)


def _train_together(kv: kvd.KVStore, training: Training, steps: int) -> None:
    names, parameters = zip(*training.model.named_parameters(), strict=True)
    kv.init(names, [parameter.detach() for parameter in parameters], merge="mean")
    for step in range(steps):
        training.backward(step)
        gradients = [parameter.grad for parameter in parameters]
        kv.pushpull(names, gradients, out=gradients)
        training.optimizer.step()
        training.measure(step)


def _train_apart(kv: kvd.KVStore, training: Training, work: Work) -> None:
    training.optimizer = kt.LocalSGD(
        training.optimizer,
        training.model.named_parameters(),
        every=work.every,
        outer=kvd.optimizer.SGD(work.outer_rate, momentum=work.outer_momentum, nesterov=work.outer_momentum > 0),
        store=kv,
    )
    if work.kind == COMPRESSED:
        kv.set_gradient_compression({"type": "int8", "min_bytes": 0})
    for step in training.optimizer.steps(work.steps):
        training.backward(step)
        training.optimizer.step()
        training.measure(step)


def carried_bytes() -> int:
    """The bytes that the TCP connections of this process have carried, both ways."""
    found = [look_at(int(name)) for name in os.listdir(DESCRIPTORS)]
    return sum(state.received + state.acknowledged for state in found if state is not None)


def train(work: Work, workers: int) -> list[Point]:
    """Run a training in a cluster of its own, and return its curve."""
    described = json.dumps(vars(work))
    with LocalCluster(workers, 1, processes=True, shared_memory="off", path="tcp") as cluster:
        processes = [cluster.script(WORKER, number, described, preferred_rank=number) for number in range(workers)]
        outputs = [process.communicate()[0].decode() for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"a worker ended with {process.returncode}:\n{output}")
    return [Point(*json.loads(line)) for line in outputs[0].splitlines() if line.startswith("[")]


def first_to_reach(curve: Sequence[Point], loss: float) -> Point | None:
    """Return the first point at or below the loss; None if there is none."""
    return next((point for point in curve if point.loss <= loss), None)


def lines(curves: dict[str, list[Point]]) -> list[tuple[str, ...]]:
    """Return the cells of the table: the synchronous training, and each other one where it first has its loss."""
    last = curves[SYNCHRONOUS][-1]
    rows: list[tuple[str, ...]] = []
    for name, curve in curves.items():
        found = last if name == SYNCHRONOUS else first_to_reach(curve, last.loss)
        shown, ratio = (curve[-1], "never") if found is None else (found, f"{found.nbytes / last.nbytes:.4f}")
        rows.append((name, str(shown.step), f"{shown.loss:.4f}", f"{shown.nbytes / 1e6:.2f}", ratio))
    return rows


def picture(curves: dict[str, list[Point]]) -> str:
    """Draw the losses over the bytes, as SVG."""
    points = [point for curve in curves.values() for point in curve]
    megabytes = [point.nbytes / 1e6 for point in points]
    series = [
        Series(name, tuple((point.nbytes / 1e6, point.loss) for point in curve), marked=name != SYNCHRONOUS)
        for name, curve in curves.items()
    ]
    x = decades("MB carried by the connections of worker 0", min(megabytes), max(megabytes))
    y = linear("loss, nats per character", max(point.loss for point in points))
    return chart("DiLoCo and a synchronous training", "python -m benchmarks.diloco", x, y, series)


def table_of(curves: dict[str, list[Point]]) -> str:
    """Write the curves as comma-separated values."""
    rows = [f"{name},{point.step},{point.nbytes},{point.loss:.6f}" for name, curve in curves.items() for point in curve]
    return "\n".join(["training,step,bytes,loss", *rows]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in each way, print the table, and write the curves. Ends with 1 if DiLoCo never reaches the loss."""
    parser = argparse.ArgumentParser("python -m benchmarks.diloco", description=__doc__)
    parser.add_argument("--workers", type=positive(int), default=4)
    parser.add_argument("--steps", type=positive(int), default=600, help="of the synchronous training")
    parser.add_argument("--diloco-steps", type=positive(int), default=1200)
    parser.add_argument("--every", type=positive(int), default=50, help="steps between two exchanges of DiLoCo")
    parser.add_argument("--outer-rate", type=positive(float), default=Work.outer_rate)
    parser.add_argument("--outer-momentum", type=float, default=Work.outer_momentum)
    parser.add_argument("--svg", type=new_file, metavar="OUT.svg", help="draw the losses over the bytes")
    parser.add_argument("--csv", type=new_file, metavar="OUT.csv", help="write the curves")
    given = parser.parse_args(arguments)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    curves = {}
    for kind in (SYNCHRONOUS, DILOCO, COMPRESSED):
        steps = given.steps if kind == SYNCHRONOUS else given.diloco_steps
        curves[kind] = train(Work(kind, steps, given.every, given.outer_rate, given.outer_momentum), given.workers)
    print_table(Console(), HEADINGS, lines(curves))
    for path, text in ((given.svg, picture), (given.csv, table_of)):
        if path is not None:
            Path(path).write_text(text(curves), encoding="utf-8")
    loss = curves[SYNCHRONOUS][-1].loss
    return 0 if first_to_reach(curves[DILOCO], loss) and first_to_reach(curves[COMPRESSED], loss) else 1


if __name__ == "__main__":
    sys.exit(main())
