"""DataParallelExecutorGroup: requests for gradients, and each way of misusing a member."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.errors import ConfigError, DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.parallel import (
    Accuracy,
    BatchNorm,
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    GradientAnomaly,
    InputMismatch,
    Sequential,
)
from kvd.parallel.models.numpy.layers import Dense, Embedding, ReLU
from kvd.parallel.models.numpy.losses import SoftmaxCrossEntropy
from tests.parallel.group_harness import Groups

MODEL = Sequential(Dense(4), ReLU(), Dense(3), SoftmaxCrossEntropy())
DATA, LABEL = [DataDesc("data", (6, 2))], [DataDesc("label", (6,))]
X = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
Y = np.array([0, 1, 2, 0, 1, 2], np.float32)
BATCH = DataBatch([X], [Y])
group_of = Groups(MODEL, (2,), MODEL.initialize((6, 2)), size=6, label="float32")
NAMES = ["dense0_weight", "dense0_bias", "dense1_weight", "dense1_bias"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["null", "write", "write", "write", "write"]),
        ({"for_training": False, "grad_req": "add", "inputs_need_grad": True}, ["null"] * 5),
        ({"grad_req": "add", "inputs_need_grad": True}, ["add"] * 5),
        ({"grad_req": "null"}, ["null"] * 5),
        ({"fixed_param_names": ["dense0_bias"]}, ["null", "write", "null", "write", "write"]),
        (
            {"grad_req": {"dense0_bias": "add"}, "fixed_param_names": ["dense0_bias", "dense1_bias"]},
            ["null", "write", "add", "write", "null"],  # the mapping overrides, even what is fixed
        ),
        ({"grad_req": {"data": "write", "label": "null"}}, ["write"] * 5),
        ({"grad_req": {}, "inputs_need_grad": True}, ["write"] * 5),
        ({"grad_req": ["null", "add", "null", "write", "write", "null"]}, ["null", "add", "null", "write", "write"]),
        (
            {"grad_req": ["null", "add", "add", "add", "add", "null"], "fixed_param_names": ["dense0_bias"]},
            ["null", "add", "add", "add", "add"],  # a list is taken as it is
        ),
    ],
)
def test_requests(arguments: Any, expected: list[str]) -> None:
    group = group_of(**arguments)
    for executor in group.executors:
        assert [executor.grad_req[name] for name in ["data", *NAMES]] == expected
    missing = [arrays[0] is None for arrays in group.grad_arrays]
    assert missing == [request == "null" for request in expected[1:]]


def test_write_and_add_over_two_steps() -> None:
    written, added = group_of(), group_of(grad_req="add")
    for group in (written, added):
        group.forward_backward(BATCH)
        group.forward_backward(BATCH)
    for once, twice in zip(written.grad_arrays, added.grad_arrays, strict=True):
        assert once[0] is not None
        assert twice[0] is not None
        assert np.array_equal(2 * once[0], twice[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grad_req": "append"}, 'none of "write", "add", "null"'),
        ({"grad_req": ["write"] * 5}, "5 requests for 6 arguments: data, dense0_weight"),
        ({"grad_req": ["write"] * 6}, "label is a label"),
        ({"grad_req": {"label": "write"}}, "label is a label"),
        ({"grad_req": {"dense7_bias": "write"}}, "'dense7_bias', which the model does not have"),
        ({"fixed_param_names": ["dense7_bias"]}, "dense7_bias, not a parameter of the model; it has dense0_weight"),
        ({"workload": [1, 2, 3]}, "3 workloads for 2 devices"),
        ({"workload": [1, 0]}, "workload must be positive"),
        ({"split": "scala"}, "split='scala'"),
        ({"reshape": "always"}, "reshape='always'"),
    ],
)
def test_bad_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        group_of(**arguments)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "at least one device"),
        ("cpu", "must be a list"),
        (["gpu"], "'gpu' is not a device"),
        (["cuda:99"], "cuda|CUDA"),
    ],
)
def test_bad_devices(devices: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataParallelExecutorGroup(MODEL, devices, DATA, LABEL)


@pytest.mark.parametrize(
    ("data", "label", "message"),
    [
        (DATA, [DataDesc("label", (5,))], "disagree on the batch: data has 6, label has 5"),
        ([DataDesc("data", (6, 2), layout="TC")], None, "nothing to split"),
        ([], None, "nothing to split: no batch axis N in the layout of no arrays"),
        ([DataDesc("data", (2, 2))], None, "Too many slices. .* leave nothing for device 2"),
    ],
)
def test_descriptions_that_do_not_fit(data: Any, label: Any, message: str) -> None:
    with pytest.raises(InputMismatch, match=message):
        DataParallelExecutorGroup(MODEL, ["cpu"] * 3, data, label)


def test_mxnets_split_and_its_errors() -> None:
    assert group_of(devices=2, split="mxnet").slices == [slice(0, 3), slice(3, 6)]
    with pytest.raises(ValueError, match="Some splits are empty"):
        group_of(devices=4, split="mxnet")
    assert len(group_of(devices=4).slices) == 4


def test_bind_exec_twice() -> None:
    group = group_of()
    with pytest.raises(NotAllowed, match="already bound: pass reshape=True"):
        group.bind_exec(DATA, LABEL)
    group.bind_exec([("data", (4, 2))], [("label", (4,))], reshape=True)
    assert group.get_batch_size() == 4


def test_shared_group_misused() -> None:
    with pytest.raises(ConfigError, match="shared_group is on cpu, cpu, cpu, this group on cpu, cpu"):
        group_of(devices=2, shared_group=group_of(devices=3))
    wider = Sequential(Dense(5), ReLU(), Dense(3), SoftmaxCrossEntropy())
    with pytest.raises(ShapeMismatch, match=r"dense0_weight has shape \(4, 2\), the model wants \(5, 2\)"):
        DataParallelExecutorGroup(wider, ["cpu"] * 2, DATA, LABEL, shared_group=group_of(devices=2))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (DataBatch([X[:5]], [Y[:5]]), ShapeMismatch, r'data has shape \(5, 2\).*make it with reshape="auto"'),
        (
            DataBatch([np.ones((9, 2))], [np.ones(9)]),
            ShapeMismatch,
            r"data has shape \(9, 2\), but was bound with \(6, 2\)",
        ),
        (DataBatch([X], [Y[:5]]), ShapeMismatch, r"label has shape \(5,\)"),
        (DataBatch([X.T], [Y]), ShapeMismatch, r"data has shape \(2, 6\), but was bound with \(6, 2\)$"),
        (DataBatch([X[:, 0]], [Y]), ShapeMismatch, r"data has shape \(6,\)"),
        (DataBatch([X.astype(complex)], [Y]), DtypeMismatch, "data has dtype complex128"),
        (DataBatch([], [Y]), InputMismatch, "0 data arrays, 1 are bound"),
        (DataBatch([X, X], [Y]), InputMismatch, "2 data arrays, 1 are bound"),
        (DataBatch([X], [Y, Y]), InputMismatch, "2 labels, 1 are bound"),
        (DataBatch([X]), InputMismatch, "labels are bound"),
    ],
)
def test_bad_batches(batch: DataBatch, error: type[Exception], message: str) -> None:
    group = group_of()
    with pytest.raises(error, match=message):
        group.forward(batch)
    with pytest.raises(NotAllowed, match="run forward"):
        group.backward()


def test_backward_misused() -> None:
    with pytest.raises(NotAllowed, match="re-bind with for_training=True to run backward"):
        group_of(for_training=False).backward()
    group = group_of()
    with pytest.raises(NotAllowed, match="backward needs a forward"):
        group.backward()
    group.forward(BATCH, is_train=False)
    with pytest.raises(NotAllowed, match="is_train=True"):
        group.backward()
    group.forward_backward(BATCH)
    with pytest.raises(NotAllowed, match="since the last backward"):
        group.backward()
    group.forward(BATCH)
    with pytest.raises(NotAllowed, match="give no head gradients"):
        group.backward([np.ones((6, 3))])
    group.reshape([("data", (4, 2))], [("label", (4,))])
    with pytest.raises(NotAllowed, match="needs a forward"):
        group.backward()


def test_head_gradients_misused() -> None:
    group = DataParallelExecutorGroup(Sequential(Dense(3)), ["cpu"] * 2, DATA)
    group.forward(DataBatch([X]))
    with pytest.raises(NotAllowed, match="head gradients are required"):
        group.backward()
    with pytest.raises(ShapeMismatch, match=r"dense0_output has shape \(3, 3\), not \(6, 3\)"):
        group.backward([np.ones((3, 3))])
    with pytest.raises(ShapeMismatch, match="2 head gradients for 1 outputs"):
        group.backward([np.ones((6, 3))] * 2)
    group.backward([np.ones((6, 3))])


def test_outputs_and_input_gradients_that_are_not_there() -> None:
    group = group_of(inputs_need_grad=True)
    for member in (group.get_outputs, group.get_outputs_merged):
        with pytest.raises(NotAllowed, match="run forward first"):
            member()
    group.forward(BATCH)
    for get in (group.get_input_grads, group.get_input_grads_merged):
        with pytest.raises(NotAllowed, match="run backward first"):
            get()
    group.backward()
    assert [part.shape for part in group.get_input_grads()[0]] == [(3, 2), (3, 2)]
    group.forward(BATCH)  # what is there now belongs to the step before
    with pytest.raises(NotAllowed, match="run backward first"):
        group.get_input_grads()
    for other in (group_of(), group_of(inputs_need_grad=True, for_training=False)):
        other.forward(BATCH)
        with pytest.raises(NotAllowed, match="bind with inputs_need_grad=True"):
            other.get_input_grads()
    silent = group_of(inputs_need_grad=True, grad_req={"data": "null"})
    silent.forward_backward(BATCH)
    with pytest.raises(NotAllowed, match="grad_req gives data no gradient"):
        silent.get_input_grads()


def test_get_params_misused() -> None:
    group = group_of()
    targets: Any = {name: np.zeros(arrays[0].shape) for name, arrays in zip(NAMES, group.param_arrays, strict=True)}
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for bad, error, message in (
        ({"dense1_bias": np.zeros(4)}, ShapeMismatch, r"the target has shape \(4,\), not \(3,\)"),
        ({"dense1_bias": [0.0] * 3}, ConfigError, "must be a NumPy array that can be written"),
        ({"dense1_bias": read_only}, ConfigError, "must be a NumPy array that can be written"),
    ):
        with pytest.raises(error, match=message):
            group.get_params(targets | bad, {})
    with pytest.raises(KeyNotFound, match="no array to write dense1_bias to"):
        group.get_params({name: targets[name] for name in NAMES[:3]}, {})
    assert not targets["dense0_weight"].any()
    with pytest.raises(KeyError):
        DataParallelExecutorGroup(Sequential(BatchNorm()), ["cpu"], DATA).get_params(
            {"batchnorm0_gamma": np.zeros(2), "batchnorm0_beta": np.zeros(2)}, {"batchnorm0_running_mean": np.zeros(2)}
        )


def test_masked_arrays_are_refused() -> None:
    group = group_of()
    for batch in (DataBatch([np.ma.array(X)], [Y]), DataBatch([X], [np.ma.array(Y)])):
        with pytest.raises(NotAllowed, match="would lose its mask"):
            group.forward(batch)
    with pytest.raises(NotAllowed, match="would lose its mask"):
        group.set_params({"dense0_bias": np.ma.zeros(4)}, {}, allow_extra=True)


def test_update_metric_misused() -> None:
    unlabelled = DataParallelExecutorGroup(MODEL, ["cpu"], DATA)
    unlabelled.forward(DataBatch([X]), is_train=False)
    with pytest.raises(NotAllowed, match="no labels are bound"):
        unlabelled.update_metric(Accuracy(), [Y])
    group = group_of()
    with pytest.raises(NotAllowed, match="run forward first"):
        group.update_metric(Accuracy(), [Y])
    group.forward(BATCH)
    with pytest.raises(InputMismatch, match="2 labels for 1 bound"):
        group.update_metric(Accuracy(), [Y, Y])
    with pytest.raises(ShapeMismatch, match=r"label has shape \(5,\), not \(6,\)"):
        group.update_metric(Accuracy(), [Y[:5]])


def test_an_error_names_its_devices_and_the_group_goes_on() -> None:
    group = DataParallelExecutorGroup(Sequential(Embedding(3, 2)), ["cpu:5", "cpu:6", "cpu:7"], [("data", (3,))])
    with pytest.raises(ValueError, match="id 8") as raised:
        group.forward(DataBatch([np.array([0.0, 8.0, 9.0])]))
    assert raised.value.__notes__ == [
        "on cpu:6 (device 1 of the group)",
        "also on cpu:7 (device 2): ValueError: embedding0: id 9.0 is not a whole number in [0, 3)",
    ]
    with pytest.raises(NotAllowed, match="run forward first"):
        group.get_outputs()
    group.forward(DataBatch([np.array([0.0, 1.0, 2.0])]))
    assert group.get_outputs_merged()[0].shape == (3, 2)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # np.errstate does not reach other threads
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_anomalies(value: float) -> None:
    poisoned = X.copy()
    poisoned[4, 1] = value
    group_of().forward_backward(DataBatch([poisoned], [Y]))
    group = group_of(detect_anomaly=True)
    group.forward_backward(BATCH)
    with pytest.raises(GradientAnomaly, match="gradient of dense1_weight on cpu") as raised:
        group.forward_backward(DataBatch([poisoned], [Y]))
    assert raised.value.parameter == "dense1_weight"
    assert raised.value.__notes__ == ["on cpu (device 1 of the group)"]
    assert isinstance(raised.value, FloatingPointError)
    group.forward_backward(BATCH)
