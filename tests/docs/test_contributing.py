"""CONTRIBUTING.md names files, constants and targets that exist, and its program runs."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.sources_harness import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= 150


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?<![\w/.])(?:kvd|cli|tests|docs)/[\w./…-]*[\w/]", PAGE))))
def test_paths_exist(path: str) -> None:
    assert list(ROOT.glob(path.replace("…", "*"))), path


def test_names_are_defined_in_the_files_that_it_names() -> None:
    found = re.findall(r"`([A-Z_]\w+(?:\.\w+)?)`\s+(?:of|in)\s+`([\w/…]+\.py)`", PAGE)
    assert len(found) >= 8
    for name, path in found:
        for file in ROOT.glob(path.replace("…", "*")):
            text = file.read_text(encoding="utf-8")
            for part in name.split("."):
                assert re.search(rf"\b{part}\b\s*[:=(]", text), f"{name} in {path}"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z-]+)", PAGE))))
def test_targets_of_make_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("arguments", re.findall(r"^\.venv/bin/python -m pytest (.+)$", PAGE, re.MULTILINE))
def test_commands_of_pytest_name_tests(arguments: str) -> None:
    for path in arguments.split():
        assert (ROOT / path).exists(), path


def test_the_program_repeats_a_seed() -> None:
    """It says that equal digests mean equal runs, and that the log has virtual seconds."""
    [program] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    printed = []
    for _ in range(2):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(program, "seed.py", "exec"), {})
        printed.append(output.getvalue())
    assert printed[0] == printed[1]
    assert re.match(r"[0-9a-f]{32}\n", printed[0])
    assert re.search(r"^\d+\.\d{3} \w+", printed[0].partition("\n")[2])


def test_the_hooks_format_and_lint(tmp_path: Path) -> None:
    """They run the ruff of `.venv` in a repository with this configuration."""
    git = shutil.which("git")
    ruff = Path(sys.executable).with_name("ruff")
    if git is None or not ruff.exists():
        pytest.skip("this needs git, and ruff beside Python")
    for name in (".pre-commit-config.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "ruff").symlink_to(ruff)
    (tmp_path / "bad.py").write_text("x = ( 1 )\n")
    for command in (["init", "-q"], ["add", "bad.py", ".pre-commit-config.yaml"]):
        subprocess.run([git, *command], cwd=tmp_path, check=True, timeout=60)
    hooks = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    environment = {"PATH": f"{Path(git).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        hooks, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert (tmp_path / "bad.py").read_text() == "x = 1\n"
