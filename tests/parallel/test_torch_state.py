"""A module gets what a group of it has learned: `module.load_state_dict(model.state_dict(group))`."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.errors import KeyNotFound, ShapeMismatch
from kvd.optimizer import SGD
from kvd.parallel import DataBatch, DataParallelExecutorGroup, TorchModel
from tests.parallel.group_harness import Groups

GENERATOR = np.random.default_rng(7)
SIZE = 12
X = GENERATOR.normal(size=(SIZE, 5)).astype(np.float32)
Y = GENERATOR.integers(0, 3, SIZE)
BATCH = DataBatch([X], [Y])
RATE = 0.25


class Tied(torch.nn.Module):
    """Two names for one weight, a frozen parameter, buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(5, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.second = torch.nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.last = torch.nn.Linear(5, 3)
        self.last.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.second(self.norm(self.first(x)))))


def trained(model: TorchModel, steps: int = 3, devices: int = 1) -> DataParallelExecutorGroup:
    group = Groups(model, X.shape[1:], size=SIZE)(devices=devices)
    with kvd.create("local") as kv:
        group.bind_to(kv, optimizer=SGD(RATE))
        for _ in range(steps):
            group.forward_backward(BATCH)
        assert group.pipeline is not None
        group.pipeline.receive()
    return group


def reference(module: Any, steps: int) -> Any:
    """The same training by torch itself."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(module(torch.from_numpy(X)), torch.from_numpy(Y))
        loss.backward()
        optimizer.step()
    return module


def test_the_module_has_what_torch_would_have_learned() -> None:
    module: Any = Tied()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = TorchModel(module, torch.nn.CrossEntropyLoss())
    group = trained(model)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), f"training changed {name}"
    expected = reference(module, 3)
    assert module.load_state_dict(model.state_dict(group)) == torch.nn.modules.module._IncompatibleKeys([], [])
    assert module.second.weight is module.first.weight
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    module.eval()
    group.forward(DataBatch([X]), is_train=False)
    ours = group.get_outputs_merged()[0]
    np.testing.assert_allclose(module(torch.from_numpy(X)).detach().numpy(), ours, rtol=1e-5, atol=1e-6)


def test_names_that_share_a_tensor_share_one() -> None:
    module: Any = Tied()
    model = TorchModel(module, torch.nn.CrossEntropyLoss())
    state = model.state_dict(trained(model))
    assert list(state) == list(module.state_dict())
    assert state["first.weight"] is state["second.weight"]
    assert "scratch" not in state
    state["first.weight"].zero_()  # the tensors are new: neither the group nor the module sees it
    assert module.first.weight.abs().sum() > 0


def test_it_can_be_saved_and_a_new_group_goes_on_from_it() -> None:
    module: Any = Tied()
    model = TorchModel(module, torch.nn.CrossEntropyLoss())
    file = io.BytesIO()
    torch.save(model.state_dict(trained(model, steps=2)), file)
    file.seek(0)
    fresh: Any = Tied()
    fresh.load_state_dict(torch.load(file))
    again = TorchModel(fresh, torch.nn.CrossEntropyLoss())
    fresh.load_state_dict(again.state_dict(trained(again, steps=2)))
    for name, value in reference(module, 4).state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_states_of_several_devices_are_averaged() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    model = TorchModel(module, torch.nn.CrossEntropyLoss())
    group = trained(model, steps=1, devices=3)
    parts = np.split(X, 3)
    mean = np.mean([0.1 * part.mean(0) for part in parts], axis=0)
    np.testing.assert_allclose(model.state_dict(group)["0.running_mean"].numpy(), mean, rtol=1e-5, atol=1e-6)


def test_bfloat16_and_what_a_module_adds_by_itself() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            self.version = state["version"]

    module: Any = Extra(5, 3).to(torch.bfloat16)
    group = DataParallelExecutorGroup(TorchModel(module), ["cpu"], [("data", (SIZE, 5), "bfloat16")])
    state = group.model.state_dict(group)  # type: ignore[attr-defined]
    assert state["_extra_state"] == {"version": 3}
    assert state["weight"].dtype == torch.bfloat16
    module.load_state_dict(state)
    assert module.version == 3


def test_a_group_of_another_model() -> None:
    group = trained(TorchModel(Tied(), torch.nn.CrossEntropyLoss()))
    with pytest.raises(KeyNotFound):
        TorchModel(torch.nn.Linear(5, 3)).state_dict(group)
    shapes = TorchModel(torch.nn.Linear(5, 3), torch.nn.CrossEntropyLoss())
    with pytest.raises(ShapeMismatch):
        TorchModel(torch.nn.Linear(5, 4)).state_dict(trained(shapes))
