"""`where="servers"`: a worker that is killed and started again continues with its step and the rates of that step."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvd
import kvd.torch as kt
from kvd.errors import StateLost
from kvd.testing.cluster import LocalCluster, wait_until

STEPS, DEATH = 12, 7
X = torch.randn(STEPS, 2, 4, 5, generator=torch.Generator().manual_seed(3))
MODEL = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
RATES = [0.1, 0.05, 0.1, 0.01] * 3  # the rate of the step in which the worker dies is the first one again


def wrap(kv: kvd.KVStore, where: Any) -> tuple[nn.Module, kt.DistributedOptimizer]:
    model = copy.deepcopy(MODEL)
    plain = torch.optim.SGD(model.parameters(), RATES[0], momentum=0.9)
    return model, kt.DistributedOptimizer(plain, model.named_parameters(), where=where, op="mean", store=kv)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = RATES[number]
    loss: Any = model(x).square().mean()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_restarted_worker_ends_with_the_weights_of_an_undisturbed_run(dead: int) -> None:
    made: list[list[int]] = [[], []]

    def program(cluster: LocalCluster, rank: int, until: int) -> tuple[kvd.KVStore, list[torch.Tensor]]:
        kv = cluster.store(node_id=f"worker-{rank}", preferred_rank=rank)
        model, optimizer = wrap(kv, "servers")
        for number in optimizer.steps(STEPS):
            if number == until:
                kv.__exit__(RuntimeError, None, None)  # as a program that has failed
                break
            step(model, optimizer, number, X[number][rank])
            made[rank].append(number)
        return kv, [value.detach() for value in model.parameters()]

    with ThreadPoolExecutor(2) as threads, LocalCluster(2, 1, on_worker_loss="wait") as cluster:
        other = threads.submit(program, cluster, 1 - dead, STEPS)
        threads.submit(program, cluster, dead, DEATH).result()
        restarted, mine = threads.submit(program, cluster, dead, STEPS).result()
        assert restarted.restarted
        _, theirs = other.result()
    assert made[1 - dead] == list(range(STEPS))
    assert made[dead] == [*range(DEATH), *range(DEATH - 1, STEPS)]
    for first, second, expected in zip(mine, theirs, _in_one_process(), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=0, atol=1e-6)


def test_a_lone_worker_with_an_optimizer_of_its_own_cannot_continue_after_a_restart() -> None:
    with LocalCluster(1, 1, on_worker_loss="wait") as cluster:
        kv = cluster.store(node_id="worker-0")
        model, optimizer = wrap(kv, "workers")
        for number in optimizer.steps(STEPS):
            step(model, optimizer, number, X[number][0])
            if number == DEATH:
                break
        kv.__exit__(RuntimeError, None, None)
        kv = wait_until(lambda: cluster.store(node_id="worker-0"), "the worker is back")
        model, optimizer = wrap(kv, "workers")
        assert all(map(torch.equal, model.parameters(), MODEL.parameters())), "keys hold gradients, no weights"
        with pytest.raises(StateLost, match="no living worker has the weights"):
            next(iter(optimizer.steps(STEPS)))


@pytest.mark.parametrize("how", ["call", "setting"])
def test_a_training_continues_from_a_snapshot(how: str, tmp_path: Path) -> None:
    """The momentum and the rates are those of the step."""
    folder = tmp_path / "snapshots"
    settings: dict[str, Any] = {"snapshot_dir": str(folder), "snapshot_every": 6, "restore": "auto"}
    if how == "call":
        settings = {}
        folder.mkdir()

    def program(kv: kvd.KVStore, until: int) -> list[torch.Tensor]:
        if how == "call":
            kv.restore(folder / "six", missing_ok=True)
        model, optimizer = wrap(kv, "servers")
        for number in optimizer.steps(STEPS):
            if number == 6 and how == "call" and until < STEPS:
                kv.snapshot(folder / "six")
            if number == until:
                raise RuntimeError("the end of this run")
            step(model, optimizer, number, X[number][kv.rank])
        return [value.detach() for value in model.parameters()]

    with LocalCluster(2, 1, **settings) as cluster, pytest.raises(RuntimeError, match="the end of this run"):
        cluster.run(lambda kv: program(kv, 7))
    with LocalCluster(2, 2, **settings) as cluster:
        mine, theirs = cluster.run(lambda kv: program(kv, STEPS))
    for first, second, expected in zip(mine, theirs, _in_one_process(), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=0, atol=1e-6)


def _in_one_process() -> list[torch.Tensor]:
    whole = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(whole.parameters(), RATES[0], momentum=0.9)
    for number in range(STEPS):
        step(whole, optimizer, number, X[number].reshape(8, 5))
    return [value.detach() for value in whole.parameters()]


def test_a_worker_that_joins_takes_part_from_a_later_step_on() -> None:
    """It has the weights of the others at the end, and its gradients have counted."""
    at_step_5, begun = threading.Event(), threading.Event()
    made: list[int] = []

    def program(kv: kvd.KVStore, is_late: bool) -> list[torch.Tensor]:
        model, optimizer = wrap(kv, "servers")
        if is_late:
            begun.set()
        for number in optimizer.steps(STEPS):
            if is_late:
                made.append(number)
            if number == 5:
                at_step_5.set()
                assert begun.wait(60)
                wait_until(lambda: kv.num_workers == 3, "the new worker takes part")
            step(model, optimizer, number, X[number][min(kv.rank, 1)])
        return [value.detach() for value in model.parameters()]

    with ThreadPoolExecutor(3) as threads, LocalCluster(2, 1, max_workers=3) as cluster:
        early = [threads.submit(program, kv, False) for kv in cluster.open_stores()]
        assert at_step_5.wait(60)
        late = threads.submit(lambda: program(cluster.store(), True))
        first, second, third = [future.result() for future in [*early, late]]
    assert made == list(range(made[0], STEPS))
    assert made[0] >= 5
    for mine, other, newest, alone in zip(first, second, third, _in_one_process(), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(mine, newest)
        assert not torch.allclose(mine, alone, rtol=0, atol=1e-6)


def test_another_worker_sends_the_rate_that_a_dead_one_did_not_send() -> None:
    """The worker of the lowest rank dies in the step whose new rate it was to send, and the others go on without it."""
    rates = [0.1, 0.1, 0.0, 0.0, 0.0]

    def program(cluster: LocalCluster, rank: int) -> list[float]:
        kv = cluster.store(node_id=f"worker-{rank}", preferred_rank=rank)
        model, optimizer = wrap(kv, "servers")
        weights: list[float] = []
        for number in optimizer.steps(len(rates)):
            if rank == 0 and rates[number] == 0.0:
                kv.__exit__(RuntimeError, None, None)  # as a program that has failed
                return weights
            if number == 3:
                wait_until(lambda: kv.ranks == (1,), "the worker knows that it is alone")
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rates[number]
            loss: Any = model(X[number][rank]).square().mean()
            loss.backward()
            optimizer.step()
            weights.append(next(model.parameters())[0, 0].item())
        kv.close()
        return weights

    settings: dict[str, Any] = {"worker_timeout_s": 8.0, "request_timeout_s": 60.0, "heartbeat_interval_s": 0.1}
    with ThreadPoolExecutor(2) as threads, LocalCluster(2, 1, on_worker_loss="shrink", **settings) as cluster:
        futures = [threads.submit(program, cluster, rank) for rank in range(2)]
        assert len(futures[0].result()) == 2
        weights = futures[1].result()
    assert weights[2] == weights[3] == weights[4], "the rate of 0 has not come to the servers"
