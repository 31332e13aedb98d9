"""Keys and values as programs bring them, through a real cluster and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import kvd
from kvd.errors import DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.testing.cluster import LocalCluster

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ["float16", "float32", "float64", BFLOAT16, "int8", "int32", "int64", "uint8"]
SLICE_BYTES = 4 << 10


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One worker and two servers; the tests take keys of their own."""
    with LocalCluster(1, 2, slice_bytes=SLICE_BYTES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kv(cluster: LocalCluster) -> kvd.KVStore:
    return cluster.store()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (33, 129)], ids=str)
def test_every_dtype_and_shape(kv: kvd.KVStore, dtype: Any, shape: tuple[int, ...]) -> None:
    key = f"shape {np.dtype(dtype)} {shape}"
    count = int(np.prod(shape))
    first = (np.arange(count) % 50).reshape(shape).astype(dtype)
    kv.init(key, first)
    given = kv.pull(key)
    assert isinstance(given, np.ndarray)
    assert (given.dtype, given.shape) == (np.dtype(dtype), shape)
    np.testing.assert_array_equal(given, first)
    second = (first.astype(np.float64) + 1).astype(dtype)
    out = np.empty(shape, dtype)
    assert kv.pushpull(key, second, out=out) is out
    np.testing.assert_array_equal(out, second)
    assert kv.clock(key) == kv.version(key) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8], ids=str)
def test_torch_tensors_go_in_and_come_out(kv: kvd.KVStore, dtype: torch.dtype) -> None:
    key = f"torch {dtype}"
    value = torch.arange(12).reshape(3, 4).to(dtype)
    kv.init(key, torch.zeros(3, 4, dtype=dtype))
    out = torch.empty(3, 4, dtype=dtype)
    assert kv.pushpull(key, value, out=out) is out
    assert torch.equal(out, value)
    across = torch.zeros(4, 3, dtype=dtype).T
    kv.pull(key, out=across)
    assert torch.equal(across, value)
    kv.pushpull(key, value.T.contiguous().T)
    assert torch.equal(kv.pull(key, out=torch.empty_like(value)), value)


def test_a_tensor_that_requires_a_gradient(kv: kvd.KVStore) -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    kv.init("parameter", weight)
    kv.push("parameter", torch.full((5,), 3.0))
    kv.pull("parameter", out=weight)
    assert weight.requires_grad
    assert weight.tolist() == [3.0] * 5


def test_arrays_that_are_not_contiguous(kv: kvd.KVStore) -> None:
    whole = np.arange(48, dtype=np.float32).reshape(6, 8)
    kv.init("strided", np.zeros((3, 4), np.float32))
    for value in (whole[::2, ::2], whole[::-2, ::-2], np.asfortranarray(whole[:3, :4]), whole[:4, :3].T):
        frame = np.full((6, 8), -1, np.float32)
        out = frame[1::2, 1::2]
        kv.pushpull("strided", value, out=out)
        np.testing.assert_array_equal(out, value)
        assert (frame[::2] == -1).all()
        assert (frame[:, ::2] == -1).all()


def test_numbers_buffers_and_numpy_scalars(kv: kvd.KVStore) -> None:
    kv.init("number", 0.0)
    assert kv.pull("number").dtype == np.float32
    kv.push("number", 2.5)
    assert kv.pull("number") == 2.5
    kv.push("number", np.float32(3.5))
    assert kv.pull("number") == 3.5
    kv.init("buffer", bytearray(8))
    kv.push("buffer", b"abcdefgh")
    out = bytearray(8)
    assert kv.pull("buffer", out=out) is out
    assert out == b"abcdefgh"


def test_an_int_is_the_key_of_its_decimal_text(kv: kvd.KVStore) -> None:
    kv.init(12345, np.ones(2, np.float32))
    kv.push("12345", np.full(2, 9, np.float32))
    assert kv.pull(np.int64(12345)).tolist() == [9, 9]
    for wrong in (True, None, 1.5, b"bytes", "", "k" * 201):
        with pytest.raises(NotAllowed):
            kv.pull(wrong)
    for name in ("κλειδί 🔑", "a/b|c", " ", "k" * 200):
        kv.init(name, np.full(3, 7, np.int32))
        assert kv.pull(name).tolist() == [7, 7, 7]


def test_lists_of_keys_with_lists_of_values_and_outs(kv: kvd.KVStore) -> None:
    keys: list[str | int] = ["list a", 77, "list c"]
    shapes = [(5,), (), (40, 60)]
    kv.init(keys, [np.zeros(shape, np.float32) for shape in shapes])
    values = [np.full(shape, 1.5 * (i + 1), np.float32) for i, shape in enumerate(shapes)]
    outs = [np.empty(shape, np.float32) for shape in shapes]
    given = kv.pushpull(keys, values, out=outs)
    assert all(one is other for one, other in zip(given, outs, strict=True))
    for value, out, fresh in zip(values, outs, kv.pull(keys), strict=True):
        np.testing.assert_array_equal(out, value)
        np.testing.assert_array_equal(fresh, value)
    assert kv.pull(("list a", 77))[1] == 3.0
    assert kv.pull([]) == []
    kv.push([], [])
    with pytest.raises(NotAllowed, match="a list of keys needs as many values in a list: 3, got 2"):
        kv.push(keys, values[:2])
    with pytest.raises(NotAllowed, match="a list of keys needs as many outs in a list: 3"):
        kv.pull(keys, out=outs[0])
    assert kv.clock("list a") == 1


def test_one_array_per_device(kv: kvd.KVStore) -> None:
    kv.init("devices", np.zeros((2, 3), np.float16))
    values = [np.full((2, 3), i, np.float16) for i in (1, 2, 3)]
    outs = [np.empty((2, 3), np.float16), torch.empty(2, 3, dtype=torch.float16), np.empty((3, 2), np.float16).T]
    assert kv.pushpull("devices", values, out=outs) is outs
    for out in outs:
        np.testing.assert_array_equal(np.asarray(out), np.full((2, 3), 6, np.float16))
    kv.pushpull("devices", values)
    assert [int(value[0, 0]) for value in values] == [6, 6, 6]
    with pytest.raises(ShapeMismatch):
        kv.push("devices", [values[0], values[1][:1]])
    with pytest.raises(DtypeMismatch):
        kv.push("devices", [values[0], values[1].astype(np.float32)])


def test_the_outs_of_all_devices_are_checked_before_anything_happens(kv: kvd.KVStore) -> None:
    kv.init("outs", np.zeros(4, np.float32))
    good = np.full(4, -1, np.float32)
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    for other, error in (
        (np.zeros(5, np.float32), ShapeMismatch),
        (np.zeros(4, np.float64), DtypeMismatch),
        (fixed, NotAllowed),
    ):
        with pytest.raises(error):
            kv.pull("outs", out=[good, other])
        with pytest.raises(error):
            kv.pushpull("outs", np.ones(4, np.float32), out=[good, other])
    assert (good == -1).all()
    assert kv.clock("outs") == 0


def test_an_out_that_cannot_be_written_to(kv: kvd.KVStore) -> None:
    kv.init("read-only", np.zeros(4, np.float32))
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    for out in (fixed, b"0123456789abcdef", 3.0, [1.0, 2.0, 3.0, 4.0]):
        with pytest.raises((NotAllowed, DtypeMismatch)):
            kv.pull("read-only", out=out)
        with pytest.raises((NotAllowed, DtypeMismatch, ShapeMismatch)):
            kv.pushpull("read-only", np.ones(4, np.float32), out=out)
    with pytest.raises(NotAllowed):
        kv.pushpull("read-only", fixed)
    assert kv.clock("read-only") == 0


def test_a_wrong_shape_or_dtype_raises_at_the_call(kv: kvd.KVStore) -> None:
    kv.init("typed", np.zeros((2, 3), np.float32))
    with pytest.raises(ShapeMismatch, match="shape") as shape:
        kv.pull("typed", out=np.empty((3, 2), np.float32))
    assert shape.value.key == "typed"
    with pytest.raises(DtypeMismatch, match="dtype") as dtype:
        kv.pull("typed", out=np.empty((2, 3), np.float64))
    assert dtype.value.key == "typed"
    with pytest.raises(ShapeMismatch):
        kv.pushpull("typed", np.ones(6, np.float32))
    with pytest.raises(DtypeMismatch):
        kv.pushpull("typed", np.ones((2, 3), np.int32))
    with pytest.raises(ShapeMismatch):
        kv.pushpull("typed", np.ones((2, 3), np.float32), out=np.empty(6, np.float32))
    with pytest.raises(ShapeMismatch):
        kv.push("typed", np.ones((1, 3), np.float32)).wait()
    with pytest.raises(DtypeMismatch):
        kv.push("typed", np.ones((2, 3), np.float16)).wait()
    for unsupported in (np.zeros((2, 3), np.complex64), np.zeros((2, 3), bool), np.array("text"), object()):
        with pytest.raises((DtypeMismatch, NotAllowed)):
            kv.push("typed", unsupported)
    kv.push("typed", np.full((2, 3), 4, np.float32))  # none of this took a turn in the rounds
    assert kv.pull("typed")[1, 2] == 4
    assert kv.clock("typed") == 1


def test_an_unknown_key_is_a_key_error(kv: kvd.KVStore) -> None:
    with pytest.raises(KeyNotFound, match="'nobody'") as caught:
        kv.pull("nobody")
    assert caught.value.key == "nobody"
    with pytest.raises(KeyError):
        kv.pull("nobody", out=np.empty(3, np.float32))
    with pytest.raises(KeyNotFound):
        kv.pushpull("nobody", np.ones(3, np.float32))
    with pytest.raises(KeyNotFound):
        kv.push("nobody", np.ones(3, np.float32)).wait()
    for call in (kv.clock, kv.version):
        with pytest.raises(KeyNotFound):
            call("nobody")
    kv.init("nobody", np.ones(3, np.float32))  # and it can be made all the same
    kv.push("nobody", np.full(3, 2, np.float32))
    assert kv.pull("nobody").tolist() == [2, 2, 2]


def test_a_pulled_array_belongs_to_the_program(kv: kvd.KVStore) -> None:
    kv.init("private", np.zeros(2000, np.float32))
    first, second = kv.pull("private"), kv.pull("private")
    assert first.flags.writeable
    assert not np.shares_memory(first, second)
    first[:] = 99
    assert (second == 0).all()
    assert (kv.pull("private") == 0).all()


@pytest.mark.parametrize("count", [10, 300_000])
def test_the_buffer_is_the_programs_again_when_push_returns(kv: kvd.KVStore, count: int) -> None:
    key = f"reused {count}"
    kv.init(key, np.zeros(count, np.float32))
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    try:
        buffer = np.empty(count, np.float32)
        for step in range(8):
            buffer[:] = -(step + 1)
            if step % 2:
                kv.push(key, [buffer])  # a list of one device is no reason to share the memory
            else:
                kv.push(key, buffer)
            buffer[:] = np.nan
        np.testing.assert_array_equal(kv.pull(key), np.full(count, 36, np.float32))
    finally:
        kv.set_optimizer(None)


@pytest.mark.parametrize("count", [10, 300_000])
def test_the_buffer_is_the_programs_again_when_the_async_forms_return(kv: kvd.KVStore, count: int) -> None:
    key = f"async buffer {count}"
    buffer = np.full(count, 3, np.float32)
    made = kv.init_async(key, buffer)
    buffer[:] = np.nan
    made.wait()
    assert (kv.pull(key) == 3).all()
    out = np.empty(count, np.float32)
    for value in (buffer, [buffer]):
        buffer[:] = 5
        moved = kv.pushpull_async(key, value, out=out)
        buffer[:] = np.nan
        moved.wait()
        assert (out == 5).all()


def test_pushpull_in_place(kv: kvd.KVStore) -> None:
    kv.init("in place", np.full(2000, 10, np.float32))
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    try:
        value = np.full(2000, -1, np.float32)
        assert kv.pushpull("in place", value) is value
        assert (value == 11).all()
        handle = kv.pushpull_async("in place", value)
        assert handle.wait() is value
        assert (value == 0).all()
    finally:
        kv.set_optimizer(None)


def test_priorities_and_samples(kv: kvd.KVStore) -> None:
    kv.init("priority", np.zeros(3, np.float32))
    for priority in (0, -5, 10**6):
        kv.push("priority", np.full(3, priority, np.float32), priority)
        assert kv.pull("priority", priority=priority).tolist() == [priority] * 3
        kv.pushpull("priority", np.ones(3, np.float32), priority=priority)
    clock = kv.clock("priority")
    for wrong in (None, "high", 1.5, 1 << 70):
        with pytest.raises(NotAllowed, match="priority"):
            kv.push("priority", np.ones(3, np.float32), wrong)  # type: ignore[arg-type]
        with pytest.raises(NotAllowed, match="priority"):
            kv.pull("priority", priority=wrong)  # type: ignore[arg-type]
    for wrong in (-1, None, 2.5, 1 << 70):
        with pytest.raises(NotAllowed, match="samples"):
            kv.push("priority", np.ones(3, np.float32), samples=wrong)  # type: ignore[arg-type]
    assert kv.clock("priority") == clock


def test_a_list_larger_than_the_memory_limit_does_not_wait_for_itself() -> None:
    with LocalCluster(
        1, 1, slice_bytes="1MiB", request_timeout_s=6.0, server_timeout_s=2.0, worker_timeout_s=2.0
    ) as cluster:
        kv = cluster.store(memory_limit_bytes="1MiB", credit_bytes="1MiB")
        keys = ["a", "b", "c"]
        kv.init(keys, [np.zeros(200_000, np.float32)] * 3)
        kv.push(keys, [np.ones(200_000, np.float32)] * 3)
        for _ in range(3):
            kv.push("a", np.ones(200_000, np.float32))  # waits for room, and gets it
        assert kv.pull("a")[0] == 1
