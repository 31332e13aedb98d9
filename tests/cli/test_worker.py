"""``kvd worker``: the environment, signals, exit codes, systemd and a parent that goes away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Spawn = Callable[..., "subprocess.Popen[str]"]
DEADLINE_S = 60.0

WAITER = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
    print("here", flush=True)
    print("got", signal.sigwait({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}).name, flush=True)
"""


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-S", "-c", textwrap.dedent(code)]


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.keys  # no further variable says that there are none
def test_the_command_finds_the_cluster(spawn: Spawn) -> None:
    code = "import os; print(*sorted(f'{k}={v}' for k, v in os.environ.items() if k.startswith('KVD_')), sep='\\n')"
    flags = ["-S", "tcp://127.0.0.1:1", "--num-workers", "4", "--slice-bytes", "64KiB", "--credit-bytes", "32MiB"]
    process = spawn("worker", *flags, "--timeout", "90s", *python(code), environment={"KVD_NODE_ID": "w7"})
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert out.splitlines() == [
        "KVD_CREDIT_BYTES=32MiB",  # the default, but given: it has to win over a file that the command reads too
        "KVD_NODE_ID=w7",
        "KVD_NUM_SERVERS=0",
        "KVD_NUM_WORKERS=4",
        "KVD_PARENT_PID=",
        "KVD_REQUEST_TIMEOUT_S=90s",
        "KVD_ROLE=worker",
        "KVD_ROUND_TIMEOUT_S=90s",
        "KVD_SCHEDULER=tcp://127.0.0.1:1",
        "KVD_SLICE_BYTES=64KiB",
    ]


def test_the_command_finds_its_place_and_its_run(spawn: Spawn) -> None:
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "KVD_RUN", "KVD_JOB"
    code = f"import os; print(*(os.environ.get(name) for name in {names}))"
    flags = ["-S", "tcp://127.0.0.1:1", "--num-workers", "4", "--preferred-rank", "3", "--local-rank", "1"]
    process = spawn("worker", *flags, *python(code), environment={"KVD_RUN": "the-token", "KVD_JOB": "digits"})
    out, err = process.communicate(timeout=DEADLINE_S)
    assert out == "3 4 1 the-token digits\n", err


def test_ranks_that_are_set_stay_and_what_is_not_known_is_not_set(spawn: Spawn) -> None:
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    code = f"import os; print(*(os.environ.get(name) for name in {names}))"
    given = {"RANK": "5", "KVD_PREFERRED_RANK": "1", "LOCAL_RANK": "2"}
    out, err = spawn("worker", *python(code), environment=given).communicate(timeout=DEADLINE_S)
    assert out == "5 None 2 None\n", err


@pytest.mark.parametrize(
    ("code", "wanted"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_code_is_that_of_the_command(code: str, wanted: int, spawn: Spawn) -> None:
    process = spawn("worker", *python(code))
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == wanted


def test_a_command_that_does_not_exist(spawn: Spawn) -> None:
    process = spawn("worker", "--", "/no/such/program")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 127
    assert "error: cannot run '/no/such/program': No such file or directory" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on(number: signal.Signals, spawn: Spawn) -> None:
    process = spawn("worker", *python(WAITER))
    assert first_line(process) == "here\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert out == f"got {number.name}\n"
    assert process.returncode == 0


def ignoring(*numbers: signal.Signals) -> dict[str, object]:
    return {"preexec_fn": lambda: [signal.signal(number, signal.SIG_IGN) for number in numbers]}


def test_signals_that_are_ignored_at_the_start_stay_ignored(spawn: Spawn) -> None:
    code = """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print([signal.getsignal(n).name for n in (signal.SIGHUP, signal.SIGINT)], flush=True)
        print("got", signal.sigwait({signal.SIGTERM}).name, flush=True)
    """
    process = spawn("worker", *python(code), **ignoring(signal.SIGHUP, signal.SIGINT))
    assert first_line(process) == "['SIG_IGN', 'SIG_IGN']\n"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (out, process.returncode) == ("got SIGTERM\n", 0)


def test_a_daemon_under_nohup_ignores_the_end_of_its_terminal(spawn: Spawn) -> None:
    sizes = ["--num-workers", "1", "--num-servers", "1", "--bind", "tcp://127.0.0.1:0"]
    process = spawn("scheduler", *sizes, "--insecure", **ignoring(signal.SIGHUP, signal.SIGINT))
    assert process.stderr is not None
    while "join it with" not in process.stderr.readline():
        assert process.poll() is None
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "received SIGTERM" in err
    assert "SIGHUP" not in err
    assert "SIGINT" not in err


def test_quit_kills(spawn: Spawn) -> None:
    process = spawn("worker", "--", "sh", "-c", "trap '' TERM; echo here; sleep 1000")
    assert first_line(process) == "here\n"
    process.send_signal(signal.SIGQUIT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGKILL


def test_the_command_ends_with_its_named_parent(spawn: Spawn) -> None:
    parent = subprocess.Popen(["sleep", "1000"])
    process = spawn("worker", "--parent-pid", str(parent.pid), *python(WAITER))
    assert first_line(process) == "here\n"
    parent.kill()
    parent.wait()
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert out == "got SIGTERM\n"


def test_the_command_is_killed_with_its_guard(spawn: Spawn) -> None:
    process = spawn("worker", *python(WAITER))
    assert first_line(process) == "here\n"
    process.kill()
    out, _ = process.communicate(timeout=DEADLINE_S)  # its stdout is closed when the command has ended
    assert out == ""


def test_systemd_is_notified(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.settimeout(DEADLINE_S)
        code = "import os; print('NOTIFY_SOCKET' in os.environ, flush=True); import signal; signal.pause()"
        systemd = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "200000"}
        process = spawn("worker", *python(code), environment=systemd)
        ready = listener.recv(4096).decode().splitlines()
        assert ready[0] == "READY=1"
        assert os.path.basename(sys.executable) in ready[1]
        assert first_line(process) == "False\n", "the socket is the worker's own"
        assert [listener.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        process.send_signal(signal.SIGTERM)
        while (message := listener.recv(4096)) == b"WATCHDOG=1":
            pass
        assert message.startswith(b"STOPPING=1")
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 128 + signal.SIGTERM
