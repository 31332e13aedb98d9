"""The modules with Horovod's and BytePS's names, in workers that are processes, and alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvd.compat.byteps.torch as bps
import kvd.compat.horovod.torch as hvd
from kvd.errors import KvdError, NotAllowed, NotInitialized
from kvd.testing.cluster import LocalCluster

F: Any = torch.nn.functional
STEPS = 6
WORKERS = 2


def run(cluster: LocalCluster, code: str) -> list[dict[str, Any]]:
    """What the workers of a program have written, by rank."""
    workers = [cluster.script(code, number, str(cluster.folder)) for number in range(WORKERS)]
    for worker in workers:
        output, _ = worker.communicate(timeout=110)
        assert worker.returncode == 0, output.decode()
    results = [json.loads((cluster.folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    for rank in range(WORKERS):
        (cluster.folder / f"{rank}.json").unlink()
    return results


def write(folder: str, rank: int, results: dict[str, Any]) -> None:
    Path(folder, f"{rank}.json").write_text(json.dumps(results))


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of all workers together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def weights(model: Any) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def alone(passes: int = 1, clip: float = 0.0, factor: float = 1.0) -> list[float]:
    """The weights of one process that computes the whole batch; a step takes `passes` batches."""
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            x, y = batch(step * passes + number)
            (factor * F.cross_entropy(model(x), y)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def trained(framework: Any, passes: int = 1, clip: float = 0.0, made: int | None = None, **options: Any) -> list[float]:
    """The same by this worker's share of each batch. `made`: how many passes a step makes, if not all."""
    model = model_of(framework.rank())  # each worker begins elsewhere
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    framework.broadcast_parameters(model.state_dict(), root_rank=0)
    prefix = f"{len(options)} {passes} {clip} {made} "
    named = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
    optimizer = framework.DistributedOptimizer(optimizer, named, backward_passes_per_step=passes, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        count = passes if made is None else made
        for number in range(count):
            x, y = batch(step * count + number)
            mine = slice(framework.rank(), None, framework.size())
            F.cross_entropy(model(x[mine]), y[mine]).backward()
        if clip:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return weights(model)


HOROVOD = """
import sys, torch
import kvd.compat.horovod.torch as hvd
from tests.compat.test_frameworks import batch, model_of, trained, weights, write, STEPS

torch.set_num_threads(1)
hvd.init()
hvd.init()
rank, results = hvd.rank(), {}
results["place"] = [hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.is_initialized()]
x = torch.arange(3.0) + rank
results["calls"] = [
    hvd.allreduce(x).tolist(), hvd.allreduce(x, name="x", op=hvd.Sum).tolist(),
    hvd.allreduce(x, average=False).tolist(),
    hvd.allreduce(x, compression=hvd.Compression.fp16).tolist(), hvd.allreduce_(x.clone(), op=hvd.Sum).tolist(),
    hvd.synchronize(hvd.allreduce_async(x, prescale_factor=2.0)).tolist(),
    hvd.synchronize(hvd.allreduce_async_(x.clone(), name="y")).tolist(),
    [t.tolist() for t in hvd.grouped_allreduce([x, x[:1]], name="g")],
    [t.tolist() for t in hvd.grouped_allreduce_([x.clone(), x[:1].clone()], op=hvd.Sum)],
    [t.tolist() for t in hvd.synchronize(hvd.grouped_allreduce_async([x], op=hvd.Sum))],
    [t.tolist() for t in hvd.synchronize(hvd.grouped_allreduce_async_([x.clone()], op=hvd.Sum))],
    hvd.allgather(x[: rank + 1]).tolist(),
    hvd.broadcast(x, 1).tolist(), hvd.broadcast_(x.clone(), 1, name="b").tolist(),
    hvd.synchronize(hvd.broadcast_async(x, 1)).tolist(), hvd.synchronize(hvd.broadcast_async_(x.clone(), 0)).tolist(),
    hvd.broadcast_object({"epoch": rank}, 1), hvd.allreduce(torch.tensor(5 + rank)).item(),
]
handle = hvd.allreduce_async(x)
hvd.synchronize(handle)
results["poll"] = hvd.poll(handle)

model = model_of(rank)
adam = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), betas=(0.8, 0.9))
if rank == 1:
    model(torch.ones(1, 6)).sum().backward()
    adam.step()
hvd.broadcast_parameters(list(model.named_parameters()), root_rank=1)
hvd.broadcast_optimizer_state(adam, root_rank=1)
state = adam.state_dict()
results["adam"] = [state["param_groups"][0]["lr"], list(state["param_groups"][0]["betas"]), weights(model),
                   state["state"][0]["step"].item(), state["state"][3]["exp_avg"].tolist()]

results["plain"] = trained(hvd)
results["sum"] = trained(hvd, op=hvd.Sum)
results["two passes"] = trained(hvd, passes=2)
results["clipped"] = trained(hvd, clip=0.05)
results["two of three passes"] = trained(hvd, passes=3, made=2)
results["two of three, clipped"] = trained(hvd, passes=3, made=2, clip=0.05)

# gradients travel as float16, and other calls as they are
half = torch.nn.Parameter(torch.zeros(1 << 16))
sgd = hvd.DistributedOptimizer(torch.optim.SGD([half], lr=1.0), [("half", half)], compression=hvd.Compression.fp16)
(half * (1 + 2**-20)).sum().backward()
exact = torch.full((1 << 16,), 1 + 2**-20)
results["compressed"] = [half.grad.unique().tolist(), hvd.allreduce(exact).unique().tolist(),
                         hvd.allreduce(exact, name="exact").unique().tolist()]

# a worker that runs out of data: the last one to join has the newest parameters
model = torch.nn.Linear(1, 1, bias=False)
sgd = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
model.weight.data.fill_(0.0)
for step in range(2 + rank):
    sgd.zero_grad()
    (model(torch.ones(1, 1)) * (rank + 1)).sum().backward()
    sgd.step()
last = hvd.join()
hvd.broadcast_parameters(model.state_dict(), root_rank=last)
results["join"] = [last, model.weight.item()]
hvd.barrier()
hvd.shutdown()
hvd.shutdown()
results["ended"] = hvd.is_initialized()
write(sys.argv[1], rank, results)
"""

BYTEPS = """
import sys, torch
import kvd.compat.byteps.torch as bps
from tests.compat.test_frameworks import F, batch, model_of, trained, weights, write, STEPS

torch.set_num_threads(1)
bps.init()
rank, results = bps.rank(), {}
bps.declare("x")
x = torch.arange(3.0) + rank
results["calls"] = [
    bps.push_pull(x, name="x").tolist(), bps.push_pull(x, average=False, name="x").tolist(),
    bps.push_pull(x, name="h", compression=bps.Compression.fp16).tolist(),
    bps.push_pull_inplace(x.clone(), name="x", priority=3).tolist(),
    bps.synchronize(bps.push_pull_async(x, average=False)).tolist(),
    bps.synchronize(bps.push_pull_async_inplace(x.clone(), name="y", version=1)).tolist(),
]
results["plain"] = trained(bps)
results["two passes"] = trained(bps, passes=2)

inner = torch.nn.Sequential(model_of(rank), torch.nn.BatchNorm1d(3))
model = bps.DistributedDataParallel(inner, device_ids=[0], broadcast_buffers=True)
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
mine = slice(rank, None, bps.size())
for step in range(STEPS):
    x, y = batch(step)
    sgd.zero_grad()
    with model.no_sync():
        F.cross_entropy(model(x[mine]), y[mine]).backward()
    local = weights(torch.nn.ParameterList([p.grad for p in model.parameters()]))
    F.cross_entropy(model(x[mine]), y[mine]).backward()
    model.synchronize()
    sgd.step()
results["ddp"] = weights(model)
results["accumulated"] = local != weights(torch.nn.ParameterList([p.grad for p in model.parameters()]))
model.eval()
if rank == 0:
    model(torch.ones(2, 6))  # no other worker is asked
bps.broadcast_parameters(dict(model.module.named_buffers()), root_rank=0)
results["buffers"] = inner[1].running_mean.tolist()
bps.shutdown()
write(sys.argv[1], rank, results)
"""


@pytest.mark.timeout(300)  # four processes import torch
def test_horovods_calls_and_optimizer() -> None:
    with LocalCluster(WORKERS, 1) as cluster:
        results = run(cluster, HOROVOD)
    mean, total = [0.5, 1.5, 2.5], [1.0, 3.0, 5.0]
    calls = [
        *(
            mean,
            total,
            total,
            mean,
            total,
            [1.0, 3.0, 5.0],
            mean,
            [mean, mean[:1]],
            [total, total[:1]],
            [total],
            [total],
        ),
        *([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [0.0, 1.0, 2.0], {"epoch": 1}, 5),
    ]
    expected = {
        "plain": alone(),
        "sum": alone(factor=2.0),
        "two passes": alone(passes=2),
        "clipped": alone(clip=0.05),
        "two of three passes": alone(passes=2),
        "two of three, clipped": alone(passes=2, clip=0.05),
    }
    adam = torch.optim.Adam((model := model_of(1)).parameters(), lr=0.2, betas=(0.8, 0.9))
    model(torch.ones(1, 6)).sum().backward()
    adam.step()
    state = adam.state_dict()["state"]
    for rank, result in enumerate(results):
        assert result["place"] == [2, 0, 1, True]
        assert result["calls"] == calls
        assert result["poll"] is True
        lr, betas, parameters, steps, moments = result["adam"]
        assert (lr, betas, steps) == (0.2, [0.8, 0.9], 1.0)
        torch.testing.assert_close(parameters, weights(model), rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.tensor(moments), state[3]["exp_avg"], rtol=0, atol=1e-6)
        assert result["compressed"] == [[1.0], [1 + 2**-20], [1 + 2**-20]]
        for name, value in expected.items():
            assert result[name] == results[0][name], name
            torch.testing.assert_close(torch.tensor(result[name]), torch.tensor(value), rtol=0, atol=1e-6, msg=name)
        assert result["join"] == [1, -(1.5 + 1.5 + 2.0)], rank
        assert result["ended"] is False


@pytest.mark.timeout(300)  # four processes import torch
def test_bytepss_calls_and_optimizer() -> None:
    with LocalCluster(WORKERS, 1) as cluster:
        first, second = run(cluster, BYTEPS)
    mean, total = [0.5, 1.5, 2.5], [1.0, 3.0, 5.0]
    assert first["calls"] == second["calls"] == [mean, total, mean, mean, total, mean]
    for name, value in (("plain", alone()), ("two passes", alone(passes=2))):
        assert first[name] == second[name]
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(value), rtol=0, atol=1e-6)
    assert first["ddp"] == second["ddp"]
    assert first["accumulated"]
    assert first["buffers"] == second["buffers"]


# ── one process ──


@pytest.mark.parametrize("framework", [hvd, bps], ids=["horovod", "byteps"])
def test_a_program_without_a_cluster_is_the_only_worker(framework: Any) -> None:
    for _ in range(2):  # it can begin again
        framework.init()
        try:
            assert (framework.rank(), framework.size(), framework.local_rank(), framework.local_size()) == (0, 1, 0, 1)
            reduce = framework.allreduce if framework is hvd else framework.push_pull
            assert reduce(torch.ones(2), name="x").tolist() == [1.0, 1.0]
            if framework is hvd:
                assert hvd.join() == 0
                assert hvd.allgather(torch.ones(2)).tolist() == [1.0, 1.0]
                assert hvd.broadcast_object({"a": 1}) == {"a": 1}
                hvd.barrier()
            torch.testing.assert_close(torch.tensor(trained(framework)), torch.tensor(alone()), rtol=0, atol=1e-6)
        finally:
            framework.shutdown()


def test_calls_before_init_raise_as_in_horovod() -> None:
    tensor = torch.ones(1)
    calls: list[Any] = [
        hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.barrier, hvd.join, bps.rank, bps.local_size,
        lambda: hvd.allreduce(tensor), lambda: hvd.broadcast_(tensor, 0), lambda: hvd.allgather(tensor),
        lambda: hvd.broadcast_object(1), lambda: hvd.broadcast_parameters({}, 0),
        lambda: bps.push_pull(tensor, name="x"),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(tensor)])),
        lambda: bps.DistributedDataParallel(torch.nn.Linear(1, 1)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=r"has not been initialized: call (hvd|bps)\.init\(\) first") as raised:
            call()
        assert isinstance(raised.value, NotInitialized | KvdError)
    assert hvd.is_initialized() is False


def test_wrong_arguments_say_what_to_do() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(NotAllowed, match="no process sets"):
        hvd.init(comm=[0])
    hvd.init()
    bps.init()
    try:
        cases: list[tuple[str, Any]] = [
            ("average and op say the same", lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)),
            (r"op is hvd\.Average or hvd\.Sum, not 1", lambda: hvd.allreduce(torch.ones(1), op=1)),  # type: ignore[arg-type]
            ("push_pull needs a name", lambda: bps.push_pull(torch.ones(1))),
            ("a dict or a list of tensors, not a Tensor", lambda: hvd.broadcast_parameters(torch.ones(1), 0)),
            ("'a' is a int, not a tensor", lambda: hvd.broadcast_parameters({"a": 1}, 0)),
            ("device_ids has 2 devices", lambda: bps.DistributedDataParallel(torch.nn.Linear(1, 1), [0, 1])),
        ]
        for text, call in cases:
            with pytest.raises(NotAllowed, match=text):
                call()
        for text, options in [
            ("backward_passes_per_step is a whole number, 1 or more, not 0", {"backward_passes_per_step": 0}),
            ("gradient_predivide_factor=2.0 is not needed", {"gradient_predivide_factor": 2.0}),
            ("op is Average or Sum, not 'mean'", {"op": "mean"}),
        ]:
            with pytest.raises(NotAllowed, match=text):
                hvd.DistributedOptimizer(torch.optim.SGD([parameter]), **options)  # type: ignore[arg-type]
    finally:
        hvd.shutdown()
        bps.shutdown()


def test_what_is_left_out_says_what_to_use() -> None:
    for module, name, text in [
        (hvd, "Adasum", "use op=hvd.Average"),
        (hvd, "ProcessSet", "all workers take part"),
        (hvd, "alltoall", r"use hvd\.allgather"),
        (bps, "suspend", "--max-workers"),
    ]:
        with pytest.raises(AttributeError, match=rf"has no {name}: .*{text}.* \(docs/porting\.md\)"):
            getattr(module, name)
        assert not hasattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        hvd.nothing  # noqa: B018
