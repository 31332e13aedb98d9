"""``kvd launch``: whole jobs with real daemons."""

from __future__ import annotations

import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvd.config import load
from kvd.node.launch import Job
from kvd.testing.cluster import wait_until
from kvd_cli.launch import job_environment
from kvd_cli.prefix import Prefixer
from kvd_cli.program import cli

Spawn = Callable[..., "subprocess.Popen[str]"]
Kvd = Callable[..., Result]
DEADLINE_S = 100.0


def launch(spawn: Spawn, code: str, *flags: str, **options: Any) -> subprocess.Popen[str]:
    command = ["launch", "-n", "2", "-s", "2", *flags, "--", sys.executable, "-c", textwrap.dedent(code)]
    return spawn(*command, **options)


SCRIPT = """
    import sys
    import numpy as np
    import kvd
    kv = kvd.create(sys.argv[1] if len(sys.argv) > 1 else "dist_sync")
    value = np.full(3, kv.rank + 1, dtype=np.float32)
    kv.init("w", value)
    kv.pushpull("w", value)
    print("result", kv.rank, kv.num_workers, kv.num_servers, value.tolist())
    kv.close()
"""


@pytest.mark.keys
def test_a_job_that_uses_the_store(spawn: Spawn) -> None:
    process = launch(spawn, SCRIPT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [
        "worker-0  | result 0 2 2 [3.0, 3.0, 3.0]",
        "worker-1  | result 1 2 2 [3.0, 3.0, 3.0]",
    ]
    first, *rest = err.splitlines()
    found = re.fullmatch(
        r"launch    \| scheduler at (tcp://127\.0\.0\.1:\d+); "
        r"look at the job with: KVD_SCHEDULER=(tcp://127\.0\.0\.1:\d+) KVD_JOB=launch-[0-9a-f]{8} KVD_KEYFILE=(\S+) "
        "kvd status",
        first,
    )
    assert found is not None, err
    assert found[1] == found[2]
    assert not Path(found[3]).parent.exists(), "the key ends with the job"
    assert rest == []


def test_verbose_shows_the_logs_of_the_daemons(spawn: Spawn) -> None:
    process = launch(spawn, "print('done')", "--log-level", "info", "-n", "1")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert re.search(r"^scheduler \| .*join it with KVD_SCHEDULER=tcp", err, re.MULTILINE), err


def test_a_daemon_that_fails_shows_its_log(spawn: Spawn) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = launch(spawn, "pass", "-S", f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    assert "Address already in use" in err
    assert "launch    | scheduler ended (exit code 3): ending the job\n" in err


def test_the_scheduler_listens_where_it_is_told(spawn: Spawn) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    process = launch(spawn, "import os; print(os.environ['KVD_SCHEDULER'])", "-S", address)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert set(out.split()) >= {address}
    assert err.startswith(f"launch    | scheduler at {address}; look")


def test_logs_in_a_folder(spawn: Spawn, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    code = "import os, sys; print('to stdout', os.environ['RANK']); print('to stderr', file=sys.stderr)"
    process = launch(spawn, code, "--log-dir", str(folder))
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["worker-0  | to stdout 0", "worker-1  | to stdout 1"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = ["launch", "scheduler", "server-0", "server-1", "worker-0", "worker-1"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.log" for name in names]
    assert sorted((folder / "worker-1.log").read_text().splitlines()) == ["to stderr", "to stdout 1"]
    assert (folder / "launch.log").read_text().startswith("scheduler at tcp://127.0.0.1:")
    assert "join it with KVD_SCHEDULER=" in (folder / "scheduler.log").read_text()
    assert "join it with" not in err


def test_a_log_folder_that_cannot_be_written(kvd: Kvd, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = kvd("launch", "-n", "1", "-s", "1", "--log-dir", str(tmp_path / "file" / "logs"), "--", "true")
    assert result.exit_code == 2
    assert f"cannot write logs to {tmp_path}/file/logs: Not a directory; give --log-dir a folder" in result.stderr


@pytest.mark.keys
def test_workers_know_their_job_their_run_and_their_place(spawn: Spawn, tmp_path: Path) -> None:
    names = "KVD_JOB", "KVD_RUN", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    code = f"""
        import os, sys
        print(*(os.environ[name] for name in {names}))
        first = not os.path.exists("again")
        open("again", "a").close()
        sys.exit(7 if first and os.environ["RANK"] == "1" else 0)
    """
    process = launch(spawn, code, "--job", "digits", "--restart", "1", cwd=tmp_path)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    said = sorted(line.partition(" | ")[2].split() for line in out.splitlines())
    tokens = {words[1] for words in said}
    assert len(tokens) == 1
    assert re.fullmatch("[0-9a-f]{32}", tokens.pop())
    assert {words[0] for words in said} == {"digits"}
    assert [words[2:] for words in said if words[2] == "0"] == [["0", "2", "0", "2"]]
    assert {tuple(words[2:]) for words in said if words[2] == "1"} == {("1", "2", "1", "2")}
    assert " KVD_JOB=digits KVD_KEYFILE=" in err.splitlines()[0]


def test_the_rank_is_the_rank_in_the_store(spawn: Spawn) -> None:
    code = "import os, kvd; kv = kvd.create('dist_sync'); print(kv.rank, os.environ['RANK']); kv.close()"
    process = launch(spawn, code)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["worker-0  | 0 0", "worker-1  | 1 1"]


def test_the_workers_meet_in_torch_whatever_a_launcher_around_them_says(spawn: Spawn) -> None:
    code = """
        import os
        import torch, torch.distributed
        torch.distributed.init_process_group("gloo")
        value = torch.full((1,), torch.distributed.get_rank() + 1.0)
        torch.distributed.all_reduce(value)
        print(value.item(), *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), flush=True)
        torch.distributed.destroy_process_group()
    """
    outer = {"RANK": "pod-0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    process = launch(spawn, code, environment={**outer, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["worker-0  | 3.0 0 2 0", "worker-1  | 3.0 1 2 1"]


def test_the_exit_code_of_the_job(spawn: Spawn) -> None:
    process = launch(spawn, "import os, sys; sys.exit(int(os.environ['KVD_LOCAL_RANK']) * 9)")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 9
    assert "launch    | worker-1 failed (exit code 9): ending the job\n" in err


def test_a_worker_that_exits_with_an_error_ends_the_job_at_once(spawn: Spawn) -> None:
    code = """
        import sys, numpy as np, kvd
        kv = kvd.create("dist_sync")
        kv.init("w", np.zeros(2, np.float32))
        for step in kv.steps(3):
            if step == 2:
                if kv.rank == 1:
                    sys.exit(3)
                kv.flush()
            kv.pushpull("w", np.ones(2, np.float32))
        print("trained on without worker 1")
    """
    process = launch(spawn, code)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3, err
    assert "trained on" not in out
    assert "launch    | worker-1 failed (exit code 3): ending the job\n" in err


def test_an_interrupted_job(spawn: Spawn) -> None:
    code = "import signal; print('here', flush=True); signal.pause()"
    process = launch(spawn, code)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == ["worker-0  | here\n", "worker-1  | here\n"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("workers", "flags", "variables", "servers"),
    [
        (2, ["-s", "3"], {}, 3),
        (2, ["--num-servers", "auto"], {}, 4),
        (5, ["-s", "auto"], {}, 1),
        (9, ["-s", "auto"], {}, 1),
        (2, ["-s", "auto"], {"KVD_NUM_SERVERS": "7"}, 4),
        (2, [], {}, 4),
        (6, [], {}, 1),
        (6, ["--replicas", "2"], {}, 2),
        (6, ["-s", "auto"], {"KVD_REPLICAS": "2"}, 2),
        (2, [], {"DMLC_NUM_SERVER": "3"}, 3),
        (2, [], {"KVD_NUM_SERVERS": "7"}, 7),
    ],
)
def test_the_number_of_servers_is_given_or_suits_the_machine(
    workers: int,
    flags: list[str],
    variables: dict[str, str],
    servers: int,
    clean_environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: list[Job] = []

    def take(job: Job, sink: object) -> int:
        jobs.append(job)
        return 0

    monkeypatch.setattr("kvd_cli.launch.run", take)
    monkeypatch.setattr("kvd_cli.launch.usable_cores", lambda: frozenset(range(6)))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arguments = ["launch", "-n", str(workers), *flags, "--affinity", "auto", "--", "true"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    [job] = jobs
    assert (job.workers, job.servers) == (workers, servers)
    assert job.environment["KVD_CPU_AFFINITY"] == "auto"


@pytest.mark.parametrize(
    ("flags", "variables", "replicas"), [([], {}, 1), (["--replicas", "2"], {}, 2), ([], {"KVD_REPLICAS": "2"}, 2)]
)
def test_the_launcher_knows_how_many_copies_there_are(
    flags: list[str],
    variables: dict[str, str],
    replicas: int,
    clean_environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: list[Job] = []

    def take(job: Job, sink: object) -> int:
        jobs.append(job)
        return 0

    monkeypatch.setattr("kvd_cli.launch.run", take)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli, ["launch", "-n", "1", "-s", "2", *flags, "--", "true"])
    assert result.exit_code == 0, result.output
    assert [(job.replicas, job.environment.get("KVD_REPLICAS", "1")) for job in jobs] == [(replicas, str(replicas))]


@pytest.mark.parametrize("servers", ["0", "-1", "automatic"])
def test_an_invalid_number_of_servers_is_refused(servers: str, clean_environment: None) -> None:
    result = CliRunner().invoke(cli, ["launch", "-n", "1", "-s", servers, "--", "true"])
    assert result.exit_code == 2
    assert "--num-servers" in result.stderr


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        (("-n", "0", "-s", "1"), {}, "num_workers = 0 (from flag): give -n N (--num-workers), N is at least 1"),
        (("-s", "1"), {"KVD_NUM_WORKERS": "0"}, "num_workers = 0 (from KVD_NUM_WORKERS): give -n N"),
        (("-n", "1"), {"KVD_NUM_SERVERS": "0"}, "num_servers = 0 (from KVD_NUM_SERVERS): give -s N"),
        (("-s", "1"), {}, "give -n N (--num-workers): how many the job has"),
        (("-n", "1", "-s", "1", "--replicas", "2"), {}, "replicas = 2 needs at least 2 servers"),
        (("-n", "1", "-s", "1"), {"KVD_REPLICAS": "2"}, "replicas = 2 needs at least 2 servers"),
        (("--hosts", "localhost:2", "-s", "1", "--replicas", "2"), {}, "replicas = 2 needs at least 2 servers"),
    ],
)
def test_sizes_that_no_job_can_have(
    flags: tuple[str, ...],
    environment: dict[str, str],
    says: str,
    clean_environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli, ["launch", *flags, "--", "true"])
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--hosts", "a,a"], "a is named twice"),
        (["--hosts", "-oProxyCommand=x"], "is not HOST or HOST:SLOTS"),
        (["--hosts", "localhost:2", "-n", "3"], "num_workers = 3, but the hosts have 2 slots in all"),
        (["--hosts", "localhost:2", "-s", "auto"], "-s auto counts the cores of this machine only"),
        (["--hosts", "localhost", "--affinity", "auto"], "--affinity auto plans the cores of this machine only"),
        (["--hosts", "localhost", "--ssh", "'"], "No closing quotation"),
        (["--hosts", "localhost", "--ssh", " "], "--ssh: give a command"),
        (["-n", "1", "-s", "1", "--ssh", "ssh -p 1"], "give --hosts, too"),
    ],
)
def test_hosts_that_make_no_sense(flags: list[str], says: str, kvd: Kvd) -> None:
    result = kvd("launch", *flags, "--", "true")
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ([], (3, 2)),
        (["--replicas", "2"], (3, 2)),
        (["-n", "2"], (2, 2)),
        (["-s", "1"], (3, 1)),
        (["-n", "1", "-s", "5"], (1, 5)),
    ],
)
def test_the_hosts_say_how_many_workers_and_servers_there_are(
    flags: list[str], sizes: tuple[int, int], kvd: Kvd, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []

    def take(job: Job, sink: object) -> int:
        jobs.append(job)
        return 0

    monkeypatch.setattr("kvd_cli.launch.run", take)
    result = kvd("launch", "--hosts", "a,b:2", "--ssh", "ssh -p '2 2'", *flags, "--", "true")
    assert result.exit_code == 0, result.output
    assert (jobs[0].workers, jobs[0].servers) == sizes
    assert [(host.name, host.slots) for host in jobs[0].hosts] == [("a", 1), ("b", 2)]
    assert jobs[0].ssh == ["ssh", "-p", "2 2"]


def test_prefixed_lines(capfd: pytest.CaptureFixture[str]) -> None:
    prefixer = Prefixer(["scheduler", "worker-0"])
    prefixer.write("worker-0", "stdout", b"a \xc3\xa9\n")
    prefixer.write("launch", "stderr", b"\n")
    captured = capfd.readouterr()
    assert captured.out == "worker-0  | a é\n"
    assert captured.err == "launch    | \n"


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["a:\r", "a: 0%|", "a:\r"], "a |  0%|\r"),
        (["a: 0%\r", "a: 50%\r", "a: 100%\r", "a:\n"], "a |  0%\ra |  50%\ra |  100%\r\n"),
        (["a:name? ", "a:Zoe\n"], "a | name? Zoe\n"),
        (["a:50%", "b:line\n", "a:\r", "a:60%"], "a | 50%\nb | line\na | 60%"),
        (["a:50%", "b:line\n", "a:\n", "a:next\n"], "a | 50%\nb | line\na | next\n"),
        (["a:50%\r", "b:line\n", "a:60%\r", "a:\n"], "a | 50%\r\nb | line\na | 60%\r\n"),
        (["a:one\r\n", "a:two\n", "a:\n"], "a | one\r\na | two\na | \n"),
        (["a:x", "a:\r\n"], "a | x\r\n"),
        (["a:\r 0%|", "a:\r 50%\r", "a: 60%"], "a |  0%|\ra |  50%\ra |  60%"),
        (["a:\r 0%|", "b:line\n", "a:\r 50%"], "a |  0%|\nb | line\na |  50%"),
    ],
)
def test_lines_that_are_not_complete(pieces: list[str], shown: str, capfd: pytest.CaptureFixture[str]) -> None:
    prefixer = Prefixer(["a", "b"])
    for piece in pieces:
        node, _, text = piece.partition(":")
        prefixer.write(node, "stderr", text.encode())
    assert capfd.readouterr().err.encode() == shown.encode()


def test_a_progress_bar_a_prompt_and_a_log_in_a_pipe(spawn: Spawn, tmp_path: Path) -> None:
    code = """
        import sys
        sys.stderr.write("\\r 10%|#")
        sys.stderr.flush()
        print("name?", end=" ", flush=True)
        print("hello", sys.stdin.readline().strip())
        sys.stderr.write("\\r 20%|##")
    """
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        flags = ["-n", "1", "-v", "--log-dir", str(tmp_path / "logs")]
        process = launch(spawn, code, *flags, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
    wait_until(lambda: out.read_bytes() == b"worker-0  | name? ", "the beginning of the line is shown")
    process.communicate("Zoe\n", timeout=DEADLINE_S)
    assert process.returncode == 0, err.read_bytes()
    assert out.read_bytes() == b"worker-0  | name? hello Zoe\n"
    said = err.read_bytes()
    assert b"worker-0  |  10%|#\rworker-0  |  20%|##\n" in re.sub(rb"\n(launch|s\w+(-\d)?) +\|[^\n]*", b"", said)
    assert not [line for line in said.splitlines() if b'{"ts"' in line], "a log for people"
    log = (tmp_path / "logs" / "worker-0.log").read_bytes()
    assert all(line in log for line in (b"\r 10%|#\n", b"name? ", b"hello Zoe\n", b"\r 20%|##\n")), log


@pytest.mark.parametrize(
    ("given", "restarts", "expected"), [({}, 0, None), ({}, 1, "wait"), ({"on_worker_loss": "fail"}, 1, "fail")]
)
def test_calls_wait_for_workers_that_will_be_restarted_unless_told_not_to(
    given: dict[str, str], restarts: int, expected: str | None
) -> None:
    loaded = load(given, environ={})
    assert job_environment(loaded, restarts).get("KVD_ON_WORKER_LOSS") == expected
