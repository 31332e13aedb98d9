"""What a push may be, one row per rule."""

from __future__ import annotations

import pytest

from kvd.core.push_policy import is_updated, push_error
from kvd.protocol.messages import ABSENT, ADD, ASSIGN
from kvd.protocol.specs import DTYPES

FLOATS = sorted(name for name, dtype in DTYPES.items() if dtype.is_float)
OTHERS = sorted(name for name, dtype in DTYPES.items() if not dtype.is_float)
MERGES = ["", "sum", "mean", "weighted"]


def test_there_are_dtypes_of_both_kinds() -> None:
    assert {"float32", "float64", "bfloat16"} <= set(FLOATS)
    assert {"int32", "uint8"} <= set(OTHERS)


@pytest.mark.parametrize("how", [ADD, ASSIGN, ABSENT])
@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("has_optimizer", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_float_key_takes_every_push(dtype: str, has_optimizer: bool, merge: str, how: int) -> None:
    assert push_error("w", dtype, how, has_optimizer=has_optimizer, merge=merge) is None


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("dtype", OTHERS)
def test_an_optimizer_updates_float_keys_only(dtype: str, merge: str) -> None:
    text = push_error("w", dtype, ADD, has_optimizer=True, merge=merge)
    assert text is not None
    assert text.startswith(f"key 'w' is {dtype}: optimizers update float keys only; ")
    assert "merge='sum'" in text


@pytest.mark.parametrize("own_merge", ["sum", "mean"])
@pytest.mark.parametrize("dtype", OTHERS)
def test_a_key_of_integers_with_its_own_merge_is_merged_without_the_optimizer(dtype: str, own_merge: str) -> None:
    assert push_error("w", dtype, ADD, has_optimizer=True, merge="weighted", own_merge=own_merge) is None
    assert not is_updated(dtype)


@pytest.mark.parametrize("dtype", OTHERS)
def test_the_own_merge_of_a_key_comes_before_that_of_the_cluster(dtype: str) -> None:
    assert push_error("w", dtype, ADD, has_optimizer=False, merge="weighted", own_merge="mean") is None
    text = push_error("w", dtype, ADD, has_optimizer=False, merge="sum", own_merge="weighted")
    assert text == f"key 'w' is {dtype}: a weighted merge takes float keys only"


@pytest.mark.parametrize("dtype", OTHERS)
def test_a_weighted_merge_takes_float_keys_only(dtype: str) -> None:
    text = push_error("w", dtype, ADD, has_optimizer=False, merge="weighted")
    assert text == f"key 'w' is {dtype}: a weighted merge takes float keys only"


@pytest.mark.parametrize("merge", ["", "sum", "mean"])
@pytest.mark.parametrize("dtype", OTHERS)
def test_other_merges_take_keys_of_any_dtype(dtype: str, merge: str) -> None:
    assert push_error("w", dtype, ADD, has_optimizer=False, merge=merge) is None


@pytest.mark.parametrize("how", [ASSIGN, ABSENT])
@pytest.mark.parametrize("dtype", OTHERS)
def test_a_broadcast_may_replace_a_value_of_any_dtype(dtype: str, how: int) -> None:
    assert push_error("w", dtype, how, has_optimizer=True, merge="weighted") is None


@pytest.mark.parametrize("how", [ADD, ASSIGN, ABSENT])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_no_round_mixes_broadcasts_and_contributions(dtype: str, how: int) -> None:
    text = push_error("w", dtype, how, has_optimizer=True, merge="weighted", mixes=True)
    assert text == "key 'w' is broadcast and pushed in the same round: all workers must do the same"
