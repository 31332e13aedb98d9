"""A bound `Sequential`: requests, shared arrays, order of gradients, batch axes, and each way of misusing it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.errors import ConfigError, DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.parallel import (
    BatchNorm,
    Conv2D,
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Dense,
    Device,
    Dropout,
    Embedding,
    Executor,
    Flatten,
    MeanSquaredError,
    Model,
    ReLU,
    Sequential,
    SoftmaxCrossEntropy,
)

MODEL = Sequential(Dense(4), ReLU(), Dense(3), SoftmaxCrossEntropy())
DATA = [DataDesc("data", (5, 2))]
LABEL = [DataDesc("label", (5,))]
INPUTS = {
    "data": np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32),
    "label": np.array([0, 1, 2, 0, 1], np.float32),
}


def bound(**arguments: Any) -> Any:
    arguments.setdefault("params", MODEL.initialize((5, 2), seed=1))
    return MODEL.bind("cpu", DATA, LABEL, **arguments)


def step(executor: Any, **arguments: Any) -> Any:
    executor.forward(INPUTS, is_train=True)
    executor.backward(**arguments)
    return executor


def test_it_is_what_the_protocols_say() -> None:
    model: Model = MODEL
    executor: Executor = MODEL.bind("cpu", DATA, LABEL)  # that the attributes fit is for the type checker
    assert isinstance(model, Model)
    assert executor.device == Device.parse("cpu")


def test_the_same_input_gives_the_same_bits() -> None:
    model = Sequential(
        Conv2D(6, 3, padding=1), BatchNorm(), ReLU(), Dropout(0.3), Flatten(), Dense(10), SoftmaxCrossEntropy()
    )
    generator = np.random.default_rng(3)
    inputs = {"data": generator.normal(size=(16, 2, 9, 9)).astype(np.float32), "label": generator.integers(0, 10, 16)}

    def run() -> list[bytes]:
        descs = [DataDesc("data", (16, 2, 9, 9))], [DataDesc("label", (16,))]
        executor = model.bind("cpu", *descs, params=model.initialize((16, 2, 9, 9)), seed=5, grad_req={"data": "write"})
        bits = []
        for _ in range(2):
            bits.append(executor.forward(inputs, is_train=True)[0].tobytes())
            executor.backward()
            arrays = [*executor.grads.values(), *executor.aux.values(), *executor.input_grads.values()]
            bits.extend(array.tobytes() for array in arrays)
        return bits

    assert run() == run()


def test_a_step_is_done_again_with_the_same_bits() -> None:
    model = Sequential(Dense(50), Dropout(0.5), Dense(3), SoftmaxCrossEntropy())
    executor = model.bind("cpu", DATA, LABEL, params=model.initialize((5, 2)), seed=5)
    step(executor)
    first = executor.grads["dense0_weight"].copy()
    assert executor.step == 1
    step(executor)
    assert not np.array_equal(executor.grads["dense0_weight"], first)
    executor.step = 0
    assert np.array_equal(step(executor).grads["dense0_weight"], first)


def test_gradients_are_reported_last_layer_first_and_complete() -> None:
    expected = {name: gradient.copy() for name, gradient in step(bound()).grads.items()}
    executor, seen = bound(), []
    for gradient in executor.grads.values():
        gradient[...] = np.nan

    def on_gradient(name: str) -> None:
        seen.append(name)
        assert np.array_equal(executor.grads[name], expected[name])

    step(executor, on_gradient=on_gradient)
    assert seen == ["dense1_weight", "dense1_bias", "dense0_weight", "dense0_bias"]


def test_an_error_of_the_hook_ends_the_pass() -> None:
    executor = bound()

    def refuse(name: str) -> None:
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match="dense1_weight"):
        step(executor, on_gradient=refuse)
    with pytest.raises(NotAllowed, match="since the last backward"):
        executor.backward()


def test_write_add_and_null() -> None:
    whole = step(bound(grad_req={"data": "write"}))
    requests = {"dense0_weight": "add", "dense0_bias": "null", "data": "add"}
    executor = bound(grad_req=requests)
    assert executor.grad_req == requests | {"dense1_weight": "write", "dense1_bias": "write"}
    assert list(executor.grads) == ["dense0_weight", "dense1_weight", "dense1_bias"]
    step(step(executor))
    assert np.array_equal(executor.grads["dense0_weight"], 2 * whole.grads["dense0_weight"])
    assert np.array_equal(executor.input_grads["data"], 2 * whole.input_grads["data"])
    assert np.array_equal(executor.grads["dense1_bias"], whole.grads["dense1_bias"])


@pytest.mark.parametrize(
    "layers", [[Conv2D(2, 2), BatchNorm(), Flatten(), Dense(3)], [Embedding(4, 3), Flatten(), Dense(3)]]
)
def test_add_doubles_every_kind_of_gradient(layers: list[Any]) -> None:
    model = Sequential(*layers)
    shape = (3, 1, 3, 3) if isinstance(layers[0], Conv2D) else (3, 2)
    data, head = np.arange(np.prod(shape)).reshape(shape) % 4, np.arange(9.0).reshape(3, 3)

    def gradients(request: Any, times: int) -> Any:
        executor = model.bind("cpu", [DataDesc("data", shape)], params=model.initialize(shape), grad_req=request)
        for _ in range(times):
            executor.forward({"data": data}, is_train=True)
            executor.backward([head])
        return executor.grads

    written, added = gradients("write", 1), gradients("add", 2)
    for name, gradient in written.items():
        np.testing.assert_allclose(added[name], 2 * gradient, rtol=1e-6, atol=1e-6)


def test_null_for_all_computes_nothing() -> None:
    called: list[str] = []
    executor = step(bound(grad_req="null"), on_gradient=called.append)
    assert not executor.grads
    assert not called


def test_backward_stops_at_the_first_layer_that_wants_gradients() -> None:
    called: list[str] = []
    step(bound(grad_req={"dense0_weight": "null", "dense0_bias": "null"}), on_gradient=called.append)
    assert called == ["dense1_weight", "dense1_bias"]


def test_given_arrays_are_used_as_they_are() -> None:
    params = MODEL.initialize((5, 2))
    first = bound(params=params)
    second = bound(params=first.params, grads=first.grads)
    assert all(second.params[name] is params[name] for name in params)
    assert all(second.grads[name] is first.grads[name] for name in params)
    step(second)
    assert first.grads["dense0_weight"].any()
    norm = Sequential(BatchNorm())
    aux = norm.initialize_aux((2, 3))
    aux["batchnorm0_running_var"][...] = 9
    executor = norm.bind("cpu", [DataDesc("data", (2, 3))], aux=aux)
    assert executor.aux["batchnorm0_running_var"] is aux["batchnorm0_running_var"]
    assert (executor.aux["batchnorm0_running_var"] == 9).all()
    with pytest.raises(TypeError):
        executor.aux["batchnorm0_running_var"] = None  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"params": {"dense0_weight": np.zeros((4, 3), np.float32)}},
            ShapeMismatch,
            r"dense0_weight has shape \(4, 3\)",
        ),
        ({"params": {"dense0_weight": np.zeros((4, 2))}}, DtypeMismatch, "dtype float64"),
        ({"params": {"dense0_weight": [[0.0] * 2] * 4}}, ConfigError, "not an array of cpu"),
        ({"params": {"dense9_weight": np.zeros(1)}}, ConfigError, "'dense9_weight', which the model does not need"),
        ({"grads": {"dense0_weight": np.zeros((2, 4), np.float32).T}}, ConfigError, "not C-contiguous"),
        ({"grads": {"dense0_bias": np.zeros(4, np.float32)}, "grad_req": "null"}, ConfigError, "does not need"),
        ({"aux": {"dense0_bias": np.zeros(4, np.float32)}}, ConfigError, "aux has 'dense0_bias'"),
        ({"grad_req": "append"}, ConfigError, 'none of "write", "add", "null"'),
        ({"grad_req": {"dense0_bias": None}}, ConfigError, "none of"),
        (
            {"grad_req": {"dense0_bia": "add"}},
            ConfigError,
            "'dense0_bia', which the model does not have; it has dense0",
        ),
        ({"grad_req": {"label": "write"}}, ConfigError, "'label', which the model does not have"),
        ({"normalization": 0}, ConfigError, "normalization must be above 0"),
        ({"dtype": "float16"}, ConfigError, "'float16' is neither"),
    ],
)
def test_bad_bindings(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MODEL.bind("cpu", DATA, LABEL, **arguments)


@pytest.mark.parametrize(
    ("data", "labels", "message"),
    [
        ([], [], "one data input, 'data', not none"),
        ([DataDesc("x", (5, 2))], [], "one data input, 'data', not x"),
        ([*DATA, DataDesc("more", (5, 2))], [], "not data, more"),
        (DATA, [DataDesc("target", (5,))], "takes one label, 'label', not target"),
        (DATA, [*LABEL, DataDesc("weight", (5,))], "not label, weight"),
        (DATA, [DataDesc("label", (4,))], "label has 4 samples and data 5"),
        (DATA, [DataDesc("label", (5, 2))], r"label has shape \(5, 2\) .* not \(5,\)"),
        ([DataDesc("data", (5, 2), layout="TC")], [], "no batch axis N"),
        (DATA, [DataDesc("label", (5,), layout="")], "no batch axis N"),
    ],
)
def test_bad_descriptions_of_inputs(data: Any, labels: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODEL.bind("cpu", data, labels)


def test_a_model_without_loss_takes_no_label() -> None:
    with pytest.raises(ConfigError, match="no label, since it has no loss"):
        Sequential(Dense(2)).bind("cpu", DATA, LABEL)


def test_ids_have_no_gradient() -> None:
    with pytest.raises(ConfigError, match="embedding0 has no gradient for 'data'"):
        Sequential(Embedding(3, 2)).bind("cpu", [DataDesc("data", (3,))], grad_req={"data": "write"})


def test_forward_misused() -> None:
    executor = bound()
    with pytest.raises(NotAllowed, match="run forward first"):
        _ = executor.outputs
    with pytest.raises(KeyNotFound, match="'data' is missing"):
        executor.forward({"label": INPUTS["label"]}, is_train=True)
    with pytest.raises(KeyNotFound, match="'label' is bound"):
        executor.forward({"data": INPUTS["data"]}, is_train=True)
    with pytest.raises(NotAllowed, match="'weight' was not bound; bound inputs: data, label"):
        executor.forward(INPUTS | {"weight": INPUTS["label"]}, is_train=True)
    with pytest.raises(ShapeMismatch, match=r"data has shape \(4, 2\), but was bound with \(5, 2\)"):
        executor.forward(INPUTS | {"data": INPUTS["data"][:4]}, is_train=True)
    (output,) = executor.forward({"data": INPUTS["data"]}, is_train=False)
    assert executor.outputs[0] is output
    np.testing.assert_allclose(output.sum(axis=1), 1, rtol=1e-6)


def test_backward_misused() -> None:
    with pytest.raises(NotAllowed, match="re-bind with for_training=True to run backward"):
        step(bound(for_training=False))
    executor = bound()
    with pytest.raises(NotAllowed, match="needs a forward"):
        executor.backward()
    executor.forward(INPUTS, is_train=False)
    with pytest.raises(NotAllowed, match="needs a forward with is_train=True"):
        executor.backward()
    step(executor)
    with pytest.raises(NotAllowed, match="since the last backward"):
        executor.backward()
    with pytest.raises(NotAllowed, match="starts backward itself: give no head gradients"):
        step(executor, out_grads=[np.ones((5, 3))])
    unlabelled = MODEL.bind("cpu", DATA)
    unlabelled.forward({"data": INPUTS["data"]}, is_train=True)
    with pytest.raises(NotAllowed, match="needs labels for backward"):
        unlabelled.backward()


def test_a_failed_forward_leaves_nothing_to_go_back_from() -> None:
    executor = Sequential(Embedding(3, 2)).bind("cpu", [DataDesc("data", (2,))])
    executor.forward({"data": np.array([0, 1])}, is_train=True)
    with pytest.raises(ValueError, match="id 3"):
        executor.forward({"data": np.array([0, 3])}, is_train=True)
    with pytest.raises(NotAllowed, match="needs a forward"):
        executor.backward([np.ones((2, 2))])


def test_head_gradients() -> None:
    executor = Sequential(Dense(3)).bind("cpu", DATA)
    for out_grads in (None, [], [np.ones((5, 3))] * 2):
        executor.forward({"data": INPUTS["data"]}, is_train=True)
        with pytest.raises(NotAllowed, match="head gradients are required"):
            executor.backward(out_grads)
    with pytest.raises(ShapeMismatch, match=r"head gradient of dense0_output has shape \(5, 2\), not \(5, 3\)"):
        executor.backward([np.ones((5, 2))])
    executor.backward([np.ones((5, 3))])  # refused arguments do not use up the forward pass
    assert executor.grads["dense0_bias"].tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize(("axis", "layout"), [(0, "NTC"), (1, "TNC"), (2, "TCN")])
def test_batch_axis_elsewhere(axis: int, layout: str) -> None:
    model = Sequential(Dense(4), ReLU(), Flatten(), Dense(2), MeanSquaredError())
    generator = np.random.default_rng(2)
    data, label = generator.normal(size=(6, 5, 3)).astype(np.float32), generator.normal(size=(6, 2))
    params = model.initialize(data.shape)

    def run(data: Any, layout: str) -> Any:
        descs = [DataDesc("data", data.shape, layout=layout)], [DataDesc("label", (2, 6), layout="CN")]
        executor = model.bind("cpu", *descs, params=params, grad_req={"data": "write"})
        assert executor.output_descs[0].shape == (6, 2)
        executor.forward({"data": data, "label": label.T}, is_train=True)
        executor.backward()
        return executor

    expected, moved = run(data, "NTC"), run(np.ascontiguousarray(np.moveaxis(data, 0, axis)), layout)
    np.testing.assert_allclose(moved.outputs[0], expected.outputs[0], rtol=1e-6)
    np.testing.assert_allclose(moved.grads["dense0_weight"], expected.grads["dense0_weight"], rtol=1e-5)
    gradient = np.moveaxis(moved.input_grads["data"], axis, 0)
    np.testing.assert_allclose(gradient, expected.input_grads["data"], rtol=1e-5, atol=1e-7)


def test_images_of_any_dtype_and_layout() -> None:
    model = Sequential(Conv2D(2, 2), Flatten(), Dense(2))
    images = np.random.default_rng(1).integers(0, 17, (1, 4, 4, 3)).astype(np.uint8)  # CHWN
    executor = model.bind(
        "cpu", [DataDesc("data", images.shape, "uint8", "CHWN")], params=model.initialize((3, 1, 4, 4))
    )
    (output,) = executor.forward({"data": images}, is_train=False)
    assert (output.shape, output.dtype) == ((3, 2), np.float32)
    assert executor.output_descs[0] == DataDesc("dense0_output", (3, 2))


def test_float64() -> None:
    executor = Sequential(Dense(2)).bind("cpu", DATA, dtype="float64")
    executor.forward({"data": INPUTS["data"]}, is_train=True)
    executor.backward([np.ones((5, 2))])
    dtypes = {array.dtype for array in (*executor.params.values(), *executor.grads.values(), *executor.outputs)}
    assert dtypes == {np.dtype("float64")}


def test_monitor_sees_every_output() -> None:
    executor, seen = bound(), []
    executor.set_monitor(lambda name, array: seen.append((name, array.shape)))
    executor.forward(INPUTS, is_train=False)
    assert seen == [
        ("dense0_output", (5, 4)),
        ("relu0_output", (5, 4)),
        ("dense1_output", (5, 3)),
        ("softmaxcrossentropy0_output", (5, 3)),
    ]
    executor.set_monitor(None)
    executor.forward(INPUTS, is_train=False)
    assert len(seen) == 4


def test_the_input_is_left_as_it_was() -> None:
    model = Sequential(ReLU(), Dropout(0.5), BatchNorm(), Dense(3), SoftmaxCrossEntropy())
    executor = model.bind("cpu", DATA, LABEL, params=model.initialize((5, 2)), grad_req={"data": "write"})
    before = {name: array.copy() for name, array in INPUTS.items()}
    step(executor)
    assert all(np.array_equal(INPUTS[name], array) for name, array in before.items())


def test_a_device_without_samples_has_gradients_of_zero() -> None:
    model = Sequential(Dense(3), SoftmaxCrossEntropy())
    executor = model.bind("cpu", [DataDesc("data", (0, 2))], [DataDesc("label", (0,), "int64", layout="N")])
    executor.forward({"data": np.zeros((0, 2), np.float32), "label": np.zeros(0, np.int64)}, is_train=True)
    executor.backward()
    assert all((grad == 0).all() for grad in executor.grads.values())
    assert {name: grad.shape for name, grad in executor.grads.items()} == {"dense0_weight": (3, 2), "dense0_bias": (3,)}


def test_the_label_may_have_the_name_that_mxnet_gives_it() -> None:
    """The same gradients, whatever the label is called."""
    results = []
    for name in ("label", "softmax_label"):
        group = DataParallelExecutorGroup(MODEL, ["cpu", "cpu"], DATA, [DataDesc(name, (5,))])
        group.set_params(MODEL.initialize((5, 2), seed=1))
        group.forward_backward(
            DataBatch([np.arange(10, dtype=np.float32).reshape(5, 2)], [np.arange(5, dtype=np.float32) % 2])
        )
        results.append([np.array(gradient) for parts in group.grad_arrays for gradient in parts])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
