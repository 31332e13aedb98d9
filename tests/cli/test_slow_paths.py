"""What status and doctor say of paths that are slower than they could be."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.transport.links import connector
from kvd_cli.health import health_of
from tests.cli.reports import member, report, server

NO_LINK = f"zmq: {connector.ELSEWHERE}"
ELSEWHERE = "zmq: no link at this host: the peer is on another host; no link over TCP: "


def given(path: str, *, hosts: str = "ab", **changes: Any) -> dict[str, Any]:
    """A worker on the first host, and a server on the second, which has come by this path."""
    worker, other = [{**member(role, 0), "host": host} for role, host in zip(("worker", "server"), hosts, strict=True)]
    return report({**server(0), "paths": {"worker 0": path}}, **{"members": [other, worker], **changes})


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("the package cryptography cannot be imported", "Install it on all hosts with pip install 'cryptography>=47'"),
        ("the package cryptography is too old", "Install it on all hosts with pip install 'cryptography>=47'"),
        ("turned off", 'Set tcp_links = "auto" (KVD_TCP_LINKS)'),
        ("the server has links over TCP turned off", 'Set tcp_links = "auto" (KVD_TCP_LINKS)'),
        ("not done within 3 s", "Open the ports of the servers' hosts"),
        ("Connection refused", "Open the ports of the servers' hosts"),
    ],
)
def test_the_reason_and_the_remedy_are_said(reason: str, remedy: str) -> None:
    health = health_of(given(ELSEWHERE + reason))
    assert health.is_healthy
    [line] = health.advice
    assert line.startswith("slow: worker 0 → server 0 by ZeroMQ's own encryption (CURVE), which takes several times")
    assert f"an encrypted link: {reason}. {remedy}" in line


def test_links_that_are_turned_off_here() -> None:
    [line] = health_of(given("zmq: turned off")).advice
    assert "an encrypted link: turned off. Set tcp_links" in line


@pytest.mark.parametrize(
    "healthy",
    [
        given("encrypted tcp"),
        given("zmq: a link is being opened"),
        given("shared memory", hosts="aa"),
        given(f"{ELSEWHERE}turned off", members=[member("server", 0), {**member("worker", 0, "left"), "host": "x"}]),
    ],
)
def test_other_paths_are_no_matter(healthy: dict[str, Any]) -> None:
    assert health_of(healthy).advice == ()


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        (f"{NO_LINK}; no link over TCP: turned off", 'Set shared_memory = "auto" (KVD_SHARED_MEMORY) for both'),
        ("zmq: turned off", 'Set shared_memory = "auto" (KVD_SHARED_MEMORY) for both'),
        ("zmq: the peer runs as user 7", "Run the servers and workers of a host as one user."),
        ("unix socket: Function not implemented", "Shared memory takes Linux 5.1, memfd_create"),
    ],
)
def test_within_a_host_the_lack_of_shared_memory_is_said(path: str, remedy: str) -> None:
    for insecure in (False, True):
        health = health_of(given(path, hosts="aa", insecure=insecure))
        assert health.is_healthy
        line = health.advice[-1]
        reason = path.partition(": ")[2].partition("; no link")[0]
        assert line.startswith(
            f"slow: worker 0 → server 0 without shared memory, though both run on one host: {reason}. {remedy}"
        )


def test_without_keys_nothing_is_encrypted() -> None:
    lines = health_of(given(f"{ELSEWHERE}turned off", insecure=True)).advice
    assert not [line for line in lines if line.startswith("slow")]


def test_workers_with_the_same_reason_share_a_line_and_servers_count() -> None:
    members = [
        *({**member("worker", rank), "host": "a"} for rank in range(2)),
        *({**member("server", rank), "host": f"b{rank}", "incarnation": f"{rank:016x}"} for rank in range(2)),
    ]
    path = f"{ELSEWHERE}turned off"
    first = {**server(0), "paths": {"worker 0": path, "worker 1": path}, "paths_to_servers": {f"{1:016x}": path}}
    [line] = health_of(report(first, server(1), members=members)).advice
    assert line.startswith("slow: worker 0 → server 0, worker 1 → server 0, server 0 → server 1 by ZeroMQ's")
