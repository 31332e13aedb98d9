"""TorchModel: outputs that are not as the module was described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvd.errors import ConfigError, NotAllowed, ShapeMismatch
from kvd.parallel import DataDesc, TorchModel


class Unsteady(torch.nn.Module):
    """Two outputs of shape (batch, 2) when it is evaluated, as for the description; others when it is trained."""

    def __init__(self, trained: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(3, 2)
        self.trained = trained

    def forward(self, x: torch.Tensor) -> Any:
        y = self.dense(x)
        return self.trained(y) if self.training else (y, y)


@pytest.mark.parametrize(
    ("trained", "error", "message"),
    [
        (lambda y: (y, y[:, :1]), ShapeMismatch, r"returned .*'output1', \(4, 1\).* was described as .*\(4, 2\)"),
        (lambda y: (y, y.sum()), ShapeMismatch, r"returned .*'output1', \(\).* was described as"),
        (lambda y: (y,), ShapeMismatch, r"returned \[\('output0', \(4, 2\)\)\], but was described as .*output1"),
        (lambda y: (y, y, y), ShapeMismatch, r"returned .*'output2', .* was described as"),
        (lambda y: y, ShapeMismatch, r"returned \[\('output', .* was described as \[\('output0'"),
        (lambda y: {"output1": y, "output0": y}, ShapeMismatch, r"returned \[\('output1', .* as \[\('output0'"),
        (lambda y: (y, 3.0), ConfigError, "the module's output1 is a float, not a tensor"),
    ],
    ids=["shape", "number of axes", "too few", "too many", "no tuple", "order", "no tensor"],
)
def test_outputs_that_are_not_as_described_are_refused(
    trained: Callable[[torch.Tensor], Any], error: type[Exception], message: str
) -> None:
    executor = TorchModel(Unsteady(trained)).bind("cpu", [DataDesc("x", (4, 3))])
    inputs = {"x": np.ones((4, 3), np.float32)}
    assert [output.shape for output in executor.forward(inputs, False)] == [(4, 2), (4, 2)]
    with pytest.raises(error, match=message):
        executor.forward(inputs, True)
    with pytest.raises(NotAllowed, match="needs a forward"):
        executor.backward([np.ones((4, 2), np.float32)] * 2)
    assert executor.step == 0


def test_autocast_may_give_outputs_another_dtype_than_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not in force where a large module runs to be described."""
    monkeypatch.setattr("kvd.parallel.models.torch.model.QUICK", 0)

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.dense(x)

    executor = TorchModel(Mixed()).bind("cpu", [DataDesc("x", (4, 3))])
    assert executor.output_descs[0].dtype == "float32"
    (output,) = executor.forward({"x": np.ones((4, 3), np.float32)}, True)
    assert output.dtype.name == "bfloat16"
    executor.backward([np.ones((4, 2), np.float32)])
    assert executor.grads["dense.bias"].dtype == np.float32
    np.testing.assert_array_equal(executor.grads["dense.bias"], 4.0)


@pytest.mark.parametrize("quick", [0, 2**30])
def test_a_description_leaves_the_random_numbers_alone(quick: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.parallel.models.torch.model.QUICK", quick)

    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(x.shape, device=x.device)

    before = torch.random.get_rng_state()
    (output,) = TorchModel(Noisy()).describe([DataDesc("x", (4, 3))]).outputs
    assert output.shape == (4, 3)
    assert torch.equal(torch.random.get_rng_state(), before)
