"""A small training by `LocalSGD`, and the same one calculated in one process by torch alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kvd
import kvd.torch as kt

Weights = dict[str, np.ndarray[Any, Any]]

INPUTS, HIDDEN, CLASSES, BATCH = 6, 5, 3, 8
OUTER_RATE, OUTER_MOMENTUM, INNER_RATE = 0.7, 0.9, 0.02
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]  # of 30, 5, 15 and 3 elements


@dataclass(frozen=True)
class Plan:
    """A training.

    Attributes:
        loops: inner steps of each loop.
        fragments: the names of each, as `LocalSGD` should divide them.
    """

    loops: Sequence[int]
    every: int
    fragments: Sequence[Sequence[str]] = (NAMES,)
    delay: int = 0
    local_share: float = 0.5
    compression: Mapping[str, Any] | None = None
    outer: kvd.optimizer.Optimizer = field(
        default_factory=lambda: kvd.optimizer.SGD(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    )


def new_model(seed: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    chance = torch.Generator().manual_seed(seed)  # workers may be threads of one process
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4, generator=chance)
    return model


def new_inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), INNER_RATE)


def gradients(model: nn.Module, loop: int, step: int, rank: int) -> Tensor:
    """Set the gradients of one batch, drawn by loop, step and rank."""
    chance = torch.Generator().manual_seed(1_000_000 * loop + 1000 * step + rank)
    x = torch.randn(BATCH, INPUTS, generator=chance)
    y = torch.randint(CLASSES, (BATCH,), generator=chance)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


# ── with kvd ──


def wrap(kv: kvd.KVStore, plan: Plan, model: nn.Module) -> kt.LocalSGD:
    optimizer = kt.LocalSGD(
        new_inner(model),
        model.named_parameters(),
        every=plan.every,
        outer=plan.outer,
        store=kv,
        fragments=len(plan.fragments),
        delay=plan.delay,
        local_share=plan.local_share,
    )
    if plan.compression is not None:
        kv.set_gradient_compression(plan.compression)
    return optimizer


def train(
    kv: kvd.KVStore, plan: Plan, before_step: Callable[[int, int], None] = lambda loop, step: None
) -> tuple[Weights, list[list[int]]]:
    """Train, and return the weights and the steps that each loop gave.

    Args:
        before_step: called with the loop and the step before each inner step.
    """
    model = new_model(kv.rank)  # other weights in each worker: those of worker 0 count
    optimizer = wrap(kv, plan, model)
    made: list[list[int]] = []
    for loop, total in enumerate(plan.loops):
        made.append([])
        for step in optimizer.steps(total):
            made[-1].append(step)
            before_step(loop, step)
            gradients(model, loop, step, kv.rank)
            optimizer.step()
    return weights_of(model), made


# ── the same by torch alone ──


class Replica:
    """What one worker has: a model and its inner optimizer."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.model = new_model(0)
        self.values = dict(self.model.named_parameters())
        self.adopt(weights, weights)
        self.inner = new_inner(self.model)

    def adopt(self, anchors: Mapping[str, Tensor], names: Iterator[str] | Sequence[str] | Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name in names:
                self.values[name].copy_(anchors[name])

    def train(self, loop: int, step: int, rank: int) -> None:
        gradients(self.model, loop, step, rank)
        self.inner.step()


def simulate(
    plan: Plan,
    workers: int,
    *,
    joins: Mapping[int, tuple[int, int]] | None = None,
    deaths: Mapping[int, tuple[int, int]] | None = None,
) -> Weights:
    """All workers in lockstep: the algorithms of both papers, with torch's SGD for the outer steps.

    Args:
        joins: rank → loop and step with which the worker begins; 0, 0 for the others.
        deaths: rank → loop and step before which the worker is killed and restarted.
    """
    joins, deaths = joins or {}, deaths or {}
    anchors = {name: value.detach().clone() for name, value in new_model(0).named_parameters()}
    outer = torch.optim.SGD(list(anchors.values()), OUTER_RATE, OUTER_MOMENTUM, nesterov=True)
    replicas = {rank: Replica(anchors) for rank in range(workers) if rank not in joins}
    due = {(place + 1) * plan.every // len(plan.fragments): names for place, names in enumerate(plan.fragments)}
    under_way: list[tuple[int, Sequence[str]]] = []  # when the result is used, and of which fragment
    clock = 0

    def use(names: Sequence[str], share: float) -> None:
        for replica in replicas.values():
            for name in names:
                local = replica.values[name].detach()
                replica.values[name].data = share * local + (1 - share) * anchors[name] if share else anchors[name] + 0

    def exchange(names: Sequence[str]) -> None:
        nonlocal under_way
        for _, waiting in under_way:
            if waiting is names:
                use(names, plan.local_share)
        under_way = [entry for entry in under_way if entry[1] is not names]
        outer.zero_grad()
        for name in names:
            differences = [anchors[name] - replicas[rank].values[name].detach() for rank in sorted(replicas)]
            if plan.compression is not None:
                differences = [difference.half().float() for difference in differences]
            anchors[name].grad = torch.stack(differences).mean(0)
        outer.step()
        under_way.append((clock + plan.delay, names))

    for loop, total in enumerate(plan.loops):
        for step in range(total):
            first = step // plan.every * plan.every
            if step == first:
                at_beginning = {name: anchor.clone() for name, anchor in anchors.items()}
            for rank, moment in joins.items():
                if moment == (loop, step):
                    replicas[rank] = Replica(anchors)
            for rank, moment in deaths.items():
                if moment == (loop, step):
                    replicas[rank] = _restarted(plan, due, at_beginning, anchors, rank, (loop, first, step, total))
            for rank, replica in replicas.items():
                replica.train(loop, step, rank)
            clock += 1
            for used_at, names in under_way:
                if used_at == clock:
                    use(names, plan.local_share)
            under_way = [entry for entry in under_way if entry[0] != clock]
            is_last_round, is_end = first + plan.every >= total, step == total - 1
            for names in plan.fragments if is_last_round and is_end else ():
                exchange(names)
            if not is_last_round and step - first + 1 in due:
                exchange(due[step - first + 1])
            if is_end or not plan.delay:
                for _, names in under_way:
                    use(names, 0.0)
                under_way = []
    return {name: anchor.numpy() for name, anchor in anchors.items()}


def _restarted(
    plan: Plan,
    due: Mapping[int, Sequence[str]],
    at_beginning: Mapping[str, Tensor],
    anchors: Mapping[str, Tensor],
    rank: int,
    moment: tuple[int, int, int, int],
) -> Replica:
    """A worker that begins the round again: the exchanges that its predecessor made give it the anchors."""
    loop, first, step, total = moment
    replica = Replica(at_beginning)
    for again in range(first, step):
        replica.train(loop, again, rank)
        if first + plan.every < total and again - first + 1 in due:
            replica.adopt(anchors, due[again - first + 1])
    return replica


# ── a program of `kvd launch` ──

LAUNCHED = Plan(loops=[14], every=6, fragments=[NAMES[:1], NAMES[1:]])
DEATHS = {0: (0, 8), 1: (0, 10)}  # in the second round, before and after the exchange of the first fragment


def main(folder: Path) -> None:
    """Train as a worker of a job that dies once; write the weights and the steps."""
    with kvd.create("dist_sync") as kv:

        def die(loop: int, step: int) -> None:
            marker = folder / f"died-{kv.rank}"
            if DEATHS.get(kv.rank) == (loop, step) and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        weights, made = train(kv, LAUNCHED, die)
        np.savez(folder / f"weights-{kv.rank}.npz", allow_pickle=False, **weights)
        (folder / f"steps-{kv.rank}").write_text(" ".join(map(str, made[0])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
