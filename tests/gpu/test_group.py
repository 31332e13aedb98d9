"""The layers and the group on a CUDA device: the same numbers as on the CPU, and the same bits every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import ConfigError
from kvd.optimizer import SGD
from kvd.parallel import (
    Accuracy,
    BatchNorm,
    Conv2D,
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Device,
    Sequential,
    TorchModel,
)
from kvd.parallel.models.numpy.layers import Dense, Dropout, Embedding, Flatten, ReLU, Tanh
from kvd.parallel.models.numpy.losses import MeanSquaredError, SoftmaxCrossEntropy
from tests.gpu.cuda_harness import CUDA, NEEDS_CUDA

pytestmark = NEEDS_CUDA

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.normal(size=(12, 2, 6, 6)).astype(np.float32)
IDS = GENERATOR.integers(0, 7, (12, 5))
CLASSES = GENERATOR.integers(0, 3, 12)
TARGETS = GENERATOR.normal(size=(12, 3)).astype(np.float32)
CONVOLUTIONS = [Conv2D(4, 3, stride=2, padding=1), BatchNorm(), ReLU(), Dropout(0.3), Flatten(), Dense(3)]
MODELS: list[tuple[Any, Any, Any]] = [
    (Sequential(*CONVOLUTIONS, SoftmaxCrossEntropy()), IMAGES, CLASSES),
    (Sequential(Embedding(7, 4), Dense(5), Tanh(), Flatten(), Dense(3), MeanSquaredError()), IDS, TARGETS),
]


def step_of(devices: list[str], model: Any, data: Any, label: Any) -> DataParallelExecutorGroup:
    """A group after one step."""
    group = DataParallelExecutorGroup(
        model,
        devices,
        [DataDesc("data", data.shape, data.dtype.name)],
        [DataDesc("label", label.shape, label.dtype.name)],
    )
    group.set_params(model.initialize(data.shape), model.initialize_aux(data.shape))
    group.forward_backward(DataBatch([data], [label]))
    return group


def results(group: DataParallelExecutorGroup) -> list[Any]:
    """Outputs, gradients and states of every device, in host memory."""
    arrays = [*group.get_outputs(), *group.grad_arrays, *group.aux_arrays]
    return [d.to_host(array) for parts in arrays for d, array in zip(group.devices, parts, strict=True)]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("case", MODELS, ids=["images", "ids"])
def test_cuda_computes_what_the_cpu_computes(case: Any, devices: int) -> None:
    expected = results(step_of(["cpu"] * devices, *case))
    actual = results(step_of(["cuda:0"] * devices, *case))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", MODELS, ids=["images", "ids"])
def test_the_same_bits_every_time(case: Any) -> None:
    first, second = (results(step_of(["cuda:0"] * 2, *case)) for _ in range(2))
    assert [array.tobytes() for array in first] == [array.tobytes() for array in second]


def test_cpu_and_cuda_in_one_group() -> None:
    model, data, label = MODELS[1]
    group = step_of(["cuda:0", "cpu"], model, data, label)
    (merged,) = group.get_outputs_merged()
    assert isinstance(merged, CUDA.xp.ndarray)
    (expected,) = step_of(["cpu"], model, data, label).get_outputs_merged()
    np.testing.assert_allclose(CUDA.to_host(merged), expected, rtol=1e-4, atol=1e-5)
    params = {name: np.empty_like(value) for name, value in model.initialize(data.shape).items()}
    group.get_params(params, {})
    for name, value in model.initialize(data.shape).items():
        assert np.array_equal(params[name], value)


def test_metric_of_arrays_on_the_device() -> None:
    model, data, label = MODELS[0]
    metric, group = Accuracy(), step_of(["cuda:0", "cuda:0"], model, data, label)
    group.update_metric(metric, [label])
    assert metric.count == 12


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"no device cuda:99; this host has cpu, cuda:0"):
        Device.parse("cuda:99").check()


def test_a_torch_module_with_batch_norm_trains_on_both_kinds_of_devices() -> None:
    """It has a 0-d state, `num_batches_tracked`, which is put on each device."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    )
    trained = []
    for device in ("cpu", "cuda:0"):
        group = DataParallelExecutorGroup(
            TorchModel(module, torch.nn.CrossEntropyLoss()),
            [device],
            [DataDesc("data", IMAGES.shape)],
            [DataDesc("label", CLASSES.shape, "int64", layout="N")],
        )
        with kvd.create("local") as kv:
            group.bind_to(kv, optimizer=SGD(0.1))
            for _ in range(3):
                group.forward_backward(DataBatch([IMAGES], [CLASSES]))
            trained.append([*results(group)])
    assert int(trained[1][-1]) == 3
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
