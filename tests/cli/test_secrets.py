"""The secret part of a key is in its file, and nowhere where others or a log could show it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from zmq.utils import z85

from kvd.node.keys.keyfiles import read_key
from tests.cli.running_job import DEADLINE_S, running_job

pytestmark = [pytest.mark.keys, pytest.mark.usefixtures("clean_environment")]


def forms_of(secret: str) -> list[bytes]:
    raw = z85.decode(secret)
    return [secret.encode(), raw, raw.hex().encode(), repr(raw).encode()]


@pytest.mark.parametrize("hosts", [False, True], ids=["this host", "through ssh"])
def test_a_running_job_shows_its_key_nowhere(hosts: bool, tmp_path: Path) -> None:
    flags = ["--log-dir", str(tmp_path / "logs"), "-v", "--restart", "1", "--state-dir", str(tmp_path / "state")]
    for job in running_job(tmp_path, *flags, hosts=hosts):
        file = Path(job.variables["KVD_KEYFILE"])
        secret = forms_of(read_key(file).keypair.secret)
        # guards, daemons and workers, on other hosts with an ssh each
        processes = job.processes()
        assert len(processes) >= 6
        shown = [(pid, name, _read(pid, name)) for pid in processes for name in ("cmdline", "environ", "comm")]
        named = {pid for pid, name, content in shown if name == "environ" and b"KVD_KEYFILE=" in content}
        assert len(named) >= 4, "processes get the name of the file"
        for command in (
            ["status"],
            ["status", "-o", "json"],
            ["config", "show", "--origin"],
            ["key", "show"],
            ["keys"],
        ):
            told = subprocess.run(
                [sys.executable, "-m", "kvd_cli.main", *command, "-v"],
                env={**os.environ, **job.variables}, capture_output=True, timeout=DEADLINE_S, check=True,
            )  # fmt: skip
            shown.append((0, " ".join(command), told.stdout + told.stderr))
        shown.append((0, "output", job.end().encode()))
        shown += [(0, str(path), path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()]
        assert any("scheduler.log" in name for _, name, _ in shown)
        assert not file.exists()
        leaks = [(pid, name) for pid, name, content in shown if any(form in content for form in secret)]
        assert leaks == []


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # it has ended
