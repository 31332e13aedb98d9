"""`Monitor`: which batches, which names, which statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.errors import ConfigError
from kvd.optimizer import SGD
from kvd.parallel import (
    BatchNorm,
    DataParallelExecutorGroup,
    Dense,
    Flatten,
    Monitor,
    MonitorEntry,
    Sequential,
    SoftmaxCrossEntropy,
    TorchModel,
)
from kvd.parallel.group.monitor import gradient_name, root_mean_square
from tests.parallel.group_harness import BATCH, X, descs, group_of


def names_of(entries: list[MonitorEntry]) -> list[str]:
    return [entry.name for entry in entries]


def test_outputs_weights_and_gradients_by_mxnets_names() -> None:
    group, monitor = group_of(devices=1), Monitor(1)
    group.install_monitor(monitor)
    monitor.tic()
    group.forward_backward(BATCH)
    names = names_of(monitor.toc())
    assert names == [
        *("dense0_output", "relu0_output", "dense1_output", "softmaxcrossentropy0_output"),
        *("dense0_weight", "dense0_bias", "dense1_weight", "dense1_bias"),
        *("dense0_backward_weight", "dense0_backward_bias", "dense1_backward_weight", "dense1_backward_bias"),
    ]


def test_the_statistic_is_calculated_per_device() -> None:
    group = group_of(devices=2)
    monitor = Monitor(1, pattern="dense0_(weight|backward_weight)|.*cross.*_output$")
    group.install_monitor(monitor)
    monitor.tic()
    group.forward_backward(BATCH)
    entries = monitor.toc()
    outputs, weights, gradients = group.get_outputs()[0], group.param_arrays[0], group.grad_arrays[0]
    expected: dict[str, list[float]] = {
        "softmaxcrossentropy0_output": [],
        "dense0_weight": [],
        "dense0_backward_weight": [],
    }
    for name, arrays in zip(expected, (outputs, weights, gradients), strict=True):
        for array in arrays:
            assert array is not None
            expected[name].append(float(np.linalg.norm(array.ravel()) / np.sqrt(array.size)))
    for name, values in expected.items():
        seen = [value for step, other, value in entries if other == name]
        assert (sorted(seen) if "output" in name else seen) == pytest.approx(
            sorted(values) if "output" in name else values, rel=1e-6
        )
    assert len(entries) == 6
    assert {entry.step for entry in entries} == {1}


def test_every_third_batch() -> None:
    group, monitor = group_of(), Monitor(3, pattern="dense1_bias")
    group.install_monitor(monitor)
    seen = []
    for _ in range(7):
        monitor.tic()
        group.forward(BATCH, is_train=False)
        seen.append([entry.step for entry in monitor.toc()])
        assert monitor.toc() == []
    assert [steps[:1] for steps in seen] == [[1], [], [], [4], [], [], [7]]


def test_without_tic_nothing_is_collected() -> None:
    calls: list[Any] = []
    group = group_of()
    monitor = Monitor(1, calls.append)
    group.install_monitor(monitor)
    group.forward_backward(BATCH)
    assert monitor.toc() == []
    assert calls == []


def test_an_own_statistic_sorted_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    group = group_of(devices=1)
    monitor = Monitor(
        2, lambda array: [array.shape[0], np.array([array.ndim, 7])], "dense[01]_(bias|weight)$", sort=True
    )
    group.install_monitor(monitor)
    monitor.tic()
    group.forward(BATCH, is_train=False)
    monitor.toc_print()
    shapes = [group.param_arrays[group.param_names.index(name)][0].shape for name in sorted(group.param_names)]
    assert capsys.readouterr().out.splitlines() == [
        f"Batch: {1:7d} {name:30s} {shape[0]}\t[{len(shape)} 7]"
        for name, shape in zip(sorted(group.param_names), shapes, strict=True)
    ]
    monitor.tic()
    monitor.toc_print()
    assert capsys.readouterr().out == ""


def test_it_stays_over_a_reshape_and_ends_with_none_and_with_another() -> None:
    group, monitor, other = (
        group_of(devices=1),
        Monitor(1, pattern="dense0_(weight|output)$"),
        Monitor(1, pattern="dense0_bias"),
    )
    group.install_monitor(monitor)
    group.reshape(*descs(4))
    monitor.tic()
    assert names_of(monitor.toc()) == ["dense0_weight"]
    group.install_monitor(other)
    monitor.tic()
    other.tic()
    assert (names_of(monitor.toc()), names_of(other.toc())) == ([], ["dense0_bias"])
    group.install_monitor(None)
    other.tic()
    assert other.toc() == []


def test_several_groups_and_the_same_twice() -> None:
    groups, monitor = [group_of(devices=1), group_of(devices=1)], Monitor(1, pattern="dense0_(bias|output)")
    for group in [*groups, groups[0]]:
        group.install_monitor(monitor)
    monitor.tic()
    for group in groups:
        group.forward(BATCH, is_train=False)
    assert names_of(monitor.toc()) == ["dense0_output", "dense0_output", "dense0_bias", "dense0_bias"]


def test_states_are_shown() -> None:
    model = Sequential(Flatten(), BatchNorm(), Dense(3), SoftmaxCrossEntropy())
    group = DataParallelExecutorGroup(model, ["cpu"], *descs())
    monitor = Monitor(1, pattern=".*running.*")
    group.install_monitor(monitor)
    monitor.tic()
    group.forward_backward(BATCH)
    assert sorted(names_of(monitor.toc())) == sorted(group.aux_names)
    assert group.aux_names


def test_a_torch_module() -> None:
    module = torch.nn.Sequential()
    module.add_module("fc1", torch.nn.Linear(int(np.prod(X.shape[1:])), 3))
    model = TorchModel(torch.nn.Sequential(torch.nn.Flatten(), module), torch.nn.CrossEntropyLoss())
    group, monitor = DataParallelExecutorGroup(model, ["cpu"], *descs()), Monitor(1, pattern=".*fc1")
    group.install_monitor(monitor)
    monitor.tic()
    group.forward_backward(BATCH)
    assert names_of(monitor.toc()) == [
        "1_fc1_output",
        "1_fc1_weight",
        "1_fc1_bias",
        "1_fc1_backward_weight",
        "1_fc1_backward_bias",
    ]


def test_a_group_that_is_bound_to_a_store() -> None:
    group, monitor = group_of(devices=1), Monitor(1, pattern="dense0_weight")
    group.install_monitor(monitor)
    with kvd.create("local") as kv:
        group.bind_to(kv, optimizer=SGD(0.5))
        values = []
        for _ in range(2):
            monitor.tic()
            group.forward_backward(BATCH)
            values += [entry.value for entry in monitor.toc()]
    assert len(values) == 2
    assert values[0] != values[1]


def test_names_of_gradients() -> None:
    assert gradient_name("dense0_weight") == "dense0_backward_weight"
    assert gradient_name("1.fc1.weight") == "1_fc1_backward_weight"
    assert gradient_name("lstm.weight_ih_l0") == "lstm_backward_weight_ih_l0"
    assert gradient_name("block/dense/w") == "block_dense_backward_w"
    assert gradient_name("w") == "backward_w"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no interval": ({"interval": 0}, "interval"),
    "half an interval": ({"interval": 1.5}, "interval"),
    "True": ({"interval": True}, "interval"),
    "no function": ({"interval": 1, "stat_func": 3}, "stat_func"),
    "no pattern": ({"interval": 1, "pattern": "("}, "pattern"),
    "a pattern of bytes": ({"interval": 1, "pattern": 3}, "pattern"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what: str) -> None:
    arguments, setting = WRONG[what]
    with pytest.raises(ConfigError) as error:
        Monitor(**arguments)
    assert error.value.setting == setting


def test_what_is_no_monitor() -> None:
    wrong: Any = "monitor"
    with pytest.raises(ConfigError, match="monitor is a Monitor, a function or None, not a str"):
        group_of().install_monitor(wrong)


def test_an_empty_array_has_the_statistic_0() -> None:
    assert root_mean_square(np.zeros((0, 3), np.float32)) == 0.0
