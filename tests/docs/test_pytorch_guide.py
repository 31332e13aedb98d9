"""The programs and commands of the PyTorch guide, run as they are written."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import child_environment
from kvd.node.remote import free_port
from kvd.testing.cluster import wait_until
from tests.docs.sources_harness import ROOT

GUIDE = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
TIMEOUT_S = 115
START_OF_STEP = "    order = torch.randperm("
PAUSE = """
    import pathlib
    from kvd.testing.cluster import wait_until
    if step in (20, 40):
        pathlib.Path(f"at-{step}-{kv.rank}").touch()
        wait_until(pathlib.Path(f"go-{step}").exists, "the test goes on", 300)
"""

DDP = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from kvd.data import digits

meeting = f"file://{Path('meeting').absolute()}"
dist.init_process_group("gloo", init_method=meeting, rank=int(sys.argv[1]), world_size=2)
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(
    torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(16 * 8 * 8, 10),
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = digits.load()
images, labels = torch.from_numpy(data.train_images[:, None]), torch.from_numpy(data.train_labels)
for step in range(60):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))
    mine = order[:96][dist.get_rank() :: dist.get_world_size()]
    loss = functional.cross_entropy(model(images[mine]), labels[mine])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(f"worker {dist.get_rank()}: loss {loss.item()}")
dist.destroy_process_group()
"""


def program(name: str) -> str:
    [text] = re.findall(rf"^```python\n(# {name}\n.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    return str(text)


def commands(name: str) -> list[str]:
    """Return the shell lines of the guide that name a program."""
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if name in line]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables in which `kvd` and `python` are those of this test."""
    shims = tmp_path / "bin"
    shims.mkdir()
    for name, command in (
        ("python", [sys.executable]),
        ("kvd", [sys.executable, "-m", "kvd_cli.main"]),
        ("torchrun", [sys.executable, "-m", "torch.distributed.run", "--standalone"]),
    ):
        (shims / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (shims / name).chmod(0o755)
    path = f"{shims}{os.pathsep}{os.environ['PATH']}"
    return child_environment({"PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})


def start(command: str, folder: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            shlex.split(command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def digests(log: Path) -> list[str]:
    return re.findall(r"digest (\w+)", log.read_text())


def processes(launcher: int) -> dict[str, list[int]]:
    """Return the processes that a launcher has started, by what they run."""
    found: dict[str, list[int]] = {"server": [], "servers.py": []}
    pids = [launcher]
    for pid in pids:
        try:
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        except FileNotFoundError:
            continue
        if pid != launcher and arguments[-1] in found and "guarded" not in arguments:
            found[arguments[-1]].append(pid)
    return found


@pytest.mark.timeout(300)
def test_a_training_ends_with_the_same_bits_though_a_worker_and_a_server_are_killed(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    [command] = commands("servers.py")
    calm = tmp_path / "calm"
    calm.mkdir()
    (calm / "servers.py").write_text(program("servers.py"))
    undisturbed = start(command, calm, environment, tmp_path / "undisturbed")
    assert START_OF_STEP in program("servers.py")
    (tmp_path / "servers.py").write_text(program("servers.py").replace(START_OF_STEP, PAUSE + START_OF_STEP))
    log = tmp_path / "log"
    launcher = start(command, tmp_path, environment, log)

    def kill_at(step: int, victim: str) -> None:
        both = [tmp_path / f"at-{step}-{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in both), f"both workers are at step {step}", TIMEOUT_S)
        os.kill(processes(launcher.pid)[victim][0], signal.SIGKILL)
        (tmp_path / f"go-{step}").touch()

    try:
        kill_at(20, "servers.py")
        kill_at(40, "server")
        assert launcher.wait(TIMEOUT_S) == 0, log.read_text()
        assert undisturbed.wait(TIMEOUT_S) == 0, (tmp_path / "undisturbed").read_text()
    finally:
        for job in (launcher, undisturbed):
            job.terminate()
            job.wait(30)
    assert log.read_text().count("restart 1 of 3") == 2, log.read_text()
    assert digests(log) == digests(tmp_path / "undisturbed")
    assert len(set(digests(log))) == 1


@pytest.mark.timeout(200)
def test_gradient_means_give_the_losses_of_ddp(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "workers.py").write_text(program("workers.py"))
    (tmp_path / "ddp.py").write_text(DDP)
    command = commands("workers.py")[0]
    job = start(command, tmp_path, environment, tmp_path / "job")
    ddp = [start(f"python ddp.py {rank}", tmp_path, environment, tmp_path / f"ddp-{rank}") for rank in range(2)]
    assert [process.wait(TIMEOUT_S) for process in (job, *ddp)] == [0] * 3, (tmp_path / "job").read_text()

    def losses(*logs: str) -> dict[str, str]:
        texts = [(tmp_path / log).read_text() for log in logs]
        return dict(re.findall(r"worker (\d): loss ([\d.e+-]+)", "".join(texts)))

    assert losses("job") == losses("ddp-0", "ddp-1")
    assert set(losses("job")) == {"0", "1"}


@pytest.mark.timeout(200)
def test_workers_that_torchrun_starts(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "workers.py").write_text(program("workers.py"))
    [block] = [text for text in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL) if "torchrun" in text]
    address = f"tcp://127.0.0.1:{free_port()}"
    script = block.replace("KVD_SCHEDULER=tcp://127.0.0.1:9191 ", "")
    done = subprocess.run(
        ["sh", "-ec", f"{script}wait"],
        cwd=tmp_path,
        env={**environment, "KVD_SCHEDULER": address},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 2, done.stdout  # torchrun may mix their lines
