"""DataParallelExecutorGroup: each member's documented behaviour."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from kvd.errors import ShapeMismatch
from kvd.parallel import (
    BatchNorm,
    Conv2D,
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Device,
    InputMismatch,
    ModelDescription,
    Sequential,
)
from kvd.parallel.models.numpy.layers import Dense, Dropout, Flatten, Tanh
from kvd.parallel.models.numpy.losses import SoftmaxCrossEntropy
from kvd.testing.cluster import wait_until
from tests.parallel.group_harness import BATCH, MODEL, PARAMS, X, Y, descs, group_of, summed_gradients

GENERATOR = np.random.default_rng(1)


@pytest.mark.parametrize("devices", [1, 3, 5])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_gradients_equal_those_of_torch_on_the_whole_batch(devices: int, axis: int) -> None:
    images, classes = GENERATOR.normal(size=(13, 2, 6, 5)).astype(np.float32), GENERATOR.integers(0, 3, 13)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, stride=2, padding=1), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(36, 3)
    )
    model = Sequential(Conv2D(4, 3, stride=2, padding=1), Tanh(), Flatten(), Dense(3), SoftmaxCrossEntropy())
    x = torch.from_numpy(images).requires_grad_()
    loss: Any = torch.nn.functional.cross_entropy(module(x), torch.from_numpy(classes))
    loss.backward()

    data = np.ascontiguousarray(np.moveaxis(images, 0, axis))
    layout = "CHW"[:axis] + "N" + "CHW"[axis:]
    group = DataParallelExecutorGroup(
        model,
        [f"cpu:{i}" for i in range(devices)],
        [DataDesc("data", data.shape, layout=layout)],
        [DataDesc("label", (13,), "int64")],
        inputs_need_grad=True,
    )
    names = group.param_names
    group.set_params(dict(zip(names, (p.detach().numpy() for p in module.parameters()), strict=True)))
    group.forward_backward(DataBatch([data], [classes]))
    for gradient, parameter in zip(summed_gradients(group).values(), module.parameters(), strict=True):
        assert parameter.grad is not None
        np.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=1e-5, atol=1e-5)
    expected = torch.softmax(module(x), dim=1).detach().numpy()
    np.testing.assert_allclose(group.get_outputs_merged()[0], expected, rtol=1e-5, atol=1e-5)
    assert x.grad is not None
    gradient = np.moveaxis(group.get_input_grads_merged()[0], axis, 0)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_the_same_bits_every_time() -> None:
    model = Sequential(Dense(40), Dropout(0.5), BatchNorm(), Dense(3), SoftmaxCrossEntropy())

    def run() -> list[bytes]:
        group = DataParallelExecutorGroup(model, ["cpu"] * 4, *descs(), seed=3)
        group.set_params(model.initialize(X.shape))
        for _ in range(3):
            group.forward_backward(BATCH)
        return [
            array.tobytes()
            for arrays in (*group.grad_arrays, *group.aux_arrays)
            for array in arrays
            if array is not None
        ]

    assert run() == run()


def test_devices_draw_different_masks() -> None:
    group = DataParallelExecutorGroup(Sequential(Dropout(0.5)), ["cpu"] * 2, [("data", (2, 100))])
    group.forward(DataBatch([np.ones((2, 100), np.float32)]))
    first, second = group.get_outputs()[0]
    assert not np.array_equal(first, second)


def test_devices_run_at_the_same_time() -> None:
    group, meeting = group_of(devices=3), threading.Barrier(3, timeout=20)
    group.forward(BATCH)
    seen: list[tuple[int, str]] = []

    def on_gradient(index: int, name: str) -> None:
        meeting.wait()  # all three devices are in their first gradient at once, or this breaks
        seen.append((index, name))

    group.backward(on_gradient=on_gradient)
    for index in range(3):
        names = [name for i, name in seen if i == index]
        assert names == ["dense1_weight", "dense1_bias", "dense0_weight", "dense0_bias"]


def test_members_after_binding() -> None:
    group = group_of(devices=3, workload=[2, 1, 1])
    assert group.get_batch_size() == 11
    assert group.slices == [slice(0, 5), slice(5, 8), slice(8, 11)]
    assert group.arg_names == ["data", "dense0_weight", "dense0_bias", "dense1_weight", "dense1_bias", "label"]
    assert group.param_names == list(PARAMS)
    assert group.aux_names == []
    assert group.aux_arrays == []
    assert group.get_output_shapes() == [("softmaxcrossentropy0_output", (11, 3))]
    assert group.data_shapes == tuple(descs()[0])
    assert group.label_shapes == tuple(descs()[1])
    for name, arrays in zip(group.param_names, group.param_arrays, strict=True):
        assert len(arrays) == 3
        assert all(np.array_equal(array, PARAMS[name]) for array in arrays)
        assert not np.shares_memory(arrays[0], arrays[1])


def test_outputs() -> None:
    group = group_of(devices=3)
    group.forward(BATCH, is_train=False)
    ((first, second, third),) = group.get_outputs()
    assert [len(part) for part in (first, second, third)] == [4, 4, 3]
    (merged,) = group.get_outputs_merged()
    assert np.array_equal(merged, np.concatenate([first, second, third]))
    single = group_of(devices=1)
    single.forward(BATCH, is_train=False)
    assert single.get_outputs_merged()[0] is single.get_outputs()[0][0]
    np.testing.assert_allclose(single.get_outputs_merged()[0], merged, rtol=1e-5)


def test_the_batch_may_be_reused_after_forward() -> None:
    group, expected = group_of(devices=3), group_of(devices=3)
    expected.forward_backward(BATCH)
    x, y = X.copy(), Y.copy()
    group.forward(DataBatch([x], [y]))
    x[...], y[...] = np.nan, 99
    group.backward()
    for name, gradient in summed_gradients(group).items():
        assert np.array_equal(gradient, summed_gradients(expected)[name])


def test_labels_are_optional_unless_training() -> None:
    group = group_of(devices=2)
    group.forward(DataBatch([X]), is_train=False)
    group.forward(DataBatch([X], []), is_train=False)
    with pytest.raises(InputMismatch, match="training needs those of the batch"):
        group.forward(DataBatch([X]))
    unlabelled = DataParallelExecutorGroup(MODEL, ["cpu"], descs()[0], for_training=False)
    unlabelled.forward(BATCH)  # labels that are not bound are ignored
    assert unlabelled.get_outputs_merged()[0].shape == (11, 3)


def test_head_gradients_are_split_as_the_output_is() -> None:
    model = Sequential(Dense(3))
    whole, parts = (DataParallelExecutorGroup(model, ["cpu"] * n, descs()[0]) for n in (1, 4))
    head = GENERATOR.normal(size=(11, 3)).astype(np.float32)
    for group in (whole, parts):
        group.set_params(model.initialize(X.shape))
        for out_grads in ([head], head):
            group.forward(DataBatch([X]))
            group.backward(out_grads)
    for name, gradient in summed_gradients(parts).items():
        np.testing.assert_allclose(gradient, summed_gradients(whole)[name], rtol=1e-5, atol=1e-6)


def test_set_params_casts_and_keeps_what_is_left_out() -> None:
    group = group_of(devices=2)
    group.set_params({"dense0_bias": np.arange(4)}, {})
    assert [array.tolist() for array in group.param_arrays[1]] == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert np.array_equal(group.param_arrays[0][1], PARAMS["dense0_weight"])
    group.set_params({"dense0_bias": np.ones(4), "other": np.ones(1)}, {"more": np.ones(1)}, allow_extra=True)
    assert group.param_arrays[1][0].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            [{"dense0_bias": np.ones(4), "other": np.ones(1)}],
            InputMismatch,
            "no parameter 'other'; it has dense0_weight",
        ),
        ([{"dense0_bias": np.ones(4)}, {"mean": np.ones(1)}], InputMismatch, "no auxiliary state 'mean'; it has none"),
        ([{"dense0_bias": np.ones(4), "dense0_weight": np.ones((2, 4))}], ShapeMismatch, r"\(2, 4\), not \(4, 2\)"),
        ([{"dense0_bias": np.ones(4), "dense1_bias": np.array(["a"] * 3)}], ValueError, "could not convert"),
    ],
)
def test_set_params_is_all_or_nothing(arguments: Any, error: type[Exception], message: str) -> None:
    group = group_of(devices=2)
    with pytest.raises(error, match=message):
        group.set_params(*arguments)
    assert all(not array.any() for array in group.param_arrays[1])
    assert issubclass(error, ValueError)


def test_get_params_is_the_mean_in_place() -> None:
    model = Sequential(BatchNorm(), Dense(3), SoftmaxCrossEntropy())
    group = DataParallelExecutorGroup(model, ["cpu"] * 3, *descs())
    group.set_params(model.initialize(X.shape, seed=2), model.initialize_aux(X.shape))
    group.forward(BATCH)
    group.param_arrays[3][0][...] = [3.0, 6.0, 9.0]
    params: Any = {
        name: np.empty(arrays[0].shape, np.float64)
        for name, arrays in zip(group.param_names, group.param_arrays, strict=True)
    }
    params["dense0_bias"] = np.zeros(3, np.float16)
    aux = {name: np.empty(2, np.float32) for name in group.aux_names}
    kept = dict(params)
    group.get_params(params, aux)
    assert all(params[name] is kept[name] for name in kept)
    assert params["dense0_bias"].tolist() == [1.0, 2.0, 3.0]
    assert params["dense0_bias"].dtype == np.float16
    for name, arrays in zip(group.aux_names, group.aux_arrays, strict=True):
        np.testing.assert_allclose(aux[name], np.mean(arrays, axis=0), rtol=1e-6)
    equal = {"dense0_weight": np.empty((3, 2), np.float32)}
    group.get_params(params | equal, aux)
    assert np.array_equal(equal["dense0_weight"], group.param_arrays[2][0])  # the mean of equals is exactly that


def test_threads_end_with_the_group() -> None:
    def own_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvd-cpu:77")]

    group = DataParallelExecutorGroup(MODEL, ["cpu:77", "cpu:78"], *descs())
    group.install_monitor(lambda *entry: None)
    group.forward(BATCH)
    assert own_threads()
    del group
    gc.collect()
    wait_until(lambda: not own_threads(), "the threads of the group end")


def test_arrays_without_a_batch_axis_go_whole_to_every_device() -> None:
    class Scaled:
        """y = data · scale, where every device gets the whole scale; a second output is the scale itself."""

        def describe(self, data: Any, labels: Any = ()) -> Any:
            return ModelDescription({}, {}, (data[0], DataDesc("scale_output", (2,), layout="C")), has_loss=False)

        def bind(self, device: Any, data: Any, labels: Any = (), **arguments: Any) -> Any:
            return ScaledExecutor(data)

    class ScaledExecutor:
        params: Any = {}  # noqa: RUF012
        grads: Any = {}  # noqa: RUF012
        aux: Any = {}  # noqa: RUF012

        def __init__(self, data: Any) -> None:
            self.data = data
            self.step = 0

        def set_monitor(self, hook: Any) -> None:
            pass

        def forward(self, inputs: Any, is_train: bool) -> Any:
            assert [inputs[desc.name].shape for desc in self.data] == [desc.shape for desc in self.data]
            self.outputs = [inputs["data"] * inputs["scale"], inputs["scale"].copy()]

    scale = DataDesc("scale", (2,), layout="C")
    group = DataParallelExecutorGroup(Scaled(), ["cpu"] * 3, [*descs()[0], scale])
    group.forward(DataBatch([X, np.array([2, 3], np.float32)]))
    merged = group.get_outputs_merged()
    assert np.array_equal(merged[0], X * np.array([2, 3], np.float32))
    assert merged[1] is group.get_outputs()[1][0]
    with pytest.raises(ShapeMismatch, match=r"scale has shape \(3,\), but was bound with \(2,\)$"):
        group.forward(DataBatch([X, np.ones(3, np.float32)]))


def test_two_devices_of_one_name_are_two_devices() -> None:
    group = DataParallelExecutorGroup(MODEL, ["cpu", Device.parse("cpu")], *descs())
    assert group.devices[0] == group.devices[1]
    assert group.param_arrays[0][0] is not group.param_arrays[0][1]
