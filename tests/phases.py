"""Everything that `make test` runs, phase by phase. All phases run; the names of what failed are the last lines.

`python -m tests.phases`
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
"""They are about the state machines and the protocol alone. Measuring coverage would double the time of the rest."""

REPEATED: Final = tuple(
    f"tests/client/test_{name}.py"
    for name in [
        "aio",
        "broadcast",
        "cast",
        "cluster",
        "compression",
        "copy_false",
        "delay_compensation",
        "delete",
        "elastic",
        "exchange",
        "handles",
        "large_lists",
        "merge_per_key",
        "optimizer",
        "refused_pushes",
        "repeated_keys",
        "rounds",
        "row_gradients",
        "staleness",
        "steps_shared",
        "tables_cluster",
        "values",
        "waits",
        "weighted",
        "whole_keys",
    ]
)
"""Tests of operations that a cluster repeats, where the lanes apply. They return the same without. The target
`test-without-lanes` of the Makefile runs all tests with clusters so."""

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
    others = [f"--ignore={folder}" for folder in CORE]
    return [
        Phase("the core and the protocol", [*python, "-n", "auto", *covered, *CORE]),
        Phase("the coverage of the core and the protocol", report, is_pytest=False),
        Phase("all other tests", [*pytest, "--durations=40", *others]),
        Phase("repeated operations without lanes", [*pytest, "--kvd-lanes", "off", *REPEATED]),
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
    parser.add_argument("--workers", default="4", help="processes of pytest")
    try:
        return run_all(phases(parser.parse_args().workers), lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
