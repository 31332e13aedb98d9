"""`where="workers"`: workers are killed at named moments, and the training ends with the bits of an undisturbed one."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import kvd.torch as kt
from kvd.testing.cluster import LocalCluster, wait_until
from tests.torch import healing_program as program

TOTAL = 16
SETTINGS: dict[str, Any] = {"on_worker_loss": "wait", "worker_timeout_s": 30.0, "request_timeout_s": 60.0}
CODE = "from tests.torch.healing_program import main; main()"
TIMEOUT_S = 280
DEATHS = [
    *("0:0:before", "1:*:received"),  # the beginning is the same transfer
    *("1:1:before", "2:3:bucket", "0:4:bucket", "1:5:over", "2:6:updated", "0:7:updated"),
    *("0:8:bucket", "2:8:bucket"),  # two in one step
    *("0:10:before", "1:*:serving"),  # the donor, too
    *("2:12:before", "2:*:received"),  # the newcomer again
    *("1:15:updated", "2:16:end"),
]


def job(
    folder: Path,
    deaths: Sequence[str],
    total: int = TOTAL,
    server_dies_with: str = "",
    timeout_s: float = TIMEOUT_S,
    **settings: Any,
) -> list[dict[str, Any]]:
    """The results of all workers.

    Args:
        server_dies_with: the mark of a death, at which server 0 is killed; "": it is not.
    """
    folder.mkdir()
    with LocalCluster(program.WORKERS, 2, processes=True, **{**SETTINGS, **settings}) as cluster:
        process = cluster.script(CODE, 0, str(total), str(folder), *deaths)
        try:
            if server_dies_with:
                mark = folder / server_dies_with
                wait_until(lambda: mark.exists() or process.poll() is not None, f"{mark} is there", TIMEOUT_S)
                cluster.kill_server(0)
            output = process.communicate(timeout=timeout_s)[0].decode()
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, output
    return [json.loads((folder / f"result-{number}").read_text()) for number in range(program.WORKERS)]


def in_one_process() -> list[Any]:
    """The weights, by torch alone: the models of all workers side by side, and the means of their gradients."""
    torch.manual_seed(7)
    models = [program.make_model()]
    models += [copy.deepcopy(models[0]) for _ in range(program.WORKERS - 1)]
    optimizer = program.AdamWithCount(models[0].parameters(), 1e-2, amsgrad=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL)
    for step in range(TOTAL):
        for rank, model in enumerate(models):
            model.load_state_dict({**model.state_dict(), **dict(models[0].named_parameters())})
            seed = hashlib.blake2b(f"3 {step} {rank}".encode(), digest_size=7).digest()
            torch.manual_seed(int.from_bytes(seed, "big"))
            x, y = program.batch(step, rank)
            model.zero_grad()
            loss: Any = functional.cross_entropy(model(x), y)
            loss.backward()
        with torch.no_grad():
            for entries in zip(*[model.buffers() for model in models], strict=True):
                if entries[0].is_floating_point():
                    mean = torch.stack(list(entries)).mean(0)
                    for entry in entries:
                        entry.copy_(mean)
            for entries in zip(*[model.parameters() for model in models], strict=True):
                entries[0].grad = torch.stack([entry.grad for entry in entries]).mean(0)
        if step != 2:
            nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
            optimizer.step()
        schedule.step()
    return [value.tolist() for value in models[0].parameters()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return job(tmp_path_factory.mktemp("job") / "undisturbed", [])


@pytest.mark.timeout(300)  # many processes import torch, one after the other
def test_each_moment_of_death(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    assert len({result["digest"] for result in undisturbed}) == 1
    for found, expected in zip(undisturbed[0]["weights"], in_one_process(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    results = job(tmp_path / "disturbed", DEATHS)
    assert [result["digest"] for result in results] == [undisturbed[0]["digest"]] * program.WORKERS
    assert len(list((tmp_path / "disturbed").glob("died-*"))) == len(DEATHS)
    assert results[0]["scale"] != 65536.0


def test_the_server_that_passes_states_on_dies_with_two_workers(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    """Server 0 leads the first partition, and dies when one worker has, and the giver of the state is about to."""
    deaths = ["1:5:over", "0:*:serving", "2:9:bucket"]
    results = job(tmp_path / "job", deaths, server_dies_with="died-0", replicas=2)
    assert [result["digest"] for result in results] == [undisturbed[0]["digest"]] * program.WORKERS
    assert len(list((tmp_path / "job").glob("died-*"))) == len(deaths)


def test_a_backward_that_ends_on_another_thread_gives_the_state() -> None:
    """As it does on CUDA: the thread of the program waits for it."""
    steps, death = 6, 3
    x = torch.randn(steps, 2, 4, 5, generator=torch.Generator().manual_seed(3))

    def train(cluster: LocalCluster, rank: int, until: int) -> list[torch.Tensor]:
        kv = cluster.store(node_id=f"worker-{rank}", preferred_rank=rank)
        model = nn.Linear(5, 2)
        optimizer = kt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
            model.named_parameters(),
            where="workers",
            op="mean",
            store=kv,
        )
        with ThreadPoolExecutor(1) as other:
            for step in optimizer.steps(steps):
                if step == until:
                    kv.__exit__(RuntimeError, None, None)  # as a program that has failed
                    break
                optimizer.zero_grad()
                loss: Any = model(x[step][rank]).square().mean()
                other.submit(loss.backward).result()
                optimizer.step()
        kv.close()
        return [value.detach() for value in model.parameters()]

    with LocalCluster(2, 1, **SETTINGS) as cluster, ThreadPoolExecutor(2) as threads:
        survivor = threads.submit(train, cluster, 0, steps)
        threads.submit(train, cluster, 1, death).result()
        mine, theirs = threads.submit(train, cluster, 1, steps).result(), survivor.result()
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_workers_are_killed_at_random(tmp_path: Path, seed: int, replicas: int) -> None:
    """One holder of the state is left each time."""
    total = 300
    undisturbed = job(tmp_path / "undisturbed", [], total, replicas=replicas)
    folder = tmp_path / "disturbed"
    results = job(folder, [program.AT_RANDOM, str(seed)], total, timeout_s=900, replicas=replicas)
    assert [result["digest"] for result in results] == [undisturbed[0]["digest"]] * program.WORKERS
    assert list(folder.glob("killed-*"))
