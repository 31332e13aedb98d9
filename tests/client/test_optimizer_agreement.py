"""Workers that set different optimizers all raise; all of them together may change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, Adam
from kvd.testing.cluster import LocalCluster


def ones() -> Any:
    return np.ones(4, np.float32)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_another_optimizer_raises_in_all(mode: str, first: int) -> None:
    """Whoever sets its optimizer first learns of the other's when it pushes."""
    optimizers = [SGD(0.5, momentum=0.9), SGD(0.25, momentum=0.9)]
    rates = [0.5, 0.25]
    second = 1 - first

    def program(kv: kvd.KVStore) -> str:
        kv.init("w", np.zeros(4, np.float32))
        if kv.rank == second:
            kv.barrier("the first has set its optimizer")
            with pytest.raises(NotAllowed) as error:
                kv.set_optimizer(optimizers[kv.rank])
            kv.barrier("and the second has tried")
        else:
            kv.set_optimizer(optimizers[kv.rank])
            kv.barrier("the first has set its optimizer")
            kv.barrier("and the second has tried")
            with pytest.raises(NotAllowed) as error:
                kv.pushpull("w", ones())
        kv.barrier("both have raised")
        kv.set_optimizer(optimizers[first])
        kv.barrier("and agree")
        if kv.clock("w") == 0:  # the other's push is kept
            kv.push("w", ones())
        assert kv.pull("w").tolist() == [-2 * rates[first]] * 4 if mode == "dist_sync" else True
        return str(error.value)

    with LocalCluster(2, 3) as cluster:
        texts = cluster.run(program, mode)
    for text in texts:
        assert text.startswith(
            f"the workers' optimizers differ: worker {second} sets SGD(learning_rate={rates[second]}), "
            f"but worker {first} set SGD(learning_rate={rates[first]})"
        )


def test_a_worker_that_waits_in_a_push_is_told() -> None:
    def program(kv: kvd.KVStore) -> str:
        kv.init(["w", "v"], [np.zeros(4, np.float32)] * 2)
        if kv.rank == 0:
            kv.set_optimizer(SGD(0.5))
            handle = kv.push("v", ones())  # staged, and waits for worker 1
            kv.barrier("pushed")
            with pytest.raises(NotAllowed) as error:
                kv.pull("v")
            with pytest.raises(NotAllowed):
                handle.wait()
            kv.barrier("told")
            kv.barrier("agreed")
        else:
            kv.barrier("pushed")
            with pytest.raises(NotAllowed) as error:
                kv.set_optimizer(Adam(0.5))
            kv.barrier("told")
            kv.set_optimizer(SGD(0.5))
            kv.barrier("agreed")
            kv.push("v", ones()).wait()
        kv.flush()
        assert kv.pull("v").tolist() == [-1] * 4  # the push that was kept counts once
        return str(error.value)

    with LocalCluster(2, 2) as cluster:
        for text in cluster.run(program):
            assert "worker 1 sets Adam, but worker 0 set SGD" in text


def test_all_change_it_together() -> None:
    """The rounds before the change belong to the optimizer before, also those that nobody has waited for."""

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, np.float32))
        kv.set_optimizer(SGD(1.0))
        for _ in range(2):
            kv.push("w", ones())
        kv.set_optimizer(SGD(0.125))
        kv.set_optimizer(SGD(0.125))
        for _ in range(2):
            kv.push("w", ones())
        kv.set_optimizer(None)
        kv.push("w", ones() * 7)
        before = kv.pull("w")
        kv.set_optimizer(SGD(1.0))
        kv.push("w", ones())
        return before, kv.pull("w")

    with LocalCluster(2, 2) as cluster:
        for before, after in cluster.run(program):
            assert before.tolist() == [14.0] * 4
            assert after.tolist() == [12.0] * 4


def test_a_sum_of_rounds_under_two_optimizers() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, np.float32))
        for rate, rounds in ((1.0, 3), (0.25, 2)):
            kv.set_optimizer(SGD(rate))
            for _ in range(rounds):
                kv.push("w", ones())
        return kv.pull("w")

    with LocalCluster(3, 2) as cluster:
        for value in cluster.run(program):
            assert value.tolist() == [-3 * (3 * 1.0 + 2 * 0.25)] * 4


def test_a_change_that_one_worker_does_not_make() -> None:
    def program(kv: kvd.KVStore) -> str:
        kv.init("w", np.zeros(4, np.float32))
        kv.set_optimizer(SGD(1.0))
        kv.pushpull("w", ones())
        if kv.rank == 0:
            kv.set_optimizer(SGD(0.5))
        kv.barrier("changed")
        with pytest.raises(NotAllowed) as error:
            kv.pushpull("w", ones())
        kv.barrier("raised")
        if kv.rank == 1:
            kv.set_optimizer(SGD(0.5))
        kv.barrier("agreed")
        assert kv.pull("w").tolist() == [-3.0] * 4  # both pushes were kept
        return str(error.value)

    with LocalCluster(2, 2) as cluster:
        for text in cluster.run(program):
            assert "worker 1 still has SGD(learning_rate=1.0), but worker 0 set SGD(learning_rate=0.5)" in text


def test_setting_the_same_again_waits_for_nobody() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, np.float32))
        kv.set_optimizer(SGD(1.0))
        if kv.rank == 0:
            handle = kv.push("w", ones())
            kv.set_optimizer(SGD(1.0))
            assert not handle.done()
        kv.barrier("worker 0 has set it again")
        if kv.rank == 1:
            kv.push("w", ones())
        return kv.pull("w").tolist()

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == [[-2.0] * 4] * 2


def test_one_worker_may_set_it_for_all() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, np.float32))
        for rate in (1.0, 0.5):
            if kv.rank == 0:
                kv.set_optimizer(SGD(rate))
            kv.barrier(f"set {rate}")
            kv.pushpull("w", ones())
            kv.barrier(f"pushed {rate}")
        return kv.pull("w")

    with LocalCluster(2, 2) as cluster:
        for value in cluster.run(program):
            assert value.tolist() == [-3.0] * 4


def test_one_worker_may_load_another_one_for_all(tmp_path: Path) -> None:
    file = tmp_path / "states"

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, np.float32))
        kv.set_optimizer(SGD(1.0))
        kv.pushpull("w", ones())
        if kv.rank == 0:
            kv.update_optimizer(learning_rate=0.5)
            kv.save_optimizer_states(file, dump_optimizer=True)
            kv.update_optimizer(learning_rate=1.0)
            kv.load_optimizer_states(file)
        kv.barrier("loaded")
        kv.set_optimizer(SGD(1.0))  # as a program does that is started again: no change
        return kv.pushpull("w", ones())

    with LocalCluster(2, 2) as cluster:
        for value in cluster.run(program):
            assert value.tolist() == [-3.0] * 4


def test_a_restarted_worker_repeats_its_program() -> None:
    settings: dict[str, Any] = {"worker_timeout_s": 40.0, "request_timeout_s": 50.0}
    with LocalCluster(1, 1, **settings) as cluster:
        kv = cluster.store(node_id="trainer")
        kv.init("w", np.zeros(4, np.float32))
        for rate in (1.0, 0.5):
            kv.set_optimizer(SGD(rate, momentum=0.5))
            kv.pushpull("w", ones())
        kv.__exit__(RuntimeError, None, None)
        again = cluster.store(node_id="trainer")
        again.init("w", np.zeros(4, np.float32))
        again.set_optimizer(SGD(1.0, momentum=0.5))
        again.rewind(again.clock("w"))
        again.set_optimizer(SGD(0.5, momentum=0.5))
        assert again.pushpull("w", ones()).tolist() == [-1.0 - 0.5 - 0.5 * 1.5] * 4  # with the momentum of before
