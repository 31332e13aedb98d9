"""fit: epochs, uneven batches and data, metrics, progress, and invalid arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.errors import ConfigError, GradientAnomaly, InputMismatch
from kvd.optimizer import Adam
from kvd.parallel import (
    Accuracy,
    Composite,
    CrossEntropy,
    DataBatch,
    EpochReport,
    TorchModel,
    fit,
)
from kvd.testing.cluster import LocalCluster
from tests.parallel.fit_harness import RULE, SAMPLES, X, Y, batches, expected, group_of, parts, run_two
from tests.parallel.group_harness import assert_close, assert_same, weights_of


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
@pytest.mark.parametrize("update", ["server", "local"])
def test_an_uneven_last_batch_has_the_gradient_of_the_samples_it_has(kind: str, update: Any) -> None:
    reports: list[EpochReport] = []

    def program(kv: kvd.KVStore) -> list[Any]:
        group = group_of(size=16)
        metric = Composite(Accuracy(), CrossEntropy())
        told: list[EpochReport] = []
        reports[:] = fit(
            group,
            kv,
            batches(16),
            3,
            metric=metric,
            optimizer=RULE,
            update=update,
            eval_data=batches(20),
            on_epoch=told.append,
        )
        assert told == reports
        return weights_of(group)

    if kind == "local":
        with kvd.create("local") as kv:
            weights = program(kv)
    else:
        with LocalCluster(1, 2) as cluster:
            (weights,) = cluster.run(program)
    assert_close(weights, expected([[part] for _ in range(3) for part in parts(batches(16))]))
    assert [(report.epoch, report.steps, report.samples) for report in reports] == [(e, 4, SAMPLES) for e in range(3)]
    assert set(reports[0].train) == set(reports[0].evaluation) == {"accuracy", "cross_entropy"}
    assert reports[2].evaluation["cross_entropy"] < reports[0].evaluation["cross_entropy"]
    assert reports[2].evaluation["accuracy"] == pytest.approx(accuracy(weights))


def accuracy(weights: list[Any]) -> float:
    w0, b0, w1, b1 = weights
    return float(((np.tanh(X @ w0.T + b0) @ w1.T + b1).argmax(1) == Y).mean())


def test_uneven_batches_and_uneven_numbers_of_batches_per_worker() -> None:
    """Worker 0 has 20 samples in batches of 8, worker 1 has 34 in batches of 10, so it has one batch more."""
    cut = 20
    own = [batches(8, X[:cut], Y[:cut]), batches(10, X[cut:], Y[cut:])]

    def program(kv: kvd.KVStore) -> Any:
        group = group_of(size=8)
        reports = fit(group, kv, own[kv.rank], 2, optimizer=RULE, uneven=True)
        assert sum(report.steps for report in reports) == 2 * len(own[kv.rank])
        return weights_of(group)

    first, second = [parts(given) * 2 for given in own]
    assert (len(first), len(second)) == (6, 8)
    steps = [[first[i], second[i]] if i < len(first) else [second[i]] for i in range(len(second))]
    results = run_two(program)
    assert_same(*results)
    assert_close(results[0], expected(steps))
    assert_same(run_two(program)[0], results[0])


def test_data_by_epoch_with_a_torch_model_and_states() -> None:
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(
        torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 3)
    )
    asked: list[int] = []

    def program(kv: kvd.KVStore) -> Any:
        def data(epoch: int) -> Iterator[DataBatch]:
            asked.append(epoch)
            order = np.random.default_rng([epoch, kv.rank]).permutation(SAMPLES)
            return iter(batches(9, X[order], Y[order]))

        model = TorchModel(net, torch.nn.CrossEntropyLoss())
        group = group_of(model, size=9, seed=kv.rank)
        fit(group, kv, data, 2, optimizer=Adam(0.01))
        states = {name: np.empty(a[0].shape) for name, a in zip(group.aux_names, group.aux_arrays, strict=True)}
        values = {
            name: np.empty(a[0].shape, np.float32)
            for name, a in zip(group.param_names, group.param_arrays, strict=True)
        }
        group.get_params(values, states)
        return [*values.values(), *states.values()]

    first, second = run_two(program, "mean")
    assert_same(first, second)  # states too: rank 0's
    again, _ = run_two(program, "mean")
    assert_close(first, again)  # torch adds up in an order that depends on its threads
    assert sorted(asked) == [0] * 4 + [1] * 4


def test_two_fits_after_each_other_go_on() -> None:
    def program(kv: kvd.KVStore) -> Any:
        group = group_of(size=16)
        fit(group, kv, batches(16), 1, optimizer=RULE)
        reports = fit(group, kv, batches(16), 2)
        assert [report.steps for report in reports] == [4, 4]
        return weights_of(group)

    with LocalCluster(1, 1) as cluster:
        (weights,) = cluster.run(program)
    assert_close(weights, expected([[part] for _ in range(3) for part in parts(batches(16))]))


def test_anomalies_and_batches_smaller_than_the_group() -> None:
    poisoned = X[:8].copy()
    poisoned[3] = np.inf
    with kvd.create("local") as kv:
        group = group_of()
        with pytest.raises(GradientAnomaly):
            fit(group, kv, [DataBatch([poisoned], [Y[:8]])], 1, optimizer=RULE, detect_anomaly=True)
        with pytest.raises(InputMismatch, match="leave nothing for device 1"):
            fit(group, kv, [DataBatch([X[:1]], [Y[:1]])], 1)


def test_progress_is_shown_only_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in ("auto", False, True):
        with kvd.create("local") as kv:
            fit(
                group_of(),
                kv,
                batches(8),
                1,
                optimizer=RULE,
                metric=Accuracy(),
                eval_data=batches(8),
                progress=progress,
            )
        shown = capsys.readouterr()
        assert shown.out == ""
        assert ("epoch 1" in shown.err and "7/7" in shown.err) is (progress is True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": -1}, "epochs must be"),
        ({"data": iter(batches(8))}, "iterated only once"),
        ({"resume": True}, "need a checkpoint"),
        ({"checkpoint_steps": 3}, "need a checkpoint"),
        ({"checkpoint_steps": 0, "checkpoint": "x"}, "above 0"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"data": batches(8), "epochs": 1, "optimizer": RULE, **arguments}
    with kvd.create("local") as kv, pytest.raises(ConfigError, match=message):
        fit(group_of(), kv, given.pop("data"), given.pop("epochs"), **given)
