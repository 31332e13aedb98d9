"""`where="workers"`: gradients are those of `DistributedDataParallel`, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvd
import kvd.torch as kt
from kvd.testing.cluster import LocalCluster, PathName
from tests.torch.beside_ddp import CASES

STEPS, SIZE = 5, 3
X = torch.randn(STEPS, 4 * SIZE, 5, generator=torch.Generator().manual_seed(7))
MODEL = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 2))

PROGRAM = "from tests.torch.beside_ddp import main; main()"
TIMEOUT_S = 110


@pytest.mark.timeout(300)  # four processes import torch
def test_two_workers_have_the_bits_of_ddp(tmp_path: Path) -> None:
    with LocalCluster(2, 1) as cluster:
        workers = [cluster.script(PROGRAM, number, str(tmp_path / "ddp")) for number in range(2)]
        try:
            outputs = [worker.communicate(timeout=TIMEOUT_S)[0].decode() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert all(f"same in {len(CASES)} trainings" in output for output in outputs), outputs


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss: Any = model(x).square().mean()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_four_workers_and_two_servers_train_as_one_process_does(path: PathName) -> None:
    """Also in a loop over steps, and with the steps of the optimizer seen by its hooks."""

    def program(kv: kvd.KVStore) -> list[torch.Tensor]:
        model = copy.deepcopy(MODEL)
        plain = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        optimizer = kt.DistributedOptimizer(
            plain, model.named_parameters(), where="workers", op="mean", store=kv, bucket_bytes=50_000
        )
        seen: list[Any] = []
        optimizer.register_step_post_hook(lambda *given: seen.append(given[0]))
        for number in optimizer.steps(STEPS):
            step(model, optimizer, X[number][kv.rank * SIZE : (kv.rank + 1) * SIZE])
        assert seen == [plain] * STEPS
        assert optimizer.state is plain.state
        assert optimizer.state_dict().keys() == {"state", "param_groups"}
        return list(model.parameters())

    with LocalCluster(4, 2, path=path, slice_bytes="16KiB") as cluster:
        results = cluster.run(program)
    whole = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(whole.parameters(), 0.05, momentum=0.9)
    for number in range(STEPS):
        step(whole, optimizer, X[number])
    for trained in results:
        for mine, first, expected in zip(trained, results[0], whole.parameters(), strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_compressed_gradients() -> None:
    """The mean is that of what the workers have sent, in half precision."""

    def program(kv: kvd.KVStore) -> tuple[torch.Tensor, torch.Tensor]:
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1000)), "unused": nn.Parameter(torch.zeros(3))})
        kt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1.0),
            model.named_parameters(),
            where="workers",
            op="mean",
            store=kv,
            compression={"type": "fp16", "min_bytes": 0},
        )
        own = X.reshape(-1)[kv.rank : kv.rank + 200].repeat(5)
        loss: Any = (model["w"] * own).sum()
        loss.backward()
        assert model["unused"].grad is None
        merged = model["w"].grad
        assert merged is not None
        return own, merged

    with LocalCluster(2, 2) as cluster:
        (first, merged), (second, other) = cluster.run(program)
    assert torch.equal(merged, other)
    torch.testing.assert_close(merged, (first.half().float() + second.half().float()) / 2, rtol=1e-3, atol=1e-3)
    assert not torch.equal(merged, (first + second) / 2)
