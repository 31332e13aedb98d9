"""The launcher and the guards, with real processes. The daemons here are stand-ins: the launcher is what is tested."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from kvd.errors import ConfigError, RequestTimeout
from kvd.node.affinity import Plan, auto_servers, plan, running_on, usable_cores
from kvd.node.launch import MAX_LINE, Job, Launch, _Child, run
from kvd.node.parent import Guard, ParentWatch

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0

DAEMON = """
import os, signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("up", os.environ["KVD_NODE_ID"], os.environ["KVD_PARENT_PID"], os.environ["KVD_BIND"], flush=True)
if sys.argv[1] == "server" and "SERVER_IS_UP" in os.environ:
    open(os.environ["SERVER_IS_UP"], "w").close()
if sys.argv[1] == os.environ.get("FAILS"):
    sys.exit(int(os.environ["FAILS_WITH"]))
if sys.argv[1] == "scheduler" and "NEVER_READY" not in os.environ:
    with open(sys.argv[sys.argv.index("--ready-file") + 1], "w") as file:
        file.write("tcp://127.0.0.1:12345\\n")
    name = os.environ["NOTIFY_SOCKET"]
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1\\nSTATUS=x", "\\0" + name[1:])
signal.sigwait({signal.SIGTERM})
print("down", os.environ["KVD_NODE_ID"], flush=True)
"""

# A worker that ends before a server has begun would have it ended before it could say anything.
WAIT_FOR_SERVER = """
import os, time
while not os.path.exists(os.environ["SERVER_IS_UP"]):
    time.sleep(0.01)
"""

LAUNCHER = """
import json, os, sys
from kvd.node.launch import Job, run
given = json.loads(sys.argv[1])
def show(node, stream, line):  # from several threads: one write is one line, which print does not promise
    os.write(1, f"{node} {stream} {line.decode()}\\n".encode())
sys.exit(run(Job(**given), show))
"""


class Lines:
    """Collects what a job says."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, bytes]] = []
        self._changed = threading.Condition()

    def take(self, node: str, stream: str, line: bytes) -> None:
        with self._changed:
            self.all.append((node, stream, line))
            self._changed.notify_all()

    def of(self, node: str) -> list[str]:
        return [line.decode() for name, _stream, line in self.all if name == node]

    def wait_for(self, node: str, line: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: line in self.of(node), DEADLINE_S), self.all


@pytest.fixture
def daemon(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "daemon.py"
    path.write_text(DAEMON)
    return (sys.executable, "-S", str(path))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def mark() -> Iterator[dict[str, str]]:
    """A variable that every process of a test inherits. Nothing that has it may be left at the end."""
    name = uuid.uuid4().hex
    yield {"JOB_MARK": name}
    left = marked(name)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


def marked(name: str) -> list[int]:
    """The processes that have the mark in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and f"JOB_MARK={name}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue  # it has ended
    return found


def wait_until_gone(name: str) -> None:
    """Wait until no process with the mark is left."""
    deadline = time.monotonic() + DEADLINE_S
    while left := marked(name):
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        wait_for_end(left[0])


def wait_for_end(pid: int) -> None:
    watch = ParentWatch(pid)
    if watch.descriptor is not None:
        assert select.select([watch.descriptor], [], [], DEADLINE_S)[0], f"process {pid} does not end"
    watch.close()


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def shell(code: str) -> list[str]:
    return ["/bin/sh", "-c", code]


# --- the end of a job ------------------------------------------------------------------------------------------------


def test_workers_find_the_cluster_and_success_is_0(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = """
        import os
        names = ("ROLE", "SCHEDULER", "NODE_ID", "NUM_WORKERS", "NUM_SERVERS", "PREFERRED_RANK", "LOCAL_RANK")
        print(*(os.environ["KVD_" + name] for name in names), "NOTIFY_SOCKET" in os.environ)
    """
    environment = {**mark, "KVD_NODE_ID": "mine", "KVD_BIND": "tcp://0.0.0.0:1"}
    job = Job(command=python(code), workers=2, servers=1, environment=environment, daemon=daemon)

    assert run(job, lines.take, handle_signals=False) == 0

    assert lines.of("worker-0") == ["worker tcp://127.0.0.1:12345 worker-0 2 1 0 0 False"]
    assert lines.of("worker-1") == ["worker tcp://127.0.0.1:12345 worker-1 2 1 1 1 False"]
    assert lines.of("scheduler") == [f"up scheduler {os.getpid()} tcp://127.0.0.1:0", "down scheduler"]
    assert lines.of("server-0") == [f"up server-0 {os.getpid()} ", "down server-0"]
    assert lines.all.index(("server-0", "stdout", b"down server-0")) < lines.all.index(
        ("scheduler", "stdout", b"down scheduler")
    )


def test_a_failing_worker_ends_the_rest_with_its_code(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = """
        import os, signal, sys
        if os.environ["KVD_LOCAL_RANK"] == "1":
            sys.exit(7)
        signal.pause()
    """
    job = Job(command=python(code), workers=3, servers=2, environment=mark, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == 7
    assert "worker-1 failed (exit code 7): ending the job" in lines.of("launch")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (shell("kill -SEGV $$"), 128 + signal.SIGSEGV),
        (["/no/such/program"], 127),
        (["/dev/null"], 126),
    ],
)
def test_ends_of_a_worker_that_are_no_exit_code(
    command: list[str], code: int, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    job = Job(command=command, workers=1, servers=1, environment=mark, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == code


def test_a_worker_is_restarted_under_its_name(tmp_path: Path, daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = f"""
        import os, pathlib, signal
        mine = pathlib.Path({str(tmp_path)!r}, os.environ["KVD_NODE_ID"])
        starts = int(mine.read_text()) if mine.exists() else 0
        mine.write_text(str(starts + 1))
        print("start", starts)
        if starts < 2 and mine.name == "worker-1":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    job = Job(command=python(code), workers=2, servers=1, environment=mark, restarts=2, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == 0
    assert lines.of("worker-1") == ["start 0", "start 1", "start 2"]
    assert lines.of("worker-0") == ["start 0"]
    assert "worker-1 failed (SIGKILL): restart 2 of 2" in lines.of("launch")


def test_restarts_are_counted(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    job = Job(command=shell("exit 5"), workers=1, servers=1, environment=mark, restarts=3, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == 5
    assert len(lines.of("launch")) == 4


@pytest.mark.parametrize(("role", "code", "wanted"), [("server", 3, 1), ("server", 2, 2), ("scheduler", 2, 2)])
def test_a_daemon_that_ends_ends_the_job(
    role: str, code: int, wanted: int, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    environment = {**mark, "FAILS": role, "FAILS_WITH": str(code)}
    job = Job(command=shell("sleep 1000"), workers=1, servers=1, environment=environment, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == wanted
    assert any(f"ended (exit code {code})" in line for line in lines.of("launch"))


def test_a_scheduler_that_never_is_ready(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    environment = {**mark, "NEVER_READY": "1"}
    job = Job(command=["true"], workers=1, servers=1, environment=environment, daemon=daemon, startup_s=0.5)
    with pytest.raises(RequestTimeout, match=r"not ready within 0\.5 s"):
        run(job, lines.take, handle_signals=False)


@pytest.mark.parametrize("field", ["workers", "servers"])
def test_a_job_needs_some_of_each(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Job(**{"command": ["true"], "workers": 1, "servers": 1, field: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="command"):
        Job(command=[], workers=1, servers=1)


def test_each_daemon_has_a_state_folder_of_its_own(
    tmp_path: Path, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    show = tmp_path / "show.py"
    show.write_text(Path(daemon[-1]).read_text().replace('os.environ["KVD_BIND"]', 'os.environ["KVD_STATE_DIR"]'))
    environment = {**mark, "KVD_STATE_DIR": "/state", "SERVER_IS_UP": str(tmp_path / "up")}
    command = python(WAIT_FOR_SERVER)
    job = Job(command=command, workers=1, servers=1, environment=environment, daemon=(*daemon[:-1], str(show)))
    assert run(job, lines.take, handle_signals=False) == 0
    assert lines.of("scheduler")[0].endswith(" /state/scheduler")
    assert lines.of("server-0")[0].endswith(" /state/server-0")


# --- output ----------------------------------------------------------------------------------------------------------


def test_lines_come_whole_and_long_ones_in_pieces(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = f"""
        import os, sys
        os.write(1, b"one, ")
        os.write(1, b"\\xff two\\n\\n")
        os.write(2, b"x" * {MAX_LINE + 10} + b"\\n")
        os.write(1, b"the end without a line end")
    """
    job = Job(command=python(code), workers=1, servers=1, environment=mark, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == 0
    out = [line for node, stream, line in lines.all if (node, stream) == ("worker-0", "stdout")]
    assert out == [b"one, \xff two", b"", b"the end without a line end"]
    err = [line for node, stream, line in lines.all if (node, stream) == ("worker-0", "stderr")]
    assert [len(line) for line in err] == [MAX_LINE, 10]


def test_the_job_ends_when_nobody_reads_its_output(daemon: Any, mark: dict[str, str]) -> None:
    def broken(node: str, stream: str, line: bytes) -> None:
        raise BrokenPipeError

    job = Job(command=shell("echo x; sleep 1000"), workers=1, servers=1, environment=mark, daemon=daemon)
    assert run(job, broken, handle_signals=False) == 128 + signal.SIGPIPE


def test_a_blocked_reader_does_not_stop_the_end(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    """Whoever reads slowly slows the nodes down, but the job can still be ended."""
    entered, release = threading.Event(), threading.Event()

    def blocked(node: str, stream: str, line: bytes) -> None:
        if node == "worker-0":
            entered.set()
            release.wait(DEADLINE_S)

    job = Job(
        command=shell("while :; do echo x; done"), workers=1, servers=1, environment=mark, daemon=daemon, grace_s=1
    )
    launch = Launch(job, blocked)
    result = in_thread(launch)
    assert entered.wait(DEADLINE_S)
    launch.stop(3)
    assert result() == 3
    release.set()


# --- ending it from outside ------------------------------------------------------------------------------------------


def in_thread(launch: Launch) -> Callable[[], int]:
    """Run a job beside the test; the returned function waits for its exit code."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(asyncio.run(launch.run())))
    thread.start()

    def result() -> int:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the job does not end"
        return codes[0]

    return result


def test_stop_is_graceful_first_and_at_once_then(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = """
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print("pid", os.getpid(), flush=True)
        while True:
            signal.sigwait({signal.SIGTERM})
            print("not yet", flush=True)
    """
    job = Job(command=python(code), workers=1, servers=1, environment=mark, daemon=daemon, grace_s=1000)
    launch = Launch(job, lines.take)
    result = in_thread(launch)
    wait_for_line(lines, "worker-0", "pid ")
    assert launch.scheduler == "tcp://127.0.0.1:12345"
    assert launch.pid_of("worker-0") is not None
    assert launch.pid_of("worker-7") is None
    launch.stop(9)
    lines.wait_for("worker-0", "not yet")
    launch.stop(9)
    assert result() == 9
    launch.stop(9)  # the job is over: nothing happens
    assert "down scheduler" not in lines.of("scheduler"), "at once is at once for the daemons too"


def wait_for_line(lines: Lines, node: str, beginning: str) -> str:
    deadline = time.monotonic() + DEADLINE_S
    with lines._changed:
        while True:
            found = next((line for line in lines.of(node) if line.startswith(beginning)), None)
            if found is not None:
                return found
            assert lines._changed.wait(deadline - time.monotonic()), lines.all


def test_a_worker_that_will_not_end_is_killed_after_the_grace(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"
    job = Job(command=python(code), workers=1, servers=1, environment=mark, daemon=daemon, grace_s=0.3)
    launch = Launch(job, lines.take)
    result = in_thread(launch)
    lines.wait_for("worker-0", "here")
    launch.stop(4)
    assert result() == 4
    assert "killing worker-0: still there 0.3 s after SIGTERM" in lines.of("launch")
    assert "down scheduler" in lines.of("scheduler")


def test_what_a_worker_leaves_behind_is_ended(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    command = shell("sleep 1000 & setsid sleep 1000 & (setsid sh -c 'trap : TERM; sleep 1000; sleep 1000' &) ; exit 0")
    job = Job(command=command, workers=1, servers=1, environment=mark, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == 0
    assert not marked(mark["JOB_MARK"])


def test_a_guard_that_is_killed_takes_its_command_along(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    command = shell("echo pid $$; sleep 1000 & sleep 1000; exit 0")
    job = Job(command=command, workers=1, servers=1, environment=mark, daemon=daemon)
    launch = Launch(job, lines.take)
    result = in_thread(launch)
    wait_for_line(lines, "worker-0", "pid ")
    guard = launch.pid_of("worker-0")
    assert guard is not None
    os.kill(guard, signal.SIGKILL)
    assert result() == 128 + signal.SIGKILL
    wait_until_gone(mark["JOB_MARK"])


def test_a_process_that_has_just_ended_may_be_killed(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    """Its exit code is still there, for the thread that waits for it to take, and must not be taken by the kill."""
    children: list[_Child] = []
    killed = threading.Event()
    wait_for_end = os.waitid

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)  # it has ended by now
        children[0].kill()
        killed.set()
        return wait_for_end(*arguments)

    async def main() -> int:
        monkeypatch.setattr(os, "waitid", slow)
        children.append(_Child("x", ["true"], os.environ, lines.take, lambda *_: None, guards=False))
        return await asyncio.wait_for(children[0].exited, DEADLINE_S)

    assert asyncio.run(main()) == 0
    assert killed.is_set()


# --- signals to a launcher -------------------------------------------------------------------------------------------


class Launcher:
    """A launcher in a process of its own."""

    def __init__(self, mark: dict[str, str], folder: Path, **job: Any) -> None:
        self.mark = mark["JOB_MARK"]
        path = f"{ROOT}{os.pathsep}{ROOT / 'cli'}"
        # A launcher that is killed cannot remove its folder: it lies where pytest removes it.
        environment = {**os.environ, **mark, "PYTHONPATH": path, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, json.dumps({"workers": 2, "servers": 1, **job})],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.out: IO[str] = self.process.stdout
        self.seen: list[str] = []

    def wait_for(self, *lines: str) -> None:
        """Read until all these lines have come."""
        missing = set(lines)
        while missing:
            line = self.out.readline()
            assert line, f"the output ended without {missing}: {self.seen}"
            self.seen.append(line.rstrip("\n"))
            missing.discard(self.seen[-1])

    def end(self) -> tuple[int, list[str]]:
        """Its exit code, and all that it said."""
        rest, _ = self.process.communicate(timeout=DEADLINE_S)
        self.seen += rest.splitlines()
        return self.process.returncode, self.seen


@pytest.fixture
def launcher(mark: dict[str, str], daemon: Any, tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(**job: Any) -> Launcher:
        started.append(Launcher(mark, tmp_path, daemon=daemon, **job))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        one.out.close()


POLITE = """
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_the_job_in_good_order(number: int, launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=python(POLITE))
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    job.process.send_signal(number)
    code, said = job.end()
    assert code == 128 + number
    assert not marked(job.mark)
    order = [
        said.index(f"{name} stdout {word}")
        for name, word in (
            ("worker-0", "bye"),
            ("server-0", "down server-0"),
            ("scheduler", "down scheduler"),
        )
    ]
    assert order == sorted(order)


def test_the_second_signal_kills(launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=python(STUBBORN), grace_s=1000)
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("worker-0 stdout no", "worker-1 stdout no")
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 128 + signal.SIGINT
    assert not marked(job.mark)
    assert any("SIGINT again: killing everything" in line for line in said)


def test_nothing_outlives_a_killed_launcher(launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=shell("sleep 1000 & setsid sleep 1000 & echo here; sleep 1000; exit 0"))
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    assert len(marked(job.mark)) >= 1 + 2 + 2 * 3  # launcher, daemons, and for each worker guard, shell and sleeps
    job.process.kill()
    job.process.wait()
    wait_until_gone(job.mark)


def test_a_stubborn_worker_does_not_outlive_a_killed_launcher(launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=python(STUBBORN))
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    job.process.kill()
    job.process.wait()
    wait_until_gone(job.mark)


# --- what the guard is made of ---------------------------------------------------------------------------------------


def test_a_watch_without_pidfd_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError

    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    watch = ParentWatch(child.pid)
    assert watch.descriptor is None
    assert not watch.is_gone()
    child.kill()
    child.communicate()
    assert watch.is_gone()
    assert watch.is_gone()
    watch.close()


def test_a_watch_for_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert ParentWatch(child.pid).is_gone()


def test_a_guard_ends_a_command_whose_parent_is_gone_already(mark: dict[str, str]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    before = signal.getsignal(signal.SIGTERM)
    guard = Guard(["sleep", "1000"], environment={**os.environ, **mark}, parent_pid=gone.pid, grace_s=5)
    assert guard.run() == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


# --- cores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "cores", "servers"), [(2, 2, 1), (2, 1, 1), (2, 3, 1), (2, 6, 4), (4, 64, 8)])
def test_servers_take_the_cores_that_the_workers_leave(workers: int, cores: int, servers: int) -> None:
    assert auto_servers(workers, cores) == servers


def test_each_server_gets_the_last_cores_and_the_rest_is_for_the_others() -> None:
    found = plan(2, 2, {7, 0, 3, 1, 2})
    assert found == Plan(servers=(3, 7), rest=frozenset({0, 1, 2}))
    assert found is not None
    assert [set(found.cores_of(server)) for server in (0, 1, None)] == [{3}, {7}, {0, 1, 2}]
    assert plan(3, 2, {7, 0, 3, 1, 2}) is not None
    assert plan(4, 2, {7, 0, 3, 1, 2}) is None


def test_a_process_inherits_its_cores_and_the_starter_keeps_its_own() -> None:
    own = usable_cores()
    one = min(own)
    show = [sys.executable, "-S", "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with running_on({one}):
        inside = subprocess.check_output(show, text=True)
    with running_on(None):
        anywhere = subprocess.check_output(show, text=True)
    assert inside == f"[{one}]\n"
    assert anywhere == f"{sorted(own)}\n"
    assert usable_cores() == own


SHOW_CORES = "import os; print('cores', sorted(os.sched_getaffinity(0)))"


def test_servers_are_pinned_where_there_are_cores_enough(tmp_path: Path, lines: Lines, mark: dict[str, str]) -> None:
    """With two cores of this machine a worker and a server each have one; the plan is the same for more."""
    cores = sorted(usable_cores())
    if len(cores) < 2:
        pytest.skip("one core cannot be divided")
    path = tmp_path / "daemon.py"
    path.write_text(DAEMON.replace('print("up"', f'{SHOW_CORES}\nprint("up"', 1))
    environment = {**mark, "KVD_CPU_AFFINITY": "auto", "SERVER_IS_UP": str(tmp_path / "up")}
    daemon = (sys.executable, "-S", str(path))
    command = python(f"{SHOW_CORES}\n{WAIT_FOR_SERVER}")
    job = Job(command=command, workers=1, servers=1, environment=environment, daemon=daemon)

    assert run(job, lines.take, handle_signals=False) == 0

    assert lines.of("server-0")[0] == f"cores [{cores[-1]}]"
    assert lines.of("scheduler")[0] == lines.of("worker-0")[0] == f"cores {cores[:-1]}"
    assert lines.of("launch")[0].startswith(f"servers run on cores {cores[-1]}, everyone else on {cores[0]}")
    assert sorted(usable_cores()) == cores


def test_nothing_is_pinned_where_there_are_too_few_cores_or_nobody_asked(
    daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    cores = sorted(usable_cores())
    for asked in ("auto", "off"):
        environment = {**mark, "KVD_CPU_AFFINITY": asked}
        workers = len(cores) if asked == "auto" else 1
        job = Job(command=python(SHOW_CORES), workers=workers, servers=1, environment=environment, daemon=daemon)
        assert run(job, lines.take, handle_signals=False) == 0
        assert lines.of("worker-0")[-1] == f"cores {cores}"
    assert lines.of("launch") == [
        f"no server gets a core of its own: {len(cores) + 1} workers and servers, {len(cores)} usable cores"
    ]
