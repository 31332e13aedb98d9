"""Jobs on several hosts: how hosts are named and shared out, and jobs through an ssh that stays on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import ConfigError, ConnectError
from kvd.node.launch import Host, Job, Launch, parse_hosts, run
from kvd.node.launch.hosts import Place, Placement, Reach, on_host
from kvd.node.launch.supervisor import MOST_CONNECTING
from kvd.node.remote import Mode
from kvd.testing.cluster import wait_until
from tests.node.launch.harness import (
    WAIT_FOR_SERVERS,
    Launcher,
    Lines,
    in_thread,
    marked,
    python,
    shell,
    wait_for_end,
    wait_until_gone,
)

STAY = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("here", flush=True)
    signal.sigwait({signal.SIGTERM})
    print("bye", flush=True)
"""
STUBBORN = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("here", flush=True)
    while True:
        signal.sigwait({signal.SIGTERM})
        print("no", flush=True)
"""


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", 1)]),
        ("a,b:2", [("a", 1), ("b", 2)]),
        (" me@trainer-b.lan:12 , 10.0.0.2", [("me@trainer-b.lan", 12), ("10.0.0.2", 1)]),
        ("[fe80::1%eth0]:3,[::1]", [("fe80::1%eth0", 3), ("::1", 1)]),
    ],
)
def test_hosts_have_slots(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == tuple(Host(*host) for host in hosts)


@pytest.mark.parametrize(
    "text",
    ["", "a,", "a:0", "a:-1", "a:x", "-oProxyCommand=x", "me@-oProxyCommand=x", "a b", "a;true", "fe80::1", "a:12345"],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST or HOST:SLOTS"):
        parse_hosts(text)


def test_a_host_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="a is named twice; give it the sum of the slots"):
        parse_hosts("a,b,a:2")


def test_workers_fill_the_hosts_in_order_and_servers_take_turns() -> None:
    placement = Placement(parse_hosts("a,b:3,c"), 4)
    assert [placement.worker(rank) for rank in range(4)] == [
        Place("a", 0, 1), Place("b", 0, 3), Place("b", 1, 3), Place("b", 2, 3),
    ]  # fmt: skip
    assert [placement.server(index) for index in range(5)] == ["a", "b", "c", "a", "b"]
    here = Placement((), 2)
    assert [here.worker(1), here.server(3)] == [Place("", 1, 2), ""]


def test_more_workers_than_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_workers = 4, but the hosts have 3 slots in all: .* --hosts a:2,"):
        Job(command=["true"], workers=4, servers=1, hosts=parse_hosts("a,b:2"))


@pytest.mark.parametrize(
    ("seen", "bind", "reached_by"),
    [
        ({}, "tcp://127.0.0.1:0", {"": "127.0.0.1"}),
        ({"localhost": "127.0.0.1"}, "tcp://127.0.0.1:0", {"": "127.0.0.1", "localhost": "127.0.0.1"}),
        ({"a": "10.0.0.1", "b": "10.0.0.1"}, "tcp://10.0.0.1:0", {"": "10.0.0.1", "b": "10.0.0.1"}),
        # a host that is this one: the servers there must be reached by the others
        ({"me": "127.0.0.1", "b": "10.0.0.1"}, "tcp://10.0.0.1:0", {"": "10.0.0.1", "me": "10.0.0.1"}),
        ({"a": "10.0.0.1", "b": "10.1.0.1"}, "tcp://0.0.0.0:0", {"": "10.0.0.1", "a": "10.0.0.1", "b": "10.1.0.1"}),
        ({"a": "10.0.0.1", "b": "fd00::1"}, "tcp://*:0", {"": "10.0.0.1", "a": "10.0.0.1", "b": "[fd00::1]"}),
        ({"a": "fe80::1%eth0"}, "tcp://*:0", {"a": "[fe80::1%eth0]"}),
        ({"a": "fd00::1"}, "tcp://[fd00::1]:0", {"": "[fd00::1]", "a": "[fd00::1]"}),
    ],
)
def test_the_hosts_reach_the_scheduler_from_where_they_were_reached(
    seen: dict[str, str], bind: str, reached_by: dict[str, str]
) -> None:
    reach = Reach("", seen)
    assert reach.bind == bind
    listening = bind.removesuffix(":0") + ":4711"
    for host, number in reached_by.items():
        assert reach.scheduler(host, listening) == f"tcp://{number}:4711"


@pytest.mark.parametrize(
    ("seen", "host", "address", "reached_by"),
    [
        ({}, "", "", "127.0.0.1"),
        ({"a": "10.0.0.1"}, "a", "10.0.0.2", "10.0.0.2"),
        ({"me@trainer-a": "10.0.0.1"}, "me@trainer-a", "", "trainer-a"),  # its ssh does not tell
        ({"localhost": "127.0.0.1"}, "localhost", "127.0.0.1", "127.0.0.1"),
        ({"localhost": "127.0.0.1", "b": "10.0.0.1"}, "localhost", "127.0.0.1", "10.0.0.1"),
    ],
)
def test_where_the_workers_meet_is_an_address_that_all_hosts_reach(
    seen: dict[str, str], host: str, address: str, reached_by: str
) -> None:
    assert Reach("", seen).worker(host, address) == reached_by


def test_the_address_that_is_given_is_used() -> None:
    reach = Reach("tcp://10.9.9.9:9191", {"a": "10.0.0.1", "b": ""})
    assert reach.bind == reach.scheduler("a", "tcp://10.9.9.9:9191") == "tcp://10.9.9.9:9191"


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({"a": "10.0.0.1", "b": ""}, r"the ssh to b does not tell .*SSH_CONNECTION.*give --scheduler"),
        ({"a": ""}, r"the ssh to a does not tell"),
    ],
)
def test_hosts_without_an_address_in_common_need_one(seen: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Reach("", seen)


def test_the_order_is_not_on_the_command_line() -> None:
    command = on_host(["ssh", "-p", "2222"], "b", Mode.RUN)
    assert command[:3] == ["ssh", "-p", "2222"]
    assert command[-3:-1] == ["--", "b"]
    assert "-oBatchMode=yes" in command
    assert command[-1].startswith(f"exec {sys.executable} -I -S ")


def test_a_job_on_two_hosts(ssh: Any, daemon: Any, lines: Lines, mark: dict[str, str], tmp_path: Path) -> None:
    code = """
        import os
        names = ("KVD_NODE_ID", "KVD_SCHEDULER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FAKE_HOST")
        assert (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) > 0) == ("127.0.0.1", True)
        print(*(os.environ[name] for name in names), os.getcwd(), os.read(0, 1), os.environ["ODD"])
    """
    environment = {
        **mark, "ODD": "'a b' \"$HOME\"\n\udcff", "KVD_RUN": "token", "SERVER_IS_UP": str(tmp_path / "up"),
    }  # fmt: skip
    job = Job(
        command=python(WAIT_FOR_SERVERS, code), workers=3, servers=2, environment=environment, daemon=daemon,
        hosts=parse_hosts("a,noisy:2"), ssh=ssh,
    )  # fmt: skip
    assert run(job, lines.take, handle_signals=False) == 0
    scheduler, here = "tcp://127.0.0.1:12345", os.getcwd()
    for rank, place in enumerate(("0 1 a", "0 2 noisy", "1 2 noisy")):
        said = [line for node, stream, line in lines.all if (node, stream) == (f"worker-{rank}", "stdout")]
        assert said == [f"worker-{rank} {scheduler} {rank} 3 {place} {here} b'' 'a b' \"$HOME\"".encode(), b"\xff"]
    assert lines.of("server-1") == ["welcome to noisy", "up server-1  ", "down server-1"]
    assert ("noisy", "stdout") not in {(node, stream) for node, stream, _ in lines.all}


def test_the_exit_code_and_the_last_words_come_through(
    ssh: Any, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    job = Job(
        command=shell("echo out; echo last words >&2; exit 7"), workers=1, servers=1, environment=mark, daemon=daemon,
        hosts=[Host("a")], ssh=ssh,
    )  # fmt: skip
    assert run(job, lines.take, handle_signals=False) == 7
    said = {(stream, line) for node, stream, line in lines.all if node == "worker-0"}
    assert said == {("stdout", b"out"), ("stderr", b"last words")}
    assert "worker-0 on a failed (exit code 7): ending the job" in lines.of("launch")


@pytest.mark.parametrize(
    ("host", "folder", "says"),
    [
        ("refused", "", "cannot reach host refused: ssh: connect to host refused port 22: Connection refused; `"),
        ("bare", "", r"host bare cannot run .*python.* \(exit code 127\): .*/no/such/python: not found; each host"),
        (
            "closed",
            "",
            r"host closed cannot run .* \(exit code 1\): This account is not available\.; each host needs",
        ),
        ("gone", "gone", r"host gone has no folder /.*/gone: each host needs the same checkout"),
    ],
)
def test_a_host_that_cannot_be_used_is_named_at_once(
    host: str, folder: str, says: str, ssh: Any, lines: Lines, mark: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("IS_SILENT", str(tmp_path / "silent"))
    if folder:
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setenv("FOLDER", str(tmp_path / folder))
    job = Job(command=["true"], workers=2, servers=1, environment=mark, hosts=[Host("silent"), Host(host)], ssh=ssh)
    with pytest.raises(ConnectError, match=says) as caught:
        run(job, lines.take, handle_signals=False)
    assert caught.value.address == host


def test_a_program_that_a_host_does_not_have(ssh: Any, lines: Lines, mark: dict[str, str]) -> None:
    job = Job(command=["/no/such/program"], workers=1, servers=1, environment=mark, hosts=[Host("a")], ssh=ssh)
    with pytest.raises(ConnectError, match=r"host a has no program /no/such/program: each host needs the same"):
        run(job, lines.take, handle_signals=False)


def test_an_ssh_that_does_not_exist(lines: Lines, mark: dict[str, str]) -> None:
    job = Job(command=["true"], workers=1, servers=1, environment=mark, hosts=[Host("a")], ssh=["/no/such/ssh"])
    with pytest.raises(ConnectError, match=r"host a cannot run .*cannot run '/no/such/ssh': No such file or directory"):
        run(job, lines.take, handle_signals=False)


def test_a_job_is_stopped_while_a_host_does_not_answer(
    ssh: Any, lines: Lines, mark: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    os.mkfifo(asked)
    monkeypatch.setenv("IS_SILENT", str(asked))
    job = Job(command=["true"], workers=1, servers=1, environment=mark, hosts=[Host("silent")], ssh=ssh)
    launch = Launch(job, lines.take)
    result = in_thread(launch)
    asked.open().close()  # returns when the ssh has opened it, too
    launch.stop(5)
    assert result() == 5


def test_few_connections_to_a_host_are_made_at_once(
    ssh: Any, daemon: Any, lines: Lines, mark: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "stuck"
    stuck.touch()
    monkeypatch.setenv("STUCK", str(stuck))
    job = Job(
        command=["true"], workers=8, servers=1, environment=mark, daemon=daemon, hosts=parse_hosts("stuck:8"), ssh=ssh
    )
    launch = Launch(job, lines.take)
    result = in_thread(launch)
    wait_until(lambda: stuck.read_text() == "x" * MOST_CONNECTING, "the first connections are being made")
    launch.stop(5)
    launch.stop(5)
    assert result() == 5
    assert stuck.read_text() == "x" * MOST_CONNECTING


def test_a_job_in_a_folder_that_is_gone(
    lines: Lines, mark: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    job = Job(command=["true"], workers=1, servers=1, environment=mark, hosts=[Host("a")])
    with pytest.raises(ConfigError, match="the folder in which this runs is gone"):
        run(job, lines.take, handle_signals=False)


def job_on_hosts(ssh: Any, **job: Any) -> dict[str, Any]:
    return {"ssh": list(ssh), "hosts": [["a", 1], ["b", 1]], **job}


def test_ctrl_c_ends_all_hosts_in_order(
    ssh: Any, launcher: Callable[..., Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_IS_UP", str(tmp_path / "up"))
    job = launcher(command=python(WAIT_FOR_SERVERS, STAY), **job_on_hosts(ssh))
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 130
    assert not marked(job.mark)
    order = [said.index(f"{line}") for line in ("worker-1 stdout bye", "server-0 stdout down server-0")]
    assert order == sorted(order)


def test_a_second_ctrl_c_kills_on_all_hosts(ssh: Any, launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=python(STUBBORN), grace_s=1000, **job_on_hosts(ssh))
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("worker-0 stdout no", "worker-1 stdout no")
    job.process.send_signal(signal.SIGINT)
    code, _ = job.end()
    assert code == 130
    wait_until_gone(job.mark)


def test_nothing_on_a_host_outlives_a_killed_launcher(ssh: Any, launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=shell("sleep 1000 & setsid sleep 1000 & echo here; sleep 1000; exit 0"), **job_on_hosts(ssh))
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    job.process.kill()
    job.process.wait()
    wait_until_gone(job.mark)


@pytest.mark.parametrize("is_private", [True, False], ids=["private folder", "open folder"])
def test_a_launcher_that_is_silent_counts_as_gone(is_private: bool, mark: dict[str, str], tmp_path: Path) -> None:
    """As when the network is cut: no end of the connection is seen. The key of the job goes with its processes."""
    runtime, temporary = tmp_path / "runtime", tmp_path / "temporary"
    runtime.mkdir(mode=0o700 if is_private else 0o750)
    temporary.mkdir()
    command = 'stat -c "%n %a" $KVD_KEYFILE; cat $KVD_KEYFILE; sleep 1000 & echo here; sleep 1000'
    order = {
        "command": shell(command), "environment": mark, "folder": str(tmp_path),
        "grace_s": 0.1, "silence_s": 2.0, "key": "the key\n", "takes_stdin": False,
    }  # fmt: skip
    program = on_host([], "a", Mode.RUN)[-1]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary)}
    with subprocess.Popen(
        ["/bin/sh", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"kvd is here\n"
        file, mode = process.stdout.readline().decode().split()
        assert (Path(file).parent.parent, mode) == (runtime if is_private else temporary, "600")
        assert Path(file).parent.stat().st_mode & 0o777 == 0o700
        assert process.stdout.readline() == b"the key\n"
        assert process.stdout.readline() == b"here\n"
        wait_for_end(process.pid)
        process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert not marked(mark["JOB_MARK"])
    assert not [*runtime.iterdir(), *temporary.iterdir()]
