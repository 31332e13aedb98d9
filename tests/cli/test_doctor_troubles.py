"""``kvd doctor`` finds troubles that are planted in real clusters, with cause and remedy, and none in a healthy one."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import zmq

from kvd.config import parse_address
from kvd.core.placement import shard_of
from kvd.node.keys.keyfiles import new_cluster_key, write_key
from kvd.testing.cluster import LocalCluster, ProcessNode, wait_until
from kvd.transport.zmq.curve import new_keypair
from tests.cli.conftest import DEADLINE_S, Kvd

pytestmark = pytest.mark.keys

ELSEWHERE = """
import kvd.node.daemon.server_role
kvd.node.daemon.server_role.host_id = lambda: "elsewhere"  # nobody here watches its process
"""

FEW_FILES = 64
ODD = f"""
import os
if os.environ["KVD_NODE_ID"] == "server-1":
    import resource, time
    resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW_FILES}, {FEW_FILES}))
    now = time.time
    time.time = lambda: now() + 3600
    del os.memfd_create
    os.environ["KVD_TCP_LINKS"] = "off"
"""

LINES, COLUMNS = 1 << 9, 1 << 10  # 2 MiB of float32


def advice_of(kvd: Kvd, scheduler: str, *flags: str) -> tuple[int, list[str]]:
    """The exit code of the doctor, and its lines."""
    result = kvd("doctor", "-S", scheduler, *flags)
    return result.exit_code, (result.stdout or result.stderr).splitlines()


def error_of(kvd: Kvd, scheduler: str, *flags: str) -> str:
    """The error because of which the doctor sees nothing of the cluster."""
    code, lines = advice_of(kvd, scheduler, *flags)
    assert code == 3
    return lines[-1]


def only_line(kvd: Kvd, scheduler: str, *flags: str) -> str:
    """The only thing that is wrong."""
    code, lines = advice_of(kvd, scheduler, *flags)
    assert (code, len(lines)) == (1, 1), lines
    return lines[0]


@contextmanager
def listening(address: str, backlog: int = 16) -> Iterator[socket.socket]:
    """Listens where a server did that is dead now, and accepts nothing."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", parse_address(address).port))
        listener.listen(backlog)
        yield listener


@contextmanager
def web_server(address: str) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", parse_address(address).port), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def other_cluster(address: str) -> Iterator[None]:
    """A node with a key that nobody here knows."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.curve_server = True
        router.curve_secretkey = new_keypair().secret.encode()
        router.bind(address)
        yield


@contextmanager
def dropping(address: str) -> Iterator[None]:
    """The kernel drops attempts to connect: the queue of those that nobody has accepted is full."""
    with listening(address, 0) as listener, ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield


@contextmanager
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (75, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_addresses_are_tried_from_here(kvd: Kvd, tmp_path: Path) -> None:
    with LocalCluster(
        1, 2, processes=True, server_prelude=ELSEWHERE, server_timeout_s=600.0, request_timeout_s=700.0
    ) as cluster:
        cluster.store()
        place = cluster.address
        assert advice_of(kvd, place) == (0, ["all is well"])

        with few_files():
            line = only_line(kvd, place)
        assert line.startswith(
            "files: a program that is started here may open 75 files, and a worker of 2 servers needs"
        )
        assert "ulimit -n 1024 in this shell" in line

        node = cluster.servers[1]
        assert isinstance(node, ProcessNode)
        where = node.address
        begin = f"no answer: server 1 (node server-1) at {where}: "
        os.kill(node.process.pid, signal.SIGSTOP)
        try:
            line = only_line(kvd, place)
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
        assert line.startswith(
            f"{begin}it accepts connections, and says nothing. Its process is stopped, or a firewall"
        )
        assert f"kill -CONT {node.process.pid} lets it continue" in line
        wait_until(lambda: advice_of(kvd, place) == (0, ["all is well"]), "it goes on", DEADLINE_S)

        cluster.kill_server(1)
        line = only_line(kvd, place)
        assert line.startswith(
            f"{begin}nothing listens there (Connection refused). Its process has ended, or the address"
        )
        assert line.endswith("It listens on 127.0.0.1, which only processes of its own host reach.")
        with web_server(where):
            line = only_line(kvd, place)
            assert line.startswith(f"{begin}there is a web server (HTTP) instead. Another program has the port")
            line = error_of(kvd, where)
            assert "is no kvd scheduler, but a web server (HTTP): correct the address (--scheduler" in line
        with other_cluster(where):
            line = only_line(kvd, place)
            assert line.startswith(f"{begin}the node there has another key than the server. It is of another cluster")
        with dropping(where):
            line = only_line(kvd, place)
            assert line.startswith(
                f"{begin}Connection timed out. Its process is stopped, or a firewall drops what this"
            )

        line = error_of(kvd, where)
        assert line.startswith(f"error: no scheduler answers at {where} (Connection refused): start one there")
        line = error_of(kvd, "tcp://nowhere.invalid:9191")
        assert "the host 'nowhere.invalid' of tcp://nowhere.invalid:9191 is not known here" in line
        other = tmp_path / "other.key"
        write_key(other, new_cluster_key())
        line = error_of(kvd, place, "--keyfile", str(other))
        assert "has another key than this process, which has" in line
        assert "name the scheduler's key with --keyfile (KVD_KEYFILE), or import it" in line


def test_what_runs_out_or_differs_is_found(kvd: Kvd, tmp_path: Path) -> None:
    """One server has few files, another clock, another setting and no shared memory, the other one all keys."""
    snapshots = tmp_path / "snapshots"
    with LocalCluster(
        1, 2, processes=True, replicas=2, num_shards=2, memory_limit_bytes="80MiB", server_prelude=ODD
    ) as cluster:
        store = cluster.store(snapshot_dir=str(snapshots), snapshot_every=1)
        keys = [key for key in map(str, range(100)) if shard_of(key, 0, 2) == 0][:6]
        ones = np.ones((LINES, COLUMNS), np.float32)
        for key in keys:
            store.init(key, ones)
        for step in store.steps(5, keys):
            store.pushpull(keys, [ones] * len(keys), out=[ones.copy() for _ in keys])
            if step == 1:
                wait_until(lambda: len(list(snapshots.glob("step-*"))) == 1, "a snapshot is written", DEADLINE_S)
                shutil.rmtree(snapshots)
                snapshots.touch()  # no folder any more

        code, lines = advice_of(kvd, cluster.address)
        found = {line.partition(":")[0]: line for line in lines}
        assert code == 1
        assert list(found) == ["memory", "files", "snapshot", "uneven", "settings", "clock", "slow"], lines
        assert len(lines) == len(found)
        assert found["memory"].startswith("memory: server 0 needs 72.0 MiB of its 80.0 MiB, and refuses new keys")
        assert "Raise its memory_limit_bytes (KVD_MEMORY_LIMIT_BYTES), add servers" in found["memory"]
        assert f"of at most {FEW_FILES} files open" in found["files"]
        assert found["files"].startswith("files: server 1 has ")
        assert "LimitNOFILE= in its systemd unit" in found["files"]
        assert "though one is due every 1 steps (snapshot_every)" in found["snapshot"]
        assert "see whether snapshot_dir is full, or may not be written" in found["snapshot"]
        assert found["uneven"].startswith("uneven: server 0 leads 12.0 MiB, 2.0 times the mean of 2 servers (6.0 MiB)")
        assert "lower slice_bytes (KVD_SLICE_BYTES)" in found["uneven"]
        assert found["settings"].startswith("settings: tcp_links is auto at server 0, and off at server 1. Start all")
        assert found["clock"].startswith("clock: that of server 1 is 60 min ahead of the scheduler's")
        assert "timedatectl set-ntp true" in found["clock"]
        assert "server 1 → server 0 without shared memory, though both run on one host: no shared" in found["slow"]
        assert "memfd_create (a seccomp profile may forbid it)" in found["slow"]

        cluster.kill_server(1)

        def one_copy() -> list[str]:
            return [line for line in advice_of(kvd, cluster.address)[1] if line.startswith("degraded: ")]

        [line] = wait_until(one_copy, "the death is announced", DEADLINE_S)
        assert (
            "of the keys have one copy, on server 0; if that server dies, they are lost. Start server 1 again" in line
        )
