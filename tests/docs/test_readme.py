"""The program of the README, run as it is written. Its commands for several hosts run in `tests/cli`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import child_environment
from tests.docs.sources_harness import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 115
PRINTED = "[[1. 2. 3. 4.]]"
MODULE = """
class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm, self.last = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        self.scale = torch.nn.Parameter(torch.tensor(10.0))

    def forward(self, x):
        return self.scale * self.last(self.norm(x + torch.relu(self.second(torch.tanh(self.first(x))))))


model = Module()
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
    [program] = blocks("python", "The first program")
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


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command that succeeds, and return its output."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed_by(program: str) -> str:
    """Run a program as the main one of this process, which has torch already, and return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def launches() -> list[str]:
    """Return the commands that run the program as a job on this machine."""
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
        for line in block.split("\n")
    ]
    return [line for line in lines if line.startswith("kvd launch ")]


def test_the_program_has_about_ten_lines() -> None:
    [program] = blocks("python", "The first program")
    statements = [line for line in program.splitlines() if line and not line.startswith(("#", "import"))]
    assert len(statements) <= 15


def test_the_first_screen_has_the_picture_and_whom_kvd_is_not_for() -> None:
    screen = README.partition("\n## ")[0]
    assert len(screen.splitlines()) <= 24
    assert "](docs/pictures/deaths.svg)" in screen
    for words in ("**For**", "**Not for**", "MXNet", "Gloo"):
        assert words in screen


@pytest.mark.parametrize("command", launches())
def test_the_program_as_a_job_on_this_machine(command: str, folder: Path, environment: dict[str, str]) -> None:
    printed = run(shlex.split(command), folder, environment)
    for rank in range(2):
        assert f"worker {rank}: {PRINTED}" in printed
    assert f"`{PRINTED}`" in README


def test_the_program_in_one_process(folder: Path) -> None:
    """Its comment says how."""
    program = (folder / "train.py").read_text(encoding="utf-8")
    assert program.count('"dist_sync"') == 2
    changed = program.replace('"dist_sync"', '"local"', 1)
    assert f"worker 0: {PRINTED}" in printed_by(changed)


def test_any_module_takes_the_place_of_the_linear_one(folder: Path) -> None:
    """One with buffers, tied weights and a parameter without dimensions."""
    program = (folder / "train.py").read_text(encoding="utf-8")
    [model] = re.findall(r"^model = .*$", program, re.MULTILINE)
    [result] = re.findall(r"^print\(.*$", program, re.MULTILINE)
    changed = program.replace('"dist_sync"', '"local"', 1).replace(model, MODULE)
    changed = changed.replace(result, 'print("loss", loss.item(), len(optimizer.param_groups[0]["params"]))')
    found = re.search(r"loss (\S+) (\d+)", printed_by(changed))
    assert found is not None
    assert float(found[1]) < 3.0  # of 30 before the first step
    assert int(found[2]) == 8  # the tied weight has one name
