"""A group bound again: to other shapes, and to the arrays of another group."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.errors import DtypeMismatch, ShapeMismatch
from kvd.parallel import (
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Dense,
    InputMismatch,
    Sequential,
    SoftmaxCrossEntropy,
)
from tests.parallel.group_harness import BATCH, X, Y, descs, group_of, summed_gradients


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


def test_a_bucket_may_have_other_parameters_too() -> None:
    longer = Sequential(Dense(4), Dense(4, name="extra"), Dense(3), SoftmaxCrossEntropy())
    first = DataParallelExecutorGroup(longer, ["cpu"], *descs())
    second = DataParallelExecutorGroup(
        Sequential(Dense(4), Dense(5, name="new")), ["cpu"], descs()[0], shared_group=first
    )
    assert second.param_arrays[0][0] is first.param_arrays[0][0]
    assert second.param_names == ["dense0_weight", "dense0_bias", "new_weight", "new_bias"]
