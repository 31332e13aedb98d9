"""`kvd launch --hosts` through a real sshd, on hosts that are network namespaces."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.restart_harness import Hold, readme_program, readme_results
from tests.environments import without_settings
from tests.node.launch.lan_harness import DEADLINE_S, Lan, missing_for_lan

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

SSHD_CONFIG = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
SetEnv XDG_RUNTIME_DIR={folder}/runtime HOME={folder}
"""
SSH_CONFIG = """
Host a b
  IdentityFile {folder}/user
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking no
  LogLevel ERROR
Host a
  HostName 10.0.0.2
Host b
  HostName 10.0.0.3
"""

TRAIN = """
import os, socket, sys
import numpy as np
import kvd
kv = kvd.create("dist_sync")
value = np.full(3, kv.rank + 1, np.float32)
kv.init("w", value)
kv.pushpull("w", value)
here = os.environ["SSH_CONNECTION"].split()[2]
assert os.environ["MASTER_ADDR"] == "10.0.0.2", "the host of rank 0"
assert os.environ["KVD_KEYFILE"].startswith(os.environ["XDG_RUNTIME_DIR"] + "/kvd-key-")
print(kv.rank, os.environ["RANK"], os.environ["LOCAL_RANK"], here, value.tolist(), kv.num_servers, flush=True)
if len(sys.argv) > 1:
    sys.stdin.read()
    os.system("sleep 1000 & sleep 1000")
kv.close()
"""

pytestmark = pytest.mark.keys  # the workers look at theirs
Start = Callable[..., "subprocess.Popen[str]"]


def missing_for_ssh() -> str:
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "this needs ssh and sshd: `apt-get install openssh-server` (Debian, Ubuntu) brings them"
    if os.geteuid() != 0:
        return "this has to run as root: an sshd of another user cannot separate its privileges in a namespace"
    return missing_for_lan()


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lan, str]]:
    """A host for the launcher, and a (10.0.0.2) and b (10.0.0.3) with an sshd each; the ssh that reaches them."""
    missing = missing_for_ssh()
    if missing:
        pytest.skip(missing)
    assert SSHD is not None
    folder = tmp_path_factory.mktemp("ssh")
    (folder / "runtime").mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "sshd.conf").write_text(SSHD_CONFIG.format(folder=folder))
    (folder / "ssh.conf").write_text(SSH_CONFIG.format(folder=folder))
    # HOME of the sessions is empty: what a user's shell says when it starts is not what kvd says
    with Lan(3) as net:
        for host in (2, 3):
            # without -D it returns when it listens
            subprocess.run(net.on(host, SSHD, "-f", str(folder / "sshd.conf")), check=True, timeout=DEADLINE_S)
        yield net, f"ssh -F {folder}/ssh.conf"


@pytest.fixture
def start(lan: tuple[Lan, str], tmp_path: Path) -> Iterator[Start]:
    """Starts `kvd launch --hosts` on the host of the launcher. Nothing may be left on the hosts at the end, no process
    and no key."""
    net, ssh = lan
    (tmp_path / "train.py").write_text(TRAIN)
    started: list[subprocess.Popen[str]] = []

    def launch(*arguments: str, options: str = "", path: str = "") -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "kvd_cli.main", "launch", "--ssh", f"{ssh} {options}", *arguments]
        process = subprocess.Popen(
            net.on(1, *program),
            # a launcher that is killed cannot remove its folder: it lies where pytest removes it
            env=without_settings(TMPDIR=str(tmp_path), **({"PYTHONPATH": path} if path else {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        yield launch
    finally:
        os.chdir(here)
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()
    for host in (2, 3):
        net.wait_until_only(host, {"sshd"})
    runtime = Path(ssh.split()[-1]).with_name("runtime")
    assert not list(runtime.iterdir())


def training(*, hosts: str = "a,b:2", waits: bool = False) -> list[str]:
    return ["--hosts", hosts, "--", sys.executable, "train.py", *(["wait"] if waits else [])]


def wait_for_workers(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        line = process.stdout.readline()
        assert line.startswith("worker-"), process.communicate()


def test_a_job_on_two_hosts(start: Start) -> None:
    process = start(*training())
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [
        "worker-0  | 0 0 0 10.0.0.2 [6.0, 6.0, 6.0] 2",
        "worker-1  | 1 1 0 10.0.0.3 [6.0, 6.0, 6.0] 2",
        "worker-2  | 2 2 1 10.0.0.3 [6.0, 6.0, 6.0] 2",
    ]
    assert err.startswith("launch    | scheduler at tcp://10.0.0.1:")
    assert len([line for line in err.splitlines() if line.startswith("launch ")]) == 1


def test_ctrl_c(start: Start) -> None:
    process = start(*training(waits=True))
    wait_for_workers(process, 3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130


def test_a_launcher_that_is_killed(start: Start) -> None:
    process = start(*training(waits=True))
    wait_for_workers(process, 3)
    process.kill()
    process.communicate(timeout=DEADLINE_S)


def test_an_ssh_that_dies(start: Start) -> None:
    process = start(*training(waits=True))
    wait_for_workers(process, 3)
    os.kill(connections(process, "b")[-1], signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 137
    assert "worker-2 on b failed (SIGKILL): ending the job" in err


def test_a_worker_whose_connection_ends_is_restarted(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hold").mkdir()
    hold = Hold(tmp_path / "hold")
    (tmp_path / "train.py").write_text(readme_program())
    program = ["env", f"HOLD_IN={tmp_path / 'hold'}", sys.executable, "train.py"]
    flags = ["--hosts", "a,b", "-s", "1", "--restart", "1"]
    process = start(*flags, "--", *program, path=hold.environment["PYTHONPATH"])
    hold.wait_for("worker-0", "worker-1")
    os.kill(connections(process, "b")[-1], signal.SIGKILL)
    assert process.stderr is not None
    while "worker-1 on b failed (SIGKILL): restart 1 of 1" not in (line := process.stderr.readline()):
        assert line, "the launcher says that it restarts the worker"
    hold.let_go()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert [line.partition(" | ")[2] for line in sorted(out.splitlines())] == readme_results(2)


def connections(process: subprocess.Popen[str], host: str) -> list[int]:
    """The processes of ssh to a host, in the order in which they began."""
    found = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--sort=start_time,pid", "--ppid", str(process.pid)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    pids = [int(line.split()[0]) for line in found.stdout.splitlines() if " ssh -F" in line and f"-- {host} " in line]
    assert pids, found.stdout
    return pids


def test_a_host_that_is_cut_off(start: Start, lan: tuple[Lan, str]) -> None:
    net, _ = lan
    process = start(*training(waits=True), options="-o ServerAliveInterval=1 -o ServerAliveCountMax=2")
    wait_for_workers(process, 3)
    net.cut_off(3)
    try:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode != 0
        assert re.search(r"launch    \| \S+ on b \w+ \(exit code 255: its ssh could not connect, or lost its", err), err
        assert "ending the job\n" in err
        net.wait_until_only(3, {"sshd"})  # before it can be reached again
    finally:
        net.join(3)


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("a,10.0.0.99", r"error: cannot reach host 10.0.0.99: ssh: connect to host 10.0.0.99 port 22: "),
        ("a,nobody@b", r"error: cannot reach host nobody@b: nobody@10.0.0.3: Permission denied (publickey"),
        ("no-such-host", r"error: cannot reach host no-such-host: ssh: Could not resolve hostname no-such-host: "),
    ],
)
def test_a_host_that_cannot_be_reached(hosts: str, says: str, start: Start) -> None:
    process = start(*training(hosts=hosts), options="-o ConnectTimeout=5")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3, err
    assert says in err
