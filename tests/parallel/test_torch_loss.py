"""The losses of a TorchModel: a mean is over the whole batch and a sum stays a sum, on any number of devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvd.errors import ConfigError
from kvd.parallel import DataBatch, DataDesc, DataParallelExecutorGroup, TorchModel
from tests.parallel.group_harness import summed_gradients

F: Any = torch.nn.functional
GENERATOR = np.random.default_rng(11)
SIZE = 13  # divides evenly over no number of devices but 1 and 13
X = GENERATOR.normal(size=(SIZE, 4)).astype(np.float32)
TARGETS = GENERATOR.normal(size=(SIZE, 3)).astype(np.float32)
TOWARDS = torch.softmax(torch.from_numpy(TARGETS), 1).numpy()


def network() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3), torch.nn.LogSoftmax(1))


def group_of(devices: int, loss: Any, **arguments: Any) -> DataParallelExecutorGroup:
    model = TorchModel(network(), loss, **arguments)
    return DataParallelExecutorGroup(
        model, ["cpu"] * devices, [DataDesc("x", X.shape)], [DataDesc("target", TARGETS.shape)]
    )


def assert_equals_torch(group: DataParallelExecutorGroup, loss: Callable[[Any, Any], torch.Tensor]) -> None:
    """Loss and gradients of a step of the group are those of torch in float64 for the whole batch at once."""
    reference = copy.deepcopy(network()).double()
    expected = loss(reference(torch.from_numpy(X).double()), torch.from_numpy(TOWARDS).double())
    expected.backward()  # type: ignore[no-untyped-call]
    group.forward_backward(DataBatch([X], [TOWARDS]))
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        wanted = parameter.grad.numpy()
        # A sum of float32 is wrong by a part of its largest terms, however small the sum is.
        atol = 1e-6 * max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(summed_gradients(group)[name], wanted, rtol=1e-5, atol=atol)
    losses = [executor.loss for executor in group.executors]  # type: ignore[attr-defined]
    assert sum(losses) == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("devices", [1, 3, 5, 13])
@pytest.mark.parametrize(
    "loss",
    [
        torch.nn.MSELoss(),
        torch.nn.MSELoss(reduction="sum"),
        torch.nn.KLDivLoss(reduction="sum"),
        torch.nn.KLDivLoss(reduction="batchmean"),
        torch.nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1),
    ],
    ids=lambda loss: f"{type(loss).__name__}-{loss.reduction}",
)
def test_a_loss_of_torch_says_itself_what_it_is(loss: torch.nn.Module, devices: int) -> None:
    assert_equals_torch(group_of(devices, loss), loss)


@pytest.mark.parametrize("devices", [1, 3, 5, 13])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_plain_callable_with_loss_reduction(reduction: str, devices: int) -> None:
    def loss(outputs: Any, target: Any) -> torch.Tensor:
        return F.mse_loss(outputs, target, reduction=reduction)  # type: ignore[no-any-return]

    assert_equals_torch(group_of(devices, loss, loss_reduction=reduction), loss)


@pytest.mark.parametrize("devices", [1, 3, 5, 13])
@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_one_loss_per_sample(reduction: str | None, devices: int) -> None:
    def per_sample(outputs: Any, target: Any) -> torch.Tensor:
        return F.mse_loss(outputs, target, reduction="none").sum(1)  # type: ignore[no-any-return]

    def whole(outputs: Any, target: Any) -> torch.Tensor:
        each = per_sample(outputs, target)
        return each.sum() if reduction == "sum" else each.mean()

    assert_equals_torch(group_of(devices, per_sample, loss_reduction=reduction), whole)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_device_uses_the_number_of_a_plain_callable_as_it_is(reduction: str) -> None:
    def loss(outputs: Any, target: Any) -> torch.Tensor:
        return 3 * F.mse_loss(outputs, target, reduction=reduction)  # type: ignore[no-any-return]

    assert_equals_torch(group_of(1, loss), loss)


def test_on_several_devices_a_plain_callable_must_say_what_its_number_is() -> None:
    group = group_of(3, lambda outputs, target: F.mse_loss(outputs, target))
    with pytest.raises(ConfigError, match="loss_reduction") as caught:
        group.forward_backward(DataBatch([X], [TOWARDS]))
    assert caught.value.setting == "loss_reduction"


def test_one_loss_per_element_is_refused() -> None:
    group = group_of(1, torch.nn.MSELoss(reduction="none"))
    with pytest.raises(ConfigError, match="one number, or one per sample"):
        group.forward_backward(DataBatch([X], [TOWARDS]))


@pytest.mark.parametrize(
    ("loss", "reduction", "error"),
    [
        (torch.nn.MSELoss(), "sum", 'the loss has reduction "mean"'),
        (torch.nn.MSELoss(reduction="sum"), "mean", 'the loss has reduction "sum"'),
        (F.mse_loss, "average", 'not "mean" or "sum"'),
        (None, "mean", "the model has no loss"),
    ],
)
def test_reductions_that_cannot_be(loss: Any, reduction: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error) as caught:
        TorchModel(network(), loss, loss_reduction=reduction)
    assert caught.value.setting == "loss_reduction"
