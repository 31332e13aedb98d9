"""DDP whose gradients a store merges: the bits of plain DDP, and errors that backward raises as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kvd
import kvd.torch as kt
from kvd.errors import NodeLost, NotAllowed
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster

PROGRAM = """
import json, sys, warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import kvd
import kvd.torch as kt

warnings.simplefilter("ignore", FutureWarning)  # of broadcast_buffers, whose new name is not in all versions
torch.set_num_threads(1)


def trained(hook, dtype=torch.float32):
    torch.manual_seed(0)
    # Several buckets, in another order after the first step.
    module = nn.Sequential(nn.Linear(20, 90), nn.BatchNorm1d(90), nn.ReLU(), nn.Linear(90, 90), nn.Linear(90, 5))
    model = DistributedDataParallel(module.to(dtype), bucket_cap_mb=0.02, broadcast_buffers=False)
    if hook is not None:
        model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(5):
        generator = torch.Generator().manual_seed(2 * step + kv.rank)
        x, y = torch.randn(8, 20, generator=generator).to(dtype), torch.randint(0, 5, (8,), generator=generator)
        optimizer.zero_grad()
        with model.no_sync():
            nn.functional.cross_entropy(model(x), y).backward()
        nn.functional.cross_entropy(model(x + 1), y).backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


with kvd.create("dist_sync") as kv:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=kv.rank, world_size=2)
    plain = trained(None)
    mean, total = trained(kt.ddp_hook(kv)), trained(kt.ddp_hook(kv, op="sum", name="sum"))
    half = trained(kt.ddp_hook(kv, name="half"), torch.bfloat16)
    rough = trained(kt.ddp_hook(kv, compression={"type": "bf16", "min_bytes": 0}, name="rough"))
    distance = (rough - plain).abs().max().item()
    found = {
        "mean": torch.equal(mean, plain),
        "sum": torch.equal(total, plain),
        "half": torch.equal(half, trained(None, torch.bfloat16)),
        "rough": 0 < distance < 0.05,
        "rank": kv.rank,
    }
    dist.destroy_process_group()
    print(json.dumps(found))
"""


def test_two_workers_have_the_bits_of_plain_ddp(tmp_path: Path) -> None:
    with LocalCluster(2, 1) as cluster:
        workers = [cluster.script(PROGRAM, number, str(tmp_path / "group")) for number in range(2)]
        said = [worker.communicate(timeout=110)[0].decode() for worker in workers]
        with cluster.observer() as observer:
            listed = observer.keys()
    found = [json.loads(text.splitlines()[-1]) for text in said if text.strip()]
    assert sorted(entry.pop("rank") for entry in found) == [0, 1], said
    assert all(entry == {"mean": True, "sum": False, "half": True, "rough": True} for entry in found), found
    keys = [entry["key"] for entry in listed if entry["key"].startswith("kvd.torch/ddp/model/")]
    elements = sum(int(key.split("/")[4]) for key in keys)
    assert elements == 20 * 90 + 90 + 2 * 90 + 90 * 90 + 90 + 90 * 5 + 5  # those of the first step are gone


# ── in one process: DDP in a group of one, and the workers of the store in threads ──


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("group")
def test_backward_raises_the_error_of_a_bucket() -> None:
    def program(kv: kvd.KVStore) -> float:
        model = DistributedDataParallel(torch.nn.Linear(4, 3), broadcast_buffers=False)
        model.register_comm_hook(*kt.ddp_hook(kv))

        def backward() -> float:
            model.zero_grad()
            loss: Any = model(torch.full((1, 4), kv.rank + 1.0)).sum()
            loss.backward()
            return float(model.module.weight.grad[0, 0])

        found = backward()
        if kv.rank == 0:
            with pytest.raises(NodeLost, match=r"kvd\.torch/ddp/model/0/15/float32.* waits for worker 1") as caught:
                backward()
            assert caught.value.node == "worker 1"
        kv.__exit__(RuntimeError, None, None)  # as a program that has failed
        return found

    with LocalCluster(2, 1, worker_timeout_s=1.0, heartbeat_interval_s=0.1) as cluster:
        assert cluster.run(program) == [1.5, 1.5]


def test_stores_that_merge_no_gradients_are_refused() -> None:
    with kvd.create("local") as kv:
        with pytest.raises(NotAllowed, match='op is "mean" or "sum", not \'max\''):
            kt.ddp_hook(kv, op="max")  # type: ignore[arg-type]
        kv.set_optimizer(SGD(0.1))
        with pytest.raises(NotAllowed, match="an optimizer is set on the store"):
            kt.ddp_hook(kv)
