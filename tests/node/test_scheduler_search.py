"""Waiting for the scheduler: names that are not known yet, addresses where nothing listens, keys that nobody made."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvd
import kvd.aio
from kvd.client.cluster.joining import Arrival
from kvd.client.cluster.observer import Observer
from kvd.config import Config, load
from kvd.errors import ConfigError, ConnectError
from kvd.node.daemon.listening import own_addresses
from kvd.node.daemon.roles import new_daemon
from kvd.node.daemon.scheduler_search import KeyWait, Notices, no_answer, remedy
from kvd.node.keys.keyfiles import new_cluster_key, read_key, write_key
from kvd.testing.cluster import LocalCluster, ThreadNode, wait_until
from kvd.transport.finding import Finding, Outcome
from kvd.transport.reaching import UnknownNameError
from kvd.transport.zmq.curve import Curve
from tests.transport.names_harness import Names

NAME = "late.example"
REFUSED = Finding(Outcome.REFUSED, "Connection refused")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def named(address: str) -> str:
    """An address under the name."""
    return f"tcp://{NAME}:{address.rpartition(':')[2]}"


def said(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return any(text in record.getMessage() for record in caplog.records)


# --- names -----------------------------------------------------------------------------------------------------------

JOINS: dict[str, Callable[[str], Any]] = {
    "create": lambda where: kvd.create("dist_sync", scheduler=where, join_timeout_s=60),
    "aio": lambda where: asyncio.run(kvd.aio.create("dist_sync", scheduler=where, join_timeout_s=60)),
    "observer": lambda where: kvd.Observer(scheduler=where),
}


@pytest.mark.parametrize("how", JOINS)
def test_a_name_that_is_not_known_yet_is_waited_for(
    how: str, names: Names, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalCluster(1, 1) as cluster:
        where = named(cluster.address)
        future: Future[Any] = pool.submit(JOINS[how], where)
        wait_until(lambda: said(caplog, f"the host '{NAME}' of {where} is not known here (Name or service"), "said")
        assert not future.done()
        names.known[NAME] = ["127.0.0.1"]
        store = future.result(60)
        if how == "aio":
            store._backend.closing.abandon(failed=False)
        else:
            store.close()


@pytest.mark.keys
def test_a_server_waits_for_the_name_of_its_scheduler(
    names: Names, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = ThreadNode("scheduler", {"bind": "tcp://127.0.0.1:0", "num_workers": 1, "num_servers": 1})
    future = pool.submit(ThreadNode, "server", {"scheduler": named(scheduler.address)})
    wait_until(lambda: said(caplog, f"still waiting for the scheduler: the host '{NAME}'"), "said")
    names.known[NAME] = ["127.0.0.1"]
    server = future.result(60)
    assert server.address.startswith("tcp://127.0.0.1:")
    kvd.create("dist_sync", scheduler=scheduler.address, join_timeout_s=60).close()
    server.stop()
    scheduler.stop()


def test_a_scheduler_listens_at_all_own_addresses_of_its_name(names: Names) -> None:
    names.known[NAME] = ["127.0.0.1", "127.0.0.2", "192.0.2.1"]
    assert own_addresses(f"tcp://{NAME}:9") == ["tcp://127.0.0.1:9", "tcp://127.0.0.2:9"]
    assert own_addresses(f"tcp://{NAME}:0") == ["tcp://127.0.0.1:0"]
    for kept in ("tcp://*:9", "tcp://[::1]:9", "ipc:///tmp/x", "tcp://lo:9"):
        assert own_addresses(kept) == [kept]
    names.known[NAME] = ["192.0.2.1"]
    with pytest.raises(ConnectError, match=rf"this machine has no such address \({NAME} is 192\.0\.2\.1\)"):
        own_addresses(f"tcp://{NAME}:9")
    names.known[NAME] = []
    with pytest.raises(UnknownNameError):
        own_addresses(f"tcp://{NAME}:9")


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_name_that_nobody_learns_is_an_error_at_the_end(role: Any, names: Names) -> None:
    settings = {"scheduler": f"tcp://{NAME}:9", "num_workers": 1, "num_servers": 1, "join_timeout_s": 0.1}
    daemon = new_daemon(load(settings, environ={}), role)
    with pytest.raises(ConnectError, match=rf"the host '{NAME}'.* is not known here .*tried for 0\.1 s"):
        asyncio.run(daemon.run(signals=False))
    with pytest.raises(ConnectError, match=rf"the host '{NAME}'.* is not known here .*tried for 1 s"):
        kvd.create("dist_sync", scheduler=f"tcp://{NAME}:9", join_timeout_s=1)


def test_a_person_at_a_prompt_does_not_wait_for_a_name(names: Names) -> None:
    settings = load({"scheduler": f"tcp://{NAME}:9"}, environ={}).config
    arrival = Arrival(patience_s=0.1)
    begun = time.monotonic()
    with pytest.raises(ConnectError, match="is not known here"):
        Observer(settings, arrival)
    assert time.monotonic() - begun < settings.request_timeout_s / 2


# --- what is said ----------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_reported_at_once_and_other_waits_after_a_while() -> None:
    now = 100.0
    notices = Notices(3.0, lambda: now)
    assert not notices.is_due(Finding(Outcome.NO_ANSWER))
    assert notices.is_due(REFUSED)
    assert not notices.is_due(REFUSED)
    times = []
    for second in range(100, 150):
        now = float(second)
        if notices.is_due(REFUSED):
            times.append(second - 100)
    assert times == [9, 21, 45]


def test_the_words_of_the_last_error_are_used() -> None:
    where = "tcp://trainer:9"
    assert no_answer(None, where) == f"no scheduler answers at {where}"
    assert no_answer(REFUSED, where) == f"no scheduler answers at {where} (Connection refused)"
    unknown = Finding(Outcome.UNKNOWN_NAME, "Name or service not known")
    assert no_answer(unknown, where) == f"the host 'trainer' of {where} is not known here (Name or service not known)"
    assert "start one there" in remedy(REFUSED, where)
    assert (
        no_answer(Finding(Outcome.SUCCEEDED), where)
        == f"the scheduler at {where} accepts connections, and does not answer"
    )
    assert "whether its process is stopped" in remedy(Finding(Outcome.SUCCEEDED), where)
    assert "correct the scheduler's address" in remedy(unknown, where)


@pytest.mark.keys
def test_a_host_that_refuses_is_named_at_once_and_tried_again(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    future = pool.submit(kvd.create, "dist_sync", scheduler=where, join_timeout_s=60)
    wait_until(lambda: said(caplog, f"no scheduler answers at {where} (Connection refused): start one there"), "said")
    scheduler = ThreadNode("scheduler", {"scheduler": where, "num_workers": 1, "num_servers": 1})
    server = ThreadNode("server", {"scheduler": where})
    future.result(60).close()
    server.stop()
    scheduler.stop()


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KVD_INSECURE", raising=False)
    return tmp_path / "config"


@pytest.mark.keys
def test_servers_workers_and_observers_may_come_before_the_scheduler_has_made_the_key(
    home: Path, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    server = pool.submit(ThreadNode, "server", {"scheduler": where})
    worker = pool.submit(kvd.create, "dist_sync", scheduler=where, join_timeout_s=60)
    observer = pool.submit(kvd.Observer, scheduler=where)
    missing = f"(Connection refused), and there is no key at {home}/kvd/cluster.key: the first scheduler of this user"
    wait_until(lambda: sum(missing in record.getMessage() for record in caplog.records) == 3, "all said it")
    scheduler = ThreadNode("scheduler", {"scheduler": where, "num_workers": 1, "num_servers": 1})
    observer.result(60).close()
    worker.result(60).close()
    server.result(60).stop()
    scheduler.stop()
    assert all(record.levelno == logging.WARNING for record in caplog.records if "there is no key" in record.message)


@pytest.mark.keys
def test_a_key_that_is_imported_while_a_worker_waits(home: Path, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    elsewhere = tmp_path / "scheduler.key"
    write_key(elsewhere, new_cluster_key())
    with LocalCluster(1, 1, keyfile=str(elsewhere)) as cluster:
        future = pool.submit(kvd.create, "dist_sync", scheduler=cluster.address, join_timeout_s=60)
        wait_until(future.running, "it waits")
        write_key(home / "kvd" / "cluster.key", read_key(elsewhere))
        future.result(60).close()


@pytest.mark.keys
def test_without_a_key_it_ends_with_the_way_to_get_one(home: Path) -> None:
    where = "tcp://127.0.0.1:9"
    key = rf"there is no key at {home}/kvd/cluster.key: the first scheduler of this user .*kvd key import"
    with pytest.raises(ConfigError, match=key):
        kvd.create("dist_sync", scheduler=where, join_timeout_s=0.1)
    with pytest.raises(ConfigError, match=key):
        KeyWait(Config(scheduler=where), "observer").run(time.monotonic())
    with pytest.raises(ConfigError, match="does not exist: check the name"):  # a name that was given is an error
        kvd.create("dist_sync", scheduler=where, keyfile=str(home / "x.key"))


@pytest.mark.keys
def test_a_pause_can_end_the_wait_for_a_key_during_a_handshake(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a handler of Ctrl-C does: a handshake may wait long for a name server."""
    begun, may_end = threading.Event(), threading.Event()

    def handshake(address: str, curve: Curve | None) -> Finding:
        begun.set()
        may_end.wait(60)
        return REFUSED

    def pause(seconds: float) -> None:
        if begun.wait(seconds):
            raise KeyboardInterrupt

    monkeypatch.setattr("kvd.node.daemon.scheduler_search.try_handshake", handshake)
    with pytest.raises(KeyboardInterrupt):
        KeyWait(Config(scheduler="tcp://127.0.0.1:9"), "worker", pause=pause).run(time.monotonic())
    may_end.set()


@pytest.mark.keys
def test_a_scheduler_without_keys_is_found_out_by_who_waits_for_one(home: Path) -> None:
    with LocalCluster(1, 1, insecure=True) as cluster, pytest.raises(ConnectError, match=r"give --insecure"):
        kvd.create("dist_sync", scheduler=cluster.address, insecure=False)


@pytest.mark.keys
def test_a_creation_that_is_cancelled_waits_for_no_key(home: Path) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(kvd.aio.create("dist_sync", scheduler="tcp://127.0.0.1:9"), 0.2)

    begun = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - begun < 60


# --- no cluster ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "given", "finding", "begins"),
    [
        ("worker", False, REFUSED, "no cluster is running here: kvd launch -n 2 -s 1 -- python "),
        ("observer", False, REFUSED, "no cluster is running here: kvd launch -n 2 -s 1 -- python train.py\n"),
        ("worker", True, REFUSED, ""),
        ("worker", False, Finding(Outcome.NO_ANSWER), ""),
        ("worker", False, None, ""),
    ],
)
def test_a_program_without_a_cluster_is_told_how_to_start_one(
    role: str, given: bool, finding: Finding | None, begins: str
) -> None:
    text = Arrival(scheduler_given=given).no_cluster(Config(), role, finding)
    assert text.startswith(begins)
    assert bool(text) == bool(begins)
