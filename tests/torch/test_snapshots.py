"""`where="workers"`: a snapshot has the weights and the state of worker 0, and a job that was restored from it ends
with the bits of one that was never interrupted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kvd
import kvd.torch as kt
from kvd.client.cluster.preparing import Preparation
from kvd.errors import NotAllowed, NotResumed
from kvd.snapshots.reader import StoredSnapshot
from kvd.testing.cluster import LocalCluster

TOTAL, EVERY = 9, 4
WORKERS = 2
SEEDED = threading.Lock()  # torch has one generator for all threads


def make_model() -> Any:
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


class Training:
    """A training of one worker, its state made from the number of the process's life."""

    def __init__(self, kv: kvd.KVStore, life: int) -> None:
        self.kv = kv
        with SEEDED:
            torch.manual_seed(life)  # each life begins with other weights
            self.model = make_model()
        self.optimizer = kt.DistributedOptimizer(
            torch.optim.AdamW(self.model.parameters(), 1e-2),
            self.model.named_parameters(),
            where="workers",
            op="mean",
            store=kv,
            module=self.model,
            buffers="mean",
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, TOTAL)
        self.optimizer.keep("schedule", self.schedule)

    def run(self, until: int = TOTAL, folder: Path | None = None) -> list[int]:
        """Return the steps that were made: those before `until`, where the process dies. Take a snapshot."""
        made = []
        for step in self.optimizer.steps(TOTAL):
            if step == until:
                break
            if step == EVERY and folder is not None:
                self.kv.snapshot(folder / f"step-{step:06}")
            made.append(step)
            chance = torch.Generator().manual_seed(100 * step + self.kv.rank)
            x, y = torch.randn(8, 6, generator=chance), torch.randint(0, 3, (8,), generator=chance)
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.schedule.step()
        return made

    def state(self) -> list[Any]:
        moments = self.optimizer.state_dict()["state"]
        found = [value.clone() for value in self.model.state_dict().values()]
        found += [value.clone() for number in sorted(moments) for _, value in sorted(moments[number].items())]
        return [*found, torch.tensor(self.optimizer.param_groups[0]["lr"])]


def in_all(
    cluster: LocalCluster, life: int, until: int, folder: Path | None = None, **settings: Any
) -> list[tuple[list[int], list[Any]]]:
    """Train in all workers, and stop there as a process does that is killed."""

    def work(rank: int) -> tuple[list[int], list[Any]]:
        kv = cluster.store(preferred_rank=rank, node_id=f"worker-{rank}", **settings)
        training = Training(kv, 10 * life + rank)
        made = training.run(until, folder)
        if until < TOTAL:
            kv.__exit__(RuntimeError, None, None)  # as a program that has failed
        else:
            kv.close()
        return made, training.state()

    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(work, range(WORKERS)))


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_job_whose_processes_have_all_died_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"snapshot_dir": str(tmp_path), "snapshot_every": EVERY, "restore": "auto"}
    with LocalCluster(WORKERS, 1) as cluster:
        (_, undisturbed), (_, other) = in_all(cluster, 1, TOTAL)
    assert same(undisturbed, other)
    with LocalCluster(WORKERS, 1) as cluster:
        in_all(cluster, 1, 6, tmp_path)
    with LocalCluster(WORKERS, 2) as cluster:
        results = in_all(cluster, 2, TOTAL, **settings)
    assert [made for made, _ in results] == [list(range(EVERY, TOTAL))] * WORKERS
    assert all(same(state, undisturbed) for _, state in results)

    # The values of the keys are weights.
    last = StoredSnapshot.open(tmp_path / "step-000008")
    values = {key.key: last.value(key) for key in last.manifest.keys if key.gradients}
    assert sorted(values) == sorted(name for name, _ in make_model().named_parameters())
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store(**settings)
        training = Training(kv, 3)
        assert training.run() == [8]  # a single worker goes on, too
        kv.close()


def test_worker_0_dies_before_it_has_given_the_state_of_the_snapshot(tmp_path: Path) -> None:
    """The others wait for its successor, which reads the snapshot again."""
    settings: dict[str, Any] = {"snapshot_dir": str(tmp_path), "snapshot_every": EVERY, "restore": "auto"}
    with LocalCluster(WORKERS, 1) as cluster:
        ((_, undisturbed), _) = in_all(cluster, 1, TOTAL)
    with LocalCluster(WORKERS, 1) as cluster:
        in_all(cluster, 1, 6, tmp_path)
    with LocalCluster(WORKERS, 1, on_worker_loss="wait") as cluster, ThreadPoolExecutor(WORKERS) as threads:

        def work(rank: int) -> list[Any]:
            kv = cluster.store(preferred_rank=rank, node_id=f"worker-{rank}", **settings)
            training = Training(kv, 20 + rank)
            if rank == 0:
                kv.__exit__(RuntimeError, None, None)  # it dies before its loop
                kv = cluster.store(preferred_rank=rank, node_id=f"worker-{rank}", **settings)
                training = Training(kv, 30)
            training.run()
            kv.close()
            return training.state()

        results = list(threads.map(work, range(WORKERS)))
    assert all(same(state, undisturbed) for state in results)


def test_snapshots_that_a_program_takes(tmp_path: Path) -> None:
    """In one process: the calls, what is refused, and another model."""
    kv = kvd.create("local")
    training = Training(kv, 1)
    optimizer, states = training.optimizer, []
    kv.snapshot(tmp_path / "begin")  # the keys hold the first weights
    for step in optimizer.steps(4):
        if step == 2:
            kv.snapshot(tmp_path / "two")
            states.append(training.state())
        optimizer.zero_grad()
        training.model(torch.ones(4, 6) * step).square().mean().backward()
        if step == 3:
            with pytest.raises(NotAllowed, match="between two steps, before the backward"):
                kv.snapshot(tmp_path / "refused")
        optimizer.step()
        training.schedule.step()
    kv.snapshot(tmp_path / "end")
    states.append(training.state())
    kv.close()

    for folder, expected in zip(("two", "end"), states, strict=True):
        kv = kvd.create("local")
        steps = kv.restore(tmp_path / folder)
        assert steps is not None
        training = Training(kv, 2)
        with pytest.raises(NotResumed, match=r"under way.*optimizer\.steps"):
            training.model(torch.ones(4, 6)).square().mean().backward()
        training.optimizer.zero_grad()
        with pytest.raises(NotAllowed, match="not loaded before the first step"):
            kv.snapshot(tmp_path / "early")
        assert next(training.optimizer.steps(steps + 1)) == steps
        assert same(training.state(), expected)
        kv.close()

    kv = kvd.create("local")
    kv.restore(tmp_path / "begin")
    training = Training(kv, 3)
    assert torch.equal(training.model[0].weight, Training(kvd.create("local"), 1).model[0].weight)
    kv.close()

    kv = kvd.create("local")
    kv.restore(tmp_path / "end")
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = kt.DistributedOptimizer(sgd, model.named_parameters(), where="workers", op="mean", store=kv)
    with pytest.raises(NotAllowed, match=r"no more buffers where the snapshot .*end has the buffer '1.running_mean'"):
        next(optimizer.steps(5))
    kv.close()


def test_keys_of_gradients_are_not_read_as_weights(tmp_path: Path) -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        training = Training(kv, 1)
        training.run()
        kv.snapshot(tmp_path / "taken")
        with cluster.observer() as observer:
            with pytest.raises(NotAllowed, match=r"'0.weight' holds the gradients .*kv\.snapshot"):
                observer.pull("0.weight")
            assert observer.keys()
            with pytest.raises(NotAllowed, match=r"'0.weight' holds the gradients"):
                observer.save(tmp_path / "saved")
        kv.close()
    assert not (tmp_path / "saved").exists()
    with pytest.raises(NotAllowed, match=r"have it call kv\.restore"):
        Preparation(tmp_path / "taken")


def test_a_snapshot_without_a_loop_that_knows_the_state_is_refused(tmp_path: Path) -> None:
    kv = kvd.create("local")
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = kt.DistributedOptimizer(sgd, model.named_parameters(), where="workers", op="mean", store=kv)
    for _ in kv.steps(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with pytest.raises(NotAllowed, match=r"'weight' holds merged gradients.*optimizer\.steps"):
        kv.snapshot(tmp_path / "taken")
    kv.close()


def test_a_worker_that_joins_without_the_loop_does_not_train_on_gradients() -> None:
    with LocalCluster(1, 1, max_workers=2) as cluster:
        first = Training(cluster.store(), 1)
        first.run()
        joined = Training(cluster.lone_store(), 2)
        with pytest.raises(NotResumed, match=r"worker 1 came to .* under way.*optimizer\.steps"):
            joined.model(torch.ones(4, 6)).square().mean().backward()
        first.kv.__exit__(RuntimeError, None, None)


def test_a_worker_that_joins_in_the_midst_of_the_first_step_does_not_train_on_gradients() -> None:
    """Those of the last layer are merged by then, and those of the first are not."""
    with LocalCluster(1, 1, max_workers=2) as cluster:
        first = Training(cluster.store(), 1)
        first.kv.push("3.bias", torch.full((3,), 7.0))
        first.kv.flush()
        joined = Training(cluster.lone_store(), 2)
        joined.kv.resume()
        with pytest.raises(NotResumed, match=r"worker 1 came to .* under way.*optimizer\.steps"):
            joined.model(torch.ones(4, 6)).square().mean().backward()
        assert not joined.model[3].bias.eq(7.0).any()
        first.kv.__exit__(RuntimeError, None, None)
