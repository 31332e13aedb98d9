"""DataParallelExecutorGroup: each member's documented behaviour."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from kvd.errors import DtypeMismatch, ShapeMismatch
from kvd.parallel import (
    Accuracy,
    BatchNorm,
    Conv2D,
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Dense,
    Device,
    Dropout,
    Flatten,
    InputMismatch,
    MeanSquaredError,
    ModelDescription,
    ReLU,
    Sequential,
    SoftmaxCrossEntropy,
    Tanh,
)
from tests.parallel.group_harness import Groups, summed_gradients

MODEL = Sequential(Dense(4), ReLU(), Dense(3), SoftmaxCrossEntropy())
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(11, 2)).astype(np.float32)
Y = GENERATOR.integers(0, 3, 11)
BATCH = DataBatch([X], [Y])
PARAMS = MODEL.initialize(X.shape, seed=1)
group_of = Groups(MODEL, (2,), PARAMS, devices=3, size=11)


def descs(size: int = 11) -> tuple[list[DataDesc], list[DataDesc]]:
    return group_of.descs(size)


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


def test_reshape_there_and_back() -> None:
    group = group_of(devices=3)
    group.forward_backward(BATCH)
    first, arrays, executors = summed_gradients(group), group.param_arrays, group.executors
    group.reshape(*descs())
    assert group.executors == executors  # nothing changed, nothing done
    group.reshape(*descs(7))
    assert group.get_batch_size() == 7
    assert [part.stop - part.start for part in group.slices] == [3, 2, 2]
    group.forward_backward(DataBatch([X[:7]], [Y[:7]]))
    assert group.get_outputs_merged()[0].shape == (7, 3)
    group.reshape(*descs())
    group.forward_backward(BATCH)
    for name, gradient in summed_gradients(group).items():
        assert np.array_equal(gradient, first[name])
    for before, after in zip(arrays, group.param_arrays, strict=True):
        assert all(x is y for x, y in zip(before, after, strict=True))
    assert [executor.step for executor in group.executors] == [3, 3, 3]


def test_reshape_to_more_samples() -> None:
    group, expected = group_of(devices=3, size=4), group_of(devices=3)
    group.forward_backward(DataBatch([X[:4]], [Y[:4]]))
    group.reshape(*descs())
    for either in (group, expected):
        either.forward_backward(BATCH)
    for name, gradient in summed_gradients(group).items():
        assert np.array_equal(gradient, summed_gradients(expected)[name])


def test_reshape_notices_dtype_and_layout() -> None:
    group = group_of(devices=2)
    with pytest.raises(DtypeMismatch, match="label has dtype float64, but was bound with int64"):
        group.forward(DataBatch([X], [Y.astype(np.float64)]))
    group.reshape(descs()[0], [DataDesc("label", (11,), "float64")])
    group.forward(DataBatch([X], [Y.astype(np.float64)]))
    group.reshape([DataDesc("data", (2, 11), layout="CN")], descs()[1])
    group.forward(DataBatch([X.T], [Y]))
    (moved,) = group.get_outputs_merged()
    group.reshape(*descs())
    group.forward(BATCH)
    assert np.array_equal(group.get_outputs_merged()[0], moved)


def test_reshape_that_fails_changes_nothing() -> None:
    group = group_of(devices=3)
    for data, label, message in (
        ([DataDesc("data", (2, 2))], [DataDesc("label", (2,))], "Too many slices"),
        ([DataDesc("data", (11, 2))], [DataDesc("label", (7,))], "disagree"),
        ([DataDesc("data", (11, 3))], None, r"dense0_weight has shape \(4, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            group.reshape(data, label)
        assert group.get_batch_size() == 11
    group.forward_backward(BATCH)


def test_automatic_reshape() -> None:
    group, expected = group_of(devices=3, reshape="auto"), group_of(devices=3, size=8)
    group.forward(BATCH)
    group.forward_backward(DataBatch([X[:8]], [Y[:8]]))
    expected.forward_backward(DataBatch([X[:8]], [Y[:8]]))
    assert group.get_batch_size() == 8
    for name, gradient in summed_gradients(group).items():
        assert np.array_equal(gradient, summed_gradients(expected)[name])
    with pytest.raises(ShapeMismatch):
        group.forward(DataBatch([X[:7]], [Y[:8]]))
    with pytest.raises(InputMismatch, match="Too many slices"):
        group.forward(DataBatch([X[:2]], [Y[:2]]))
    assert group.get_batch_size() == 8


def test_shared_groups_use_the_same_arrays() -> None:
    long = group_of(devices=2, grad_req="add")
    short = group_of(devices=2, size=4, shared_group=long, grad_req="add")
    for mine, other in ((short.param_arrays, long.param_arrays), (short.grad_arrays, long.grad_arrays)):
        assert all(x is y for a, b in zip(mine, other, strict=True) for x, y in zip(a, b, strict=True))
    long.forward(BATCH)
    short.forward_backward(DataBatch([X[:4]], [Y[:4]]))  # buckets have inputs of their own
    long.backward()
    separate = group_of(devices=2), group_of(devices=2, size=4)
    separate[0].forward_backward(BATCH)
    separate[1].forward_backward(DataBatch([X[:4]], [Y[:4]]))
    for name, gradient in summed_gradients(long).items():
        expected = summed_gradients(separate[0])[name] + summed_gradients(separate[1])[name]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_binding_again_to_another_groups_arrays() -> None:
    group, other = group_of(devices=2), group_of(devices=2)
    group.bind_exec(*descs(4), reshape=True)
    assert group.param_arrays[0][0] is not other.param_arrays[0][0]
    group.bind_exec(*descs(4), shared_group=other, reshape=True)
    assert group.param_arrays[0][0] is other.param_arrays[0][0]


def test_threads_end_with_the_group() -> None:
    def own_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvd-cpu:77")]

    group = DataParallelExecutorGroup(MODEL, ["cpu:77", "cpu:78"], *descs())
    group.install_monitor(lambda *entry: None)
    group.forward(BATCH)
    assert own_threads()
    del group
    gc.collect()
    deadline = time.monotonic() + 10
    while own_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not own_threads()


def test_a_bucket_may_have_other_parameters_too() -> None:
    longer = Sequential(Dense(4), Dense(4, name="extra"), Dense(3), SoftmaxCrossEntropy())
    first = DataParallelExecutorGroup(longer, ["cpu"], *descs())
    second = DataParallelExecutorGroup(
        Sequential(Dense(4), Dense(5, name="new")), ["cpu"], descs()[0], shared_group=first
    )
    assert second.param_arrays[0][0] is first.param_arrays[0][0]
    assert second.param_names == ["dense0_weight", "dense0_bias", "new_weight", "new_bias"]


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


def test_monitor_names_the_device() -> None:
    group, seen = DataParallelExecutorGroup(MODEL, ["cpu:4", "cpu:4"], *descs()), []
    group.install_monitor(lambda index, device, name, array: seen.append((index, str(device), name, len(array))))
    group.forward(BATCH, is_train=False)
    assert sorted(seen)[:4] == [
        (0, "cpu:4", "dense0_output", 6),
        (0, "cpu:4", "dense1_output", 6),
        (0, "cpu:4", "relu0_output", 6),
        (0, "cpu:4", "softmaxcrossentropy0_output", 6),
    ]
    assert [entry[0] for entry in sorted(seen)] == [0] * 4 + [1] * 4
    group.reshape(*descs(4))
    group.forward(DataBatch([X[:4]], [Y[:4]]), is_train=False)
    assert len(seen) == 16
    group.install_monitor(None)
    group.forward(DataBatch([X[:4]], [Y[:4]]), is_train=False)
    assert len(seen) == 16


@pytest.mark.parametrize("devices", [1, 4])
def test_update_metric(devices: int) -> None:
    group, metric = group_of(devices=devices), Accuracy()
    group.forward(BATCH, is_train=False)
    group.update_metric(metric, [Y])
    assert metric.get()[1] == np.mean(group.get_outputs_merged()[0].argmax(axis=1) == Y)
    assert metric.count == 11


def test_update_metric_with_labels_whose_batch_is_not_first() -> None:
    model = Sequential(Flatten(), Dense(2), MeanSquaredError())
    labels = GENERATOR.normal(size=(2, 11)).astype(np.float32)
    group = DataParallelExecutorGroup(model, ["cpu"] * 3, descs()[0], [DataDesc("label", (2, 11), layout="CN")])
    group.forward_backward(DataBatch([X], [labels]))

    class Seen:
        shapes: list[Any] = []  # noqa: RUF012

        def update(self, labels: Any, outputs: Any) -> None:
            self.shapes.append((labels[0].shape, outputs[0].shape))

        def get(self) -> Any:
            return "shapes", self.shapes

    group.update_metric(Seen(), [labels])
    assert Seen.shapes == [((4, 2), (4, 2)), ((4, 2), (4, 2)), ((3, 2), (3, 2))]


def test_two_devices_of_one_name_are_two_devices() -> None:
    group = DataParallelExecutorGroup(MODEL, ["cpu", Device.parse("cpu")], *descs())
    assert group.devices[0] == group.devices[1]
    assert group.param_arrays[0][0] is not group.param_arrays[0][1]
