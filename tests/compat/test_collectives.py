"""Collective calls on torch tensors, compared with what torch computes of all workers' tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvd
from kvd.compat.autograd import Reduction, broadcasted, gathered, reduced
from kvd.compat.collectives import Collectives, ReduceOp
from kvd.compat.scratch import MOST_NAMES, PIECE_BYTES, RING
from kvd.errors import DtypeMismatch, KvdError, NotAllowed, ShapeMismatch
from kvd.testing.cluster import LocalCluster

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
OTHERS = [torch.bool, torch.int16, torch.complex64]


def run(workers: int, program: Callable[[Collectives], Any], servers: int = 1) -> list[Any]:
    with LocalCluster(workers, servers) as cluster:
        return cluster.run(lambda kv: program(Collectives(kv)))


def values_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 40, shape, generator=generator).to(dtype)


def backward(value: Any) -> None:
    value.backward()


def equals(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    return tensor.dtype == expected.dtype and torch.equal(tensor, expected)


# ── reductions ──


@pytest.mark.parametrize("workers", [1, 3])
def test_reductions_in_every_dtype_by_name_and_without(workers: int) -> None:
    parts = {dtype: [values_of(rank, dtype) for rank in range(workers)] for dtype in (*FLOATS, *INTEGERS)}

    def program(calls: Collectives) -> None:
        rank = calls.store.rank
        for dtype, of_all in parts.items():
            mine = of_all[rank].clone()
            total = torch.stack([part.to(torch.float64) for part in of_all]).sum(0)
            mean = total / workers
            mean = mean.trunc() if dtype in INTEGERS else mean.to(torch.float32 if dtype != torch.float64 else dtype)
            for name in (None, "x", "x"):
                [summed] = calls.reduce([mine], ReduceOp.SUM, name=name).wait()
                assert equals(summed, total.to(dtype)), (dtype, name)
                [averaged] = calls.reduce([mine], ReduceOp.AVERAGE, name=name).wait()
                torch.testing.assert_close(averaged, mean.to(dtype), rtol=1e-6 if dtype in FLOATS[2:] else 0.01, atol=0)
                assert averaged.dtype == dtype
            assert equals(mine, of_all[rank])  # the input stays as it is
            [same] = calls.reduce([mine], ReduceOp.SUM, in_place=True).wait()
            assert same is mine
            assert equals(mine, total.to(dtype))

    run(workers, program, servers=2)


def test_groups_factors_shapes_and_lengths() -> None:
    def program(calls: Collectives) -> None:
        rank = calls.store.rank
        group = [torch.full((2, 2), rank + 1.0), torch.tensor(rank, dtype=torch.int64), torch.empty(0), torch.ones(3)]
        for name in (None, "group"):
            results = calls.reduce(group, ReduceOp.SUM, name=name).wait()
            assert [result.tolist() for result in results] == [[[3.0, 3.0]] * 2, 1, [], [2.0] * 3]
        [scaled] = calls.reduce([torch.ones(2) * rank], ReduceOp.AVERAGE, prescale=4.0, postscale=0.5).wait()
        assert scaled.tolist() == [1.0, 1.0]
        turned = torch.arange(6.0).reshape(2, 3).t()  # not contiguous
        [result] = calls.reduce([turned], ReduceOp.SUM, in_place=True).wait()
        assert torch.equal(result, 2 * torch.arange(6.0).reshape(2, 3).t())
        parameter = torch.nn.Parameter(torch.ones(2))
        calls.reduce([parameter], ReduceOp.SUM, name="parameter", in_place=True).wait()
        assert parameter.tolist() == [2.0, 2.0]
        for size in (1, 2, 100, 2):  # one name, several shapes
            [result] = calls.reduce([torch.ones(size)], ReduceOp.SUM, name="varies").wait()
            assert result.tolist() == [2.0] * size
        large = torch.arange(PIECE_BYTES // 4 * 2 + 7, dtype=torch.float32)  # three pieces
        [result] = calls.reduce([large], ReduceOp.AVERAGE).wait()
        assert torch.equal(result, large)

    run(2, program, servers=2)


def test_calls_with_names_may_come_in_any_order_and_many_be_under_way() -> None:
    def program(calls: Collectives) -> None:
        rank = calls.store.rank
        names = [f"n{place}" for place in range(3 * RING)]
        order = names if rank == 0 else names[::-1]
        under_way = {name: calls.reduce([torch.full((4,), float(name[1:]))], ReduceOp.SUM, name=name) for name in order}
        unnamed = [calls.reduce([torch.full((4,), float(place))], ReduceOp.SUM) for place in range(3 * RING)]
        for place, operation in enumerate(unnamed):
            assert operation.wait()[0].tolist() == [2.0 * place] * 4
            assert operation.done()
        for name, operation in under_way.items():
            assert operation.wait()[0].tolist() == [2 * float(name[1:])] * 4
            assert operation.wait() is operation.wait()
        keys = calls.store.version("collective/reduce/sum/float32/64/0")
        assert keys == 3  # of `3 * RING` calls, each ring key took three

    run(2, program)


def test_workers_that_reduce_different_tensors_are_told() -> None:
    def program(calls: Collectives) -> list[str]:
        rank, texts = calls.store.rank, []
        for mine in (torch.ones(5 + rank), torch.ones(2, 3 + 0 * rank).reshape((2, 3) if rank else (3, 2))):
            with pytest.raises(ShapeMismatch) as raised:
                calls.reduce([mine], ReduceOp.SUM).wait()
            texts.append(str(raised.value))
        with pytest.raises(ShapeMismatch, match="different tensors"):
            calls.reduce([torch.full((4,), float("nan"))] * (1 + rank), ReduceOp.AVERAGE).wait()
        [result] = calls.reduce([torch.ones(2)], ReduceOp.SUM).wait()  # nothing is out of step
        assert result.tolist() == [2.0, 2.0]
        return texts

    first, second = run(2, program)
    assert "('sum', torch.float32, [(5,)])" in first[0]
    assert "('sum', torch.float32, [(6,)])" in second[0]


def test_a_name_with_another_shape_than_that_of_worker_0_is_refused() -> None:
    with LocalCluster(2, 1) as cluster:
        zero, one = (Collectives(store) for store in cluster.open_stores())
        waiting = zero.reduce([torch.ones(3)], ReduceOp.SUM, name="x")
        with pytest.raises(ShapeMismatch, match="'collective/reduce/sum/float32/x'"):
            one.reduce([torch.ones(4)], ReduceOp.SUM, name="x").wait()
        assert not waiting.done()


def test_bad_tensors_names_and_roots() -> None:
    with kvd.create("local") as kv:
        calls = Collectives(kv)
        with pytest.raises(DtypeMismatch, match="bool is not supported"):
            calls.reduce([torch.ones(2, dtype=torch.bool)], ReduceOp.SUM)
        with pytest.raises(NotAllowed, match=r"layout torch\.sparse_coo is not dense"):
            calls.reduce([torch.eye(2).to_sparse()], ReduceOp.SUM)
        with pytest.raises(NotAllowed, match="takes torch tensors, not a list"):
            calls.reduce([[1.0]], ReduceOp.SUM)  # type: ignore[list-item]
        for root in (1, -1, True, "0"):
            with pytest.raises(NotAllowed, match="no worker has the rank"):
                calls.broadcast(torch.ones(1), root)  # type: ignore[arg-type]
        with pytest.raises(NotAllowed, match="without dimensions cannot be joined"):
            calls.gather(torch.tensor(1.0))
        for number in range(MOST_NAMES):
            calls.reduce([torch.ones(1)], ReduceOp.SUM, name=str(number)).wait()
        with pytest.raises(NotAllowed, match=f"'new' is name {MOST_NAMES + 1} of this program"):
            calls.reduce([torch.ones(1)], ReduceOp.SUM, name="new")
        calls.reduce([torch.ones(1)], ReduceOp.SUM, name="7").wait()
    with LocalCluster(1, 1) as cluster, pytest.raises(NotAllowed, match='create the store as "dist_sync"'):
        Collectives(cluster.store("dist_async"))


# ── from one to all, and from all to all ──


def test_broadcasts_from_any_worker_keep_every_bit() -> None:
    def program(calls: Collectives) -> None:
        rank = calls.store.rank
        for root in (2, 0, 1):
            for dtype in (*FLOATS, *INTEGERS, *OTHERS):
                for name in (None, "b"):
                    mine = values_of(rank, dtype)
                    result = calls.broadcast(mine, root, name=name).wait()
                    assert equals(result, values_of(root, dtype)), (root, dtype)
                    assert equals(mine, values_of(rank, dtype))
                    assert calls.broadcast(mine, root, name=name, in_place=True).wait() is mine
                    assert equals(mine, values_of(root, dtype))
        special = torch.tensor([-0.0, float("nan"), float("inf")]) if rank == 1 else torch.ones(3)
        result = calls.broadcast(special, 1).wait()
        assert str(result.tolist()) == "[-0.0, nan, inf]"
        turned = torch.full((2,), 1j * (rank + 1)).conj()
        assert calls.broadcast(turned, 1).wait().tolist() == [-2j, -2j]
        large = torch.full((PIECE_BYTES // 4 + 5,), float(rank))
        assert (calls.broadcast(large, 2).wait() == 2.0).all()
        assert calls.broadcast(torch.tensor(float(rank)), 1).wait().item() == 1.0
        assert calls.broadcast(torch.empty(0), 1).wait().tolist() == []
        if rank == 1:
            calls.broadcast(torch.ones(4), 1).wait()
        else:
            with pytest.raises(ShapeMismatch, match="worker 1 broadcasts another tensor"):
                calls.broadcast(torch.ones(2, 2), 1).wait()

    run(3, program, servers=2)


def test_many_tensors_in_one_stream_and_lists_that_differ() -> None:
    def program(calls: Collectives) -> None:
        rank = calls.store.rank
        model: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        torch.manual_seed(rank)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model[1].num_batches_tracked += rank
        large = torch.full((3, PIECE_BYTES // 4), float(rank)).t()  # not contiguous, and three pieces
        tensors = [*model.state_dict().items(), ("large", large)]
        calls.broadcast_all(tensors, 1)
        assert (large == 1.0).all()
        assert model[1].num_batches_tracked.item() == 1
        [spread] = calls.reduce(
            [torch.cat([p.detach().flatten() for p in model.parameters()])], ReduceOp.AVERAGE
        ).wait()
        torch.testing.assert_close(spread, torch.cat([p.detach().flatten() for p in model.parameters()]))

        cases: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], type[KvdError], str]] = [
            (
                {"a": torch.ones(2)},
                {"b": torch.ones(2)},
                ShapeMismatch,
                "worker 0 broadcasts 'a' where worker 1 has 'b'",
            ),
            (
                {"a": torch.ones(2)},
                {"a": torch.ones(3)},
                ShapeMismatch,
                r"'a' has the shape \(2,\) in worker 0, and \(3,\)",
            ),
            ({"a": torch.ones(2)}, {"a": torch.ones(2).half()}, DtypeMismatch, "'a' has the dtype float32 in worker 0"),
            ({"a": torch.ones(2)}, {}, ShapeMismatch, "only worker 0 has 'a'"),
            ({}, {"a": torch.ones(2)}, ShapeMismatch, "only worker 1 has 'a'"),
        ]
        for of_root, of_other, kind, text in cases:
            if rank == 0:
                calls.broadcast_all(list(of_root.items()), 0)
            else:
                with pytest.raises(kind, match=text):
                    calls.broadcast_all(list(of_other.items()), 0)
        after = torch.full((2,), float(rank))  # nothing is out of step
        calls.broadcast_all([("after", after)], 1)
        assert after.tolist() == [1.0, 1.0]

    run(2, program)


def test_objects_travel_without_pickle() -> None:
    thing = {
        "lr": 0.1,
        3: [None, True, "text", b"bytes", (1, (2.5,)), -(2**40)],
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "large": torch.arange(300_000),
    }

    def program(calls: Collectives) -> None:
        rank = calls.store.rank
        received = calls.broadcast_object(thing if rank == 1 else None, 1)
        assert received.keys() == thing.keys()
        assert received[3] == thing[3]
        assert equals(received["tensor"], thing["tensor"])  # type: ignore[arg-type]
        assert equals(received["large"], thing["large"])  # type: ignore[arg-type]
        assert calls.broadcast_object(rank, 0) == 0
        with pytest.raises(NotAllowed, match="set"):
            calls.broadcast_object({"a": [1, {2}]} if rank == 0 else None, 0)
        assert calls.broadcast_object([rank], 1) == [1]

    run(2, program)


def test_gathering_joins_parts_of_different_lengths() -> None:
    def program(calls: Collectives) -> None:
        rank = calls.store.rank
        for dtype in (*FLOATS, *INTEGERS, *OTHERS):
            parts = [values_of(of, dtype, (of, 2)) for of in range(3)]  # worker 0 has nothing
            joined, start = calls.gather(parts[rank])
            assert equals(joined, torch.cat(parts))
            assert start == sum(range(rank))
        with pytest.raises(ShapeMismatch, match=r"worker \d gathers a tensor whose dtype, or shape"):
            calls.gather(torch.ones(2, 3 if rank == 2 else 4))
        joined, _ = calls.gather(torch.tensor([float(rank)]))
        assert joined.tolist() == [0.0, 1.0, 2.0]

    run(3, program, servers=2)


# ── gradients ──


def test_gradients_flow_through_the_calls() -> None:
    """With workers of equal loss functions f(all) = Σ weight_r · all, whose gradients are known."""

    def program(calls: Collectives) -> None:
        rank = calls.store.rank
        weight = torch.tensor([1.0, 10.0]) * (rank + 1)
        for op, factor in ((ReduceOp.SUM, 3.0), (ReduceOp.AVERAGE, 1.5)):
            x = torch.ones(2, requires_grad=True)
            backward((reduced(calls, Reduction(op, "x"), [x])[0] * weight).sum())
            assert x.grad is not None
            assert x.grad.tolist() == [factor, 10 * factor]
        x = torch.ones(2, requires_grad=True)
        backward((broadcasted(calls, x, 1, None) * weight).sum())
        assert x.grad is not None
        assert x.grad.tolist() == ([1.5, 15.0] if rank == 1 else [0.0, 0.0])
        y = torch.ones(1 + rank, requires_grad=True)
        backward((gathered(calls, y) * torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)).sum())
        assert y.grad is not None
        assert y.grad.tolist() == ([1.5] if rank == 0 else [3.0, 4.5])

    run(2, program)


def test_join_waits_for_all_and_finds_who_got_furthest() -> None:
    came = threading.Barrier(2)

    def program(calls: Collectives) -> list[float]:
        rank = calls.store.rank
        seen = []
        for epoch in range(2):
            steps = (2, 4)[rank] if epoch == 0 else (5, 3)[rank]
            for _ in range(steps):
                [mean] = calls.reduce([torch.full((2,), float(rank))], ReduceOp.AVERAGE, name="gradient").wait()
                seen.append(mean[0].item())
            seen.append(100.0 + calls.join(steps))
        came.wait(60)
        return seen

    first, second = run(2, program)
    assert first == [0.5, 0.5, 101.0, 0.5, 0.5, 0.5, 0.0, 0.0, 100.0]
    assert second == [0.5, 0.5, 1.0, 1.0, 101.0, 0.5, 0.5, 0.5, 100.0]
