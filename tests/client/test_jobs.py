"""Several programs on running daemons: one after the other, twice the same, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.cluster.observer import Observer
from kvd.config import load
from kvd.errors import ConfigError, JobBusy, JobEnded, KeyNotFound, KvdError, NotAllowed
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import ones

SETTINGS: dict[str, Any] = {"run": "", "heartbeat_interval_s": 0.1}


@pytest.fixture
def daemons() -> Iterator[LocalCluster]:
    """A scheduler for two workers, and two servers, which run like daemons: no program has a token."""
    with LocalCluster(2, 2, **SETTINGS) as cluster:
        yield cluster


def train(cluster: LocalCluster, value: float, steps: int = 3, **settings: Any) -> list[Any]:
    """Two workers that sum what both push."""

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, np.float32))
        return [float(kv.pushpull("w", np.full(4, value, np.float32))[0]) for _ in range(steps)]

    return cluster.run(program, **settings)


def observer(cluster: LocalCluster, **settings: Any) -> Observer:
    return cluster.observer(**settings)


def phases(cluster: LocalCluster) -> list[tuple[str, str]]:
    with observer(cluster) as look:
        return [(run["job"], run["phase"]) for run in look.jobs()]


# ── one after the other ──


def test_a_second_program_starts_afresh(daemons: LocalCluster) -> None:
    assert train(daemons, 1) == [[2, 2, 2]] * 2
    assert train(daemons, 3, node_id="") == [[6, 6, 6]] * 2
    assert train(daemons, 1) == [[2, 2, 2]] * 2
    assert phases(daemons) == [("default", "ended")] * 3


def test_what_a_run_leaves_can_be_read_until_the_next_one_is_complete(daemons: LocalCluster) -> None:
    train(daemons, 1)
    with observer(daemons) as first:
        assert first.pull("w").tolist() == [2] * 4
        train(daemons, 5)
        assert first.pull("w").tolist() == [2] * 4  # it goes on with its run
        name = f"default@{first.jobs()[0]['run']}"
    with observer(daemons) as later:
        assert later.pull("w").tolist() == [10] * 4
        later.end_job(name)
        assert [run["phase"] for run in later.jobs()] == ["gone", "ended"]
        assert later.pull("w").tolist() == [10] * 4


# ── side by side ──


def test_two_jobs_share_the_daemons(daemons: LocalCluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(train, daemons, 1, 30, job="one")
        two = pool.submit(train, daemons, 10, 30, job="two")
        assert one.result() == [[2] * 30] * 2
        assert two.result() == [[20] * 30] * 2
    assert sorted(phases(daemons)) == [("one", "ended"), ("two", "ended")]


def test_two_stores_of_one_process_in_two_jobs(daemons: LocalCluster) -> None:
    """Their optimizers, keys and numbers of workers are their own."""
    one = daemons.store(job="one", num_workers=1, node_id="me")
    two = daemons.store(job="two", num_workers=1, node_id="me")
    one.init("w", ones())
    two.init("w", np.zeros((2, 2), np.float64))
    two.set_optimizer(kvd.optimizer.SGD(1.0))
    assert one.pushpull("w", np.full(4, 5, np.float32)).tolist() == [5] * 4
    assert two.pushpull("w", np.ones((2, 2))).tolist() == [[-1, -1], [-1, -1]]
    assert (one.job, one.num_workers, two.job) == ("one", 1, "two")


def test_a_second_store_in_the_same_job_is_refused(daemons: LocalCluster) -> None:
    one = daemons.lone_store(node_id="me")
    with pytest.raises(NotAllowed, match="this process is worker 0 already"):
        daemons.lone_store(node_id="me")
    assert one.rank == 0


# ── who does not belong ──


def test_a_stranger_gets_job_busy_and_disturbs_nobody(daemons: LocalCluster) -> None:
    one, other = daemons.open_stores()
    with pytest.raises(JobBusy, match="kvd jobs end default") as caught:
        daemons.store()
    assert caught.value.job == "default"
    with pytest.raises(JobBusy):
        daemons.store(run="another")
    one.init_async("w", np.zeros(4, np.float32))
    other.init("w", np.zeros(4, np.float32))
    other.push("w", ones())
    assert one.pushpull("w", ones()).tolist() == [2] * 4


def test_a_worker_that_is_restarted_after_its_run_gets_job_ended(daemons: LocalCluster) -> None:
    train(daemons, 1, run="first")
    with pytest.raises(JobEnded, match="has ended"):
        daemons.store(run="first", node_id="worker-0")
    train(daemons, 2, run="second")
    with pytest.raises(JobEnded) as caught:
        daemons.store(run="first", node_id="worker-0")
    assert caught.value.job == "default"


def test_a_program_can_start_after_a_broken_one() -> None:
    broken: dict[str, Any] = {"worker_timeout_s": 1.0}
    with LocalCluster(2, 1, **SETTINGS, **broken) as cluster:
        for store in cluster.open_stores():
            store.__exit__(RuntimeError, None, None)
        assert train(cluster, 1) == [[2, 2, 2]] * 2  # it waits until the first has failed
        assert phases(cluster) == [("default", "failed"), ("default", "ended")]


def test_the_same_program_goes_on_after_all_its_workers_died() -> None:
    with LocalCluster(2, 1, heartbeat_interval_s=0.1, worker_timeout_s=0.5, server_timeout_s=5.0) as cluster:
        stores = cluster.open_stores(each=[{"node_id": "a"}, {"node_id": "b"}])
        for making in [store.init_async("w", np.zeros(4, np.float32)) for store in stores]:
            making.wait()
        for store in stores:
            store.__exit__(RuntimeError, None, None)
        wait_until(lambda: phases(cluster) == [("default", "failed")], "it has failed")
        again = cluster.open_stores(each=[{"node_id": "a"}, {"node_id": "b"}])
        assert all(store.restarted for store in again)
        assert again[1].pull("w").tolist() == [0] * 4
        assert phases(cluster) == [("default", "running")]


def test_the_number_of_workers_differs_within_a_job(daemons: LocalCluster) -> None:
    first = daemons.lone_store(num_workers=3)
    assert first.num_workers == 3
    with pytest.raises(ConfigError, match="num_workers=2"):
        daemons.lone_store(num_workers=2)


@pytest.mark.parametrize("name", ["", "a b", "a@x", "a/b", "ü" * 65, "\n"])
def test_a_name_with_odd_characters_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"job": name}, environ={})
    assert caught.value.setting == "job"


# ── ended from outside ──


def test_jobs_end_stops_a_job_while_it_trains(daemons: LocalCluster) -> None:
    other = daemons.store(job="other", num_workers=1)
    other.init("w", np.zeros(4, np.float32))
    one, two = daemons.open_stores()
    two.init_async("w", np.zeros(4, np.float32))
    one.init("w", np.zeros(4, np.float32))
    waiting = one.pushpull_async("w", ones())
    with observer(daemons) as look:
        look.end_job("default")
        with pytest.raises(NotAllowed, match="no run of job 'default'"):
            look.end_job("default")
    with pytest.raises(JobEnded):
        waiting.wait(10)
    for store in (one, two):
        with pytest.raises(JobEnded, match="start the program again"):
            wait_until(lambda store=store: store.pull("w") is None, "it is told", 20)  # type: ignore[misc]
    assert other.pushpull("w", ones()).tolist() == [1] * 4
    assert train(daemons, 1) == [[2, 2, 2]] * 2


def test_the_memory_of_runs_that_are_over_is_given_back() -> None:
    """Each run takes more than half of what the servers may use."""
    with LocalCluster(1, 1, **SETTINGS, memory_limit_bytes="8MiB", slice_bytes="1MiB", credit_bytes="1MiB") as cluster:
        for number in range(4):
            with cluster.store() as kv:
                kv.init("w", np.full(1 << 18, number, np.float32))
            with observer(cluster) as look:
                assert look.pull("w")[0] == number
                name = look.jobs()[0]["run"]
        with observer(cluster, job=f"default@{name}") as first, pytest.raises((KvdError, KeyNotFound)):
            first.pull("w")


def test_shutdown_ends_the_daemons() -> None:
    with LocalCluster(1, 2, processes=True, **SETTINGS) as cluster:
        kv = cluster.store()
        with observer(cluster) as look:
            with pytest.raises(NotAllowed, match="job 'default' is running"):
                look.shut_down(force=False)
            kv.close()
            look.shut_down(force=False)
        daemons: Any = [cluster.scheduler, *cluster.servers]
        assert [daemon.process.wait(20) for daemon in daemons] == [0, 0, 0]


def test_a_worker_does_not_choose_a_run() -> None:
    with pytest.raises(ConfigError, match="only readers name a run"):
        kvd.create("dist_sync", job="default@1f")
