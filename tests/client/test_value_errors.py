"""Errors about one value of a list: they name its key, and are errors of kvd, whatever library the value is from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

import kvd
from kvd.errors import DtypeMismatch, KeyNotFound, KvdError, NotAllowed, ShapeMismatch
from kvd.testing.cluster import LocalCluster

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecat|torch.ao)")  # of kinds of tensors of torch
FLOAT = np.float32
KEYS: list[Any] = ["layer0", "layer1", 2, "layer3"]


class Immutable:
    """An array that gives copies of its elements only, as those of JAX on a GPU."""

    def __init__(self, elements: Any) -> None:
        self.elements = np.asarray(elements, FLOAT)
        self.shape = self.elements.shape
        self.dtype = self.elements.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.elements.copy()


class Unreadable:
    """An array of a library that raises an error of its own."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise LookupError("the shape is not known")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise LookupError("it was donated")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2)


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(2, FLOAT)
    array.flags.writeable = False
    return array


def nested(**options: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **options)


NO_VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "bool": lambda: torch.ones(2, dtype=torch.bool),
    "int16": lambda: np.ones(2, np.int16),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "object": lambda: np.array([None, 1.0]),
    "structured": lambda: np.zeros(2, [("a", FLOAT)]),
    "dates": lambda: np.zeros(2, "M8[s]"),
    "string": lambda: "weights",
    "strings": lambda: np.array(["a", "b"]),
    "dict": lambda: {"weight": np.zeros(2, FLOAT)},
    "generator": lambda: iter([0.0, 1.0]),
    "meta": lambda: torch.ones(2, device="meta"),
    "fake": fake,
    "lazy": lambda: torch.nn.LazyLinear(2).weight,
    "lazy buffer": lambda: torch.nn.UninitializedBuffer(),
    "nested": nested,
    "jagged": lambda: nested(layout=torch.jagged),
    "sparse": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "masked": lambda: np.ma.array([1.0, 2.0], FLOAT, mask=[False, True]),
    "nothing masked": lambda: np.ma.array([1.0, 2.0], FLOAT),
    "masked tensor": lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])),
    "masked in a list": lambda: [np.ma.array([1.0, 2.0], FLOAT, mask=[False, True])],
    "masked numbers": lambda: [np.ma.masked, 1.0],
    "uneven lists": lambda: [[1.0], [1.0, 2.0]],
    "list of strings": lambda: ["a", "b"],
    "tensors in lists": lambda: [[torch.ones(2, requires_grad=True)], [1.0]],
    "shape": lambda: np.zeros(3, FLOAT),
    "dtype": lambda: np.zeros(2, np.float64),
    "one of two devices": lambda: [np.zeros(2, FLOAT), np.zeros(3, FLOAT)],
    "None on a device": lambda: [np.zeros(2, FLOAT), None],
    "lazy on a device": lambda: [np.zeros(2, FLOAT), torch.nn.LazyLinear(2).weight],
    "unreadable": Unreadable,
    "huge number": lambda: 10**40,
}
NO_OUTS: dict[str, Callable[[], Any]] = {
    "read-only": read_only,
    "bytes": lambda: bytes(8),
    "immutable": lambda: Immutable([0, 0]),
    "number": lambda: 3.0,
    "numbers": lambda: [1.0, 2.0],
    "immutable on a device": lambda: [np.zeros(2, FLOAT), Immutable([0, 0])],
}
UNWANTED_IN_BROADCAST = {"shape", "dtype"}  # a new key would have them


@pytest.fixture(scope="module", params=["local", "cluster"])
def kv(request: pytest.FixtureRequest) -> Iterator[kvd.KVStore]:
    if request.param == "local":
        with kvd.create("local") as store:
            store.init(KEYS, [np.zeros(2, FLOAT)] * 4)
            yield store
    else:
        with LocalCluster(1, 2) as cluster:
            store = cluster.store()
            store.init(KEYS, [np.zeros(2, FLOAT)] * 4)
            yield store


def with_one(wrong: Any, place: int) -> list[Any]:
    return [wrong if index == place else np.zeros(2, FLOAT) for index in range(4)]


PUSHES: dict[str, Callable[[kvd.KVStore, Any, Any], Any]] = {
    "push": lambda kv, keys, values: kv.push(keys, values).wait(),
    "pushpull": lambda kv, keys, values: kv.pushpull(keys, values),
    "pushpull out": lambda kv, keys, values: kv.pushpull(keys, values, out=with_one(np.zeros(2, FLOAT), 0)),
    "pushpull view": lambda kv, keys, values: kv.pushpull(keys, values, copy=False),
    "pushpull_async": lambda kv, keys, values: kv.pushpull_async(keys, values).wait(),
}
PULLS: dict[str, Callable[[kvd.KVStore, Any, Any], Any]] = {
    "pull": lambda kv, keys, outs: kv.pull(keys, out=outs),
    "pull_async": lambda kv, keys, outs: kv.pull_async(keys, out=outs).wait(),
    "pushpull out": lambda kv, keys, outs: kv.pushpull(keys, with_one(np.zeros(2, FLOAT), 0), out=outs),
}


@pytest.mark.parametrize("call", [*PUSHES, "init", "broadcast"])
def test_a_value_that_is_none(kv: kvd.KVStore, call: str) -> None:
    for place in (1, 2):
        for name, make in NO_VALUES.items():
            keys, run = KEYS, PUSHES.get(call)
            if run is None:
                if name in UNWANTED_IN_BROADCAST:
                    continue
                keys = [f"new {key}" for key in KEYS]
                run = (lambda kv, keys, values: kv.init(keys, values)) if call == "init" else _broadcast
            with pytest.raises(KvdError) as caught:
                run(kv, keys, with_one(make(), place))
            check(caught.value, keys[place], name)
    assert [kv.clock(key) for key in KEYS] == [0] * 4


def _broadcast(kv: kvd.KVStore, keys: Any, values: Any) -> None:
    kv.broadcast(keys, values, out=with_one(np.zeros(2, FLOAT), 0))


@pytest.mark.parametrize("call", PULLS)
def test_an_out_that_is_none(kv: kvd.KVStore, call: str) -> None:
    for place in (1, 2):
        for name, make in (NO_VALUES | NO_OUTS).items():
            with pytest.raises(KvdError) as caught:
                PULLS[call](kv, KEYS, with_one(make(), place))
            check(caught.value, KEYS[place], name)


def check(error: KvdError, key: Any, what: str) -> None:
    assert repr(key) in str(error), f"{what}: {error}"
    assert getattr(error, "key", None) == key, f"{what}: {error}"
    assert isinstance(error, NotAllowed | DtypeMismatch | ShapeMismatch), f"{what}: {error!r}"


def test_the_error_of_another_library_is_the_cause(kv: kvd.KVStore) -> None:
    for call in (lambda: kv.push(KEYS, with_one(Unreadable(), 2)), lambda: kv.pull("layer1", out=[Unreadable()])):
        with pytest.raises(NotAllowed, match="Unreadable cannot be read") as caught:
            call()
        assert isinstance(caught.value.__cause__, LookupError)
        assert "it was donated" in str(caught.value)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_values_name_the_first_key_without_one(kv: kvd.KVStore, count: int) -> None:
    given = [np.zeros(2, FLOAT)] * count
    for call in (
        lambda: kv.push(KEYS, given),
        lambda: kv.pull(KEYS, out=given),
        lambda: kv.pushpull(KEYS, given),
        lambda: kv.init(KEYS, given),
        lambda: kv.broadcast(KEYS, given),
    ):
        with pytest.raises(NotAllowed, match=f"4, got {count}, none for {KEYS[count]!r}") as caught:
            call()
        assert caught.value.key == KEYS[count]
    with pytest.raises(NotAllowed, match="4, got 5"):
        kv.push(KEYS, [np.zeros(2, FLOAT)] * 5)


def test_an_entry_that_is_no_key_is_named_by_its_place(kv: kvd.KVStore) -> None:
    for call in (kv.delete, kv.bind, kv.pull):
        with pytest.raises(NotAllowed, match=r"not NoneType \(entry 1 of the list of keys\)"):
            call(["layer0", None])
    with pytest.raises(KeyNotFound, match="'nobody'"):
        kv.bind(["layer0", "nobody"])


# ── pushpull: the key decides what is wrong ──


@pytest.mark.parametrize("cast", [False, True])
def test_the_key_decides_whether_value_or_out_is_wrong(kv: kvd.KVStore, cast: bool) -> None:
    right, wrong = np.zeros(2, FLOAT), np.zeros(3, FLOAT)

    def listed(*given: Any) -> Any:
        return kv.pushpull(["layer1", 2], [right, given[0]], out=[right.copy(), given[1]], cast=cast)

    calls: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("'layer0'", lambda *given: kv.pushpull("layer0", given[0], out=given[1], cast=cast)),
        ("2", lambda *given: kv.pushpull_async(2, given[0], out=given[1], cast=cast).wait()),
        ("2", listed),
    )
    for key, call in calls:
        with pytest.raises(ShapeMismatch, match=rf"key {key} has shape \(2,\), the given value has \(3,\)"):
            call(wrong, right)
        with pytest.raises(ShapeMismatch, match=rf"key {key} has shape \(2,\), the given out has \(3,\)"):
            call(right, wrong)
        with pytest.raises(ShapeMismatch, match=rf"key {key} has shape \(2,\), the given value has \(3,\)"):
            call(wrong, wrong.copy())
        with pytest.raises(DtypeMismatch, match=rf"key {key} has dtype float32, the given out has int32"):
            call(right, np.zeros(2, np.int32))
        with pytest.raises(DtypeMismatch, match=rf"key {key} has dtype float32, the given value has int32"):
            call(np.zeros(2, np.int32), right)
    with pytest.raises(KeyNotFound, match="'nobody'"):
        kv.pushpull("nobody", right, out=wrong)
    assert [kv.clock(key) for key in KEYS] == [0] * 4


def test_a_broadcast_with_an_out_of_another_shape_changes_nothing(kv: kvd.KVStore) -> None:
    with pytest.raises(ShapeMismatch, match=r"'layer0' has shape \(2,\), the given out has \(3,\)"):
        kv.broadcast("layer0", np.ones(2, FLOAT), out=np.zeros(3, FLOAT))
    with pytest.raises(ShapeMismatch, match=r"'layer0' has shape \(2,\), the given value has \(3,\)"):
        kv.broadcast("layer0", np.ones(3, FLOAT), out=np.zeros(2, FLOAT))
    with pytest.raises(ShapeMismatch, match=r"'fresh' has shape \(3,\), the given out has \(2,\)"):
        kv.broadcast("fresh", np.ones(3, FLOAT), out=np.zeros(2, FLOAT))
    assert kv.pull("layer0").tolist() == [0, 0]
    with pytest.raises(KeyNotFound):
        kv.pull("fresh")


def test_a_value_that_cannot_take_the_result_of_a_call_without_out(kv: kvd.KVStore) -> None:
    given = Immutable([1, 2])
    for key, values in (("layer3", given), (["layer0", "layer3"], [np.zeros(2, FLOAT), given])):
        for call in (kv.pushpull, lambda *given: kv.pushpull_async(*given).wait()):
            with pytest.raises(NotAllowed, match=r"key 'layer3': without out=, pushpull writes .*copy=False"):
                call(key, values)
        with pytest.raises(NotAllowed, match=r"key 'layer3': without out=, broadcast writes .*pass out="):
            kv.broadcast(key, values)
    assert kv.clock("layer3") == 0
    kv.init("immutable", Immutable([0, 0]))
    assert kv.pushpull("immutable", given, copy=False).tolist() == [1, 2]
    out = np.zeros(2, FLOAT)
    kv.pushpull("immutable", given, out=out)
    assert out.tolist() == [1, 2]
    kv.delete("immutable")


# ── rows of tables ──


def test_rows_that_are_none(kv: kvd.KVStore) -> None:
    kv.init(["t", 9], [kvd.RowSparse(shape=(5, 2))] * 2)
    good, rows = kvd.RowSparseArray([0], np.ones((1, 2), FLOAT)), np.zeros((1, 2), FLOAT)
    masked_ids, masked_rows = np.ma.array([1], mask=[True]), np.ma.array([[1, 2]], FLOAT, mask=[[False, True]])
    for wrong in (
        None,
        "rows",
        rows,
        kvd.RowSparseArray([0], None),
        kvd.RowSparseArray(None, rows),
        kvd.RowSparseArray([0], Unreadable()),
        kvd.RowSparseArray(Unreadable(), rows),
        kvd.RowSparseArray([0], masked_rows),
        kvd.RowSparseArray(masked_ids, rows),
        kvd.RowSparseArray([0], torch.ones(1, 2, device="meta")),
    ):
        with pytest.raises(KvdError) as caught:
            kv.push(["t", 9], [good, wrong]).wait()
        check(caught.value, 9, repr(wrong))
    for ids, out in (
        ([[0], None], None),
        ([[0], masked_ids], None),
        ([[0], Unreadable()], None),
        ([[0], [1]], [rows, np.zeros((2, 2), FLOAT)]),
        ([[0], [1]], [rows, Unreadable()]),
        ([[0], [1]], [rows, Immutable([[1, 2]])]),
        ([[0], [1]], [rows, masked_rows]),
    ):
        with pytest.raises(KvdError) as caught:
            kv.row_sparse_pull(["t", 9], ids, out=out)
        check(caught.value, 9, repr((ids, out)))
    with pytest.raises(KvdError) as caught:
        kv.init("begun", kvd.RowSparse(shape=(1, 2), values=masked_rows))
    check(caught.value, "begun", "values")
    assert kv.clock("t") == kv.clock(9) == 0
    kv.delete(["t", 9])


def test_in_an_event_loop() -> None:
    async def program() -> None:
        async with await kvd.aio.create("local") as kv:
            await kv.init(KEYS, [np.zeros(2, FLOAT)] * 4)
            for make in NO_VALUES.values():
                with pytest.raises(KvdError) as caught:
                    await kv.push_async(KEYS, with_one(make(), 2))
                check(caught.value, 2, repr(make))
                with pytest.raises(KvdError) as caught:
                    await kv.pull(KEYS, out=with_one(make(), 1))
                check(caught.value, "layer1", repr(make))
            with pytest.raises(ShapeMismatch, match="the given out"):
                await kv.pushpull("layer0", np.zeros(2, FLOAT), out=np.zeros(3, FLOAT))

    asyncio.run(program())
