"""`LocalSGD` beside the same algorithm in one process, with deaths, newcomers and bad input."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvd
import kvd.torch as kt
from kvd.config import child_environment
from kvd.errors import ConfigError, NotAllowed, NotCopyable
from kvd.testing.cluster import ROOT, LocalCluster, wait_until
from tests.torch import local_sgd_harness as harness
from tests.torch.local_sgd_harness import NAMES, Plan, Weights, gradients, new_inner, new_model, simulate

OUTER = kvd.optimizer.SGD(0.7, momentum=0.9, nesterov=True)
WAIT_S = 60.0
TIMEOUT_S = 280


def assert_close(weights: Weights, expected: Weights) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-6, err_msg=name)


def assert_same_bits(all_weights: list[Weights]) -> None:
    for weights in all_weights[1:]:
        for name, value in weights.items():
            assert value.tobytes() == all_weights[0][name].tobytes(), name


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        pytest.param(3, Plan([11, 3], every=4), id="two loops, whole models"),
        pytest.param(2, Plan([17], every=5, fragments=[NAMES[:1], NAMES[1:2], NAMES[2:]]), id="fragments"),
        pytest.param(
            2,
            Plan([14, 6], every=5, fragments=[NAMES[:1], NAMES[1:]], delay=3, local_share=0.25),
            id="exchanges under way",
        ),
        pytest.param(2, Plan([8], every=4, compression={"type": "fp16", "min_bytes": 0}), id="compressed"),
    ],
)
def test_the_weights_are_those_of_the_algorithm_in_one_process(workers: int, plan: Plan) -> None:
    with LocalCluster(workers, 2) as cluster:
        results = cluster.run(lambda kv: harness.train(kv, plan))
    assert_same_bits([weights for weights, _ in results])
    assert_close(results[0][0], simulate(plan, workers))
    assert all(made == [list(range(total)) for total in plan.loops] for _, made in results)


def test_an_asynchronous_worker_alone_makes_the_same_steps() -> None:
    plan = Plan([10], every=4, outer=kvd.optimizer.DelayedNesterov(0.7, buffer_size=1, momentum=0.9))
    with LocalCluster(1, 1) as cluster:
        [(weights, _)] = cluster.run(lambda kv: harness.train(kv, plan), "dist_async")
    assert_close(weights, simulate(plan, 1))


@pytest.mark.timeout(TIMEOUT_S + 20)  # four processes import torch
def test_a_restarted_worker_begins_its_round_again_with_the_weights_of_the_last_outer_step(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", "2", "-s", "1", "--restart", "1", "--"]
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})
    done = subprocess.run(
        [*launch, sys.executable, harness.__file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("died-*"))) == 2
    everyone = [dict(np.load(tmp_path / f"weights-{rank}.npz")) for rank in range(2)]
    assert_same_bits(everyone)
    assert_close(everyone[0], simulate(harness.LAUNCHED, 2, deaths=harness.DEATHS))
    steps = [(tmp_path / f"steps-{rank}").read_text().split() for rank in range(2)]
    assert [[int(made[0]), int(made[-1])] for made in steps] == [[6, 13], [6, 13]]


def test_a_newcomer_takes_the_weights_of_the_last_outer_step() -> None:
    """It comes when the others are in their second round, and takes part in the third."""
    plan = Plan([20], every=4, fragments=[NAMES[:1], NAMES[1:]])
    may_come = threading.Event()

    def come(cluster: LocalCluster) -> tuple[Weights, list[list[int]]]:
        assert may_come.wait(WAIT_S)
        return harness.train(cluster.store(node_id="newcomer"), plan)

    with ThreadPoolExecutor(3) as pool, LocalCluster(2, 2, max_workers=3, on_worker_loss="shrink") as cluster:
        stores = cluster.open_stores()

        def wait_for_it(loop: int, step: int) -> None:
            if step == 6:  # the first fragment was exchanged in this round
                may_come.set()
                wait_until(lambda: all(kv.ranks == (0, 1, 2) for kv in stores), "the newcomer takes part")

        running = [pool.submit(harness.train, kv, plan, wait_for_it) for kv in stores]
        results = [future.result() for future in [*running, pool.submit(come, cluster)]]
    assert_same_bits([weights for weights, _ in results])
    assert_close(results[0][0], simulate(plan, 3, joins={2: (0, 8)}))
    assert results[2][1] == [list(range(8, 20))]


def test_a_worker_that_the_others_did_not_wait_for_takes_the_weights_of_the_newest_outer_step() -> None:
    """Worker 2 stops in the second round, and comes back when the others are in their fourth."""
    plan = Plan([28], every=4, fragments=[NAMES[:1], NAMES[1:]])
    others_are_ahead = threading.Event()

    def train(kv: kvd.KVStore) -> tuple[Weights, list[list[int]]]:
        def before_step(loop: int, step: int) -> None:
            if kv.rank == 2 and step == 5:
                assert others_are_ahead.wait(WAIT_S)
            if kv.rank < 2 and step == 13:
                others_are_ahead.set()
                wait_until(lambda: kv.ranks == (0, 1, 2), "the late worker takes part again")

        return harness.train(kv, plan, before_step)

    with LocalCluster(3, 2, quorum=2, quorum_grace_s=2.0) as cluster:
        results = cluster.run(train)
    assert_same_bits([weights for weights, _ in results])
    [late] = results[2][1]
    assert late[:8] == [*range(8)]  # it finds out in the exchanges of its second round
    assert late[8:] == [*range(late[8], 28)]
    assert late[8] >= 16


def test_a_snapshot_after_a_round_continues_like_a_restarted_worker(tmp_path: Path) -> None:
    plan = Plan([14], every=4)
    with kvd.create("local") as kv:
        model = new_model(0)
        optimizer = harness.wrap(kv, plan, model)
        for step in optimizer.steps(14):
            gradients(model, 0, step, 0)
            optimizer.step()
            if step == 7:
                kv.snapshot(tmp_path / "snapshot")
                break
    with kvd.create("local") as kv:
        kv.restore(tmp_path / "snapshot")
        weights, made = harness.train(kv, plan)
    assert made == [[*range(8, 14)]]
    assert_close(weights, simulate(plan, 1, deaths={0: (0, 8)}))


# ── a torch optimizer ──


def test_it_is_a_torch_optimizer_for_schedules_scalers_and_checkpoints() -> None:
    """With an outer rate of 1 and no momentum, one worker trains as if it were not wrapped."""
    scales = [False, True, True, False, False, True, False]  # whether the gradients of a step are infinite

    def run(model: Any, inner: Any, optimizer: Any, steps: Any) -> list[float]:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        rates = []
        for step in steps:
            gradients(model, 0, step, 0)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= torch.inf if scales[step] else scaler.get_scale()
            scaler.scale(torch.zeros(()))  # makes its scale
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            rates.append(inner.param_groups[0]["lr"])
        return rates

    bare, wrapped = new_model(0), new_model(0)
    bare_inner, inner = new_inner(bare), new_inner(wrapped)
    expected = run(bare, bare_inner, bare_inner, range(7))
    with kvd.create("local") as kv:
        optimizer = kt.LocalSGD(inner, wrapped.named_parameters(), every=3, outer=kvd.optimizer.SGD(1.0), store=kv)
        assert isinstance(optimizer, torch.optim.Optimizer)
        called: list[Any] = []
        optimizer.register_step_post_hook(lambda *arguments: called.append(arguments))
        assert run(wrapped, inner, optimizer, optimizer.steps(7)) == expected
        assert_close(harness.weights_of(wrapped), harness.weights_of(bare))
        assert kv.version("0.weight") == 3  # also though the last step of the first round was skipped
        assert_close({name: kv.pull(name) for name in NAMES}, harness.weights_of(wrapped))
        assert len(called) == scales.count(False)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
        assert optimizer.store is kv
        optimizer.load_state_dict(bare_inner.state_dict())
        assert str(optimizer.state_dict()) == str(bare_inner.state_dict())
        optimizer.zero_grad()
        assert wrapped[0].weight.grad is None
        with pytest.raises(NotCopyable, match="state_dict"):
            copy.deepcopy(optimizer)
        with pytest.raises(NotAllowed, match="add them first, then wrap"):
            optimizer.add_param_group({"params": [torch.zeros(1)]})


def test_steps_outside_of_a_loop_are_counted_and_a_fused_optimizer_reads_the_scaler() -> None:
    model = new_model(0)
    inner = torch.optim.AdamW(model.parameters(), 0.02, fused=True)
    with kvd.create("local") as kv:
        optimizer = kt.LocalSGD(inner, model.named_parameters(), every=2, outer=kvd.optimizer.SGD(1.0), store=kv)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(5):
            loss = gradients(model, 0, step, 0)
            assert loss.isfinite()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= torch.inf if step == 0 else 4.0
            scaler.scale(loss.detach())
            before = harness.weights_of(model)
            scaler.step(optimizer)
            changed = any((before[name] != value).any() for name, value in harness.weights_of(model).items())
            assert changed == (step > 0)
            assert [kv.version(name) for name in NAMES] == [(step + 1) // 2] * 4
            scaler.update()


def test_frozen_tied_and_compiled_parameters_and_those_of_half_precision() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
            self.last.weight = self.first.weight
            self.unused = torch.nn.Parameter(torch.ones(3))
            self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x))

    torch.manual_seed(0)
    model = Tied().to(torch.bfloat16)
    twin = copy.deepcopy(model)
    named = [(f"_orig_mod.{name}", value) for name, value in model.named_parameters(remove_duplicate=False)]
    inner = torch.optim.SGD(model.parameters(), 0.5)
    with kvd.create("local") as kv:
        optimizer = kt.LocalSGD(inner, named, every=2, outer=kvd.optimizer.SGD(1.0), store=kv)
        for trained, wrapped in ((model, optimizer), (twin, torch.optim.SGD(twin.parameters(), 0.5))):
            for step in optimizer.steps(4) if wrapped is optimizer else range(4):
                wrapped.zero_grad()
                x = torch.arange(step, step + 3)
                torch.nn.functional.cross_entropy(trained(x), x + 1).backward()  # type: ignore[no-untyped-call]
                wrapped.step()
        pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
        assert all(torch.allclose(one.float(), other.float(), rtol=2**-7, atol=0.01) for one, other in pairs)
        assert not torch.equal(model.first.weight, torch.zeros_like(model.first.weight))
        assert kv.pull("frozen").astype(float).tolist() == [1, 1]
        assert [kv.version(name) for name in ("first.weight", "unused", "frozen")] == [2, 2, 0]
        with pytest.raises(kvd.KeyNotFound):
            kv.pull("last.weight")


# ── bad input ──


def test_arguments_that_make_no_sense_are_refused() -> None:
    model = new_model(0)
    inner = new_inner(model)

    def refused(match: str, optimizer: Any = inner, named: Any = None, **options: Any) -> None:
        given = {"outer": OUTER, "store": kv, **options}
        with pytest.raises((NotAllowed, ConfigError), match=match):
            kt.LocalSGD(optimizer, model.named_parameters() if named is None else named, **given)

    with kvd.create("local") as kv:
        refused("every is a whole number from 1", every=0)
        refused("fragments is a whole number from 1", fragments=0)
        refused(r"fragments \(3\) are at most every \(2\)", every=2, fragments=3)
        refused(r"fragments \(5\) are at most the trained parameters \(4\)", fragments=5)
        refused("delay is less than every", every=3, delay=3)
        refused("local_share is a number from 0 to 1", delay=1, local_share=1.5)
        refused("local_share must be a number", delay=1, local_share="all")
        refused("outer is an optimizer of the servers", outer=inner)
        refused("a torch optimizer is wanted", optimizer=model)
        refused("a parameter of shape .* does not name", named=list(model.named_parameters())[1:])
        refused("the optimizer does not have '1.weight'", named=[*model.named_parameters(), *_extra("1.weight")])
        refused("two parameters of the name '0.bias'", named=[*model.named_parameters(), *_extra("0.bias")])
        refused("a Parameter where a pair of a name", named=list(model.parameters()))
        refused("int under the name 'x'", named=[("x", 1)])
        frozen = new_model(0).requires_grad_(False)
        refused("no parameter needs gradients", optimizer=new_inner(frozen), named=frozen.named_parameters())
        optimizer = kt.LocalSGD(inner, model.named_parameters(), outer=OUTER, store=kv)
        refused("a LocalSGD is wrapped already", optimizer=optimizer)
        with kvd.create("local") as other:
            distributed = kt.DistributedOptimizer(
                new_inner(model), model.named_parameters(), where="servers", op="mean", store=other
            )
            refused("a DistributedOptimizer is wrapped already", optimizer=distributed)
        refused("this store has a LocalSGD already")
        with pytest.raises(NotAllowed, match="number of steps"):
            optimizer.steps(-1)


def _extra(name: str) -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(torch.ones(2)))]


def test_changes_after_wrapping_are_refused_and_name_the_parameter() -> None:
    def after(change: Any, match: str) -> None:
        model = new_model(0)
        inner = new_inner(model)
        with kvd.create("local") as kv:
            optimizer = kt.LocalSGD(inner, model.named_parameters(), every=1, outer=OUTER, store=kv)
            gradients(model, 0, 0, 0)
            optimizer.step()
            with pytest.raises(NotAllowed, match=match):
                change(model, inner, optimizer)

    def trained(model: Any, optimizer: Any) -> None:
        gradients(model.float(), 0, 1, 0)
        optimizer.step()

    def moved(model: Any, inner: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model[2].double()
        optimizer.step()

    def frozen(model: Any, inner: Any, optimizer: Any) -> None:
        model[2].bias.requires_grad_(False)
        optimizer.step()

    def added(model: Any, inner: Any, optimizer: Any) -> None:
        inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        trained(model, optimizer)

    def loaded(model: Any, inner: Any, optimizer: Any) -> None:
        list(optimizer.steps(1))
        model.load_state_dict(new_model(1).state_dict())
        list(optimizer.steps(1))

    def twice(model: Any, inner: Any, optimizer: Any) -> None:
        for _ in optimizer.steps(2):
            optimizer.step()
            optimizer.step()

    after(moved, r"parameter '2.weight' was torch.float32 \(3, 5\) on cpu when .* torch.float64")
    after(frozen, "parameter '2.bias' was frozen")
    after(added, "parameters cannot be added")
    after(loaded, "a parameter among '0.weight', '0.bias', '2.weight' and 1 more was changed")
    after(twice, "called twice in one step")


def test_another_model_or_another_interval_on_another_rank_is_refused_in_all() -> None:
    def wrap(kv: kvd.KVStore, every: int, inputs: int, outer: kvd.optimizer.Optimizer) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(inputs, 5), torch.nn.Linear(5, 3))
        kt.LocalSGD(new_inner(model), model.named_parameters(), every=every, outer=outer, store=kv)

    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1) as cluster:
        stores = cluster.open_stores()
        for every, inputs, outer, text in (
            (50, 7, OUTER, r"worker 1 has '0.weight \(5, 7\) float32' where worker 0 has '0.weight \(5, 6\) float32'"),
            (20, 6, OUTER, r"worker 1 has 'every=20, fragments=1, delay=0' where worker 0 has 'every=50"),
            (
                50,
                6,
                kvd.optimizer.SGD(0.5),
                r"worker 1 has 'outer=SGD\(.*=0.5.*' where worker 0 has 'outer=SGD\(.*=0.7",
            ),
        ):
            wrapping = [pool.submit(wrap, stores[0], 50, 6, OUTER), pool.submit(wrap, stores[1], every, inputs, outer)]
            for future in wrapping:
                with pytest.raises(NotAllowed, match=text):
                    future.result(WAIT_S)


def test_a_newcomer_with_another_interval_is_refused() -> None:
    with LocalCluster(1, 1, max_workers=2, on_worker_loss="shrink") as cluster:
        harness.train(cluster.store(node_id="first"), Plan([4], every=4))
        with pytest.raises(NotAllowed, match="worker 1 has every=3, fragments=1, delay=0, and the job every=4, frag"):
            harness.train(cluster.store(node_id="newcomer"), Plan([4], every=3))
