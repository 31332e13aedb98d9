"""What a training step costs with kvd.torch and with DDP: ``python -m benchmarks.torch_step``.

Two workers and a server train the same models in the same processes, in turn: with DistributedDataParallel over Gloo,
with `kvd.torch.DistributedOptimizer` in both of its modes, each worker on its own without any communication, and
worker 0 alone while worker 1 waits. A turn counts once, with its median step. The cost of a system is what its step
takes beyond that of one process alone. Processor time is that of both workers and the server, per step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import kvd
import kvd.torch as kt
from benchmarks import machine
from benchmarks.arguments import new_file, positive, some_of
from benchmarks.report import print_table
from kvd.testing.cluster import LocalCluster, ProcessNode

CLASSES: Final = 10
SYSTEMS: Final = ("alone", "apart", "ddp", "workers", "servers")
TITLES: Final = {
    "alone": "one process alone",
    "apart": "two without communication",
    "ddp": "DDP over Gloo",
    "workers": 'kvd.torch, where="workers"',
    "servers": 'kvd.torch, where="servers"',
}
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
WORKER: Final = "from benchmarks.torch_step import work; work()"


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.short = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.short(x))


def mlp() -> nn.Module:
    """5.75 million parameters."""
    sizes = (784, 1536, 1536, 1408)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES))


def resnet() -> nn.Module:
    """1.5 million parameters in 61 tensors."""
    widths = (24, 48, 96, 168)
    blocks = [nn.Conv2d(3, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for inputs, outputs in zip((widths[0], *widths), widths, strict=False):
        blocks += [Residual(inputs, outputs, 1 if inputs == outputs else 2), Residual(outputs, outputs, 1)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


class Work(NamedTuple):
    """A model, the shape of a sample, and the samples of a worker in a step."""

    model: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int
    optimizer: Callable[[Any], torch.optim.Optimizer]


WORKS: Final = {
    "mlp": Work(mlp, (784,), 64, lambda parameters: torch.optim.Adam(parameters, 1e-3)),
    "resnet": Work(resnet, (3, 32, 32), 16, lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9)),
}


class Figures(NamedTuple):
    """One turn of one system in one worker.

    Attributes:
        step_s: the median step.
        least_s: the shortest one.
        cpu_s: processor time of this process per step, and of the server.
    """

    work: str
    system: str
    rank: int
    step_s: float
    least_s: float
    cpu_s: float
    server_s: float


# ── a worker ──


def work() -> None:
    """Take turns, and print the figures as JSON; the argument is a dict with the options, as JSON."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    rank = options["rank"]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{options['file']}", rank=rank, world_size=2)
    found: list[Figures] = []
    for name in options["works"]:
        # A store has one optimizer for all keys, so each training has a job of its own.
        stores = {
            system: kvd.create("dist_sync", job=f"{name}-{system}", preferred_rank=rank)
            for system in ("workers", "servers")
        }
        steps = {system: _step(WORKS[name], system, rank, stores.get(system)) for system in SYSTEMS}
        for step in steps.values():
            _turn(step, options["steps"])
        for turn in range(options["turns"]):
            for place in range(len(SYSTEMS)):
                system = SYSTEMS[(turn + place) % len(SYSTEMS)]
                dist.barrier()
                if system != "alone" or rank == 0:
                    server = _server_cpu_s(options["server"])
                    times, cpu_s = _turn(steps[system], options["steps"])
                    server_s = (_server_cpu_s(options["server"]) - server) / len(times)
                    found.append(Figures(name, system, rank, statistics.median(times), min(times), cpu_s, server_s))
        for store in stores.values():
            store.close()
    print("FIGURES", json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _step(work: Work, system: str, rank: int, store: kvd.KVStore | None) -> Callable[[], None]:
    """A step of a training of its own."""
    torch.manual_seed(rank)
    model = work.model()
    forward = DistributedDataParallel(model, broadcast_buffers=False) if system == "ddp" else model
    optimizer = work.optimizer(model.parameters())
    if system in ("workers", "servers"):
        where: Any = system
        optimizer = kt.DistributedOptimizer(optimizer, model.named_parameters(), where=where, op="mean", store=store)
    x = torch.randn(work.batch, *work.sample)
    y = torch.randint(0, CLASSES, (work.batch,))

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()

    return step


def _turn(step: Callable[[], None], count: int) -> tuple[list[float], float]:
    """The seconds of so many steps, and the processor time of one."""
    times = []
    begun = time.process_time()
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times, (time.process_time() - begun) / count


def _server_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


# ── the command ──


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_step", description=__doc__)
    parser.add_argument("--turns", type=positive(int), default=8, help="of each system")
    parser.add_argument("--steps", type=positive(int), default=8, help="per turn")
    parser.add_argument("--threads", type=positive(int), default=1, help="of torch, in each worker")
    parser.add_argument("--only", type=some_of(tuple(WORKS)), default=list(WORKS), help="which models")
    parser.add_argument("--json", type=new_file, help="write every turn to this file")
    options = parser.parse_args(arguments)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    figures = measure(options.only, options.turns, options.steps, options.threads)
    if options.json:
        about = {"machine": machine.describe(), "torch": torch.__version__, "threads": options.threads}
        options.json.write_text(json.dumps({**about, "figures": [entry._asdict() for entry in figures]}))
    for name in options.only:
        _show(name, figures, options.threads)
    return 0


def measure(works: Sequence[str], turns: int, steps: int, threads: int) -> list[Figures]:
    """The figures of all turns of both workers."""
    with tempfile.TemporaryDirectory() as folder, LocalCluster(2, 1, processes=True) as cluster:
        server = cluster.servers[0]
        assert isinstance(server, ProcessNode)
        options = {
            "works": list(works),
            "turns": turns,
            "steps": steps,
            "threads": threads,
            "file": f"{folder}/workers",
            "server": server.process.pid,
        }
        workers = [cluster.script(WORKER, rank, json.dumps({**options, "rank": rank})) for rank in range(2)]
        try:
            outputs = [worker.communicate()[0].decode() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    found = [
        Figures(*entry)
        for output in outputs
        for line in output.splitlines()
        if line.startswith("FIGURES ")
        for entry in json.loads(line.removeprefix("FIGURES "))
    ]
    if len({entry.rank for entry in found}) < 2:
        raise RuntimeError("\n".join(outputs))
    return found


def _show(name: str, figures: Sequence[Figures], threads: int) -> None:
    def of(system: str, field: str) -> float:
        """The median over the turns, of the slower worker in each; of processor time the sum of both."""
        rows = [entry for entry in figures if entry.work == name and entry.system == system]
        by_rank: list[list[float]] = [
            [getattr(entry, field) for entry in rows if entry.rank == rank] for rank in range(2)
        ]
        if field == "cpu_s":
            return sum(statistics.median(values) for values in by_rank if values)
        turns = zip(*[values for values in by_rank if values], strict=True)
        return float(statistics.median(map(max, turns)))

    parameters = sum(value.numel() for value in WORKS[name].model().parameters())
    alone_s, ddp_s = of("alone", "step_s"), of("ddp", "step_s")
    least_s, ddp_least_s = of("alone", "least_s"), of("ddp", "least_s")
    rows = []
    for system in SYSTEMS:
        step_s, shortest_s = of(system, "step_s"), of(system, "least_s")
        is_shared = system not in ("alone", "apart")
        rows.append(
            (
                TITLES[system],
                f"{step_s * 1e3:.1f}",
                f"{(step_s - alone_s) * 1e3:.1f}",
                f"{(step_s - alone_s) / (ddp_s - alone_s):.2f}" if is_shared else "",
                f"{shortest_s * 1e3:.1f}",
                f"{(shortest_s - least_s) / (ddp_least_s - least_s):.2f}" if is_shared else "",
                f"{of(system, 'cpu_s') * 1e3:.1f}",
                f"{of(system, 'server_s') * 1e3:.1f}" if is_shared else "",
            )
        )
    title = f"{name}: {parameters / 1e6:.2f} million parameters, batch {WORKS[name].batch}, {threads} threads each"
    headings = (
        "system",
        "step, ms",
        "cost, ms",
        "of DDP's",
        "shortest, ms",
        "of DDP's",
        "workers' CPU, ms",
        "server's",
    )
    console = Console()
    console.print(title)
    print_table(console, headings, rows)


if __name__ == "__main__":
    sys.exit(main())
