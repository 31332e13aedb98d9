"""`make`: what it installs and when, and what `make test` says at its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.environments import ROOT, without_settings
from tests.phases import FAILURES_OPTION, Phase, phases, quick_phases, run_all

DEADLINE_S: Final = 300.0

# Stands for Python outside and inside of .venv, and for the tools there: notes what it is called for.
STUB: Final = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
"-m venv --clear .venv")
    rm -rf .venv
    mkdir -p .venv/bin
    for tool in python kvd ruff mypy lint-imports; do cp "$0" ".venv/bin/$tool"; done
    touch .venv/has-pip ;;
*"pip --disable-pip-version-check --version") test -e .venv/has-pip ;;
*"pip "*install*) test ! -e no-network ;;
esac
"""


class Checkout:
    """A folder with our Makefile, whose Python only notes what it is called for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        (folder / "python").write_text(STUB)
        (folder / "python").chmod(0o755)
        self._calls = folder / "calls"

    def make(self, target: str, code: int = 0) -> list[str]:
        """Run a target. Return what was installed, and which tools were called after that."""
        self._calls.write_text("")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(
            ["make", target, f"PYTHON={self._folder}/python"],
            cwd=self._folder,
            env={**environment, "CALLS": str(self._calls)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (done.returncode != 0) == (code != 0), done.stdout + done.stderr
        calls = self._calls.read_text().splitlines()
        pip = "python -m pip --disable-pip-version-check "
        asked = ("python -c ", f"{pip}--version")  # which Python it is, and whether it has pip
        return [call.removeprefix(pip) for call in calls if not call.startswith(asked)]

    def file(self, name: str) -> Path:
        return self._folder / name


VENV, BASE, DEV = "python -m venv --clear .venv", "install --quiet -e .", "install --quiet -e .[dev]"
DEMO, TEST, QUICK = "kvd demo", "python -m tests.phases --workers 6", "python -m tests.phases --quick"
SITE = "python -m sphinx -q -W --keep-going -c docs . build/site"
LINT = [SITE, "ruff format --check .", "ruff check .", "mypy ", "lint-imports "]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    if shutil.which("make") is None:
        pytest.skip("this needs make")
    return Checkout(tmp_path)


def test_the_demo_needs_the_base_package_only(checkout: Checkout) -> None:
    assert checkout.make("demo") == [VENV, BASE, DEMO]
    assert checkout.make("demo") == [DEMO]
    assert checkout.make("test") == [DEV, TEST]
    assert checkout.make("quick") == [QUICK]
    assert checkout.make("lint") == LINT
    assert checkout.make("demo") == [DEMO]


@pytest.mark.parametrize("target", ["test", "quick", "lint"])
def test_tests_and_tools_need_all(target: str, checkout: Checkout) -> None:
    assert checkout.make(target)[:3] == [VENV, BASE, DEV]
    assert checkout.make("demo") == [DEMO]
    assert checkout.make("test") == [TEST]


def test_an_installation_that_was_interrupted_is_made_again(checkout: Checkout) -> None:
    checkout.file("no-network").touch()
    assert checkout.make("test", 2) == [VENV, BASE]
    checkout.file("no-network").unlink()
    checkout.file(".venv/has-pip").unlink()  # as if it had ended in the middle of venv
    assert checkout.make("test") == [VENV, BASE, DEV, TEST]


def test_other_requirements_are_installed(checkout: Checkout) -> None:
    checkout.make("test")
    os.utime(checkout.file("pyproject.toml"), (2e9, 2e9))
    assert checkout.make("demo") == [BASE, DEMO]


def phase(name: str, code: int, *names: str) -> Phase:
    text = "".join(f"{test}\n" for test in names)
    program = f"import sys; open(sys.argv[2], 'w').write({text!r}); sys.exit({code})"
    return Phase(name, [sys.executable, "-c", program])


def test_all_phases_run_and_what_failed_comes_last() -> None:
    said: list[str] = []
    todo = [
        phase("first", 1, "tests/a.py::one", "tests/b.py::two[x y]"),
        Phase("coverage", [sys.executable, "-c", "raise SystemExit(2)"], is_pytest=False),
        phase("well", 0),
        phase("last", 3),  # as pytest after an error of its own
    ]
    assert run_all(todo, said.append) == 1
    assert said[-6:] == [
        "", "failed:", "first: tests/a.py::one", "first: tests/b.py::two[x y]", "coverage: exit code 2",
        "last: exit code 3",
    ]  # fmt: skip


def test_nothing_is_said_if_nothing_failed() -> None:
    said: list[str] = []
    assert run_all([phase("first", 0), phase("last", 0)], said.append) == 0
    assert len(said) == 2, "the commands"


def test_an_interrupted_phase_ends_all() -> None:
    said: list[str] = []
    assert run_all([phase("first", 2), phase("last", 0)], said.append) == 130
    assert said[-1] == "interrupted in: first"


def files(arguments: Sequence[str]) -> list[Path]:
    """The files of tests that pytest collects with these arguments, each as often as it does."""
    ignored = {argument.removeprefix("--ignore=") for argument in arguments if argument.startswith("--ignore=")}
    found: list[Path] = []
    for argument in arguments:
        path = ROOT / argument.partition("::")[0]
        if argument.startswith("tests/"):
            assert path.exists(), f"{argument} does not exist"
            found += path.rglob("test_*.py") if path.is_dir() else [path]
    return [path for path in found if str(path.relative_to(ROOT)) not in ignored]


def test_the_phases_run_every_test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    core, _, others = phases("4")
    assert sorted([*files(core.command), *files(others.command)]) == sorted((ROOT / "tests").rglob("test_*.py"))


def test_the_quick_phases_are_tools_and_tests_that_exist() -> None:
    *tools, tests = quick_phases()
    assert [shutil.which(program) for phase in tools for program in phase.command if "/" in program]
    assert files(tests.command)


def test_pytest_writes_the_names_of_what_fails(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_fails(): assert False\n"
        "def test_passes(): pass\n"
        "def test_has_an_error(broken): pass\n"
    )
    names = tmp_path / "names"
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "1", FAILURES_OPTION, str(names)]
    done = subprocess.run(
        [*command, "-o", "addopts=", "test_it.py"], cwd=tmp_path, env=without_settings(), capture_output=True,
        text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert names.read_text().splitlines() == ["test_it.py::test_fails", "test_it.py::test_has_an_error"]
