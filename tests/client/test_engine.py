"""The engine: its thread, and an address that it cannot use."""

from __future__ import annotations

import time
from typing import Any

import pytest

import kvd
from kvd.errors import ConnectError
from kvd.testing.cluster import LocalCluster, engine_of


def test_the_engine_does_not_hold_the_interpreter() -> None:
    """A program that ends while its store waits for somebody ends."""
    code = "import kvd, sys\nkv = kvd.create('dist_sync')\nkv.set_barrier_before_exit(False)\n"
    with LocalCluster(2, 1) as cluster:
        script = cluster.script(code, 0)
        cluster.store(node_id="worker-1")
        output, _ = script.communicate(timeout=20)
        assert output == b""


def test_a_scheduler_address_that_is_none_ends_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvd.transport.zmq import ZmqTransport

    def refuse(self: Any, peer: Any, address: str) -> None:
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
