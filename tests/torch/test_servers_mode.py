"""`where="servers"`: the weights are those of torch's optimizer on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import kvd
import kvd.torch as kt
from kvd.errors import NotAllowed
from kvd.testing.cluster import LocalCluster

STEPS, SIZE, WORKERS = 50, 4, 2
GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(STEPS, WORKERS * SIZE, 5, generator=GENERATOR)
Y = torch.randint(0, 3, (STEPS, WORKERS * SIZE), generator=GENERATOR)


class Case(NamedTuple):
    """An optimizer, and what a program does to its learning rates.

    Attributes:
        schedule: made of the optimizer; its `step` ends each step.
        set_rates: called before each backward with the groups and the number of the step.
    """

    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    set_rates: Callable[[list[dict[str, Any]], int], None] | None = None
    micro: int = 1


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    biases = [value for name, value in model.named_parameters() if name.endswith("bias")]
    others = [value for name, value in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, 0.01)


def halve_late(groups: list[dict[str, Any]], step: int) -> None:
    for group in groups:
        group["lr"] = 0.05 if step < STEPS // 2 else 0.025


CASES = {
    "sgd": Case(lambda model: torch.optim.SGD(model.parameters(), 0.05)),
    "nesterov": Case(
        lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    ),
    "adam": Case(lambda model: torch.optim.Adam(model.parameters(), 0.01), set_rates=halve_late),
    "adamw": Case(lambda model: torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1), micro=2),
    "groups": Case(two_groups, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)),
}


# Models are made here: threads share the random numbers of torch.
NETWORK = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
NETWORK[2].weight.requires_grad_(False)
TWO_HEADS = nn.ModuleDict({"used": nn.Linear(5, 3), "sometimes": nn.Linear(5, 3)})
GAN = nn.ModuleDict({"generator": nn.Linear(5, 5), "discriminator": nn.Linear(5, 1)})


def network() -> nn.Module:
    return copy.deepcopy(NETWORK)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def train(case: Case, model: nn.Module, optimizer: Any, steps: Any, own: slice) -> list[torch.Tensor]:
    """The loop of a worker, and of one process with the whole batch."""
    schedule = case.schedule(optimizer) if case.schedule else None
    for step in steps:
        optimizer.zero_grad()
        if case.set_rates:
            case.set_rates(optimizer.param_groups, step)
        pieces = list(zip(X[step][own].chunk(case.micro), Y[step][own].chunk(case.micro), strict=True))
        if isinstance(optimizer, kt.DistributedOptimizer):
            with optimizer.no_sync():
                for x, y in pieces[:-1]:
                    _backward(functional.cross_entropy(model(x), y) / case.micro)
            pieces = pieces[-1:]
            before = weights(model)
        for x, y in pieces:
            _backward(functional.cross_entropy(model(x), y) / case.micro)
        if isinstance(optimizer, kt.DistributedOptimizer):
            assert all(map(torch.equal, before, model.parameters())), "weights change in step() only"
        optimizer.step()
        if schedule:
            schedule.step()
    return weights(model)


def _backward(loss: Any) -> None:
    loss.backward()


def whole_batch(case: Case) -> list[torch.Tensor]:
    model = network()
    return train(case, model, case.optimizer(model), range(STEPS), slice(None))


@pytest.mark.parametrize("name", CASES)
def test_weights_of_two_workers_are_those_of_torch_on_the_whole_batch(name: str) -> None:
    case = CASES[name]

    def program(kv: kvd.KVStore) -> list[torch.Tensor]:
        model = network()
        if kv.rank:  # worker 0 has the first values, also those that are frozen
            with torch.no_grad():
                for value in model.parameters():
                    value.zero_()
        pointers = [value.data_ptr() for value in model.parameters()]
        optimizer = kt.DistributedOptimizer(
            case.optimizer(model), model.named_parameters(), where="servers", op="mean", store=kv
        )
        own = slice(kv.rank * SIZE, (kv.rank + 1) * SIZE)
        trained = train(case, model, optimizer, optimizer.steps(STEPS), own)
        assert not optimizer.state, "the state is on the servers"
        assert pointers == [value.data_ptr() for value in model.parameters()]
        return trained

    with LocalCluster(WORKERS, 2) as cluster:
        results = cluster.run(program)
    for mine, other, expected in zip(*results, whole_batch(case), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_a_store_of_one_process_updates_as_torch_does() -> None:
    case = CASES["nesterov"]
    model = network()
    with kvd.create() as kv:
        optimizer = kt.DistributedOptimizer(
            case.optimizer(model), model.named_parameters(), where="servers", op="mean", store=kv
        )
        trained = train(case, model, optimizer, optimizer.steps(STEPS), slice(None))
    for mine, expected in zip(trained, whole_batch(case), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_gradients_may_be_summed_and_parameters_without_one_count_as_zeros() -> None:
    def program(kv: kvd.KVStore) -> list[torch.Tensor]:
        model = copy.deepcopy(TWO_HEADS)
        optimizer = kt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.5),
            model.named_parameters(),
            where="servers",
            op="sum",
            store=kv,
        )
        optimizer.step()  # nothing was computed, and nothing is sent
        for step in range(3):
            optimizer.zero_grad()
            loss = model["used"](X[step]).square().mean()
            if kv.rank == 0 and step == 0:
                loss = loss + model["sometimes"](X[step]).square().mean()
            loss.backward()
            optimizer.step()
        return weights(model)

    with LocalCluster(WORKERS, 1) as cluster:
        results = cluster.run(program)
    for mine, other, expected in zip(*results, _with_summed_gradients(), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def _with_summed_gradients() -> list[torch.Tensor]:
    """The same by torch in one process: worker 1 has the same gradients of "used", and none of "half"."""
    model = copy.deepcopy(TWO_HEADS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss = 2 * model["used"](X[step]).square().mean()
        if step == 0:
            loss = loss + model["sometimes"](X[step]).square().mean()
        loss.backward()
        optimizer.step()
    return weights(model)


def test_two_optimizers_of_a_gan() -> None:
    """The loss of the generator reaches the parameters of the discriminator, which its optimizer must not see."""

    def steps(kv: kvd.KVStore | None) -> list[torch.Tensor]:
        generator, discriminator = copy.deepcopy(GAN).values()
        optimizers: list[Any] = []
        for prefix, module, rate in (("generator", generator, 0.01), ("discriminator", discriminator, 0.05)):
            made: Any = torch.optim.Adam(module.parameters(), rate)
            if kv is not None:
                named = module.named_parameters(prefix=prefix)
                made = kt.DistributedOptimizer(made, named, where="servers", op="mean", store=kv)
            optimizers.append(made)
        of_generator, of_discriminator = optimizers
        schedule = torch.optim.lr_scheduler.ExponentialLR(of_discriminator, 0.8)
        for step in range(8) if kv is None else kv.steps(8):
            x = X[step] if kv is None else X[step][kv.rank :: WORKERS]
            of_discriminator.zero_grad()
            _backward(discriminator(generator(x).detach()).mean() - discriminator(x).square().mean())
            of_discriminator.step()
            of_generator.zero_grad()
            with nullcontext() if kv is None else of_discriminator.no_sync():
                _backward(-discriminator(generator(x)).mean())
            of_generator.step()
            schedule.step()
        return [*weights(generator), *weights(discriminator)]

    with LocalCluster(WORKERS, 1) as cluster:
        results = cluster.run(steps)
    for mine, other, expected in zip(*results, steps(None), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_compiled_model_and_mixed_precision() -> None:
    """Names are those of the model that was compiled."""

    def program(kv: kvd.KVStore) -> list[torch.Tensor]:
        model = network()
        compiled: Any = torch.compile(copy.deepcopy(model), backend="aot_eager")
        trained = []
        for prefix, module in (("eager", model), ("compiled", compiled)):
            named = module.named_parameters(prefix=prefix)
            optimizer = kt.DistributedOptimizer(
                torch.optim.SGD(module.parameters(), 0.1), named, where="servers", op="mean", store=kv
            )
            for step in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = functional.cross_entropy(module(X[step]), Y[step])
                _backward(loss)
                optimizer.step()
            trained.append(weights(module))
        assert kv.version("compiled.0.weight") == 3
        for eager, other in zip(*trained, strict=True):
            torch.testing.assert_close(eager, other, rtol=0, atol=1e-3)
        return trained[1]

    with LocalCluster(1, 1) as cluster:
        (result,) = cluster.run(program)
    assert not torch.equal(result[0], next(network().parameters()))


def test_a_scaler_is_refused() -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu")
    with kvd.create() as kv:
        optimizer = kt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), where="servers", op="mean", store=kv
        )
        _backward(scaler.scale(functional.cross_entropy(model(X[0]), Y[0])))
        with pytest.raises(NotAllowed, match="GradScaler"):
            scaler.step(optimizer)
