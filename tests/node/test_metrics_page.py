"""The metrics page of real daemons, read by prometheus-client's parser, and asked badly."""

from __future__ import annotations

import http.client
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as families_in

import kvd
from kvd.config import load
from kvd.errors import ConfigError
from kvd.node.daemon.metrics_page import MOST_CONNECTIONS, REQUEST_BYTES, MetricsPage
from kvd.observe.families import FAMILIES, LAG
from kvd.testing.cluster import LocalCluster, wait_until

TOKEN = "0123456789abcdefABCDEF"
STEPS = 12
JOB = "team:a.1+b-2_c"


def ask(url: str, path: str = "", method: str = "GET", token: str = "") -> tuple[int, str]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    try:
        connection.request(method, path or where.path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def values_of(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families_in(page)
        for sample in family.samples
    }


def test_pages_of_a_cluster_have_every_family_and_the_numbers_of_the_program(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(f"{TOKEN}\n")
    with LocalCluster(2, 2, replicas=2, job=JOB, metrics_bind="127.0.0.1:0", metrics_token_file=str(token)) as cluster:
        stores = cluster.open_stores()
        value = np.ones(1 << 16, np.float32)

        def work(store: kvd.KVStore) -> None:
            store.init("w", value)
            for _ in range(STEPS):
                store.pushpull("w", value, np.empty_like(value))

        threads = [threading.Thread(target=work, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        urls = [cluster.scheduler.metrics_url, *(server.metrics_url for server in cluster.servers)]

        def steps() -> float:
            pages = [ask(url, token=TOKEN)[1] for url in urls[1:]]
            found = [values_of(page).get(("kvd_step", (("kvd_job", JOB),)), 0) for page in pages]
            return max(found) == STEPS

        wait_until(steps, "the pages have seen the last step")
        pages = [ask(url, token=TOKEN) for url in urls]
        assert [status for status, _ in pages] == [200] * 3
        scheduler, *servers = [values_of(page) for _, page in pages]
        job = ("kvd_job", JOB)
        assert scheduler["kvd_members", (job, ("role", "server"), ("state", "active"))] == 2
        assert scheduler["kvd_members", (job, ("role", "worker"), ("state", "active"))] == 2
        assert scheduler["kvd_missing_members", (job,)] == 0
        assert scheduler["kvd_runs", (("phase", "running"),)] == 1
        assert scheduler["kvd_partitions", (("copies", "2"), job)] == 2
        assert scheduler["kvd_deaths_total", (job, ("role", "server"))] == 0
        assert scheduler["kvd_state_unsaved", ()] == 0
        led = [server["kvd_memory_bytes", (job, ("what", "led"))] for server in servers]
        assert sum(led) == value.nbytes
        assert sum(server["kvd_updates_total", ()] for server in servers) >= STEPS
        assert (
            sum(server["kvd_bytes_total", (("direction", "received"),)] for server in servers) >= STEPS * value.nbytes
        )
        for page in (scheduler, *servers):
            assert (
                page[
                    "kvd_build_info",
                    (("role", "scheduler" if page is scheduler else "server"), ("version", kvd.__version__)),
                ]
                == 1
            )
            assert page[f"{LAG}_count", ()] >= 0
        shown = {family.name for _, page in pages for family in families_in(page)}
        never = {"kvd_snapshot_last_success_timestamp_seconds", "kvd_snapshot_step", "kvd_snapshot_interval_steps"}
        described = {family.name.removesuffix("_total") for family in FAMILIES}
        assert shown == described | {LAG}
        assert never <= described
        assert all(page.count("\n") < 400 for _, page in pages)

        _answers_bad_requests(urls[0])
        _outlives_those_who_do_not_read(urls[0])


def _answers_bad_requests(url: str) -> None:
    assert ask(url, "/healthz") == (200, "ok\n")
    assert ask(url, "/readyz") == (200, "ready\n")
    assert ask(url)[0] == 401
    assert ask(url, token="another" + TOKEN)[0] == 401
    assert ask(url, "/keys", token=TOKEN)[0] == 404
    assert ask(url, method="POST", token=TOKEN)[0] == 405
    with connected(url) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2 * REQUEST_BYTES + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")
    with connected(url) as connection:
        connection.sendall(b"\xff\x00\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 405 ")
    pages = [ask(url, token=TOKEN)[1] for _ in range(50)]  # rendered a few times, not fifty
    assert all("kvd_build_info" in page for page in pages)


def _outlives_those_who_do_not_read(url: str) -> None:
    """They hold all connections; the next one is closed, until they are cut off."""
    waiting = [connected(url) for _ in range(MOST_CONNECTIONS)]
    try:
        wait_until(lambda: _is_closed(url), "one connection too many is closed")
        wait_until(lambda: _can_ask(url), "those who say nothing are cut off")
    finally:
        for connection in waiting:
            connection.close()


def connected(url: str) -> socket.socket:
    where = urlsplit(url)
    return socket.create_connection((str(where.hostname), int(where.port or 0)), 60)


def _is_closed(url: str) -> bool:
    try:
        with connected(url) as connection:
            connection.settimeout(0.5)
            return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def _can_ask(url: str) -> bool:
    try:
        return ask(url, "/healthz")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


@pytest.mark.parametrize(
    ("mode", "content", "problem"),
    [
        (0o644, TOKEN, "others may read it (mode 0644): chmod 600"),
        (0o600, "short", "a token is one line of 16 letters and digits or more"),
        (0o600, f"{TOKEN}\n{TOKEN}", "a token is one line of 16 letters and digits or more"),
        (None, "", "No such file or directory: name a file with a token"),
    ],
)
def test_a_token_that_cannot_be_used(tmp_path: Path, mode: int | None, content: str, problem: str) -> None:
    path = tmp_path / "token"
    if mode is not None:
        path.write_text(content)
        path.chmod(mode)
    config = load({"metrics_bind": "127.0.0.1:0", "metrics_token_file": str(path)}, environ={}).config
    with pytest.raises(ConfigError) as caught:
        MetricsPage(config, "server", dict, lambda: True)
    assert problem in str(caught.value)
    assert caught.value.setting == "metrics_token_file"


@pytest.mark.parametrize(
    ("given", "setting", "problem"),
    [
        ({"metrics_bind": "0.0.0.0:9190"}, "metrics_token_file", "can be reached from other hosts: name a file"),
        ({"metrics_bind": "nonsense"}, "metrics_bind", "an address is HOST:PORT, such as 127.0.0.1:9190"),
        ({"metrics_token_file": "/token"}, "metrics_bind", "needs an address: set metrics_bind to HOST:PORT"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], setting: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(given, environ={})
    assert problem in str(caught.value)
    assert caught.value.setting == setting
    assert load({"metrics_bind": "0.0.0.0:9190", "insecure": True}, environ={}).config.metrics_bind == "0.0.0.0:9190"


@pytest.mark.asyncio
async def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        page = MetricsPage(load({"metrics_bind": where}, environ={}).config, "server", dict, lambda: True)
        with pytest.raises(ConfigError, match=f"{where}.*in use: name an address of this host with a free port"):
            await page.start()
        page.close()
