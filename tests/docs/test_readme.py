"""The program of the README, run as it is written. Its commands for several hosts run in `tests/cli`."""

from __future__ import annotations

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
