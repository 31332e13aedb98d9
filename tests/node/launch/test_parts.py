"""The parts of the launcher alone: the request to stop, the plan, the relay of output, the ready socket."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from kvd.node.launch import Job
from kvd.node.launch.job import JobKey
from kvd.node.launch.output import OutputRelay, Stream, say
from kvd.node.launch.plan import PARENT_GRACE_S, JobPlan
from kvd.node.launch.signals import NEXT, StopRequest, Urgency
from kvd.node.launch.supervisor import ReadySocket
from kvd.node.parent import guarded
from kvd.node.remote import free_port
from tests.node.launch.harness import DEADLINE_S, Lines


def test_each_request_to_stop_is_more_urgent_and_the_first_code_counts() -> None:
    async def main() -> None:
        stop = StopRequest(asyncio.get_running_loop())
        assert stop.urgency is Urgency.NOT_ASKED
        stop.make(3)
        assert (stop.urgency, stop.code.result(), stop.at_once.done()) == (Urgency.IN_ORDER, 3, False)
        stop.make(4)
        assert (stop.urgency, stop.code.result(), stop.at_once.done()) == (Urgency.AT_ONCE, 3, True)
        stop.make(5)
        assert (stop.urgency, stop.code.result()) == (Urgency.AT_ONCE, 3)

    asyncio.run(main())
    assert set(NEXT) == set(Urgency)


KEY = JobKey({"KVD_KEYFILE": "/run/kvd/cluster.key"}, "the key")


def test_a_plan_gives_each_process_its_own_settings() -> None:
    environment = {"KVD_STATE_DIR": "/state", "KVD_NODE_ID": "mine", "KVD_BIND": "tcp://0.0.0.0:1", "OTHER": "1"}
    plan = JobPlan(Job(command=["train"], workers=2, servers=3, environment=environment, daemon=["kvd"]), KEY)
    assert plan.remarks == ()

    scheduler = plan.scheduler("tcp://127.0.0.1:0", Path("/run/kvd"), "@socket")
    assert scheduler.name == scheduler.environment["KVD_NODE_ID"] == "scheduler"
    assert list(scheduler.command)[-4:] == ["kvd", "scheduler", "--ready-file", "/run/kvd/scheduler"]
    assert scheduler.environment["NOTIFY_SOCKET"] == "@socket"
    assert scheduler.environment["KVD_STATE_DIR"] == "/state/scheduler"
    assert scheduler.environment["KVD_PARENT_PID"] == str(os.getpid())
    assert not scheduler.is_guard

    server = plan.server(1, "tcp://a:1")
    assert list(server.command)[-2:] == ["kvd", "server"]
    assert server.environment["KVD_SCHEDULER"] == "tcp://a:1"
    assert server.environment["KVD_STATE_DIR"] == "/state/server-1"
    assert (server.environment["KVD_PREFERRED_RANK"], server.environment["KVD_BIND"]) == ("1", "")

    worker = plan.worker(1, "tcp://a:1")
    assert list(worker.command)[-1] == "train"
    assert worker.is_guard
    assert worker.environment["OTHER"] == "1"
    assert [worker.environment[f"KVD_{name}"] for name in ("ROLE", "LOCAL_RANK", "NUM_WORKERS", "NUM_SERVERS")] == [
        "worker",
        "1",
        "2",
        "3",
    ]
    assert {spec.cores for spec in (scheduler, server, worker)} == {None}
    assert {spec.environment["KVD_KEYFILE"] for spec in (scheduler, server, worker)} == {"/run/kvd/cluster.key"}


def test_a_worker_has_its_own_place_whatever_a_launcher_around_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "pod-0", "LOCAL_WORLD_SIZE": "x", "MASTER_ADDR": "elsewhere"}
    for name, value in (outer | {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    plan = JobPlan(Job(command=["train"], workers=3, servers=1), KEY)
    first, again = plan.worker(2, "tcp://a:1").environment, plan.worker(2, "tcp://a:1").environment
    assert [first[name] for name in outer] == ["2", "3", "2", "3", "127.0.0.1"]
    assert first["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert first["MASTER_PORT"] == again["MASTER_PORT"] == plan.worker(0, "tcp://a:1").environment["MASTER_PORT"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(first["MASTER_PORT"])))
    plan.meet_at("10.0.0.2", 4711)
    assert [plan.worker(1, "tcp://a:1").environment[f"MASTER_{name}"] for name in ("ADDR", "PORT")] == [
        "10.0.0.2",
        "4711",
    ]


def test_a_free_port_is_not_one_that_somebody_listens_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("random.sample", lambda *_: [port])
        assert free_port() not in (0, port)


@pytest.mark.parametrize(("grace_s", "expected_s"), [(0.5, 0.5), (10.0, PARENT_GRACE_S)])
def test_a_worker_whose_launcher_was_killed_has_no_longer_than_the_grace(grace_s: float, expected_s: float) -> None:
    worker = JobPlan(Job(command=["train"], workers=1, servers=1, grace_s=grace_s), KEY).worker(0, "tcp://a:1")
    assert list(worker.command) == guarded(["train"], expected_s)


def test_a_relay_hands_lines_on_and_is_joined_at_their_end(lines: Lines) -> None:
    read, write = os.pipe()
    relay = OutputRelay("node", {"stdout": os.fdopen(read, "rb")}, lines.take, lambda *_: None, threading.Lock())
    os.write(write, b"one\ntwo")
    lines.wait_for("node", "one")
    assert not relay.join(0.01)
    os.close(write)
    assert relay.join(DEADLINE_S)
    assert lines.of("node") == ["one", "two"]


def test_a_relay_that_is_stuck_ends_the_wait(lines: Lines) -> None:
    read, write = os.pipe()
    is_read = threading.Event()

    def slow(node: str, stream: Stream, line: bytes) -> None:
        is_read.wait(DEADLINE_S)

    relay = OutputRelay("node", {"stdout": os.fdopen(read, "rb")}, slow, lambda *_: None, threading.Lock())
    os.write(write, b"line\n")
    os.close(write)
    assert not relay.join(0.2)
    is_read.set()
    assert relay.join(DEADLINE_S)


def test_a_relay_reads_on_when_its_sink_is_broken_and_reports_it_once() -> None:
    read, write = os.pipe()
    told: list[tuple[Stream, OSError]] = []
    full = OSError(28, "No space left on device")

    def broken(node: str, stream: Stream, line: bytes) -> None:
        raise full

    relay = OutputRelay(
        "node", {"stderr": os.fdopen(read, "rb")}, broken, lambda *error: told.append(error), threading.Lock()
    )
    writer = threading.Thread(target=lambda: [os.write(write, b"x" * 1023 + b"\n") for _ in range(1000)])
    writer.start()
    writer.join(DEADLINE_S)
    assert not writer.is_alive(), "the pipe was not read"
    os.close(write)
    assert relay.join(DEADLINE_S)
    assert told == [("stderr", full)]
    say(broken, "nobody hears this, and nothing is raised")


@pytest.mark.parametrize("message", [b"READY=1", b"STATUS=up\nREADY=1\n"])
def test_a_ready_socket_waits_for_ready(message: bytes) -> None:
    async def main() -> None:
        with (
            ReadySocket(asyncio.get_running_loop()) as ready,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.sendto(b"STATUS=READY=1 soon", f"\0{ready.name[1:]}")
            await asyncio.sleep(0.05)  # time itself: nothing is reported
            assert not ready.reported.done()
            sender.sendto(message, f"\0{ready.name[1:]}")
            sender.sendto(message, f"\0{ready.name[1:]}")
            await asyncio.wait_for(ready.reported, DEADLINE_S)

    asyncio.run(main())
