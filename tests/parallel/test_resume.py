"""fit goes on: from a checkpoint, and after the death of a worker."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import ConfigError, NotAllowed
from kvd.optimizer import Adam, Optimizer
from kvd.parallel import (
    BatchNorm,
    Checkpoint,
    DataBatch,
    Dense,
    Dropout,
    Sequential,
    SoftmaxCrossEntropy,
    Tanh,
    fit,
)
from kvd.parallel.group.parameters import host_arrays
from kvd.parallel.training.run import Run
from kvd.parallel.training.start import find_start
from kvd.testing.cluster import LocalCluster
from tests.parallel.fit_harness import RULE, X, Y, batches, group_of, run_two
from tests.parallel.group_harness import assert_same, weights_of


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
            group = group_of(model, seed=kv.rank)
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
        assert_same(mine, theirs)
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
    assert_same(*weights)


def test_asynchronous_workers_write_checkpoints_after_epochs(tmp_path: Path) -> None:
    path = tmp_path / "model"

    def program(kv: kvd.KVStore) -> Any:
        group = group_of()
        fit(group, kv, batches(8), 2, optimizer=RULE, checkpoint=path)
        with pytest.raises(ConfigError, match="only after epochs"):
            fit(group, kv, batches(8), 2, checkpoint=path, checkpoint_steps=1)
        return weights_of(group)

    with LocalCluster(2, 1) as cluster:
        cluster.run(program, "dist_async")
    assert Checkpoint.read(path).step == 14


TRAINS = """
import sys, json, hashlib, time, kvd
from kvd.parallel import Dense, Dropout, Sequential, SoftmaxCrossEntropy, Tanh, fit
from tests.parallel.fit_harness import RULE, X, Y, batches, group_of
from tests.parallel.group_harness import weights_of
kv = kvd.create("dist_sync")
die_at = int(sys.argv[1])
model = Sequential(Dense(12), Tanh(), Dropout(0.3), Dense(3), SoftmaxCrossEntropy())
group = group_of(model, seed=kv.rank)
group.set_params(model.initialize((8, 5), seed=1))
seen = 0
def data(epoch):
    global seen
    for batch in batches(8, X[kv.rank::2], Y[kv.rank::2]):
        if seen == die_at:
            send = group.pipeline._send
            def dying(name, gradients):  # the last layer's gradients have gone, the first layer's have not
                if name.startswith("dense0"):
                    time.sleep(0.3)  # time itself: they arrive, and nobody says so
                    print("dying", flush=True)
                    time.sleep(600)  # until it is killed
                send(name, gradients)
            group.pipeline._send = dying
        seen += 1
        yield batch
reports = fit(group, kv, data, 3, optimizer=RULE)
digest = hashlib.sha256(b"".join(value.tobytes() for value in weights_of(group))).hexdigest()
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


def test_what_resume_refuses(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"no checkpoint")
    with kvd.create("local") as kv:
        with pytest.raises(NotAllowed, match=r"model: this is not a checkpoint"):
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


def test_only_the_first_pipeline_of_a_restarted_worker_continues_after_its_predecessor() -> None:
    """A later one of the same process finds its own steps in the counts of the store."""
    batch = DataBatch([X[:8]], [Y[:8]])
    with LocalCluster(1, 1, on_worker_loss="wait") as cluster:
        kv = cluster.store(node_id="worker-0")
        group = group_of()
        assert group.bind_to(kv, optimizer=RULE).done_before == 0
        for _ in range(3):
            group.forward_backward(batch)
        kv.flush()
        kv.__exit__(RuntimeError, None, None)
        successor = cluster.store(node_id="worker-0")
        assert successor.restarted
        group = group_of()
        pipeline = group.bind_to(successor, optimizer=RULE)
        assert (pipeline.clock, pipeline.done_before) == (3, 3)
        group.forward_backward(batch)
        group.forward_backward(batch)
        second = group_of().bind_to(successor, optimizer=RULE)
        assert (second.clock, second.done_before) == (5, 0)


@pytest.mark.parametrize(("merge", "workers", "meets"), [("", 2, True), ("", 1, False), ("sum", 2, False)])
def test_asynchronous_workers_meet_before_and_after_a_checkpoint(
    tmp_path: Path, merge: str, workers: int, meets: bool
) -> None:
    """So that no worker changes the optimizer's state while rank 0 saves it, or starts from old weights."""
    calls: list[str] = []
    kv: Any = SimpleNamespace(merge=merge, num_workers=workers, rank=1, barrier=calls.append)
    pipeline: Any = SimpleNamespace(receive=lambda: calls.append("receive"), pull=lambda: calls.append("pull"))
    Run(group_of(), kv, pipeline, None, tmp_path / "model", None, 0, 0)._save(4, 0)
    assert calls == (["receive", "kvd:fit:save:4", "pull", "kvd:fit:saved:4"] if meets else ["receive"])


@pytest.mark.parametrize("done_before", [0, 2])
def test_a_restarted_rank_0_leaves_the_optimizer_state_of_the_servers_as_it_is(
    tmp_path: Path, done_before: int
) -> None:
    """Its predecessor loaded the checkpoint, and the servers have gone on since."""
    path, loaded, group = tmp_path / "model", list[Path](), group_of()
    params, aux = host_arrays(group.binding, group.param_names), host_arrays(group.binding, group.aux_names)
    group.get_params(params, aux)
    Checkpoint(params, aux, 1, 3, 7).write(path, lambda states: states.touch())
    kv: Any = SimpleNamespace(
        rank=0, broadcast=lambda *_: None, barrier=lambda *_: None, load_optimizer_states=loaded.append
    )
    pipeline: Any = SimpleNamespace(kv=kv, done_before=done_before)
    group.bind_to = lambda *_, **__: pipeline  # type: ignore[method-assign]
    start = find_start(group, kv, path, None, "server")
    assert (start.epoch, start.batch, start.step) == (1, 3, 7)
    assert loaded == ([] if done_before else [tmp_path / "model.7.states"])


def test_checkpoints_are_written_after_epochs_and_every_given_number_of_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int, int]] = []
    monkeypatch.setattr(Checkpoint, "write", lambda saved, *_: written.append((saved.epoch, saved.batch, saved.step)))
    with kvd.create("local") as kv:
        fit(group_of(), kv, batches(8)[:4], 2, optimizer=RULE, checkpoint=tmp_path / "model", checkpoint_steps=3)
    assert written == [(0, 3, 3), (1, 0, 4), (1, 2, 6), (2, 0, 8)]
