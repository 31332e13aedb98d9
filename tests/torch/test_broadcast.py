"""What worker 0 gives to all: parameters, buffers and objects; what is refused; and what a restarted worker gets."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kvd
import kvd.torch as kt
from kvd.errors import NotAllowed, ProtocolError
from kvd.testing.cluster import LocalCluster
from kvd.torch.objects import MAX_DEPTH, from_bytes, to_bytes

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
]


def number(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values % 2 == 1 if dtype == torch.bool else values.to(torch.float32).to(dtype)


def tensors_of(rank: int) -> dict[str, torch.Tensor]:
    """Of all dtypes and layouts, with other values for each rank."""
    found = {str(dtype): number(dtype, (3, 2), rank) for dtype in DTYPES}
    found |= {f"{dtype}, a number": number(dtype, (), rank) for dtype in DTYPES}
    found |= {f"{dtype}, transposed": number(dtype, (3, 4), rank).T for dtype in DTYPES}
    found |= {f"{dtype}, every second": number(dtype, (9,), rank)[::2] for dtype in DTYPES}
    found["empty"] = torch.zeros(0, 4)
    found["conjugated"] = torch.conj(number(torch.complex64, (3,), rank) * 1j)
    found["tied"] = found["torch.float32"]
    found["parameter"] = nn.Parameter(number(torch.float32, (2, 2), rank))
    return found


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: to_bytes(tensor.detach()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_tensors_of_all_kinds_become_those_of_worker_0(kind: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        tensors = tensors_of(kv.rank)
        before = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in tensors.items()}
        kt.broadcast_parameters(tensors, kv)
        assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in tensors.items()} == before
        assert [kt.broadcast_object([kv.rank, size] * size, kv, name="again")[1] for size in (9, 4000, 9)] == [
            9,
            4000,
            9,
        ]
        return bits(tensors)

    with LocalCluster(2, 2) as cluster:
        first, second = cluster.run(program, kind)
    assert first == bits(tensors_of(0))
    assert second == first != bits(tensors_of(1))


def test_modules_objects_and_what_is_refused() -> None:
    """One job after the other on the same names, as in a program."""

    def program(kv: kvd.KVStore) -> Any:
        torch.manual_seed(kv.rank)
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        module[2].weight = module[0].bias = nn.Parameter(torch.randn(3))  # tied, though no layer could use it
        module.register_buffer("mask", torch.rand(5) > 0.5, persistent=False)
        kt.broadcast_parameters(module.state_dict(), kv)
        state = bits(module.state_dict())
        module[1](torch.randn(8, 3))
        kt.broadcast_buffers(module, kv)
        kt.broadcast_buffers(nn.Linear(1, 1), kv)  # none
        kt.broadcast_parameters(nn.Linear(2, 2).named_parameters(), kv, name="other")
        buffers = bits(dict(module.named_buffers()))
        small = kt.broadcast_object({"rank": kv.rank}, kv, name="small")
        large = [kt.broadcast_object(torch.full((size,), kv.rank + 1.0), kv, name="large") for size in (2000, 3000, 9)]
        weight: Any = module[1].weight
        optimizer = torch.optim.Adam([weight])
        module[1](torch.randn(8, 3)).sum().backward()
        optimizer.step()
        sent = kt.broadcast_object(optimizer.state_dict(), kv, name="optimizer")
        optimizer.load_state_dict(sent)
        moments = bits(optimizer.state[weight])

        with pytest.raises(NotAllowed) as refused:  # in all workers, and the next call is in step
            kt.broadcast_object({"a": [0, {1}]}, kv, name="set")
        assert "thing['a'][1] is a builtins.set" in str(refused.value)
        assert kt.broadcast_object(kv.rank, kv, name="after") == 0

        other = (
            {"a": torch.zeros(2), "b": torch.zeros(3)} if kv.rank == 0 else {"a": torch.zeros(2), "b": torch.zeros(4)}
        )
        if kv.rank:
            with pytest.raises(
                NotAllowed, match=r"worker 0 broadcasts 'b', torch.float32 of shape \[3\], and worker 1 has"
            ):
                kt.broadcast_parameters(other, kv, name="unlike")
        else:  # the other worker has no part in it any more
            kt.broadcast_object(
                {name: [str(t.dtype), list(t.shape)] for name, t in other.items()}, kv, name="parameters of unlike"
            )
        return state, buffers, small, [tensor.tolist() for tensor in large], moments

    with LocalCluster(2, 1) as cluster:
        first, second = cluster.run(program)
        with cluster.observer() as observer:
            listed = observer.keys()
    keys = [entry["key"] for entry in listed]
    assert first == second
    assert first[2] == {"rank": 0}
    assert first[3] == [[1.0] * 2000, [1.0] * 3000, [1.0] * 9]
    large = "kvd.torch/object/large"
    assert sorted(key for key in keys if key.startswith(large)) == [large, f"{large}/4096", f"{large}/8192"]


def begin(kv: kvd.KVStore, seed: int) -> Any:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    kt.broadcast_parameters(module.state_dict(), kv)
    return bits(module.state_dict()), kt.broadcast_object({"seed": seed, "long": [seed] * 3000}, kv, name="setup")


def test_workers_that_come_later_get_what_was_broadcast() -> None:
    """A restarted worker 0, whose own values no longer count, and one that joins."""
    with LocalCluster(2, 1, max_workers=3, request_timeout_s=30.0) as cluster:
        stores = cluster.open_stores("dist_sync", [{"node_id": f"worker-{number}"} for number in range(2)])
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(begin, stores, (store.rank for store in stores))
        assert first == second
        assert first[1]["seed"] == 0
        zero = next(store for store in stores if store.rank == 0)
        node_id = f"worker-{stores.index(zero)}"
        zero.set_barrier_before_exit(False)
        zero.__exit__(RuntimeError, None, None)
        successor = cluster.store(node_id=node_id)
        assert successor.rank == 0
        assert begin(successor, 7) == first
        third = cluster.store(node_id="worker-2")
        assert begin(third, 8) == first


# ── objects ──

PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False), st.text(), st.binary()
)
THINGS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(PLAIN, inner, max_size=4),
    ),
    max_leaves=20,
)


def with_types(thing: Any) -> Any:
    """The same with the types of all parts, so that True is not 1, and a tuple no list."""
    if isinstance(thing, list | tuple):
        return type(thing), [with_types(item) for item in thing]
    if isinstance(thing, dict):
        return dict, [(with_types(key), with_types(value)) for key, value in thing.items()]
    return type(thing), thing


@given(THINGS)
def test_plain_objects_come_back_as_they_were(thing: Any) -> None:
    assert with_types(from_bytes(to_bytes(thing))) == with_types(thing)


def test_arrays_and_tensors_come_back_as_they_were() -> None:
    arrays: list[Any] = [
        np.arange(6, dtype=np.int16).reshape(2, 3).T,
        np.array([1.5, np.nan, np.inf]),
        np.arange(3, dtype=">f4"),
        np.zeros((0, 3), np.complex64),
        np.array(True),
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(2, 0),
        torch.tensor(3),
        nn.Parameter(torch.ones(2)),
    ]
    found = from_bytes(to_bytes(OrderedDict(arrays=arrays, scalar=np.float32(0.1))))
    assert type(found["scalar"]) is np.float32
    assert found["scalar"] == np.float32(0.1)
    for before, after in zip(arrays, found["arrays"], strict=True):
        if isinstance(before, torch.Tensor):
            assert after.dtype == before.dtype
            assert torch.equal(after, before.detach())
            after.zero_()  # its memory is its own
        else:
            assert after.dtype == before.dtype.newbyteorder("=")
            np.testing.assert_array_equal(after, before)
            after.fill(0)


def test_what_is_no_part_of_an_object() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for thing, text in [
        ({"a": (1, object())}, r"thing\['a'\]\[1\] is a builtins.object"),
        ([1 << 64], r"thing\[0\] is an integer of more than 64 bits"),
        ({(1, 2): 3}, "thing has a key of type tuple"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([object()]), "dtype object"),
        (torch.eye(2).to_sparse(), "thing is a tensor of dtype float32, layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "device meta"),
        (endless, f"nested deeper than {MAX_DEPTH} times"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    ]:
        with pytest.raises(NotAllowed, match=text):
            to_bytes(thing)


@given(st.binary(max_size=60))
def test_other_bytes_raise_a_protocol_error_or_are_an_object(data: bytes) -> None:
    with suppress(ProtocolError):
        from_bytes(data)


def test_damaged_arrays_are_found() -> None:
    good = to_bytes([np.ones(3), torch.ones(3), np.float32(1)])
    for place in range(len(good)):
        for value in (0, 0x7F, 0xFF):
            with suppress(ProtocolError):
                from_bytes(good[:place] + bytes([value]) + good[place + 1 :])
