"""torch's optimizers on the servers: the steps are torch's own, and what has no counterpart is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kvd
import kvd.torch as kt
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, Adam, AdamW
from kvd.testing.cluster import LocalCluster

STEPS = 50
SHAPES = {"0.weight": (5, 4), "0.bias": (5,), "scale": ()}

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda given: torch.optim.SGD(given, 0.1),
    "sgd, dampening without momentum": lambda given: torch.optim.SGD(given, 0.1, dampening=0.5),
    "sgd, momentum": lambda given: torch.optim.SGD(given, 0.05, momentum=0.9, weight_decay=0.01),
    "sgd, nesterov": lambda given: torch.optim.SGD(given, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd, maximize": lambda given: torch.optim.SGD(given, 0.05, momentum=0.9, weight_decay=0.01, maximize=True),
    "sgd, fused": lambda given: torch.optim.SGD(given, 0.05, momentum=0.9, fused=True),
    "sgd, tensors": lambda given: torch.optim.SGD(given, torch.tensor(0.05), weight_decay=torch.tensor(0.01)),
    "adam": lambda given: torch.optim.Adam(given, 0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.01),
    "adam, decoupled": lambda given: torch.optim.Adam(given, 0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adam, maximize": lambda given: torch.optim.Adam(given, 0.01, weight_decay=0.01, maximize=True),
    "adamw": lambda given: torch.optim.AdamW(given, 0.01, betas=(0.85, 0.98), weight_decay=0.1, foreach=False),
    "adagrad": lambda given: torch.optim.Adagrad(given, 0.1, lr_decay=0.01, weight_decay=0.01),
    "rmsprop": lambda given: torch.optim.RMSprop(given, 0.01, alpha=0.9, eps=1e-6, weight_decay=0.01),
    "rmsprop, all": lambda given: torch.optim.RMSprop(given, 0.01, momentum=0.9, centered=True),
    "adadelta": lambda given: torch.optim.Adadelta(given, 0.5, rho=0.8, weight_decay=0.01),
    "adamax": lambda given: torch.optim.Adamax(given, 0.01, betas=(0.8, 0.9), weight_decay=0.01),
    "nadam": lambda given: torch.optim.NAdam(given, 0.01, momentum_decay=0.01, weight_decay=0.01),
}


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: 0.3 * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value) for name, value in tensors(dtype).items()}


def gradients(dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [0.1 * torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES.values()]


def torch_steps(optimizer: torch.optim.Optimizer, known: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
    for step in range(STEPS):
        for parameter, gradient in zip(known.values(), gradients(dtype, step), strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_store_takes_the_steps_of_torch(make: Make, dtype: torch.dtype) -> None:
    known = parameters(dtype)
    optimizer = make(list(known.values()))
    with kvd.create("local") as kv:
        kv.init(list(known), [tensor.detach().clone() for tensor in known.values()])
        kv.set_optimizer(kt.from_torch(optimizer))
        for step in range(STEPS):
            kv.push(list(known), gradients(dtype, step))
        values = kv.pull(list(known))
    torch_steps(optimizer, known, dtype)
    for value, parameter in zip(values, known.values(), strict=True):
        wanted = parameter.detach().numpy()
        is_exact = dtype == torch.float64 and not isinstance(optimizer, torch.optim.NAdam)  # its momenta are float32
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-12 if is_exact else 1e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda given: torch.optim.SGD(given, 0.1, momentum=0.9, dampening=0.5), r"SGD\(dampening=0.5\)"),
        (lambda given: torch.optim.Adam(given, 0.1, amsgrad=True), r"Adam\(amsgrad=True\)"),
        (lambda given: torch.optim.AdamW(given, 0.1, amsgrad=True), r"AdamW\(amsgrad=True\)"),
        (lambda given: torch.optim.Adam(given, 0.1, differentiable=True), r"Adam\(differentiable=True\)"),
        (lambda given: torch.optim.Adagrad(given, initial_accumulator_value=0.1), "initial_accumulator_value=0.1"),
        (lambda given: torch.optim.NAdam(given, decoupled_weight_decay=True), "decoupled_weight_decay=True"),
        (lambda given: torch.optim.Adadelta(given, eps=0.0), "Adadelta has no counterpart.*epsilon must be > 0"),
        (lambda given: torch.optim.RAdam(given), r"the steps of torch.optim.*RAdam; .*SGD, Adam"),
        (lambda given: torch.optim.LBFGS(given), "LBFGS"),
    ],
)
def test_what_has_no_counterpart_is_refused(make: Make, text: str) -> None:
    with pytest.raises(NotAllowed, match=text) as caught:
        kt.from_torch(make(list(parameters().values())))
    assert 'where="workers"' in str(caught.value)


def test_a_class_derived_from_one_of_torchs_is_refused() -> None:
    class Clipped(torch.optim.SGD):
        pass

    with pytest.raises(NotAllowed, match="Clipped"):
        kt.from_torch(Clipped(parameters().values(), 0.1))


@pytest.mark.parametrize("name", ["sgd, momentum", "adamw", "adagrad"])
def test_an_optimizer_with_state_is_refused(name: str) -> None:
    known = parameters()
    optimizer = OPTIMIZERS[name](list(known.values()))
    kt.from_torch(optimizer)
    torch_steps(optimizer, known, torch.float32)
    with pytest.raises(NotAllowed, match="has made steps"):
        kt.from_torch(optimizer)


# ── groups ──


def groups_of(known: dict[str, Any], **fields: dict[str, float]) -> list[dict[str, Any]]:
    """A group for each parameter, with these values by its name."""
    return [
        {"params": [parameter], **{field: values[name] for field, values in fields.items() if name in values}}
        for name, parameter in known.items()
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_groups_become_multipliers(kind: Any) -> None:
    known = parameters(torch.float64)
    rates, decays = {"0.weight": 0.0, "0.bias": 0.02}, {"0.bias": 0.0, "scale": 0.3}
    optimizer = kind(groups_of(known, lr=rates, weight_decay=decays), lr=0.01, weight_decay=0.1)
    with kvd.create("local") as kv:
        kv.init(list(known), [tensor.detach().clone() for tensor in known.values()])
        kv.set_optimizer(kt.from_torch(optimizer, known.items()))
        for step in range(STEPS):
            kv.push(list(known), gradients(torch.float64, step))
        values = kv.pull(list(known))
    torch_steps(optimizer, known, torch.float64)
    for value, parameter in zip(values, known.values(), strict=True):
        np.testing.assert_allclose(value, parameter.detach().numpy(), rtol=0, atol=1e-12)


def test_names_come_from_the_optimizer_if_it_has_them() -> None:
    known = parameters()
    groups = [{"params": [pair], "lr": rate} for pair, rate in zip(known.items(), (0.1, 0.1, 0.2), strict=True)]
    assert kt.from_torch(torch.optim.SGD(groups)) == SGD(0.1, lr_mult={"scale": 2.0})


def test_groups_that_cannot_be_told_apart() -> None:
    known = parameters()
    groups = groups_of(known, lr={"scale": 0.2})
    with pytest.raises(NotAllowed, match=r"named_parameters=module\.named_parameters"):
        kt.from_torch(torch.optim.SGD(groups, 0.1))
    with pytest.raises(
        NotAllowed, match=r"parameter 0 of param_groups\[2\], of shape \(\), is not in named_parameters"
    ):
        kt.from_torch(torch.optim.SGD(groups, 0.1), [*known.items()][:2])
    with pytest.raises(NotAllowed, match=r"param_groups\[2\] has momentum=0.5, and param_groups\[0\] has 0"):
        kt.from_torch(torch.optim.SGD(groups_of(known, momentum={"scale": 0.5}), 0.1), known.items())
    with pytest.raises(NotAllowed, match=r"param_groups\[1\] has betas"):
        kt.from_torch(torch.optim.Adam(groups_of(known, betas={"0.bias": (0.5, 0.9)}), 0.1), known.items())  # type: ignore[dict-item]


def test_many_names_become_patterns_that_fit_the_others_not() -> None:
    """The usual groups of a transformer: biases and norms are not decayed."""
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    module = nn.ModuleDict(
        {
            "embedding": nn.Embedding(5, 4),
            "encoder": nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
            "norm": nn.LayerNorm(4),
        }
    )
    named = dict(module.named_parameters())
    free = {name for name in named if "norm" in name or name.endswith("bias")}
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in named if name in free], "weight_decay": 0.0},
        {"params": [named[name] for name in named if name not in free]},
    ]
    rule = kt.from_torch(torch.optim.AdamW(groups, 0.01, weight_decay=0.1), named.items())
    assert len(free) > len(rule.wd_mult) > 0
    assert len(rule.wd_mult) <= 8
    for name in named:
        assert rule.for_key(name).wd == (0.0 if name in free else 0.1), name


def test_names_that_no_patterns_hold_are_refused() -> None:
    known = {f"part{number}": nn.Parameter(torch.zeros(1)) for number in range(140)}
    groups = groups_of(known, lr=dict.fromkeys(list(known)[::2], 0.2))
    with pytest.raises(NotAllowed, match="groups with another lr have 70 parameters"):
        kt.from_torch(torch.optim.SGD(groups, 0.1), known.items())


# ── changes while it trains ──


def test_changes_of_a_scheduler() -> None:
    known = parameters()
    optimizer = torch.optim.Adam(groups_of(known, lr={"scale": 0.03}), 0.01)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 7))
    follow = kt.Hyperparameters(optimizer, known.items())
    assert follow.optimizer == Adam(0.0)
    assert follow.changed() == {}
    optimizer.step()  # of no gradients, as on the servers' side of a wrapper
    scheduler.step()
    changed = follow.changed()
    assert changed.pop("lr_mult") == pytest.approx({"scale": 3.0})
    assert changed == {"learning_rate": 0.01 / 7}
    for step in range(2, 8):  # the factors are those of the first rates, whatever has been rounded
        scheduler.step()
        assert follow.changed() == {"learning_rate": 0.01 * step / 7}
    scheduler.step()
    assert follow.changed() == {}
    assert follow.optimizer.learning_rate == 0.01


def test_changes_of_other_hyperparameters() -> None:
    known = parameters()
    optimizer = torch.optim.SGD(known.values(), torch.tensor(0.1), momentum=0.5)
    follow = kt.Hyperparameters(optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    optimizer.param_groups[0]["momentum"] = 0.75
    assert follow.changed() == {"learning_rate": 0.25, "momentum": 0.75}
    optimizer.param_groups[0]["dampening"] = 0.5
    for _ in range(2):
        with pytest.raises(NotAllowed, match=r"dampening=0.5"):
            follow.changed()
    optimizer.param_groups[0].update(dampening=0.0, lr=float("nan"))
    with pytest.raises(NotAllowed, match="learning_rate must be finite"):
        follow.changed()
    optimizer.param_groups[0].update(lr=0.25, foreach=True)
    assert follow.changed() == {}


def test_two_workers_with_a_scheduler_equal_torch_on_the_whole_batch() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def optimizer_of(module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        decayed = [parameter for name, parameter in module.named_parameters() if name.endswith("weight")]
        others = [parameter for name, parameter in module.named_parameters() if not name.endswith("weight")]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, 0.01, weight_decay=0.1)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    data = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(2))
    labels = torch.randint(0, 3, (STEPS, 8), generator=torch.Generator().manual_seed(3))

    def loss_of(module: nn.Module, step: int, part: slice) -> torch.Tensor:
        return nn.functional.cross_entropy(module(data[step, part]), labels[step, part])

    def program(kv: kvd.KVStore) -> list[Any]:
        module = model()
        names, weights = zip(*module.named_parameters(), strict=True)
        optimizer, scheduler = optimizer_of(module)
        kv.init(list(names), [weight.detach().clone() for weight in weights])
        follow = kt.Hyperparameters(optimizer, module.named_parameters())
        kv.set_optimizer(follow.optimizer)
        for step in range(STEPS):
            changed = follow.changed()
            if changed:
                kv.update_optimizer(**changed)
            own = slice(4 * kv.rank, 4 * kv.rank + 4)
            kv.pushpull(list(names), list(torch.autograd.grad(loss_of(module, step, own), weights)), out=list(weights))
            optimizer.step()  # of no gradients
            scheduler.step()
        return [weight.detach().numpy() for weight in weights]

    with LocalCluster(2, 2, merge="mean") as cluster:
        results = cluster.run(program)
    module = model()
    optimizer, scheduler = optimizer_of(module)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss: Any = loss_of(module, step, slice(None))
        loss.backward()
        optimizer.step()
        scheduler.step()
    for values in results:
        for value, parameter in zip(values, module.parameters(), strict=True):
            np.testing.assert_allclose(value, parameter.detach().numpy(), rtol=0, atol=1e-6)


def test_the_defaults_are_torchs() -> None:
    given = list(parameters().values())
    assert kt.from_torch(torch.optim.AdamW(given)) == AdamW()
    assert kt.from_torch(torch.optim.Adam(given)) == Adam()
