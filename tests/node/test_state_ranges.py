"""The optimizer states of slices that are updated together."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.compute.optimizers import SliceState
from kvd.core.machine import Extent
from kvd.node.jobs.optimizer_states import OptimizerStates
from kvd.protocol.specs import padded


def layout_of(*sizes: int) -> tuple[Extent, ...]:
    """Slices k0, k1 … with these numbers of float32 values."""
    entries, offset = [], 0
    for number, size in enumerate(sizes):
        offset = padded(offset)
        entries.append(Extent(f"k{number}", 0, offset, 4 * size))
        offset += 4 * size
    return tuple(entries)


def state(step: int, *values: float) -> SliceState:
    return SliceState(step, None, {"momentum": np.asarray(values, np.float32)})


def test_states_that_agree_are_joined_with_zeros_in_the_padding() -> None:
    states = OptimizerStates()
    for number, size in enumerate((1, 2, 1)):
        states.put((f"k{number}", 0), state(3, *[number + 1.0] * size), size)
    (piece,) = states.of_group(1, layout_of(1, 2, 1), 4)
    assert (piece.start, piece.stop, piece.state.step) == (0, 5, 3)
    assert piece.state.slots["momentum"].tolist() == [1, 0, 2, 2, 3]
    assert states.of_group(1, layout_of(1, 2, 1), 4)[0].state is piece.state
    assert states.of_slice(("k1", 0)).slots["momentum"].tolist() == [2, 2]
    assert np.shares_memory(states.of_slice(("k1", 0)).slots["momentum"], piece.state.slots["momentum"])
    assert states.of_slice(("unknown", 0)) == SliceState()


@pytest.mark.parametrize(
    "other",
    [
        state(4, 1.0),
        SliceState(3, np.zeros(1, np.float32), {"momentum": np.zeros(1, np.float32)}),
        SliceState(3, None, {"mean": np.zeros(1, np.float32)}),
        SliceState(3, None, {"momentum": np.zeros(1, np.float64)}),
        SliceState(3),
    ],
)
def test_states_that_do_not_agree_stay_separate(other: SliceState) -> None:
    states = OptimizerStates()
    states.put(("k0", 0), state(3, 1.0), 1)
    states.put(("k1", 0), other, 1)
    pieces = states.of_group(1, layout_of(1, 1), 4)
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 1), (2, 3)]
    assert pieces[1].state is other


def test_a_state_put_into_the_middle_does_not_change_the_others() -> None:
    states = OptimizerStates()
    layout = layout_of(2, 2, 2)
    for number in range(3):
        states.put((f"k{number}", 0), state(3, number, number), 2)
    states.of_group(1, layout, 4)
    states.put(("k1", 0), state(9, 7.0, 8.0), 2)
    pieces = states.of_group(1, layout, 4)
    assert [(piece.start, piece.stop, piece.state.step) for piece in pieces] == [(0, 2, 3), (2, 4, 9), (4, 6, 3)]
    assert [states.of_slice((f"k{number}", 0)).slots["momentum"].tolist() for number in range(3)] == [
        [0, 0],
        [7, 8],
        [2, 2],
    ]
    states.put(("k1", 0), state(3, 5.0, 5.0), 2)
    (piece,) = states.of_group(1, layout, 4)  # they agree again: one update for all of them
    assert piece.state.slots["momentum"].tolist() == [0, 0, 5, 5, 2, 2]


def test_states_of_empty_slices_do_not_accumulate() -> None:
    states = OptimizerStates()
    layout = layout_of(0, 2, 0, 0, 2, 0)
    states.of_group(1, layout, 4)
    for step in range(40):
        for number in (0, 2, 3, 5):
            states.put((f"k{number}", 0), state(step), 0)
    assert len(states.of_group(1, layout, 4)) <= 6
    assert states.of_slice(("k0", 0)).step == 39
    states.put(("k1", 0), state(7, 1.0, 2.0), 2)
    assert [states.of_slice((f"k{number}", 0)).step for number in (0, 1, 4)] == [39, 7, 0]


def test_a_slice_that_leaves_keeps_only_its_own_bytes() -> None:
    """A key that is no longer pushed must not hold the memory of all keys it was fused with."""
    states = OptimizerStates()
    for number in range(3):
        states.put((f"k{number}", 0), state(3, *[number] * 4), 4)
    (whole,) = states.of_group(1, layout_of(4, 4, 4), 4)
    (alone,) = states.of_group(2, (Extent("k1", 0, 0, 16),), 4)
    assert alone.state.slots["momentum"].tolist() == [1] * 4
    kept = [states.of_slice((f"k{number}", 0)).slots["momentum"] for number in range(3)]
    assert [array.tolist() for array in kept] == [[0] * 4, [1] * 4, [2] * 4]
    for array in kept:
        assert not np.shares_memory(array, whole.state.slots["momentum"])
        assert array.base is None or array.base.nbytes == 16


def test_a_slice_that_is_created_again_starts_again_and_the_others_continue() -> None:
    states = OptimizerStates()
    for number in range(2):
        states.put((f"k{number}", 0), state(3, number), 1)
    states.of_group(1, layout_of(1, 1), 4)
    states.drop(("k0", 0))
    states.drop(("never", 0))
    assert states.of_slice(("k0", 0)) == SliceState()
    assert states.of_slice(("k1", 0)).step == 3
    pieces = states.of_group(2, layout_of(1, 1), 4)
    assert [piece.state.step for piece in pieces] == [0, 3]


def test_a_renewed_group_has_one_new_state() -> None:
    states = OptimizerStates()
    for number in range(2):
        states.put((f"k{number}", 0), state(3 + number, number), 1)
    states.renew(1, layout_of(1, 1), 4)
    (piece,) = states.of_group(1, layout_of(1, 1), 4)
    assert (piece.start, piece.stop, piece.state) == (0, 3, SliceState())
    states.reset([("k0", 0), ("k1", 0)])
    assert states.of_group(1, layout_of(1, 1), 4)[0].state is not piece.state


def test_a_reset_begins_the_states_of_the_named_slices_anew_and_no_others() -> None:
    states = OptimizerStates()
    for number in range(4):
        states.put((f"k{number}", 0), state(3, number), 1)
    (whole,) = states.of_group(1, layout_of(1, 1, 1), 4)
    states.reset([("k1", 0), ("k3", 0), ("never", 0)])
    pieces = states.of_group(1, layout_of(1, 1, 1), 4)
    assert [(piece.start, piece.stop, piece.state.step) for piece in pieces] == [(0, 2, 3), (2, 3, 0), (3, 5, 3)]
    assert states.of_slice(("k3", 0)) == SliceState()
    assert [states.of_slice((key, 0)).slots["momentum"].tolist() for key in ("k0", "k2")] == [[0], [2]]
    assert np.shares_memory(states.of_slice(("k0", 0)).slots["momentum"], whole.state.slots["momentum"])
    states.reset([("k2", 0), ("k1", 0), ("k0", 0)])
    (piece,) = states.of_group(1, layout_of(1, 1, 1), 4)  # one update for all of them
    assert (piece.start, piece.stop, piece.state) == (0, 5, SliceState())
