"""Calls that are repeated are recognised, and whatever differs from the last one is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.keys import WrittenKeys, key_list
from kvd.client.calls.memory_budget import Reservation
from kvd.client.calls.values import spec_of
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.plain_calls import MOST_LISTS, PlainCalls
from kvd.client.facades.blocking import backend_of
from kvd.protocol.specs import KeySpec
from kvd.testing.cluster import LocalCluster

SLICE_BYTES = 4 << 20
NAMES = ["a", "b", "c"]


def arrays(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[Any]:
    return [np.ones(shape, dtype) for shape in shapes or [(4,)] * len(NAMES)]


def calls(*keys: Any) -> PlainCalls:
    plain = PlainCalls(BoundKeys(WrittenKeys()), SLICE_BYTES)
    for key in keys:
        plain.note(key, key_list(key))
    return plain


# ── what is recognised ──


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_same_keys_are_recognised_with_any_arrays(kind: Callable[[Any], Any]) -> None:
    plain = calls(NAMES)
    values, outs = arrays((4,), (2, 3), ()), arrays((4,), (2, 3), ())
    found = plain.find(kind(NAMES), kind(values), kind(outs))
    assert found is not None
    assert list(found.names) == NAMES
    assert found.listed is not None
    for item, name, value, out in zip(found.listed.items(), NAMES, values, outs, strict=True):
        assert (item.key, item.spec) == (name, spec_of(value.dtype, value.shape, SLICE_BYTES))
        assert item.source.tobytes() == value.tobytes()
        item.target[:] = 0
        assert not out.any()


def test_one_key_is_recognised() -> None:
    (value,), (out,) = arrays((4,)), arrays((4,))
    found = calls("a").find("a", value, out)
    assert found is not None
    assert [(item.key, item.source.size) for item in found.items] == [("a", 16)]


def test_arrays_are_not_kept() -> None:
    plain, values = calls(NAMES), arrays()
    died = [weakref.ref(value) for value in values]
    assert plain.find(NAMES, values, values) is not None
    del values
    gc.collect()
    assert [ref() for ref in died] == [None, None, None]


@pytest.mark.parametrize(
    ("key", "values", "outs"),
    [
        pytest.param(["a", "b", "d"], arrays(), arrays(), id="another key at the end"),
        pytest.param(["a", "d", "c"], arrays(), arrays(), id="another key in between"),
        pytest.param(["a", "b"], arrays()[:2], arrays()[:2], id="fewer keys"),
        pytest.param([], [], [], id="no keys"),
        pytest.param([1, 2, 3], arrays(), arrays(), id="whole numbers"),
        pytest.param(NAMES, arrays()[:2], arrays(), id="too few values"),
        pytest.param(NAMES, arrays(), arrays()[:2], id="too few outs"),
        pytest.param(NAMES, np.ones((3, 4), np.float32), arrays(), id="one array for all"),
        pytest.param(NAMES, [*arrays()[:2], [1.0] * 4], arrays(), id="a list of numbers"),
        pytest.param(NAMES, [*arrays()[:2], arrays()], arrays(), id="one array per device"),
        pytest.param(NAMES, arrays(dtype=np.float64), arrays(), id="another dtype"),
        pytest.param(NAMES, arrays(dtype=">f4"), arrays(dtype=">f4"), id="foreign byte order"),
        pytest.param(NAMES, arrays((4,), (4,), (2, 2)), arrays(), id="another shape"),
        pytest.param(NAMES, [*arrays()[:2], np.ones((4, 2), np.float32)[:, 0]], arrays(), id="with gaps"),
        pytest.param(NAMES, arrays(), [*arrays()[:2], np.broadcast_to(np.float32(1), (4,))], id="not writable"),
        pytest.param("d", arrays()[0], arrays()[0], id="an unknown key"),
        pytest.param("a", arrays(), arrays(), id="a list for one key"),
    ],
)
def test_other_calls_go_the_general_way(key: Any, values: Any, outs: Any) -> None:
    assert calls("a", NAMES).find(key, values, outs) is None


def test_keys_that_look_alike_are_looked_at_again() -> None:
    """Only the same objects are known to be what they were."""
    longer = "".join(["layer", "0"])
    plain = calls([longer, "b"])
    values = arrays()[:2]
    assert plain.find([longer, "b"], values, values) is not None
    assert plain.find(["".join(["layer", "0"]), "b"], values, values) is None


def test_a_key_that_is_named_twice_goes_the_general_way() -> None:
    values = arrays()[:2]
    assert calls(["a", "a"]).find(["a", "a"], values, values) is None


def test_bound_gradients_go_the_general_way() -> None:
    bound = BoundKeys(WrittenKeys())
    plain = PlainCalls(bound, SLICE_BYTES)
    plain.note(NAMES, key_list(NAMES))
    bound.add({"b": KeySpec("float32", (4,), SLICE_BYTES)}, lambda nbytes: np.empty(nbytes, np.uint8))
    assert plain.find(NAMES, arrays(), arrays()) is None


def test_lists_are_forgotten_in_the_end() -> None:
    lists = [[f"{number}", f"{number}b"] for number in range(MOST_LISTS + 1)]
    plain, values = calls(*lists), arrays()[:2]
    assert plain.find(lists[0], values, values) is None
    assert plain.find(lists[-1], values, values) is not None


# ── in a cluster ──


@pytest.fixture
def store() -> Any:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.init(NAMES, arrays())
        for _ in range(3):
            kv.pushpull(NAMES, arrays(), arrays())
        yield kv


def test_a_repeated_list_gives_the_sums_in_the_arrays_of_each_call(store: kvd.KVStore) -> None:
    for number in range(4):
        values, outs = [np.full(4, number + place, np.float32) for place in range(3)], arrays()
        given = store.pushpull(NAMES, values, outs)
        assert [given[place] is outs[place] for place in range(3)] == [True] * 3
        for place, out in enumerate(outs):
            np.testing.assert_array_equal(out, np.full(4, number + place, np.float32))


def test_the_value_of_a_repeated_call_with_a_handle_may_be_changed_at_once(store: kvd.KVStore) -> None:
    value, handles, outs = np.empty(4, np.float32), [], arrays(*[(4,)] * 6)
    for number, out in enumerate(outs):
        value[:] = number
        handles.append(store.pushpull_async("abc"[number % 3], value, out))
    value[:] = np.nan
    for number, (handle, out) in enumerate(zip(handles, outs, strict=True)):
        assert handle.wait() is out
        np.testing.assert_array_equal(out, np.full(4, number, np.float32))


def test_its_copy_counts_against_the_memory_of_pushes(store: kvd.KVStore) -> None:
    budget = backend_of(store).values._arguments._budget  # type: ignore[attr-defined]
    (value, *_), (out, *_) = arrays(), arrays()
    for key in "ab":
        store.pushpull_async(key, value, out).wait()
    handle = store.pushpull_async("a", value, out)
    budget._held_bytes += budget._limit_bytes
    with pytest.raises(kvd.RequestTimeout, match="memory_limit_bytes"):
        backend_of(store).values.pushpull("b", value, out, 0, 1, True, Reservation())
    budget._held_bytes -= budget._limit_bytes
    assert handle.wait() is out
    assert budget._held_bytes == 0


def test_an_array_that_takes_another_shape_is_noticed(store: kvd.KVStore) -> None:
    values, outs = arrays(), arrays()
    store.pushpull(NAMES, values, outs)
    values[1].shape = outs[1].shape = (2, 2)
    with pytest.raises(kvd.ShapeMismatch, match=r"'b'"):
        store.pushpull(NAMES, values, outs)
    values[1].shape = outs[1].shape = (4,)
    np.testing.assert_array_equal(store.pushpull(NAMES, values, outs)[1], np.ones(4, np.float32))


def test_what_is_changed_in_the_same_arrays_is_noticed(store: kvd.KVStore) -> None:
    """Each is passed again, as the program has changed it in place."""
    changes: dict[str, Callable[[Any], object]] = {
        "its dtype": lambda array: setattr(array, "dtype", np.int32),
        "its shape": lambda array: setattr(array, "shape", (2, 2)),
        "its size": lambda array: array.resize((5,), refcheck=False),
    }
    for change in changes.values():
        for changed in (0, 1):
            both = arrays(), arrays()
            store.pushpull(NAMES, *both)
            change(both[changed][1])
            with pytest.raises((kvd.ShapeMismatch, kvd.DtypeMismatch)):
                store.pushpull(NAMES, *both)
    values, outs = arrays(), arrays()
    np.testing.assert_array_equal(store.pushpull(NAMES, values, outs)[1], np.ones(4, np.float32))


def test_gaps_in_the_memory_of_arrays_are_noticed(store: kvd.KVStore) -> None:
    """Their form is that of the last call, but their bytes lie elsewhere."""
    spread = [np.arange(8, dtype=np.float32)[::2] for _ in NAMES]
    wide = [np.zeros(8, np.float32) for _ in NAMES]
    store.pushpull(NAMES, spread, [array[1::2] for array in wide])
    for array in wide:
        np.testing.assert_array_equal(array, [0, 0, 0, 2, 0, 4, 0, 6])


def test_values_of_all_sizes_in_one_list() -> None:
    """Some in parts of eight bytes, some with nothing at all, some of several slices; summed by two workers."""
    names = [f"k{number}" for number in range(9)]
    shapes: list[tuple[int, ...]] = [(3,), (), (0,), (5, 7), (1,), (2, 3), (40_000,), (8,), (4097,)]
    steps = 6

    def values_of(rank: int, step: int) -> list[Any]:
        random = np.random.default_rng((rank, step))
        return [np.asarray(random.normal(size=shape)).astype(np.float16) for shape in shapes]

    def program(kv: kvd.KVStore) -> None:
        kv.init(names, [np.zeros(shape, np.float16) for shape in shapes])
        for step in range(steps):
            values, outs = values_of(kv.rank, step), [np.zeros(shape, np.float16) for shape in shapes]
            kv.pushpull(names, values, outs)
            for place, out in enumerate(outs):
                both = [values_of(rank, step)[place].astype(np.float32) for rank in range(2)]
                np.testing.assert_array_equal(out, (both[0] + both[1]).astype(np.float16))
            if step == 3:  # one moves alone, and the others meet it again a step later
                kv.pushpull(names[4], values[4], outs[4])

    with LocalCluster(2, 2, slice_bytes=1 << 16) as cluster:
        cluster.run(program)


def test_a_list_in_place(store: kvd.KVStore) -> None:
    for _ in range(3):
        values = [np.full(4, 3 + place, np.float32) for place in range(3)]
        store.pushpull(NAMES, values)
        for place, value in enumerate(values):
            np.testing.assert_array_equal(value, np.full(4, 3 + place, np.float32))


def test_keys_that_are_pushed_alone_in_between(store: kvd.KVStore) -> None:
    for step in range(6):
        outs = arrays()
        store.pushpull(NAMES, [np.full(4, step, np.float32)] * 3, outs)
        np.testing.assert_array_equal(outs[1], np.full(4, step, np.float32))
        if step % 2:
            store.push("b", np.full(4, 100 + step, np.float32))
            np.testing.assert_array_equal(store.pull("b"), np.full(4, 100 + step, np.float32))
        np.testing.assert_array_equal(store.pull("c"), np.full(4, step, np.float32))


def test_an_array_that_becomes_read_only_is_noticed(store: kvd.KVStore) -> None:
    outs = arrays()
    outs[2].flags.writeable = False
    with pytest.raises(kvd.NotAllowed, match="read-only"):
        store.pushpull(NAMES, arrays(), outs)


def test_a_key_that_was_deleted_and_made_again_is_looked_at(store: kvd.KVStore) -> None:
    store.delete("b")
    with pytest.raises(kvd.KeyNotFound):
        store.pushpull(NAMES, arrays(), arrays())
    store.init("b", np.ones((2, 2), np.float32))
    with pytest.raises(kvd.ShapeMismatch):
        store.pushpull(NAMES, arrays(), arrays())
    again = arrays((4,), (2, 2), (4,))
    np.testing.assert_array_equal(store.pushpull(NAMES, again, again)[1], np.ones((2, 2), np.float32))


def test_a_key_that_became_a_table_is_refused(store: kvd.KVStore) -> None:
    store.delete("b")
    store.init("b", kvd.RowSparse((10, 4)))
    with pytest.raises(kvd.KvdError, match="table"):
        store.pushpull(NAMES, arrays(), arrays())


def test_compression_takes_a_repeated_list(store: kvd.KVStore) -> None:
    store.set_gradient_compression({"type": "fp16", "min_bytes": 1})
    third = [np.full(4, 1 / 3, np.float32) for _ in NAMES]
    given = store.pushpull(NAMES, third, arrays())
    np.testing.assert_array_equal(given[0], np.full(4, np.float16(1 / 3), np.float32))
