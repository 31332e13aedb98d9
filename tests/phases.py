"""What `make test` and `make quick` run, phase by phase. All phases run; the names of what failed are the last lines.

`python -m tests.phases`, or with `--quick`
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CORE: Final = ("tests/core", "tests/protocol")
"""They are about the state machines and the protocol alone. Measuring coverage takes 2.7 times as long."""

EXHAUSTIVE: Final = tuple(
    f"tests/core/test_{name}.py"
    for name in ["access", "copies_of_tables", "partitions_in_any_order", "replicas", "worker_waits"]
)
"""Files of `CORE` that repeat the same lines for many tables, orders and seeds: half of its time, and no line that the
others do not reach. They run without coverage."""

QUICK: Final = (
    *CORE,
    "tests/test_house.py",
    "tests/test_imports.py",
    "tests/simulation/test_regressions.py",
    "tests/simulation/test_runs.py::test_same_seed_same_run",
    "tests/client/test_cluster.py",
)
"""The tests that find most for their time: the machines, seeds that once failed, the order of the house, a cluster."""

INTERRUPTED: Final = 2
"""The exit code of a pytest that Ctrl-C ended."""

FAILURES_OPTION: Final = "--kvd-failures"
"""The option of `tests/conftest.py` that names a file for the names of tests that fail."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One command of the tests.

    Attributes:
        name: for a person.
        command: program and arguments.
        is_pytest: whether it can write the names of what fails.
    """

    name: str
    command: Sequence[str]
    is_pytest: bool = True


def phases(workers: str) -> list[Phase]:
    """The phases of `make test`, in order.

    Args:
        workers: the number of processes of pytest in phases whose tests often wait. The others have one for each core.
    """
    python = [sys.executable, "-m", "pytest", "--dist", "worksteal"]
    pytest = [*python, "-n", workers]
    covered = ["--cov=kvd/core", "--cov=kvd/protocol", "--cov-report="]
    report = [sys.executable, "-m", "coverage", "report", "--fail-under=95"]
    left = [f"--ignore={file}" for file in EXHAUSTIVE]
    tests = Path("tests")
    others = sorted({f"tests/{file.relative_to(tests).parts[0]}" for file in tests.rglob("test_*.py")} - {*CORE})
    return [
        Phase("the core and the protocol", [*python, "-n", "auto", *covered, *left, *CORE]),
        Phase("the coverage of the core and the protocol", report, is_pytest=False),
        Phase("all other tests", [*pytest, "--durations=40", *others, *EXHAUSTIVE]),
    ]


def quick_phases() -> list[Phase]:
    """The phases of `make quick`, in order. A process of pytest per core: the tests calculate more than they wait."""
    tools = Path(sys.executable).parent
    return [
        Phase("format", [f"{tools}/ruff", "format", "--check", "--quiet", "."], is_pytest=False),
        Phase("lint", [f"{tools}/ruff", "check", "--quiet", "."], is_pytest=False),
        Phase("layers", ["env", "PYTHONPATH=cli", f"{tools}/lint-imports"], is_pytest=False),
        Phase("types", [f"{tools}/mypy"], is_pytest=False),
        Phase("tests", [sys.executable, "-m", "pytest", "--dist", "worksteal", "-n", "auto", *QUICK]),
    ]


def run_all(todo: Sequence[Phase], say: Callable[[str], None]) -> int:
    """Run the phases one after the other, whatever comes of them, and say what failed. Return the exit code."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvd-phases-") as folder:
        for number, phase in enumerate(todo):
            names = Path(folder, str(number))
            command = [*phase.command, *([FAILURES_OPTION, str(names)] if phase.is_pytest else [])]
            say(" ".join(command))
            code = subprocess.run(command, check=False).returncode
            if code == INTERRUPTED and phase.is_pytest:
                say(f"interrupted in: {phase.name}")
                return 128 + signal.SIGINT
            tests = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
            if code:
                failed += [f"{phase.name}: {test}" for test in tests] or [f"{phase.name}: exit code {code}"]
    for line in ["", "failed:", *failed] if failed else []:
        say(line)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="6", help="processes of pytest")
    parser.add_argument("--quick", action="store_true", help="the tools, and the tests that find most: a minute")
    arguments = parser.parse_args()
    todo = quick_phases() if arguments.quick else phases(arguments.workers)
    try:
        return run_all(todo, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
