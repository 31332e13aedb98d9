"""The programs of the page on JAX run as jobs of two workers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvd.config import child_environment
from tests.docs.sources_harness import ROOT

pytestmark = pytest.mark.skipif(find_spec("optax") is None, reason="JAX is not installed: pip install jax optax")

PAGE = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
FRAGMENT = re.findall(r"^```python\n(try:.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
EXPECTED = {
    "train.py": ["loss 0.0 [ 1. -2.  3.]"] * 2,
    "between.py": ["start [0. 0. 0.]"] * 2 + ["total [0. 4. 8.]"] * 2,
}


def run(program: str, folder: Path) -> str:
    """Run a program as two workers, and return their output."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", "2", "-s", "1", "--", sys.executable, "program.py"]
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_these_programs() -> None:
    assert PROGRAMS.keys() == EXPECTED.keys()
    assert len(PAGE.splitlines()) <= 120


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_on_two_workers(name: str, tmp_path: Path) -> None:
    output = run(PROGRAMS[name], tmp_path)
    found = re.findall(r"(?:loss|start|total) [^\n]*", output)
    assert sorted(found) == EXPECTED[name], output


def test_the_typed_error_is_raised_where_the_page_says(tmp_path: Path) -> None:
    """The fragment, after the keys of the first program were deleted by all workers."""
    [fragment] = FRAGMENT
    ast.parse(fragment)
    before, _, _ = PROGRAMS["train.py"].partition("print(")
    indented = "".join(f"    {line}\n" for line in fragment.splitlines())
    program = (
        f'{before}jax.block_until_ready(params)\nkv.delete(["gradient.w", "gradient.b"])\n'
        f"try:\n{indented}except kvd.KeyNotFound as error:\n    print('total', error.key)\nkv.close()\n"
    )
    output = run(program, tmp_path)
    assert len(re.findall(r"total gradient\.[wb]", output)) == 2, output
