"""A worker waits until its cluster is complete, says what is missing, and leaves no trace when it gives up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import kvd
from kvd.client.calls.deadline import Deadline
from kvd.client.cluster import joining
from kvd.client.cluster import observer as observer_module
from kvd.client.cluster.joining import missing_nodes
from kvd.core.membership import ViewState
from kvd.errors import ConnectError, RequestTimeout
from kvd.node.storage.state_file import SchedulerStateFile
from kvd.protocol.messages import Epoch, Member, MemberState
from kvd.testing.cluster import LocalCluster, wait_until
from tests.core.fakes import cluster as settings_of
from tests.core.fakes import view
from tests.faults.stopping import stopped

SCHEDULER = "tcp://10.0.0.1:9191"


@pytest.fixture
def quickly_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "FIRST_NOTICE_S", 0.05)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def report_of(cluster: LocalCluster) -> dict[str, Any]:
    with cluster.observer() as observer:
        return observer.status()


def all_servers_joined(cluster: LocalCluster) -> None:
    wait_until(lambda: len(report_of(cluster)["servers"]) == cluster.num_servers, "all servers are there")


def taken(cluster: LocalCluster) -> dict[str, str]:
    """The workers that have a rank, and the states of those."""
    return {f"worker {m['rank']}": m["state"] for m in report_of(cluster)["members"] if m["role"] == "worker"}


def begun(cluster: LocalCluster, pool: ThreadPoolExecutor, **settings: Any) -> Future[kvd.KVStore]:
    """A creation that waits for the other workers."""
    before = len(taken(cluster))
    future = pool.submit(cluster.store, **settings)
    wait_until(lambda: len(taken(cluster)) > before, "it has a rank")
    assert not future.done()
    return future


# ── complete ──


def test_it_returns_when_all_workers_have_joined(pool: ThreadPoolExecutor) -> None:
    with LocalCluster(3, 2) as cluster:
        first, second = begun(cluster, pool), begun(cluster, pool)
        third = cluster.store()
        assert {store.rank for store in (first.result(), second.result(), third)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, ["RANK = 3 and WORLD_SIZE = 8, but the store has this as worker 0 of 1"]),
        ({"SLURM_PROCID": "2"}, ["SLURM_PROCID = 2, but the store has this as worker 0 of 1"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "2"}, []),
        ({"RANK": "pod-0", "WORLD_SIZE": "x"}, []),
    ],
)
def test_a_launcher_that_gives_another_rank_is_named_once(
    variables: dict[str, str], says: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with LocalCluster(1, 1) as cluster:
        store = cluster.store(preferred_rank=0, num_workers=1)
        store.barrier()
    said = [record.getMessage() for record in caplog.records if "the store has this" in record.getMessage()]
    assert [text.partition(": ")[0] for text in said] == says
    assert all("kv.rank and kv.num_workers" in text for text in said)


def test_a_restarted_worker_does_not_wait_for_those_that_are_dead_or_have_left() -> None:
    quick: dict[str, Any] = {"heartbeat_interval_s": 0.1, "worker_timeout_s": 0.5, "server_timeout_s": 30.0}
    with LocalCluster(3, 1, **quick) as cluster:
        stores = cluster.open_stores(each=[{"node_id": f"worker-{rank}"} for rank in range(3)])
        stores[0].set_barrier_before_exit(False)
        stores[0].close()
        for store in stores[1:]:
            store.__exit__(RuntimeError, None, None)
        dead = {"worker 0": "left", "worker 1": "dead", "worker 2": "dead"}
        wait_until(lambda: taken(cluster) == dead, "two are declared dead")
        successor = cluster.store(node_id="worker-2")
        assert (successor.rank, successor.restarted) == (2, True)


def test_an_observer_and_a_visitor_do_not_wait_for_workers() -> None:
    with LocalCluster(2, 1) as cluster:
        assert report_of(cluster)["missing"] == []
        assert cluster.lone_store().num_workers == 2


# ── what it says ──


@pytest.mark.usefixtures("quickly_told")
def test_it_says_what_is_missing_again_and_again(pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture) -> None:
    def said(text: str, times: int) -> bool:
        return sum(text in record.getMessage() for record in caplog.records) >= times

    with LocalCluster(3, 2) as cluster:
        all_servers_joined(cluster)
        cluster.servers.pop().stop()
        first = pool.submit(cluster.store)
        where = cluster.address
        wait_until(
            lambda: said(f"waiting for server 1 (which has left), worker 1 and worker 2 at {where}: ", 2), "said"
        )
        wait_until(lambda: said("1 of 2 servers have joined, 1 of 3 workers have joined", 1), "counted")
        assert said(f"start each missing server with kvd server --scheduler {where}", 1)
        assert said(f"start each missing worker with kvd worker --scheduler {where} -- python PROGRAM", 1)
        cluster.start("server", node_id="server-1")
        second = pool.submit(cluster.store)
        wait_until(lambda: said(f"waiting for worker 2 at {where}: 2 of 3 workers have joined", 1), "one is missing")
        cluster.store()
        first.result()
        second.result()
    assert all(record.levelname == "WARNING" for record in caplog.records if "waiting for" in record.getMessage())


SCRIPT = """
import kvd
kv = kvd.create("dist_sync")
kv.set_barrier_before_exit(False)
kv.close()
"""


def test_a_plain_script_shows_it_on_stderr() -> None:
    with LocalCluster(2, 1) as cluster:
        script = cluster.script(SCRIPT, 0)
        assert script.stdout is not None
        line = script.stdout.readline().decode()
        assert line.startswith(f"waiting for worker 1 at {cluster.address}: 1 of 2 workers have joined; start ")
        cluster.store(node_id="worker-1")
        rest, _ = script.communicate(timeout=30)
        assert script.returncode == 0, rest.decode()


@pytest.mark.usefixtures("quickly_told")
def test_it_says_that_no_scheduler_answers(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConnectError) as caught:
        kvd.create("dist_sync", scheduler="tcp://127.0.0.1:1", join_timeout_s=0.5, num_workers=3)
    assert caught.value.address == "tcp://127.0.0.1:1"
    where = "no scheduler answers at tcp://127.0.0.1:1"
    remedy = (
        "start one there (kvd scheduler --scheduler tcp://127.0.0.1:1 --num-workers 3 --num-servers N), or set "
        "KVD_SCHEDULER to where it is"
    )
    for text in (caplog.messages[0], str(caught.value)):
        assert text.startswith(where)
        assert f": {remedy}; " in text
    assert 1 <= len(caplog.messages) <= 3  # after 0.05, 0.15 and 0.35 s, unless this process slept that long


def test_a_scheduler_that_falls_silent_is_named(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "SILENCE_S", 0.5)
    with LocalCluster(2, 1) as cluster:
        creation = begun(cluster, pool, join_timeout_s=2.0)
        cluster.scheduler.stop()
        with pytest.raises(RequestTimeout, match="has been silent for") as caught:
            creation.result()
        assert caught.value.waiting_for == ("scheduler",)


def seen(*members: Member, workers: int = 1, servers: int = 1) -> ViewState:
    state = ViewState()
    assert state.update(Epoch(1, 1), view(settings_of(workers, servers), members))
    return state


def server(rank: int, address: str, state: MemberState = MemberState.ACTIVE) -> Member:
    return Member("server", rank, f"ps-{rank}", 100 + rank, address, state, "", 0.0)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (
            "tcp://127.0.0.1:4041",
            "it listens on 127.0.0.1, which only processes of its own host reach; start it without",
        ),
        ("tcp://10.0.0.7:4041", "check that this host reaches 10.0.0.7 at port 4041 (firewall, route), and that the"),
        ("ipc:///tmp/server.sock", "it listens on a Unix socket, which only processes of its own host reach"),
        ("nonsense", "this is no address"),
    ],
)
def test_a_server_that_is_not_reached_is_named_with_what_to_check(address: str, says: str) -> None:
    member = server(0, address)
    problem = missing_nodes(seen(member, workers=0), [member], SCHEDULER)
    assert problem.nodes == ("server 0",)
    assert problem.text.startswith(f"server 0 (node ps-0) has joined, but does not answer this worker at {address}: ")
    assert says in problem.text


def test_a_long_list_is_cut_and_every_node_is_in_the_attribute() -> None:
    problem = missing_nodes(seen(workers=100, servers=1), [], SCHEDULER)
    assert problem.nodes == ("server 0", *[f"worker {rank}" for rank in range(100)])
    assert "worker 6 and 93 more at tcp://10.0.0.1:9191: 0 of 1 servers have joined, 0 of 100 workers" in problem.text


def test_nothing_missing_is_no_empty_list() -> None:
    problem = missing_nodes(seen(server(0, "tcp://10.0.0.7:1"), workers=0), [], SCHEDULER)
    assert problem.nodes == ()
    assert "has just become complete" in problem.text


def test_a_server_that_does_not_answer_is_named_at_the_end() -> None:
    patient: dict[str, Any] = {"server_timeout_s": 40.0, "worker_timeout_s": 40.0}
    with LocalCluster(1, 2, processes=True, **patient) as cluster:
        all_servers_joined(cluster)
        with stopped(cluster.servers[0]), pytest.raises(RequestTimeout) as caught:
            cluster.store(join_timeout_s=2.0)
        (silent,) = caught.value.waiting_for
        assert f"{silent} (node server-0) has joined, but does not answer this worker at " in str(caught.value)
        assert "the server's process is not stopped" in str(caught.value)
        cluster.store()


# ── giving up ──


def test_one_that_gives_up_has_not_joined(pool: ThreadPoolExecutor) -> None:
    with LocalCluster(2, 1) as cluster:
        begun_at = time.monotonic()
        with pytest.raises(RequestTimeout, match="1 of 2 workers have joined") as caught:
            cluster.store(join_timeout_s=2.0)
        assert time.monotonic() - begun_at < 10
        assert caught.value.waiting_for == ("worker 1",)
        assert caught.value.outcome == "not_sent"
        assert taken(cluster) == {}
        creation = begun(cluster, pool)  # alone again: nobody takes the one that gave up for a worker
        stores = [cluster.store(), creation.result()]
        assert {store.rank for store in stores} == {0, 1}
        assert not any(store.restarted for store in stores)


def test_a_successor_that_gives_up_leaves_its_predecessor_dead() -> None:
    quick: dict[str, Any] = {"heartbeat_interval_s": 0.1, "worker_timeout_s": 0.5, "server_timeout_s": 30.0}
    with LocalCluster(2, 1, processes=True, **quick) as cluster:
        one, other = cluster.open_stores(each=[{"node_id": f"worker-{rank}"} for rank in range(2)])
        other.__exit__(RuntimeError, None, None)
        wait_until(lambda: taken(cluster)["worker 1"] == "dead", "it is declared dead")
        server: Any = cluster.servers[0]
        with stopped(server), pytest.raises(RequestTimeout):
            cluster.store(node_id="worker-1", join_timeout_s=1.0)
        wait_until(lambda: taken(cluster) == {"worker 0": "active", "worker 1": "dead"}, "it is dead as before")
        assert one.num_dead_node(4) == 1
        assert cluster.store(node_id="worker-1").restarted


def test_one_that_is_interrupted_has_not_joined() -> None:
    with LocalCluster(2, 1) as cluster:
        script = cluster.script(SCRIPT, 0)
        wait_until(lambda: taken(cluster), "it has a rank")
        os.kill(script.pid, signal.SIGINT)
        output, _ = script.communicate(timeout=30)
        assert b"KeyboardInterrupt" in output
        assert taken(cluster) == {}


@pytest.mark.asyncio
async def test_a_creation_that_is_cancelled_while_it_waits_gives_its_place_back() -> None:
    with LocalCluster(2, 1) as cluster:
        creation = asyncio.create_task(kvd.aio.create("dist_sync", scheduler=cluster.address))
        await asyncio.to_thread(wait_until, lambda: taken(cluster), "it has a rank")
        creation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creation
        await asyncio.to_thread(wait_until, lambda: taken(cluster) == {}, "the place is free")
        stores = await asyncio.to_thread(cluster.open_stores)
        assert [(store.rank, store.restarted) for store in stores] == [(0, False), (1, False)]


def test_the_status_waits_for_servers_that_the_view_does_not_show_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A view is announced once it is saved; the scheduler knows of the server before that."""
    saved = threading.Event()
    save = SchedulerStateFile.save

    def slow_save(file: SchedulerStateFile, record: Any) -> None:
        if "server-0" in str(record):
            saved.wait(30)
        save(file, record)

    monkeypatch.setattr(SchedulerStateFile, "save", slow_save)
    cluster = LocalCluster(1, 1, state_dir=str(tmp_path))
    with cluster, ThreadPoolExecutor(1) as pool, cluster.observer() as observer:
        wait_until(lambda: observer._scheduler_status(Deadline(30))["members"], "the server has joined")
        report = pool.submit(observer.status)
        wait([report], 0.5)  # the question is on its way to nowhere by then, or waits
        saved.set()
        (server,) = report.result(30)["servers"]
        assert "error" not in server


def test_the_status_does_not_wait_for_an_announcement_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk of the scheduler may be full."""
    save = SchedulerStateFile.save

    def failing_save(file: SchedulerStateFile, record: Any) -> None:
        if "server-0" in str(record):
            raise OSError("disk full")
        save(file, record)

    monkeypatch.setattr(SchedulerStateFile, "save", failing_save)
    monkeypatch.setattr(observer_module, "ANNOUNCEMENT_S", 0.2)
    with LocalCluster(1, 1, state_dir=str(tmp_path)) as cluster, cluster.observer() as observer:
        wait_until(lambda: observer._scheduler_status(Deadline(30))["cannot_save"] == "disk full", "it is told")
        report = observer.status()
    assert report["servers"] == [{"role": "server", "rank": 0, "error": observer_module.NOT_ANNOUNCED}]
