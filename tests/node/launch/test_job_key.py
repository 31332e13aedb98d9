"""The key of a job: made for it or named by its settings, in a private file, and gone with the job."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import ConfigError
from kvd.node.keys.keyfiles import new_cluster_key, parse_key, read_key, write_key
from kvd.node.launch import Job, RestartRule, parse_hosts, run
from kvd.node.launch.job import job_key
from tests.node.launch.harness import Lines, python


@pytest.fixture(autouse=True)
def with_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """These tests are about keys, whatever the others use; and jobs get a folder for their files that can be seen."""
    monkeypatch.delenv("KVD_INSECURE", raising=False)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "runs"))


def test_a_job_without_a_key_gets_one(tmp_path: Path) -> None:
    key = job_key({}, tmp_path)
    assert key.settings == {"KVD_KEYFILE": str(tmp_path / "cluster.key")}
    assert stat.S_IMODE((tmp_path / "cluster.key").stat().st_mode) == 0o600
    assert parse_key(key.text, "it") == read_key(tmp_path / "cluster.key")
    assert read_key(tmp_path / "cluster.key").keypair.secret not in repr(key)


@pytest.mark.parametrize("origin", ["environment", "job", "file"])
def test_a_job_whose_settings_name_a_key_uses_it(origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_key(tmp_path / "mine.key", new_cluster_key())
    if origin == "environment":
        monkeypatch.setenv("KVD_KEYFILE", "mine.key")
    if origin == "file":
        (tmp_path / "kvd.toml").write_text("keyfile = 'mine.key'\n")
    key = job_key({"KVD_KEYFILE": "mine.key"} if origin == "job" else {}, tmp_path / "runs")
    assert key.settings == {"KVD_KEYFILE": str(tmp_path / "mine.key")}
    assert parse_key(key.text, "it") == read_key(tmp_path / "mine.key")
    assert not list((tmp_path / "runs").iterdir())


def test_a_job_without_keys(tmp_path: Path) -> None:
    key = job_key({"KVD_INSECURE": "true"}, tmp_path / "runs")
    assert (key.settings, key.text) == ({"KVD_INSECURE": "1"}, "")
    assert not list((tmp_path / "runs").iterdir())


def test_a_key_that_cannot_be_used_ends_the_job_before_it_begins(lines: Lines, mark: dict[str, str]) -> None:
    job = Job(command=["true"], workers=1, servers=1, environment={**mark, "KVD_KEYFILE": "/no/such.key"})
    with pytest.raises(ConfigError, match=r"the key file /no/such\.key does not exist"):
        run(job, lines.take, handle_signals=False)
    assert not lines.all


SHOW_KEY = """
    import json, os, sys
    path = os.environ["KVD_KEYFILE"]
    print(json.dumps([path, os.stat(path).st_mode & 0o777, open(path).read()]))
    if not os.path.exists(os.environ["AGAIN"]):
        open(os.environ["AGAIN"], "w").close()
        sys.exit(1)
"""


@pytest.mark.parametrize("hosts", ["", "a"])
def test_all_processes_get_the_same_key_also_when_they_are_started_again(
    hosts: str, daemon: Any, lines: Lines, mark: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\nfor command; do :; done\nSSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$command"\n'
    )
    ssh.chmod(0o755)
    environment = {**mark, "AGAIN": str(tmp_path / "again")}
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "runs"))  # for the host
    job = Job(
        command=python(SHOW_KEY), workers=1, servers=1, environment=environment, daemon=daemon, restarts=RestartRule(1),
        hosts=parse_hosts(hosts) if hosts else (), ssh=[str(ssh)],
    )  # fmt: skip
    assert run(job, lines.take, handle_signals=False) == 0
    seen = [json.loads(line) for line in lines.of("worker-0")]
    assert len(seen) == 2
    assert {(mode, text) for _path, mode, text in seen} == {(0o600, seen[0][2])}
    assert parse_key(seen[0][2], "it")
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("times", [1, 2])
def test_the_key_goes_with_the_job_that_is_interrupted(times: int, launcher: Any, tmp_path: Path) -> None:
    code = """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print("here", flush=True)
        while True:
            signal.sigwait({signal.SIGTERM})
            print("no", flush=True)
    """
    job = launcher(command=python(code), grace_s=0.2 if times == 1 else 1000)
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    assert len(list(tmp_path.glob("kvd-launch-*/cluster.key"))) == 1
    job.process.send_signal(signal.SIGINT)
    if times == 2:
        job.wait_for("worker-0 stdout no", "worker-1 stdout no")
        job.process.send_signal(signal.SIGINT)
    code, _ = job.end()
    assert code == 128 + signal.SIGINT
    assert not list(tmp_path.rglob("*.key"))
