"""Embeddings whose rows are on the servers: the rows of torch's own, after the same training on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import kvd
import kvd.torch as kt
from kvd.errors import DtypeMismatch, NotAllowed, NotCopyable
from kvd.initializer import Zeros
from kvd.optimizer import SGD, Adagrad, Adam, Optimizer
from kvd.testing.cluster import LocalCluster

ROWS, WIDTH, STEPS, BATCH, PADDING = 30, 4, 6, 8, 2

VALUES = 0.3 * torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 12, (STEPS, BATCH, 3), generator=torch.Generator().manual_seed(2))  # many come up twice
TARGETS = torch.randn(STEPS, BATCH, 2, generator=torch.Generator().manual_seed(3))


def weight() -> torch.Tensor:
    return torch.randn(WIDTH, 2, generator=torch.Generator().manual_seed(4))


def loss_of(embedding: nn.Module, step: int, part: slice) -> Any:
    """Two forwards of one backward: of all ids, and of the first in each row."""
    ids, dtype = IDS[step, part], TARGETS.dtype
    both = embedding(ids).mean(1) + embedding(ids[:, 0]).tanh()
    return nn.functional.mse_loss(both.to(dtype) @ weight(), TARGETS[step, part])


def torch_rows(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The rows after all steps on whole batches."""
    values = VALUES.clone().to(dtype)
    values[PADDING] = 0
    embedding = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING, sparse=True, _weight=values)
    optimizer = make(embedding.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(embedding, step, slice(None)).backward()
        optimizer.step()
    return embedding.weight.detach()


def embedding_of(kv: kvd.KVStore, optimizer: Optimizer | None = None, **more: Any) -> kt.Embedding:
    options: dict[str, Any] = {"padding_idx": PADDING, "values": VALUES.float(), **more}
    return kt.Embedding(ROWS, WIDTH, name="words", store=kv, optimizer=optimizer, **options)


def rows_of(kv: kvd.KVStore) -> Any:
    rows = kv.row_sparse_pull("words", np.arange(ROWS))
    rows[PADDING] = 0  # torch has zeros there, and kvd what it began with, which no forward reads
    return rows


RULES: dict[str, tuple[Optimizer, Any]] = {
    "SGD": (SGD(0.3), lambda given: torch.optim.SGD(given, 0.3)),
    "Adagrad": (Adagrad(0.3), lambda given: torch.optim.Adagrad(given, 0.3)),
    # SparseAdam corrects no bias of its epsilon, which matters where a gradient is tiny.
    "Adam": (Adam(0.1, epsilon=1e-15), lambda given: torch.optim.SparseAdam([*given], 0.1, eps=1e-15)),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("rule", RULES)
def test_two_workers_and_servers_equal_torch_on_the_whole_batch(rule: str) -> None:
    optimizer, of_torch = RULES[rule]

    def program(kv: kvd.KVStore) -> Any:
        embedding = embedding_of(kv, optimizer)
        half = slice(BATCH // 2 * kv.rank, BATCH // 2 * (kv.rank + 1))
        for step in kv.steps(STEPS):
            loss_of(embedding, step, half).backward()
        return rows_of(kv), kv.version("words")

    with LocalCluster(2, 2) as cluster:
        results = cluster.run(program)
    for rows, version in results:
        np.testing.assert_allclose(rows, torch_rows(of_torch), rtol=0, atol=1e-6)
        assert version == STEPS


def test_a_table_of_float64_in_this_process() -> None:
    with kvd.create("local") as kv:
        embedding = embedding_of(kv, Adagrad(0.3), values=VALUES, dtype="float64")
        for step in range(STEPS):
            loss_of(embedding, step, slice(None)).backward()
        found = rows_of(kv)
    np.testing.assert_allclose(found, torch_rows(RULES["Adagrad"][1], torch.float64), rtol=0, atol=1e-7)


def test_an_asynchronous_store_updates_with_each_push() -> None:
    def program(kv: kvd.KVStore) -> Any:
        embedding = embedding_of(kv, SGD(1.0), padding_idx=None, initializer=Zeros(), values=None)
        for _ in range(kv.rank + 1):  # as many as each worker likes
            loss: Any = embedding(torch.tensor([3, 3, 4 + kv.rank])).sum()
            loss.backward()
        kv.barrier("pushed")
        return kv.row_sparse_pull("words", [3, 4, 5])[:, 0].tolist()

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program, "dist_async") == [[-6.0, -1.0, -2.0]] * 2


def test_accumulated_backwards_are_one_push() -> None:
    with kvd.create("local") as kv:
        embedding = embedding_of(kv, SGD(0.3))
        with embedding.no_sync():
            loss_of(embedding, 0, slice(0, 4)).backward()
            loss_of(embedding, 0, slice(0, 4)).backward()
        assert kv.version("words") == 0
        loss_of(embedding, 1, slice(None)).backward()
        assert kv.version("words") == 1
        found = rows_of(kv)
    values = VALUES.float()
    values[PADDING] = 0
    plain = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING, sparse=True, _weight=values)
    optimizer = torch.optim.SGD(plain.parameters(), 0.3)
    (2 * loss_of(plain, 0, slice(0, 4)) + loss_of(plain, 1, slice(None))).backward()
    optimizer.step()
    np.testing.assert_allclose(found, plain.weight.detach(), rtol=0, atol=1e-6)


def test_forwards_without_gradients_push_nothing() -> None:
    with kvd.create("local") as kv:
        embedding = embedding_of(kv)  # reads need no optimizer
        with torch.no_grad():
            assert not embedding(IDS[0]).requires_grad
        embedding.eval()
        found = embedding(torch.tensor([[PADDING, 5], [29, PADDING]], dtype=torch.int32))
        assert not found.requires_grad
        assert found.shape == (2, 2, WIDTH)
        assert found.flatten(1)[0].tolist() == [0.0] * WIDTH + VALUES[5].float().tolist()
        assert embedding(torch.tensor(5)).tolist() == VALUES[5].float().tolist()
        assert embedding(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, WIDTH)
        assert kv.version("words") == 0
        embedding.train()
        with pytest.raises(NotAllowed, match=r"no optimizer is set on the store of table 'words'.*job="):
            embedding(IDS[0])


def test_a_worker_without_ids_takes_part() -> None:
    def program(kv: kvd.KVStore) -> Any:
        embedding = embedding_of(kv, SGD(1.0), op="sum", padding_idx=None, initializer=Zeros(), values=None)
        for step in kv.steps(3):
            ids = torch.tensor([step, step, 7]) if kv.rank == 0 else torch.zeros(0, dtype=torch.int64)
            loss: Any = embedding(ids).sum()
            loss.backward()
        return kv.row_sparse_pull("words", [0, 1, 2, 3, 7])[:, 0].tolist()

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == [[-2.0, -2.0, -2.0, 0.0, -3.0]] * 2


def test_any_id_and_a_drawn_row() -> None:
    with kvd.create("local") as kv:
        embedding = kt.Embedding(None, 2000, name="hashed", store=kv, optimizer=SGD(0.1))
        rows = embedding(torch.tensor([1 << 62, 3])).detach()
        assert rows[0].mean().abs() < 0.2
        assert 0.9 < rows[0].std() < 1.1
        assert not torch.equal(rows[0], rows[1])
        with pytest.raises(NotAllowed, match=r"ids\[1\] is -4: table 'hashed' has the rows from 0 on"):
            embedding(torch.tensor([3, -4]))
        assert str(embedding) == "Embedding(None, 2000, name='hashed')"


def test_a_backward_that_fails_leaves_nothing_for_the_next() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            raise RuntimeError("too bad")

    with kvd.create("local") as kv:
        embedding = embedding_of(kv, SGD(1.0), padding_idx=None)
        first = embedding(torch.tensor([3])).sum()
        start = torch.ones(1, requires_grad=True)
        failing: Any = first + Failing.apply(start * 2).sum()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="too bad"):
            failing.backward()
        before = rows_of(kv)
        loss: Any = embedding(torch.tensor([4])).sum()
        loss.backward()
        changed = np.flatnonzero((rows_of(kv) != before).any(1)).tolist()
        assert changed == [4]


def test_a_table_inside_and_outside_of_a_checkpoint() -> None:
    """No gradient is lost, also where several backwards are one push."""
    with kvd.create("local") as kv:
        embedding = embedding_of(kv, SGD(1.0), padding_idx=None)
        before = rows_of(kv)

        def backward(*, reentrant: bool) -> None:
            start = torch.ones(1, WIDTH, requires_grad=True)
            inside: Any = checkpoint(lambda x: x + embedding(torch.tensor([0])), start, use_reentrant=reentrant)
            loss: Any = (inside + embedding(torch.tensor([3]))).sum()
            loss.backward()

        with embedding.no_sync():
            backward(reentrant=False)
            with pytest.raises(NotAllowed, match="use_reentrant=False"):
                backward(reentrant=True)
        backward(reentrant=False)
        np.testing.assert_allclose(
            before - rows_of(kv), np.isin(np.arange(ROWS), [0, 3])[:, None] * np.full(WIDTH, 2.0)
        )


LINEAR = nn.Linear(WIDTH, 2)


def linear_of() -> nn.Linear:
    """The same in all threads, which share torch's generator."""
    return copy.deepcopy(LINEAR)


def mixed_loss(embedding: nn.Module, linear: nn.Linear, step: int, part: slice) -> Any:
    return nn.functional.mse_loss(linear(embedding(IDS[step, part]).mean(1)), TARGETS[step, part])


def assert_equals_torch(rows: Any, linear: nn.Linear, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Both as after a training with torch on the whole batch, with SGD for the embedding and this for the rest."""
    values = VALUES.float()
    values[PADDING] = 0
    plain, wanted = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING, sparse=True, _weight=values), linear_of()
    rules = [torch.optim.SGD(plain.parameters(), 0.3), make(wanted.parameters())]
    for step in range(STEPS):
        for rule in rules:
            rule.zero_grad()
        mixed_loss(plain, wanted, step, slice(None)).backward()
        for rule in rules:
            rule.step()
    np.testing.assert_allclose(rows, plain.weight.detach(), rtol=0, atol=1e-6)
    for found, parameter in zip(linear.parameters(), wanted.parameters(), strict=True):
        np.testing.assert_allclose(found.detach(), parameter.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("where", ["servers", "workers"])
def test_a_table_beside_a_distributed_optimizer(where: Any) -> None:
    """One optimizer for both on the servers; or one of its own for the table, in a store of another job."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        if where == "servers":
            return torch.optim.SGD(parameters, 0.3)
        return torch.optim.Adam(parameters, 0.01, eps=1e-3)

    def program(kv: kvd.KVStore) -> Any:
        tables = kv
        if where == "workers":
            tables = cluster.store(job="tables", node_id=f"tables-{kv.rank}", preferred_rank=kv.rank)
        linear = linear_of()
        named = linear.named_parameters()
        optimizer = kt.DistributedOptimizer(make(linear.parameters()), named, where=where, op="mean", store=kv)
        embedding = embedding_of(tables, SGD(0.3))
        own = slice(BATCH // 2 * kv.rank, BATCH // 2 * (kv.rank + 1))
        for step in kv.steps(STEPS):
            optimizer.zero_grad()
            mixed_loss(embedding, linear, step, own).backward()
            optimizer.step()
        return rows_of(tables), linear

    with LocalCluster(2, 2) as cluster:
        results = cluster.run(program)
    for rows, linear in results:
        assert_equals_torch(rows, linear, make)


def test_a_compiled_model() -> None:
    with kvd.create("local") as kv:
        embedding = embedding_of(kv, SGD(0.3))
        model = nn.Sequential(embedding, nn.Tanh())
        compiled: Any = torch.compile(model, backend="eager")
        compiled(IDS[0]).sum().backward()
        assert torch.equal(compiled(IDS[1]), model(IDS[1]))
        assert kv.version("words") == 1


def test_what_a_state_dict_has_and_where_the_rows_are(tmp_path: Path) -> None:
    with kvd.create("local") as kv:
        model = nn.ModuleDict({"words": embedding_of(kv, SGD(0.3)), "rest": nn.Linear(1, 1)})
        state = model.state_dict()
        assert list(state) == ["rest.weight", "rest.bias"]
        assert [name for name, _ in model.named_parameters()] == ["rest.weight", "rest.bias"]
        model.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*words.weight"):
            model.load_state_dict({**state, "words.weight": torch.zeros(ROWS, WIDTH)})
        with pytest.raises(NotCopyable):
            copy.deepcopy(model)
        kv.export_table("words", tmp_path / "rows")
        np.testing.assert_array_equal(load_file(tmp_path / "rows")["rows"], VALUES.float())


def test_bad_input() -> None:
    with kvd.create("local") as kv:
        embedding = embedding_of(kv, SGD(0.3))
        with pytest.raises(NotAllowed, match=r"ids\[1, 0\] is 30: table 'words' has 30 rows, 0 to 29"):
            embedding(torch.tensor([[0, 1], [30, -1]]))
        with pytest.raises(NotAllowed, match=r"ids\[0\] is -1: table 'words' has 30 rows"):
            embedding(torch.tensor(-1))
        for ids in (torch.tensor([1.0]), torch.tensor([True])):
            with pytest.raises(DtypeMismatch, match="ids of table 'words' are whole numbers, not torch"):
                embedding(ids)
        for padding in (30, -31, True, 0.5):
            with pytest.raises(NotAllowed, match="padding_idx is a whole number from -30 to 29"):
                embedding_of(kv, padding_idx=padding)
        with pytest.raises(NotAllowed, match='op is "mean" or "sum"'):
            embedding_of(kv, op="max")
        with pytest.raises(DtypeMismatch, match="float32 or float64, not float16"):
            kt.Embedding(3, 4, name="half", store=kv, dtype="float16")
    assert nn.Embedding(ROWS, WIDTH, padding_idx=-1).padding_idx == ROWS - 1
    with kvd.create("local") as kv:
        assert embedding_of(kv, padding_idx=-1).padding_idx == ROWS - 1
