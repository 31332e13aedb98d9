"""A scheduler whose host nobody knows: who would connect to it says so at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

import kvd
import kvd.aio
from kvd.client.cluster.observer import Observer
from kvd.config import Config, load
from kvd.errors import ConnectError
from kvd.node import host_names
from kvd.node.roles import new_daemon

ELSEWHERE = "tcp://elsewhere:9"
UNKNOWN = r"the host 'elsewhere' of tcp://elsewhere:9 is not known here \(Name or service not known\)"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host has a name."""
    monkeypatch.setattr(host_names, "_look_up", lambda host: OSError(-2, "Name or service not known"))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_known_hosts(host: str) -> None:
    host_names.check_host(Config(scheduler=f"tcp://{host}:9"))
    host_names.check_host(Config(scheduler="ipc:///tmp/x"))


@pytest.mark.usefixtures("unknown")
def test_unknown_host_names_are_refused() -> None:
    with pytest.raises(ConnectError, match=UNKNOWN) as caught:
        host_names.check_host(Config(scheduler=ELSEWHERE))
    assert caught.value.address == ELSEWHERE


def test_a_slow_name_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_names, "LOOK_UP_S", 0.05)
    monkeypatch.setattr(host_names, "_look_up", lambda host: time.sleep(2))
    started = time.monotonic()
    host_names.check_host(Config(scheduler=ELSEWHERE))
    assert time.monotonic() - started < 1.5


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize(
    "start",
    [
        lambda: kvd.create("dist_sync", scheduler=ELSEWHERE, request_timeout_s=30),
        lambda: asyncio.run(kvd.aio.create("dist_sync", scheduler=ELSEWHERE, request_timeout_s=30)),
        lambda: Observer(Config(scheduler=ELSEWHERE, request_timeout_s=30)),
        lambda: new_daemon(load({"scheduler": ELSEWHERE, "request_timeout_s": 30}), "server"),
    ],
    ids=["create", "aio", "observer", "server"],
)
def test_nobody_waits_for_a_host_that_does_not_exist(start: Callable[[], object]) -> None:
    started = time.monotonic()
    with pytest.raises(ConnectError, match=UNKNOWN):
        start()
    assert time.monotonic() - started < 5
