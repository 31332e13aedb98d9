"""The state of a training with torch: read as bytes in one process, and written in place in another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kvd
import kvd.torch as kt
from kvd.errors import NotAllowed
from kvd.torch.parameters import parameters_of
from kvd.torch.state import TrainingState, buffers_of

PART = 1000  # bytes that travel at a time


def model() -> Any:
    layers: Any = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 5).to(torch.bfloat16),
        nn.Linear(5, 5, bias=False),
    )
    module = layers.to(memory_format=torch.channels_last)
    module[4].weight.requires_grad_(False)
    return module


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda values: torch.optim.AdamW(values, 1e-2, amsgrad=True),
    "fused": lambda values: torch.optim.Adam(values, 1e-2, fused=True),
    "tensor rate": lambda values: torch.optim.Adam(values, torch.tensor(1e-2), foreach=False),
    "plain sgd": lambda values: torch.optim.SGD(values, 1e-2),
    "groups": lambda values: torch.optim.SGD(
        [{"params": values[:2], "lr": 0.1}, {"params": values[2:], "momentum": 0.9}], 1e-2
    ),
    "adagrad": lambda values: torch.optim.Adagrad(values, 1e-2),
}


def made(module: Any, make: Any) -> tuple[torch.optim.Optimizer, TrainingState]:
    optimizer = make([value for value in module.parameters() if value.requires_grad])
    parameters = parameters_of(optimizer, module.named_parameters())
    return optimizer, TrainingState(optimizer, [*parameters.trained, *parameters.frozen], buffers_of(module))


def train(module: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for value in module.parameters():
        if value.requires_grad:
            value.grad = torch.randn(value.shape).to(value.dtype)
    module[1].running_mean.add_(seed)
    optimizer.step()


def copy(donor: TrainingState, taker: TrainingState) -> None:
    layout, nbytes = donor.layout(), donor.nbytes()
    assert taker.begin_write(layout, "worker 1") == nbytes
    for offset in range(0, nbytes, PART):
        part = bytearray(min(PART, nbytes - offset))
        donor.read(offset, memoryview(part))
        taker.write(offset, memoryview(part).toreadonly())
    taker.end_write()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_is_written_in_place_with_its_dtypes(name: str) -> None:
    given, taken = model(), model()
    donor, of_donor = made(given, OPTIMIZERS[name])
    taker, of_taker = made(taken, OPTIMIZERS[name])
    train(given, donor, 1)
    train(given, donor, 2)
    donor.param_groups[0]["weight_decay"] = 0.25
    if name != "tensor rate":
        train(taken, taker, 3)  # otherwise its state is made
    places = [value.data_ptr() for value in [*taken.parameters(), *taken.buffers()]]
    copy(of_donor, of_taker)
    assert same(given.state_dict(), taken.state_dict())
    assert same(donor.state_dict(), taker.state_dict())
    assert [value.data_ptr() for value in [*taken.parameters(), *taken.buffers()]] == places
    for module, optimizer in ((given, donor), (taken, taker)):
        train(module, optimizer, 4)
    assert same(given.state_dict(), taken.state_dict())


def test_buffers_are_those_of_the_beginning_of_the_step() -> None:
    given, taken = model(), model()
    _, of_donor = made(given, OPTIMIZERS["adamw"])
    _, of_taker = made(taken, OPTIMIZERS["adamw"])
    given[1].running_mean.fill_(1.0)
    of_donor.begin_step()
    given[1].running_mean.fill_(2.0)  # as a forward pass does
    copy(of_donor, of_taker)
    assert taken[1].running_mean.tolist() == [1.0] * 4
    of_donor.end_step()
    copy(of_donor, of_taker)
    assert taken[1].running_mean.tolist() == [2.0] * 4


def test_what_the_program_keeps_goes_along() -> None:
    given, taken = model(), model()
    donor, of_donor = made(given, OPTIMIZERS["adamw"])
    taker, of_taker = made(taken, OPTIMIZERS["adamw"])
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) for optimizer in (donor, taker)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0)]
    values: list[Any] = [{"mean": torch.arange(3.0)}, None]
    for number, state in enumerate((of_donor, of_taker)):
        state.keep("schedule", schedules[number])
        state.keep("scaler", scalers[number])
        state.keep("values", (lambda n=number: values[n], lambda value, n=number: values.__setitem__(n, value)))
    train(given, donor, 1)
    schedules[0].step()
    copy(of_donor, of_taker)
    assert schedules[1].state_dict() == schedules[0].state_dict()
    assert taker.param_groups[0]["lr"] == donor.param_groups[0]["lr"] < 1e-2
    assert scalers[1].get_scale() == 8.0
    assert same(values[0], values[1])


def test_another_training_is_refused_before_anything_is_written() -> None:
    given = model()
    _, donor = made(given, OPTIMIZERS["adamw"])
    layout = donor.layout()
    wider = model()
    wider[3] = nn.Linear(16, 6).to(torch.bfloat16)
    wider[4] = nn.Linear(6, 5, bias=False)
    wider[4].weight.requires_grad_(False)
    for module, make, text in (
        (
            wider,
            OPTIMIZERS["adamw"],
            r"this worker has the parameter '3.weight' \(bfloat16, shape \(6, 16\).* where worker",
        ),
        (model(), OPTIMIZERS["plain sgd"], "this worker's optimizer, SGD, has other groups or hyperparameters"),
    ):
        before = {name: value.clone() for name, value in module.state_dict().items()}
        optimizer, state = made(module, make)
        with pytest.raises(NotAllowed, match=text):
            state.begin_write(layout, "worker 1")
        assert same(before, module.state_dict())
        assert not optimizer.state
    _, state = made(model(), OPTIMIZERS["adamw"])
    state.keep("schedule", (dict, print))
    with pytest.raises(NotAllowed, match="worker 1 keeps nothing, and this worker 'schedule'"):
        state.begin_write(layout, "worker 1")


def test_wrong_arguments_are_named() -> None:
    with kvd.create() as kv:
        module: Any = nn.Linear(3, 2)
        options: dict[str, Any] = {"op": "mean", "store": kv}

        def wrap(where: Any, **more: Any) -> kt.DistributedOptimizer:
            inner = torch.optim.SGD(module.parameters(), 0.1)
            return kt.DistributedOptimizer(inner, module.named_parameters(), where=where, **options, **more)

        for where, more, text in (
            ("workers", {"buffers": "sum"}, "buffers is 'local' or 'mean'"),
            ("workers", {"module": 3}, "module is the model"),
            ("workers", {"buffers": "mean"}, "needs module="),
            ("workers", {"buffers": "mean", "module": module}, "has no floating-point buffers"),
            ("servers", {"module": module}, 'are for where="workers"'),
        ):
            with pytest.raises(NotAllowed, match=text):
                wrap(where, **more)
        optimizer = wrap("workers")
        with pytest.raises(NotAllowed, match=r"takes something with state_dict and load_state_dict, or a pair"):
            optimizer.keep("thing", 5)
        with pytest.raises(NotAllowed, match=r"thing is an? .*object|object"):
            optimizer.keep("thing", (object, print))
        optimizer.keep("thing", (dict, print))
        with pytest.raises(NotAllowed, match="was called before"):
            optimizer.keep("thing", (dict, print))
        made_steps = []
        for step in optimizer.steps(3, seed=1):
            loss: Any = module(torch.ones(1, 3)).sum()
            loss.backward()
            optimizer.step()
            made_steps.append((step, torch.rand(1).item()))
        assert [step for step, _ in made_steps] == [0, 1, 2]
        assert len({value for _, value in made_steps}) == 3
