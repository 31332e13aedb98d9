"""The program and the commands of the README, run as they are written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import child_environment
from tests.docs.sources_harness import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 115
PRINTED = "[[1. 2. 3. 4.]]"
PRIVATE = ("-rnm", "--pid", "--fork", "--kill-child", "--mount-proc")  # whatever is left ends with the namespace
HOSTS = """
set -e
mount -t tmpfs none /run
ip link add switch type bridge && ip link set switch up
for n in 1 2 3; do
    ip netns add host$n
    ip link add cable$n type veth peer name eth0 netns host$n
    ip link set cable$n master switch up
    ip -n host$n address add 10.0.0.$n/24 dev eth0
    ip -n host$n link set eth0 up && ip -n host$n link set lo up
done
on() { n=$1; shift; exec ip netns exec host$n sh -c "exec $*"; }
on 1 "$1" 2>scheduler &
on 2 "$2" 2>server &
on 2 "$3" >worker-2 2>log-2 & second=$!
on 3 "$3" >worker-3 2>log-3 & third=$!
set +e
wait $second; echo $? >codes
wait $third; echo $? >>codes
kill %1 %2
wait
"""


def blocks(language: str, heading: str) -> list[str]:
    """The blocks of code in this language below a heading; "" for what stands above the first."""
    section = re.split(r"^## ", README, flags=re.MULTILINE)
    found = [part for part in section if part.startswith(heading + "\n")] if heading else section[:1]
    assert len(found) == 1, heading
    return re.findall(rf"^```{language}\n(.*?)^```", found[0], re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program of the README."""
    pytest.importorskip("torch")
    [program] = blocks("python", "")
    assert program.startswith("# train.py\n")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    return tmp_path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where `kvd` and `python` are those of this test."""
    shims = tmp_path / "bin"
    shims.mkdir()
    for name, command in (("python", [sys.executable]), ("kvd", [sys.executable, "-m", "kvd_cli.main"])):
        (shims / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (shims / name).chmod(0o755)
    path = f"{shims}{os.pathsep}{os.environ['PATH']}"
    return child_environment({"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})


def test_the_program_has_about_ten_lines() -> None:
    [program] = blocks("python", "")
    statements = [line for line in program.splitlines() if line and not line.startswith(("#", "import"))]
    assert len(statements) <= 15


def test_the_program_as_a_job_on_this_machine(folder: Path, environment: dict[str, str]) -> None:
    [command] = blocks("sh", "")
    done = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"worker {rank}: {PRINTED}" in done.stdout
    assert f"`{PRINTED}`" in README


def test_the_program_in_one_process(folder: Path, environment: dict[str, str]) -> None:
    """As its comment says."""
    program = (folder / "train.py").read_text(encoding="utf-8")
    assert program.count('"dist_sync"') == 2
    changed = program.replace('"dist_sync"', '"local"', 1)
    done = subprocess.run(
        [sys.executable, "-c", changed], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"worker 0: {PRINTED}" in done.stdout


def test_the_program_on_three_hosts(folder: Path, environment: dict[str, str]) -> None:
    """Network namespaces with one address each and nothing else in common but a switch."""
    unshare = shutil.which("unshare")
    allowed = unshare and not subprocess.run([unshare, *PRIVATE, "true"], capture_output=True, check=False).returncode
    if unshare is None or not allowed or shutil.which("ip") is None:
        pytest.skip("this needs ip (iproute2), and a kernel that lets this user make network namespaces")
    scheduler, others = blocks("sh", "On several hosts")
    server, worker = others.splitlines()
    subprocess.run(
        [unshare, *PRIVATE, "bash", "-c", HOSTS, "bash", scheduler.strip(), server, worker],
        cwd=folder,
        env=environment,
        timeout=TIMEOUT_S,
        check=True,
    )
    told = {name: (folder / name).read_text() for name in ("scheduler", "server", "log-2", "log-3")}
    assert (folder / "codes").read_text().split() == ["0", "0"], told
    printed = "".join((folder / name).read_text() for name in ("worker-2", "worker-3"))
    assert sorted(printed.splitlines()) == [f"worker {rank}: {PRINTED}" for rank in range(2)], told
