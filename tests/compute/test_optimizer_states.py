"""The state of a slice: saved, loaded, and unchanged by an update that is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.compute.optimizers import SliceState, apply_update, kernel_of
from kvd.compute.tensors import DTYPES
from kvd.errors import DtypeMismatch, NotAllowed, ProtocolError, ShapeMismatch
from kvd.optimizer import SGD, Adam, Optimizer, RMSProp
from tests.compute.optimizer_harness import STEPS, Array, gradients_of, start, trained


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("rule", [SGD(0.1), SGD(0.1, 0.9), Adam(), RMSProp(momentum=0.9, centered=True)], ids=repr)
def test_a_loaded_state_goes_on_with_the_same_bits(dtype: str, rule: Optimizer) -> None:
    kind = DTYPES[dtype]
    weight, gradients = start(kind), gradients_of(kind)
    state = SliceState()
    current, out = weight, np.empty_like(weight)
    for gradient in gradients[:10]:
        apply_update(rule, state, current, [gradient], out, "sum")
        current, out = out, np.empty_like(out)
    saved = state.export()
    for gradient in gradients[10:]:
        apply_update(rule, state, current, [gradient], out, "sum")
        current, out = out, np.empty_like(out)
    assert int(saved["step"]) == 10
    resumed = SliceState.load(saved)
    assert resumed.nbytes == sum(array.nbytes for name, array in saved.items() if name != "step")
    # Start again from the weights after ten updates, which follow from the first ten gradients.
    again, out = trained(rule, weight, gradients[:10]), np.empty_like(weight)
    for gradient in gradients[10:]:
        apply_update(rule, resumed, again, [gradient], out, "sum")
        again, out = out, np.empty_like(out)
    assert again.tobytes() == current.tobytes()
    assert resumed.step == STEPS


def test_slots_appear_when_they_are_first_needed() -> None:
    state, weight, gradient = SliceState(), start(np.float32), gradients_of(np.float32)[0]
    apply_update(SGD(0.1), state, weight, [gradient], np.empty_like(weight), "sum")
    assert (state.slots, state.master) == ({}, None)
    apply_update(SGD(0.1, 0.9), state, weight, [gradient], np.empty_like(weight), "sum")
    assert state.slots["momentum"].tobytes() == gradient.tobytes()
    assert set(kernel_of(RMSProp(momentum=0.1, centered=True)).slot_names) == {"square", "mean", "momentum"}


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"step": np.array(-1)},
        {"step": np.array(1.0)},
        {"step": np.array([1])},
        {"step": np.array(1), "weight": np.zeros(2, np.float32)},
        {"step": np.array(1), "slot/mean": np.zeros(2, np.int32)},
        {"step": np.array(1), "slot/mean": np.zeros((2, 2), np.float32)},
        {"step": np.array(1), "master": np.zeros(2, np.float64)},
        {"step": np.array(1), "slot/mean": np.zeros(2, np.float32), "slot/variance": np.zeros(3, np.float32)},
    ],
)
def test_arrays_that_are_no_state_are_refused(arrays: dict[str, Array]) -> None:
    with pytest.raises(ProtocolError):
        SliceState.load(arrays)


def overlapping() -> tuple[Array, Array]:
    memory = np.zeros(6, np.float32)
    return memory[:4], memory[2:]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"out": np.zeros(3, np.float32)}, ShapeMismatch),
        ({"out": np.zeros(4, np.float64)}, DtypeMismatch),
        ({"current": np.zeros((2, 2), np.float32), "out": np.zeros((2, 2), np.float32)}, ShapeMismatch),
        ({"contributions": [np.zeros(3, np.float32)]}, ShapeMismatch),
        ({"contributions": [np.zeros(4, np.float64)]}, DtypeMismatch),
        ({"contributions": []}, NotAllowed),
        ({"mode": "weighted"}, NotAllowed),
        ({"state": SliceState(slots={"mean": np.zeros(3, np.float32)})}, ShapeMismatch),
        ({"state": SliceState(slots={"mean": np.zeros(4, np.float64)})}, DtypeMismatch),
        ({"state": SliceState(master=np.zeros(4, np.float32))}, DtypeMismatch),
        (dict(zip(("current", "out"), overlapping(), strict=True)), NotAllowed),
    ],
)
def test_a_refused_update_changes_nothing(changes: dict[str, Any], error: type[Exception]) -> None:
    arguments: dict[str, Any] = {
        "optimizer": Adam(),
        "state": SliceState(),
        "current": np.zeros(4, np.float32),
        "contributions": [np.ones(4, np.float32)],
        "out": np.zeros(4, np.float32),
        "mode": "sum",
    } | changes
    state = arguments["state"]
    names = set(state.slots)
    with pytest.raises(error):
        apply_update(**arguments)
    assert not arguments["out"].any()
    assert (state.step, set(state.slots)) == (0, names)
