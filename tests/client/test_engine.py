"""The engine: its thread, and an address that it cannot use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import kvd
from kvd.client.calls.promise import Promise
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.observer import Observer
from kvd.config import Config
from kvd.core.requests import Request
from kvd.errors import ConnectError
from kvd.node.daemon.scheduler_search import KeyWait
from kvd.testing.cluster import LocalCluster, engine_of
from kvd.transport.host import HostTransport


def test_the_engine_does_not_hold_the_interpreter() -> None:
    """A program that ends while its store waits for somebody ends."""
    code = "import kvd, sys\nkv = kvd.create('dist_sync')\nkv.set_barrier_before_exit(False)\n"
    with LocalCluster(2, 1) as cluster:
        script = cluster.script(code, 0)
        cluster.store(node_id="worker-1")
        output, _ = script.communicate(timeout=20)
        assert output == b""


def test_a_scheduler_address_that_is_none_ends_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvd.transport.zmq.transport import ZmqTransport

    def refuse(self: Any, peer: Any, address: str, key: str = "") -> None:
        raise ConnectError(f"{address} is no address to connect to", address=address)

    monkeypatch.setattr(ZmqTransport, "connect", refuse)
    begun = time.monotonic()
    with pytest.raises(ConnectError, match="is no address"):
        kvd.create("dist_sync", scheduler="tcp://127.0.0.1:1")
    assert time.monotonic() - begun < 5


def test_the_first_reason_why_a_node_cannot_go_on_is_the_one_that_calls_raise() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.set_barrier_before_exit(False)
        engine = engine_of(kv)
        for text in ("first", "second"):
            engine._halted(kvd.NodeLost(text, node="scheduler", last_seen_s=1.0))
        for call in (kv.barrier, kv.flush, lambda: kv.pull("w")):
            with pytest.raises(kvd.NodeLost, match="first"):
                call()


HURRIED: dict[str, Any] = {
    "scheduler": "tcp://127.0.0.1:1",
    "heartbeat_interval_s": 0.05,
    "server_timeout_s": 0.2,
    "worker_timeout_s": 0.2,
    "request_timeout_s": 0.4,
    "join_timeout_s": 0.4,
}
OPENERS = [lambda: Observer(Config(**HURRIED)), lambda: kvd.create("dist_sync", **HURRIED)]


@pytest.mark.parametrize("opens", OPENERS)
def test_an_error_does_not_wait_for_a_transport_that_cannot_be_closed(
    opens: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when libzmq looks up a host and the name server is cut off: closing takes as long as that."""
    may_close, closed = threading.Event(), threading.Event()
    close = HostTransport.close

    def late(transport: HostTransport, linger_s: float) -> None:
        may_close.wait(60)
        close(transport, linger_s)
        closed.set()

    monkeypatch.setattr(HostTransport, "close", late)
    try:
        begun = time.monotonic()
        with pytest.raises(ConnectError, match="no scheduler answers"):
            opens()
        assert time.monotonic() - begun < 4
        assert not closed.is_set()
    finally:
        may_close.set()
        assert closed.wait(60)


@pytest.mark.parametrize("opens", OPENERS)
def test_waiting_for_a_key_is_part_of_the_deadline(opens: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the deadlines is the test's, and the key takes all the time there is."""
    now = 100.0
    given: list[float | None] = []
    submit = Engine.submit

    def run(wait: KeyWait, until: float) -> None:
        nonlocal now
        now += HURRIED["request_timeout_s"]

    def noting(engine: Engine, request: Request, timeout: float | None = None) -> Promise:
        given.append(timeout)
        return submit(engine, request, timeout)

    monkeypatch.setattr(KeyWait, "run", run)
    monkeypatch.setattr("kvd.client.calls.deadline.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Engine, "submit", noting)
    with pytest.raises(ConnectError):
        opens()
    assert given[0] == 0.0
