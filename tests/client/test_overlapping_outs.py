"""Arrays that a call writes to must not share memory: one value would destroy the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.compute.tensors import DTYPES
from kvd.errors import NotAllowed
from kvd.testing.cluster import LocalCluster

FLOAT = np.float32


@pytest.fixture(scope="module", params=["local", "cluster"])
def kv(request: pytest.FixtureRequest) -> Iterator[kvd.KVStore]:
    """A store with the keys a, b and 3, of four elements that are 1, 2 and 3, and the tables t and u."""
    if request.param == "local":
        with kvd.create("local") as store:
            yield init(store)
    else:
        with LocalCluster(1, 2) as cluster:
            yield init(cluster.store())


def init(store: kvd.KVStore) -> kvd.KVStore:
    store.init(["a", "b", 3], [np.full(4, value, FLOAT) for value in (1, 2, 3)])
    store.init(["t", "u"], [kvd.RowSparse(shape=(5, 4))] * 2)
    return store


def shared_pairs() -> dict[str, Callable[[], list[Any]]]:
    """Two arrays of four elements that share memory."""
    return {
        "one array": lambda: [np.zeros(4, FLOAT)] * 2,
        "slices": lambda: (lambda buffer: [buffer[:4], buffer[3:7]])(np.zeros(9, FLOAT)),
        "slices in reverse order": lambda: (lambda buffer: [buffer[3:7], buffer[:4]])(np.zeros(9, FLOAT)),
        "a view and a step": lambda: (lambda buffer: [buffer[:4], buffer[::2]])(np.zeros(8, FLOAT)),
        "one tensor": lambda: [torch.zeros(4)] * 2,
        "two names of a tensor": lambda: (lambda tensor: [tensor, tensor.detach()])(torch.zeros(4)),
        "a tensor and its array": lambda: (lambda tensor: [tensor, tensor.numpy()])(torch.zeros(4)),
        "a buffer": lambda: (lambda buffer: [np.frombuffer(buffer, FLOAT)] * 2)(bytearray(16)),
    }


CALLS: dict[str, Callable[[kvd.KVStore, list[Any], list[Any]], Any]] = {
    "pull": lambda kv, keys, outs: kv.pull(keys, out=outs),
    "pull cast": lambda kv, keys, outs: kv.pull(keys, out=outs, cast=True),
    "pull_async": lambda kv, keys, outs: kv.pull_async(keys, out=outs).wait(),
    "pushpull": lambda kv, keys, outs: kv.pushpull(keys, [np.ones(4, FLOAT)] * 2, out=outs),
    "pushpull cast": lambda kv, keys, outs: kv.pushpull(keys, [np.ones(4, FLOAT)] * 2, out=outs, cast=True),
    "pushpull in place": lambda kv, keys, outs: kv.pushpull(keys, outs),
    "pushpull_async": lambda kv, keys, outs: kv.pushpull_async(keys, outs).wait(),
    "broadcast": lambda kv, keys, outs: kv.broadcast(keys, outs),
    "broadcast out": lambda kv, keys, outs: kv.broadcast(keys, [np.ones(4, FLOAT)] * 2, out=outs),
}


@pytest.mark.parametrize("call", CALLS)
def test_two_keys_are_named_that_would_be_written_to_one_memory(kv: kvd.KVStore, call: str) -> None:
    clocks = kv.clock("a"), kv.clock("3")
    for name, pair in shared_pairs().items():
        outs = pair()
        with pytest.raises(NotAllowed, match=r"'a' and 3 .*leave 3 out") as caught:
            CALLS[call](kv, ["a", 3], outs)
        assert caught.value.key == "a", name
        assert not np.asarray(outs[0]).any()
    assert (kv.clock("a"), kv.clock("3")) == clocks


def test_the_arrays_of_devices_and_of_a_key_that_is_named_twice(kv: kvd.KVStore) -> None:
    one, other = np.zeros(4, FLOAT), torch.zeros(4)
    for keys, outs in (("a", [one, one]), (["a", "a"], [one, one]), (["b", "a"], [[one], [other, other.detach()]])):
        with pytest.raises(NotAllowed, match=r"value of key 'a' .*share memory"):
            kv.pull(keys, out=outs)
    with pytest.raises(NotAllowed, match="'a' and 'b'"):
        kv.pull(["a", "b"], out=[[other, one], [np.zeros(4, FLOAT), one]])
    kv.pull(["a", "a"], out=[one, other])
    assert one.tolist() == other.tolist() == kv.pull("a").tolist()


def test_elements_of_one_array_at_the_same_place(kv: kvd.KVStore) -> None:
    array = np.lib.stride_tricks.as_strided(np.zeros(1, FLOAT), (4,), (0,))
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda out: kv.pull("a", out=out),
        lambda out: kv.pull(["b", "a"], out=[np.zeros(4, FLOAT), out]),
        lambda out: kv.pull("a", out=out, cast=True),
        lambda out: kv.pushpull("a", np.ones(4, FLOAT), out=out),
        lambda out: kv.pushpull("a", out),
        lambda out: kv.broadcast("a", out),
        lambda out: kv.pull("a", out=[torch.zeros(4), out]),
    )
    for expanded in (torch.zeros(1).expand(4), array):
        for call in calls:
            with pytest.raises(NotAllowed, match=r"key 'a': .* same place .*clone\(\)"):
                call(expanded)
        kv.push("a", expanded).wait()  # it is only read
    assert kv.pull("a").tolist() == [0, 0, 0, 0]
    kv.push("a", np.ones(4, FLOAT))


def test_rows_of_tables(kv: kvd.KVStore) -> None:
    rows = np.zeros((2, 4), FLOAT)
    with pytest.raises(NotAllowed, match="'t' and 'u'"):
        kv.row_sparse_pull(["t", "u"], [[0, 1], [1, 2]], out=[rows, rows])
    with pytest.raises(NotAllowed, match=r"key 't' .*share memory"):
        kv.row_sparse_pull(["t", "t"], [[0, 1], [1, 2]], out=[rows, rows])
    with pytest.raises(NotAllowed, match=r"key 't': .* same place"):
        kv.row_sparse_pull("t", [0, 1], out=torch.zeros(1, 4).expand(2, 4))
    kv.row_sparse_pull(["t", "u"], [[0], [2]], out=[rows[:1], rows[1:]])


def test_what_lies_side_by_side_is_filled(kv: kvd.KVStore) -> None:
    keys = ["a", "b", 3]
    wanted = [array.tolist() for array in kv.pull(keys)]
    buffer, matrix = np.zeros(12, FLOAT), np.zeros((4, 3), FLOAT)
    for outs in (
        [buffer[:4], buffer[8:], buffer[4:8]],
        [buffer[::3], buffer[1::3], buffer[2::3]],
        [buffer[:8:2], buffer[1:8:2], buffer[8:][::-1]],
        list(matrix.T),
        list(torch.zeros(3, 4)),
    ):
        kv.pull(keys, out=outs)
        assert [np.asarray(out).tolist() for out in outs] == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_list_call_that_was_made_many_times_looks_at_its_outs_again(kv: kvd.KVStore, dtype: str) -> None:
    keys = [f"warm {dtype} {number}" for number in range(12)]
    values = np.arange(48).reshape(12, 4).astype(DTYPES[dtype])
    outs = np.zeros((13, 4), DTYPES[dtype])
    kv.init(keys, list(values))
    for _ in range(4):
        kv.pushpull(keys, list(values), list(outs[:12]))
        np.testing.assert_array_equal(outs[:12], values)
        flat = outs.reshape(-1)
        for wrong in ([*outs[:11], flat[42:46]], [*outs[1:12], flat[4:8]], [outs[3]] * 12):
            with pytest.raises(NotAllowed, match="share memory"):
                kv.pushpull(keys, list(values), wrong)
        with pytest.raises(NotAllowed, match="share memory"):
            kv.pushpull(keys, [values[0]] * 12)
    assert {kv.clock(key) for key in keys} == {4}


@pytest.mark.parametrize("count", [300, 400_000])
def test_an_out_may_be_the_value_of_another_key(count: int) -> None:
    """Answers arrive while later messages of the same call are still to be sent."""

    def program(kv: kvd.KVStore) -> None:
        keys = ["a", "b"]
        kv.init(keys, [np.zeros(count, FLOAT)] * 2)
        kv.init("shifted", np.zeros(count, FLOAT))
        for step in range(6):
            one, other = np.full(count, step, FLOAT), torch.full((count,), step + 0.5)
            second = other if step % 2 else other.numpy()
            kv.pushpull(keys, [one, second], out=[second, one])
            assert (np.asarray(second) == step * kv.num_workers).all()
            assert (one == (step + 0.5) * kv.num_workers).all()
            buffer = np.arange(count + 100, dtype=FLOAT) % 1000 + step
            wanted = buffer[:count] * kv.num_workers
            kv.pushpull("shifted", buffer[:count], out=buffer[100:])
            np.testing.assert_array_equal(buffer[100:], wanted)

    with LocalCluster(2, 2, slice_bytes="256KiB", credit_bytes="256KiB") as cluster:
        cluster.run(program)
    with kvd.create("local") as kv:
        program(kv)


def test_tied_weights_are_one_key(kv: kvd.KVStore) -> None:
    module = torch.nn.ModuleDict({"e": torch.nn.Embedding(2, 2), "head": torch.nn.Linear(2, 2, bias=False)})
    module["head"].weight = module["e"].weight
    keys, weights = zip(*module.state_dict().items(), strict=True)
    both = list(dict(module.named_parameters(remove_duplicate=False)).values())
    for given in (weights, both):
        with pytest.raises(NotAllowed, match=r"'e\.weight' and 'head\.weight' .*leave 'head\.weight' out"):
            kv.init(keys, given)
    with pytest.raises(NotAllowed, match=r"'e.weight' and 'head.weight'"):
        kv.broadcast(keys, weights)
    names, parameters = zip(*module.named_parameters(), strict=True)
    kv.init(names, parameters)
    pushed = torch.full((2, 2), 5.0)
    kv.push("e.weight", pushed)
    kv.pull(names, out=parameters)
    assert torch.equal(both[1], pushed)
    kv.delete(names)


def test_tied_weights_are_found_key_by_key_while_the_program_has_the_tensor(kv: kvd.KVStore) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    names = {"one name": weight, "another": weight.detach()}
    kv.init("one name", names["one name"])
    with pytest.raises(NotAllowed, match=r"'one name' and 'another' .*leave 'another' out"):
        kv.init("another", names["another"])
    with pytest.raises(NotAllowed, match="'one name' and 'another'"):
        kv.init("another", weight)
    kv.init("another", weight.detach().clone())
    kv.delete(["one name", "another"])
    kv.init("another", names["another"])
    with pytest.raises(NotAllowed, match="'another' and 'one name'"):
        kv.init("one name", weight)
    del names
    kv.init("one name", weight)  # nothing else has that memory now
    kv.delete(["one name", "another"])


def test_memory_that_a_parameter_has_left_makes_no_tied_weights(kv: kvd.KVStore) -> None:
    buffer = torch.zeros(3)
    weight = torch.nn.Parameter(buffer.detach())
    kv.init("moved", weight)
    weight.data = torch.ones(3)
    kv.init("its memory", buffer)
    kv.delete(["moved", "its memory"])


def test_keys_of_an_init_that_was_refused_have_no_tensor(kv: kvd.KVStore) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(NotAllowed, match="leave 'second' out"):
        kv.init(["first", "second"], [weight, weight])
    kv.init("second", weight)
    kv.delete("second")


def test_many_keys_may_begin_with_one_array(kv: kvd.KVStore) -> None:
    for number, zeros in enumerate((np.zeros(3, FLOAT), torch.zeros(3))):
        keys = [f"zeros {number} {place}" for place in range(3)]
        kv.init(keys, [zeros] * 3)
        kv.push(keys[1], np.ones(3, FLOAT)).wait()
        assert [array.tolist() for array in kv.pull(keys)] == [[0] * 3, [1] * 3, [0] * 3]


def test_in_an_event_loop() -> None:
    async def program() -> None:
        async with await kvd.aio.create("local") as kv:
            await kv.init(["a", "b"], [np.zeros(2, FLOAT)] * 2)
            out = np.zeros(2, FLOAT)
            with pytest.raises(NotAllowed, match="'a' and 'b'"):
                await kv.pull(["a", "b"], out=[out, out])
            with pytest.raises(NotAllowed, match="'a' and 'b'"):
                await kv.pushpull(["a", "b"], [out, out])
            with pytest.raises(NotAllowed, match=r"key 'a': .*same place"):
                await kv.pull("a", out=torch.zeros(1).expand(2))

    asyncio.run(program())


def test_an_observer_fills_arrays_that_are_apart() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.init(["a", 3], [np.full(2, 1, FLOAT), np.full(2, 3, FLOAT)])
        with kvd.Observer(**{**cluster.settings, "scheduler": cluster.address}) as observer:
            out = np.zeros(4, FLOAT)
            with pytest.raises(NotAllowed, match=r"'a' and 3"):
                observer.pull(["a", 3], out=[out[:2], out[1:3]])
            observer.pull(["a", 3], out=[out[:2], out[2:]])
        assert out.tolist() == [1, 1, 3, 3]
