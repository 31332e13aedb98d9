"""fit: epochs, uneven data, checkpoints, and a worker that dies."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.errors import ConfigError, GradientAnomaly, InputMismatch, NotAllowed
from kvd.optimizer import SGD, Adam, Optimizer
from kvd.parallel import (
    Accuracy,
    BatchNorm,
    Checkpoint,
    Composite,
    CrossEntropy,
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Dense,
    Dropout,
    EpochReport,
    Model,
    Sequential,
    SoftmaxCrossEntropy,
    Tanh,
    TorchModel,
    fit,
)
from kvd.testing.cluster import LocalCluster

F: Any = torch.nn.functional
GENERATOR = np.random.default_rng(3)
SAMPLES = 54
X = GENERATOR.normal(size=(SAMPLES, 5)).astype(np.float32)
Y = (X @ GENERATOR.normal(size=(5, 3))).argmax(1)
MODEL = Sequential(Dense(12), Tanh(), Dense(3), SoftmaxCrossEntropy())
PARAMS = MODEL.initialize((8, 5), seed=1)
RULE = SGD(0.3, momentum=0.9)


def batches(size: int, x: Any = X, y: Any = Y) -> list[DataBatch]:
    """The last one is smaller where the size does not divide."""
    return [DataBatch([x[i : i + size]], [y[i : i + size]]) for i in range(0, len(x), size)]


def group_of(size: int = 8, devices: int = 2, model: Model = MODEL, **arguments: Any) -> DataParallelExecutorGroup:
    group = DataParallelExecutorGroup(
        model, ["cpu"] * devices, [DataDesc("data", (size, 5))], [DataDesc("label", (size,), "int64")], **arguments
    )
    if model is MODEL:
        group.set_params(PARAMS)
    return group


def weights_of(group: DataParallelExecutorGroup) -> dict[str, Any]:
    values = {n: np.empty(a[0].shape, np.float32) for n, a in zip(group.param_names, group.param_arrays, strict=True)}
    states = {n: np.empty(a[0].shape) for n, a in zip(group.aux_names, group.aux_arrays, strict=True)}
    group.get_params(values, states)
    return values


def expected(steps: Sequence[Sequence[tuple[Any, Any]]]) -> list[Any]:
    """torch in float64: each step is the mean over the samples of all its parts."""
    net: Any = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3)).double()
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), PARAMS.values(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    for parts in steps:
        x, y = (torch.from_numpy(np.concatenate([part[i] for part in parts])) for i in range(2))
        optimizer.zero_grad()
        F.cross_entropy(net(x.double()), y).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in net.parameters()]


def parts(given: list[DataBatch]) -> list[tuple[Any, Any]]:
    return [(batch.data[0], batch.label[0]) for batch in given if batch.label]


def check_close(weights: dict[str, Any], wanted: list[Any]) -> None:
    for got, value in zip(weights.values(), wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=0, atol=2e-6)


def check_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
@pytest.mark.parametrize("update", ["server", "local"])
def test_an_uneven_last_batch_has_the_gradient_of_the_samples_it_has(kind: str, update: Any) -> None:
    reports: list[EpochReport] = []

    def program(kv: kvd.KVStore) -> dict[str, Any]:
        group = group_of(16)
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
    check_close(weights, expected([[part] for _ in range(3) for part in parts(batches(16))]))
    assert [(report.epoch, report.steps, report.samples) for report in reports] == [(e, 4, SAMPLES) for e in range(3)]
    assert set(reports[0].train) == set(reports[0].evaluation) == {"accuracy", "cross_entropy"}
    assert reports[2].evaluation["cross_entropy"] < reports[0].evaluation["cross_entropy"]
    assert reports[2].evaluation["accuracy"] == pytest.approx(accuracy(weights))


def accuracy(weights: dict[str, Any]) -> float:
    w0, b0, w1, b1 = weights.values()
    return float(((np.tanh(X @ w0.T + b0) @ w1.T + b1).argmax(1) == Y).mean())


def run_two(program: Callable[[kvd.KVStore], Any], merge: str = "weighted", **settings: Any) -> list[Any]:
    with LocalCluster(2, 2, merge=merge, **settings) as cluster:
        return cluster.run(program)


def test_uneven_batches_and_uneven_numbers_of_batches_per_worker() -> None:
    """Worker 0 has 20 samples in batches of 8, worker 1 has 34 in batches of 10, so it has one batch more."""
    cut = 20
    own = [batches(8, X[:cut], Y[:cut]), batches(10, X[cut:], Y[cut:])]

    def program(kv: kvd.KVStore) -> Any:
        group = group_of(8)
        reports = fit(group, kv, own[kv.rank], 2, optimizer=RULE, uneven=True)
        assert sum(report.steps for report in reports) == 2 * len(own[kv.rank])
        return weights_of(group)

    first, second = [parts(given) * 2 for given in own]
    assert (len(first), len(second)) == (6, 8)
    steps = [[first[i], second[i]] if i < len(first) else [second[i]] for i in range(len(second))]
    results = run_two(program)
    check_same(*results)
    check_close(results[0], expected(steps))
    check_same(run_two(program)[0], results[0])


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
        group = group_of(9, model=model, seed=kv.rank)
        fit(group, kv, data, 2, optimizer=Adam(0.01))
        states = {name: np.empty(a[0].shape) for name, a in zip(group.aux_names, group.aux_arrays, strict=True)}
        values = {
            name: np.empty(a[0].shape, np.float32)
            for name, a in zip(group.param_names, group.param_arrays, strict=True)
        }
        group.get_params(values, states)
        return {**values, **states}

    first, second = run_two(program, "mean")
    check_same(first, second)  # states too: rank 0's
    again, _ = run_two(program, "mean")
    check_same(first, again)
    assert sorted(asked) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("optimizer", [RULE, Adam(0.02)])
@pytest.mark.parametrize(("stop", "update"), [(2, "server"), (5, "server"), (9, "server"), (5, "local")])
def test_resume_ends_with_the_same_bits(tmp_path: Path, stop: int, update: Any, optimizer: Optimizer) -> None:
    """A run that stops after `stop` batches, in the middle of an epoch of 4, and one on a new cluster that goes on."""
    model = Sequential(Dense(12), BatchNorm(), Tanh(), Dropout(0.3), Dense(3), SoftmaxCrossEntropy())
    params = model.initialize((8, 5), seed=1)
    path = tmp_path / "model.safetensors"

    class Stopped(Exception):
        pass

    def program(stop: int | None, checkpoint: Path | None) -> Callable[[kvd.KVStore], Any]:
        def run(kv: kvd.KVStore) -> Any:
            group = group_of(8, model=model, seed=kv.rank)
            group.set_params(params)
            own, seen = batches(7, X[kv.rank :: 2], Y[kv.rank :: 2]), 0

            def data(epoch: int) -> Iterator[DataBatch]:
                nonlocal seen
                for batch in own:
                    if seen == stop:
                        raise Stopped
                    seen += 1
                    yield batch

            arguments: dict[str, Any] = {"checkpoint": checkpoint, "checkpoint_steps": 1 if checkpoint else None}
            try:
                reports = fit(
                    group, kv, data, 3, optimizer=optimizer, update=update, resume=checkpoint is not None, **arguments
                )
            except Stopped:
                return None
            return weights_of(group), [report.steps for report in reports]

        return run

    whole = run_two(program(None, None))
    run_two(program(stop, path))
    saved = Checkpoint.read(path)
    assert (saved.epoch, saved.batch, saved.step) == (stop // 4, stop % 4, stop)
    assert set(saved.params) == set(params)
    assert set(saved.aux) == {"batchnorm0_running_mean", "batchnorm0_running_var"}
    assert len(list(tmp_path.iterdir())) == (2 if update == "server" else 1)  # with the optimizer's state beside it
    resumed = run_two(program(None, path))
    for (mine, steps), (theirs, _) in zip(resumed, whole, strict=True):
        check_same(mine, theirs)
        assert sum(steps) == 12 - stop


def test_a_finished_checkpoint_leaves_nothing_to_do(tmp_path: Path) -> None:
    path = tmp_path / "model"
    weights = []
    for _ in range(2):
        with kvd.create("local") as kv:
            group = group_of()
            reports = fit(group, kv, batches(8), 2, optimizer=RULE, checkpoint=path, resume=True)
            weights.append(weights_of(group))
    assert reports == []
    check_same(*weights)


def test_asynchronous_workers_write_checkpoints_after_epochs(tmp_path: Path) -> None:
    path = tmp_path / "model"

    def program(kv: kvd.KVStore) -> Any:
        group = group_of()
        fit(group, kv, batches(8), 2, optimizer=RULE, checkpoint=path)
        with pytest.raises(ConfigError, match="after epochs only"):
            fit(group, kv, batches(8), 2, checkpoint=path, checkpoint_steps=1)
        return weights_of(group)

    with LocalCluster(2, 1) as cluster:
        cluster.run(program, "dist_async")
    assert Checkpoint.read(path).step == 14


TRAINS = """
import sys, json, hashlib, time, numpy as np, kvd
sys.path.insert(0, "tests/parallel")
from test_fit import *
kv = kvd.create("dist_sync")
die_at = int(sys.argv[1])
model = Sequential(Dense(12), Tanh(), Dropout(0.3), Dense(3), SoftmaxCrossEntropy())
group = group_of(8, model=model, seed=kv.rank)
group.set_params(model.initialize((8, 5), seed=1))
seen = 0
def data(epoch):
    global seen
    for batch in batches(8, X[kv.rank::2], Y[kv.rank::2]):
        if seen == die_at:
            send = group.pipeline._send
            def dying(name, gradients):  # the last layer's gradients have gone, the first layer's have not
                if name.startswith("dense0"):
                    time.sleep(0.3)
                    print("dying", flush=True)
                    time.sleep(600)
                send(name, gradients)
            group.pipeline._send = dying
        seen += 1
        yield batch
reports = fit(group, kv, data, 3, optimizer=RULE)
digest = hashlib.sha256(b"".join(value.tobytes() for value in weights_of(group).values())).hexdigest()
kv.close()
print(json.dumps({"rank": kv.rank, "digest": digest, "steps": sum(report.steps for report in reports)}), flush=True)
"""


def finish(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output.decode()
    result: dict[str, Any] = json.loads(output.decode().strip().splitlines()[-1])
    return result


def test_a_worker_that_died_in_a_step_redoes_it_and_ends_with_the_same_bits() -> None:
    settings: dict[str, Any] = {"worker_timeout_s": 20.0, "merge": "weighted"}
    with LocalCluster(2, 2, **settings) as cluster:
        undisturbed = [finish(process) for process in [cluster.script(TRAINS, n, "-1") for n in (0, 1)]]
    assert undisturbed[0]["digest"] == undisturbed[1]["digest"]
    with LocalCluster(2, 2, **settings) as cluster:
        other = cluster.script(TRAINS, 0, "-1")
        victim = cluster.script(TRAINS, 1, "6")
        assert victim.stdout is not None
        assert victim.stdout.readline().decode().strip() == "dying"
        victim.kill()
        victim.wait()
        victim.stdout.close()
        results = [finish(cluster.script(TRAINS, 1, "-1")), finish(other)]
    assert [result["digest"] for result in results] == [undisturbed[0]["digest"]] * 2
    assert [result["steps"] for result in results] == [6, 12]


def test_two_fits_after_each_other_go_on() -> None:
    def program(kv: kvd.KVStore) -> Any:
        group = group_of(16)
        fit(group, kv, batches(16), 1, optimizer=RULE)
        reports = fit(group, kv, batches(16), 2)
        assert [report.steps for report in reports] == [4, 4]
        return weights_of(group)

    with LocalCluster(1, 1) as cluster:
        (weights,) = cluster.run(program)
    check_close(weights, expected([[part] for _ in range(3) for part in parts(batches(16))]))


def test_anomalies_and_batches_smaller_than_the_group() -> None:
    poisoned = X[:8].copy()
    poisoned[3] = np.inf
    with kvd.create("local") as kv:
        group = group_of()
        with pytest.raises(GradientAnomaly):
            fit(group, kv, [DataBatch([poisoned], [Y[:8]])], 1, optimizer=RULE, detect_anomaly=True)
        with pytest.raises(InputMismatch, match="leave nothing for device 1"):
            fit(group, kv, [DataBatch([X[:1]], [Y[:1]])], 1)


def test_progress_is_shown_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
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
        ({"data": iter(batches(8))}, "gone through only once"),
        ({"resume": True}, "need a checkpoint"),
        ({"checkpoint_steps": 3}, "need a checkpoint"),
        ({"checkpoint_steps": 0, "checkpoint": "x"}, "above 0"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"data": batches(8), "epochs": 1, "optimizer": RULE, **arguments}
    with kvd.create("local") as kv, pytest.raises(ConfigError, match=message):
        fit(group_of(), kv, given.pop("data"), given.pop("epochs"), **given)


def test_what_resume_refuses(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"no checkpoint")
    with kvd.create("local") as kv:
        with pytest.raises(NotAllowed, match=r"model: this is no checkpoint"):
            fit(group_of(), kv, batches(8), 1, optimizer=RULE, checkpoint=path, resume=True)
        group = group_of()
        group.bind_to(kv, optimizer=RULE)
        with pytest.raises(NotAllowed, match="let fit bind the group"):
            fit(group, kv, batches(8), 1, checkpoint=path, resume=True)
        with kvd.create("local") as other, pytest.raises(NotAllowed, match="another store"):
            fit(group, other, batches(8), 1)


def test_a_checkpoint_keeps_every_dtype_and_shape(tmp_path: Path) -> None:
    import ml_dtypes

    params = {"half": np.ones((2, 3), ml_dtypes.bfloat16), "whole": np.arange(4.0)[::2]}
    Checkpoint(params, {"count": np.asarray(7)}, 1, 2, 3).write(tmp_path / "file")
    read = Checkpoint.read(tmp_path / "file")
    assert (read.epoch, read.batch, read.step, read.server_states) == (1, 2, 3, "")
    assert read.params["half"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read.params["whole"], [0.0, 2.0])
    assert read.aux["count"].shape == ()
    assert not (tmp_path / "file.part").exists()
