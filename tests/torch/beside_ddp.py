"""A worker that trains each model twice, with DDP and with `where="workers"`, and prints which weights differ."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import kvd
import kvd.torch as kt

STEPS, SIZE = 4, 6


class Unused(nn.Module):
    """A parameter that no worker uses, and one that only worker 0 uses in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        hidden = torch.tanh(self.first(x))
        if dist.get_rank() == 0 and self.calls % 2:
            hidden = hidden + self.sometimes(hidden)
        return self.last(hidden)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Checkpointed(nn.Module):
    """A layer whose forward is made again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(checkpoint(self.middle, hidden, use_reentrant=self.reentrant)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))


def convolutions() -> nn.Module:
    layers: Any = nn.Sequential(
        nn.Unflatten(1, (5, 1, 1)),
        nn.Conv2d(5, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    model: nn.Module = layers.to(memory_format=torch.channels_last)
    assert not layers[1].weight.is_contiguous()
    return model


class Case(NamedTuple):
    """A training.

    Attributes:
        micro: backward passes of a step; all but the last are not synchronised.
        scaled: with GradScaler and autocast. The loss of the second step is infinite in worker 1.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    micro: int = 1
    clip: bool = False
    scaled: bool = False
    set_to_none: bool = True
    options: dict[str, Any] = {}  # noqa: RUF012
    ddp: dict[str, Any] = {}  # noqa: RUF012


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


CASES = {
    "sgd": Case(mlp, sgd),
    "small buckets": Case(mlp, adamw, options={"bucket_bytes": 4000, "first_bucket_bytes": 100}),
    "fused": Case(mlp, lambda parameters: torch.optim.Adam(parameters, 1e-2, fused=True)),
    "convolutions": Case(convolutions, adamw),
    "clipping and accumulation": Case(mlp, adamw, micro=3, clip=True),
    "gradients that stay": Case(mlp, sgd, set_to_none=False),
    "scaler": Case(mlp, adamw, scaled=True, clip=True),
    "scaler and fused": Case(
        mlp, lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True), micro=2, scaled=True
    ),
    "unused": Case(Unused, adamw, ddp={"find_unused_parameters": True}),
    "unused, small buckets": Case(
        Unused, sgd, ddp={"find_unused_parameters": True}, options={"bucket_bytes": 100, "first_bucket_bytes": 100}
    ),
    "tied": Case(Tied, sgd),
    "checkpoint": Case(lambda: Checkpointed(reentrant=False), sgd),
    "reentrant checkpoint": Case(lambda: Checkpointed(reentrant=True), sgd),
    "bfloat16": Case(lambda: mlp().to(torch.bfloat16), sgd),
    "float64": Case(lambda: mlp().double(), adamw),
}


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    while True:
        yield torch.randn(SIZE, 5, generator=generator), torch.randint(0, 3, (SIZE,), generator=generator)


def train(
    case: Case, forward: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], AbstractContextManager[Any]]
) -> None:
    """The same loop for both."""
    data = batches(dist.get_rank())
    dtype = next(forward.parameters()).dtype
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        optimizer.zero_grad(case.set_to_none)
        for micro in range(case.micro):
            x, y = next(data)
            with nullcontext() if micro == case.micro - 1 else no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=case.scaled):
                    loss: Any = functional.cross_entropy(forward(x.to(dtype).requires_grad_()), y)
                if case.scaled and step == 1 and dist.get_rank() == 1:
                    loss = loss * float("inf")
                scaler.scale(loss / case.micro).backward()
        scaler.unscale_(optimizer)
        if case.clip:
            nn.utils.clip_grad_norm_(forward.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()


def differences(case: Case, name: str, store: kvd.KVStore) -> list[str]:
    """The names of the parameters that have other bits, after a check that they have changed."""
    torch.manual_seed(dist.get_rank())
    model = case.model()
    first = copy.deepcopy(model)
    twin = copy.deepcopy(model)
    other = DistributedDataParallel(twin, **case.ddp)
    train(case, other, case.optimizer(other.parameters()), other.no_sync)
    named = [(f"{name}/{key}", value) for key, value in model.named_parameters()]
    optimizer = kt.DistributedOptimizer(
        case.optimizer(model.parameters()), named, where="workers", op="mean", store=store, **case.options
    )
    train(case, model, optimizer, optimizer.no_sync)
    pairs = zip(model.named_parameters(), twin.parameters(), first.parameters(), strict=True)
    found = []
    for (key, mine), theirs, before in pairs:
        if not torch.equal(mine, theirs):
            found.append(f"{name}: {key} differs by {(mine - theirs).abs().max().item()}")
        if torch.equal(mine, before) and "never" not in key:
            found.append(f"{name}: {key} has not changed")
    return found


def main() -> None:
    """Print "same" if no weights differ; the argument is a file for the workers of DDP to meet at."""
    store = kvd.create("dist_sync")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=store.rank, world_size=2)
    found = [text for name, case in CASES.items() for text in differences(case, name, store)]
    print("\n".join(found) or f"same in {len(CASES)} trainings")
    dist.destroy_process_group()
    store.close()
