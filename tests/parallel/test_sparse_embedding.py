"""Embeddings with row-sparse gradients: rows travel, and the weights are those of a dense one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.errors import ConfigError, GradientAnomaly, NotAllowed
from kvd.optimizer import SGD, Adagrad, Optimizer
from kvd.parallel import (
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Dense,
    Embedding,
    Flatten,
    Monitor,
    Sequential,
    SoftmaxCrossEntropy,
    TorchModel,
    fit,
)
from kvd.testing.cluster import LocalCluster
from tests.parallel.group_harness import assert_close, assert_same, weights_of

WORKERS, STEPS, SIZE, WORDS, WIDTH, VOCABULARY = 2, 5, 6, 3, 4, 40
WEIGHT = "embedding0_weight"
GENERATOR = np.random.default_rng(5)
IDS = GENERATOR.integers(0, 12, (STEPS, WORKERS * SIZE, WORDS))  # many come up twice, and some devices share some
CLASSES = GENERATOR.integers(0, 3, (STEPS, WORKERS * SIZE))


def network(*, sparse: bool = True) -> Sequential:
    return Sequential(Embedding(VOCABULARY, WIDTH, sparse), Flatten(), Dense(3), SoftmaxCrossEntropy())


PARAMS = network().initialize((SIZE, WORDS), seed=2)


def group_of(model: Any = None, devices: int = 2, size: int = SIZE, **more: Any) -> Any:
    data, labels = [DataDesc("data", (size, WORDS), "int64")], [DataDesc("label", (size,), "int64")]
    group = DataParallelExecutorGroup(model or network(), ["cpu"] * devices, data, labels, **more)
    if "shared_group" not in more and isinstance(group.model, Sequential):
        group.set_params(PARAMS)
    return group


def torch_net(*, sparse: bool = True) -> Any:
    """The network with `PARAMS`."""
    table = torch.nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
    net = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(WORDS * WIDTH, 3))
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), PARAMS.values(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return net


def cross_entropy() -> Any:
    return torch.nn.CrossEntropyLoss()


def torch_weights(optimizer: Any) -> list[Any]:
    """After all steps, in float64, with dense gradients, by one process."""
    net = torch_net(sparse=False).double()
    rule = optimizer(net.parameters())
    for ids, classes in zip(IDS, CLASSES, strict=True):
        rule.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(net(torch.from_numpy(ids)), torch.from_numpy(classes))
        loss.backward()
        rule.step()
    return [parameter.detach().numpy() for parameter in net.parameters()]


def train(kv: Any, optimizer: Optimizer, model: Any = None) -> list[Any]:
    size = WORKERS * SIZE // kv.num_workers
    own = slice(kv.rank * size, (kv.rank + 1) * size)
    group = group_of(model, size=size)
    if kv.rank:  # rank 0's values count
        group.set_params({name: np.zeros(shape, np.float32) for name, shape in group.description.params.items()})
    group.bind_to(kv, optimizer=optimizer)
    for ids, classes in zip(IDS, CLASSES, strict=True):
        group.forward_backward(DataBatch([ids[own]], [classes[own]]))
    return weights_of(group)


RULES = {
    "sgd": (SGD(0.2), lambda parameters: torch.optim.SGD(parameters, lr=0.2)),
    "adagrad": (Adagrad(0.2), lambda parameters: torch.optim.Adagrad(parameters, lr=0.2)),
}


@pytest.mark.parametrize(
    ("rule", "merge"), [("sgd", "sum"), ("adagrad", "mean"), pytest.param("sgd", "weighted", marks=pytest.mark.soak)]
)
def test_two_workers_with_two_devices_equal_torch_with_dense_gradients(rule: str, merge: str) -> None:
    optimizer, of_torch = RULES[rule]
    with LocalCluster(WORKERS, 2, merge=merge) as cluster:
        results = cluster.run(lambda kv: train(kv, optimizer))
    assert_close(results[0], torch_weights(of_torch), atol=2e-6)
    assert_same(results[1], results[0])


def test_a_module_with_a_sparse_embedding() -> None:
    optimizer, of_torch = RULES["adagrad"]
    with LocalCluster(WORKERS, 2) as cluster:
        results = cluster.run(lambda kv: train(kv, optimizer, TorchModel(torch_net(), cross_entropy())))
    assert_close(results[0], torch_weights(of_torch), atol=2e-6)
    assert_same(results[1], results[0])


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_store_of_this_process(kind: str) -> None:
    with kvd.create(kind) as kv:
        weights = train(kv, RULES["adagrad"][0])
    assert_close(weights, torch_weights(RULES["adagrad"][1]), atol=2e-6)


@pytest.mark.parametrize("kind", ["sequential", "torch"])
def test_only_the_rows_of_the_batch_travel(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pulled: list[Any] = []
    pushed: list[Any] = []
    with kvd.create("local") as kv:
        group = group_of() if kind == "sequential" else group_of(TorchModel(torch_net(), cross_entropy()))
        weight = group.param_names[0]
        group.bind_to(kv, optimizer=SGD(0.1))
        pull, push = kv.row_sparse_pull, kv.push

        def watched_pull(key: Any, ids: Any, **more: Any) -> Any:
            pulled.append((key, ids))
            return pull(key, ids, **more)

        def watched_push(*given: Any, **more: Any) -> Any:
            pushed.append(given)
            return push(*given, **more)

        monkeypatch.setattr(kv, "row_sparse_pull", watched_pull)
        monkeypatch.setattr(kv, "push", watched_push)
        group.forward_backward(DataBatch([IDS[0, :SIZE]], [CLASSES[0, :SIZE]]))
    wanted = [np.unique(part).tolist() for part in np.split(IDS[0, :SIZE], 2)]
    assert sorted((key, ids.tolist()) for key, ids in pulled) == sorted((weight, ids) for ids in wanted)
    ((key, gradients, priority),) = pushed
    assert (key, priority) == (weight, 0)
    assert [each.ids.tolist() for each in gradients] == wanted


def test_another_worker_changes_rows_that_a_later_batch_reads() -> None:
    with kvd.create("local") as kv:
        group = group_of()
        group.bind_to(kv, optimizer=SGD(1.0))
        kv.push(WEIGHT, kvd.RowSparseArray([39], np.full((1, WIDTH), 2, np.float32)))
        ids = np.full((SIZE, WORDS), 39)
        group.forward(DataBatch([ids]), is_train=False)
        for arrays in group.param_arrays[0]:
            np.testing.assert_array_equal(arrays[39], PARAMS[WEIGHT][39] - 2)


def test_fit_goes_on_from_a_checkpoint_with_the_state_of_the_rows(tmp_path: Path) -> None:
    batches = [DataBatch([ids], [classes]) for ids, classes in zip(IDS, CLASSES, strict=True)]
    rule = RULES["adagrad"][0]

    def fitted(epochs: int, **more: Any) -> list[Any]:
        with kvd.create("local") as kv:
            group = group_of(size=WORKERS * SIZE)
            fit(group, kv, batches, epochs, optimizer=rule, **more)
            return weights_of(group)

    whole = fitted(2)
    fitted(1, checkpoint=tmp_path / "c")
    assert_same(fitted(2, checkpoint=tmp_path / "c", resume=True), whole)


# ── without a store ──


def dense_of(gradients: Any) -> Any:
    whole = np.zeros((VOCABULARY, WIDTH))
    for each in gradients:
        np.add.at(whole, each.ids, each.rows.astype(np.float64))
    return whole


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("kind", ["sequential", "torch"])
def test_rows_of_gradients_are_those_of_the_dense_gradient(request_: str, kind: str) -> None:
    model = network() if kind == "sequential" else TorchModel(torch_net(), cross_entropy())
    sparse, dense = group_of(model, grad_req=request_), group_of(network(sparse=False), grad_req=request_)
    for step in (0, 1):
        for group in (sparse, dense):
            group.forward_backward(DataBatch([IDS[step, :SIZE]], [CLASSES[step, :SIZE]]))
        (rows, *others), (whole, *same) = sparse.grad_arrays, dense.grad_arrays
        np.testing.assert_allclose(dense_of(rows), sum(whole), rtol=0, atol=1e-6)
        assert_close([array for arrays in others for array in arrays], [array for arrays in same for array in arrays])
        assert all(len(np.unique(each.ids)) == len(each.ids) for each in rows)


def test_gradients_of_all_devices_are_a_value_to_push() -> None:
    group = group_of()
    group.forward_backward(DataBatch([IDS[0, :SIZE]], [CLASSES[0, :SIZE]]))
    with kvd.create("local") as kv:
        kv.init("w", kvd.RowSparse(shape=(VOCABULARY, WIDTH)))
        kv.push("w", group.grad_arrays[0])
        rows = kv.row_sparse_pull("w", np.arange(VOCABULARY))
    np.testing.assert_allclose(rows, dense_of(group.grad_arrays[0]), rtol=0, atol=1e-6)


def test_shapes_change_and_groups_share_the_same_gradients() -> None:
    group = group_of()
    held = group.grad_arrays[0]
    group.reshape([DataDesc("data", (4, WORDS), "int64")], [DataDesc("label", (4,), "int64")])
    other = group_of(size=8, shared_group=group)
    assert all(
        one is two is three for one, two, three in zip(held, *(g.grad_arrays[0] for g in (group, other)), strict=True)
    )
    other.forward_backward(DataBatch([IDS[0, :8]], [CLASSES[0, :8]]))
    np.testing.assert_array_equal(np.unique(np.concatenate([each.ids for each in held])), np.unique(IDS[0, :8]))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_monitors_and_checks_look_at_the_rows() -> None:
    with kvd.create("local") as kv:
        group = group_of(detect_anomaly=True)
        monitor = Monitor(1)
        group.install_monitor(monitor)
        group.bind_to(kv, optimizer=SGD(0.1))
        monitor.tic()
        group.forward_backward(DataBatch([IDS[0, :SIZE]], [CLASSES[0, :SIZE]]))
        assert any(entry.name == "embedding0_backward_weight" for entry in monitor.toc())
        kv.push(WEIGHT, ([IDS[1, 0, 0]], np.full((1, WIDTH), np.inf, np.float32)))
        group.forward(DataBatch([IDS[1, :SIZE]], [CLASSES[1, :SIZE]]))
        with pytest.raises(GradientAnomaly):
            group.backward()
        assert kv.version(WEIGHT) == 2  # nothing was sent


class Recommender(torch.nn.Module):
    """Two tables, one of them behind a layer with a name; a bag; and a table whose weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = torch.nn.ModuleDict({"user": torch.nn.Embedding(9, 2, sparse=True)})
        self.bag = torch.nn.EmbeddingBag(9, 2, mode="sum", sparse=True)
        self.tied = torch.nn.Embedding(9, 2, sparse=True)
        self.out = torch.nn.Linear(2, 9, bias=False)
        self.out.weight = self.tied.weight
        self.frozen = torch.nn.Embedding(9, 2, sparse=True).requires_grad_(False)
        self.narrow = torch.nn.Embedding(9, 2, sparse=True, dtype=torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = ids[:, 0]
        score = self.sides["user"](first) + self.bag(input=ids) + self.frozen(first)
        scores: torch.Tensor = score + self.narrow(first).to(score.dtype)
        return scores


def test_which_weights_of_a_module_are_row_sparse() -> None:
    torch.manual_seed(3)
    model = TorchModel(Recommender(), cross_entropy())
    ids, classes = GENERATOR.integers(0, 9, (8, 3)), GENERATOR.integers(0, 2, 8)
    descs = [DataDesc("data", ids.shape, "int64")], [DataDesc("label", (8,), "int64")]
    group = DataParallelExecutorGroup(model, ["cpu", "cpu"], *descs)
    assert set(group.description.row_sparse) == {"sides.user.weight", "bag.weight"}
    initial, _ = model.initial()
    with kvd.create("local") as kv:
        group.bind_to(kv, optimizer=SGD(0.5))
        group.forward_backward(DataBatch([ids], [classes]))
        learned, aux = model.initial()
        group.get_params(learned, aux)
    module = Recommender().double()
    module.load_state_dict(
        {name: torch.from_numpy(np.float64(array)) for name, array in (initial | aux).items()}, strict=False
    )
    loss = cross_entropy()(module(torch.from_numpy(ids)), torch.from_numpy(classes))
    loss.backward()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name != "narrow.weight":
            gradient = 0 if parameter.grad is None else parameter.grad.to_dense().numpy()
            np.testing.assert_allclose(learned[name], initial[name] - 0.5 * gradient, rtol=0, atol=1e-6)
    assert not np.array_equal(learned["bag.weight"], initial["bag.weight"])


def test_what_cannot_be() -> None:
    with kvd.create("local") as kv:
        with pytest.raises(NotAllowed, match="embedding0_weight is row-sparse"):
            group_of().bind_to(kv, optimizer=SGD(0.1), update="local")
        with pytest.raises(ConfigError, match="has row-sparse gradients in one of the two groups only"):
            group_of(network(sparse=False), shared_group=group_of())
        executor = group_of().executors[0]
        with pytest.raises(ConfigError, match="has row-sparse gradients, which each backward replaces"):
            executor.use_gradients({WEIGHT: np.zeros((VOCABULARY, WIDTH), np.float32)})
        descs = [DataDesc("data", (2, WORDS), "int64")]
        with pytest.raises(ConfigError, match="has row-sparse gradients, which a ndarray does not hold"):
            Sequential(Embedding(5, 2, sparse=True)).bind("cpu", descs, grads={WEIGHT: np.zeros((5, 2), np.float32)})
        group = group_of()
        group.bind_to(kv, optimizer=SGD(0.1))
        with pytest.raises(ValueError, match=r"id 40 is not a whole number in \[0, 40\)"):
            group.forward(DataBatch([np.full((SIZE, WORDS), VOCABULARY)]), is_train=False)
