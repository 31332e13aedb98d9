"""README's programs and the examples survive the death of any worker as they are written, with the same bits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from kvd.config import child_environment

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 110
WORKERS = 2

#: Runs a program file. Each of the VICTIMS among the workers kills itself once, at the push of a number: before that
#: push, or while it is on its way. Every worker prints a digest of the final values of all keys that it has pushed.
RUNNER = """
import hashlib, json, os, runpy, signal, sys
from pathlib import Path
import numpy as np
import kvd
from kvd.client.cluster.values import ClusterValues

program, victims, folder = sys.argv[1:4]
sys.argv = [program, *sys.argv[4:]]
pushes, keys = 0, set()
death, when, marker = json.loads(victims).get(os.environ["KVD_NODE_ID"], (0, "", ""))
marker = Path(folder, marker)
dies = death and not marker.exists()


def die():
    marker.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def dying(push):
    def replacement(store, key, *arguments, **more):
        global pushes
        pushes += 1
        keys.update(key if isinstance(key, list | tuple) else [key])
        if dies and pushes == death:
            if when == "during":
                kvd.KVStore.push_async(store, key, arguments[0])
                os.sched_yield()
            die()
        return push(store, key, *arguments, **more)
    return replacement


def closing(close):
    def replacement(store):
        store.flush()
        digest = hashlib.sha256()
        for key in sorted(keys):
            digest.update(np.ascontiguousarray(store.pull(key)).tobytes())
        print("digest of worker", store.rank, "is", digest.hexdigest(), "of", len(keys), "keys", flush=True)
        close(store)
    return replacement


def dying_bound(push):
    def replacement(values, bound, *arguments):
        global pushes
        pushes += 1
        keys.update(bound.keys.names)
        if dies and pushes == death:
            if when == "during":
                push(values, bound, *arguments)
                os.sched_yield()
            die()
        return push(values, bound, *arguments)
    return replacement


for name in ("pushpull", "pushpull_async"):
    setattr(kvd.KVStore, name, dying(getattr(kvd.KVStore, name)))
ClusterValues.pushpull_bound = dying_bound(ClusterValues.pushpull_bound)  # the calls of kvd.torch
kvd.KVStore.close = closing(kvd.KVStore.close)
runpy.run_path(program, run_name="__main__")
"""


def blocks() -> list[str]:
    """The whole programs among README's blocks of Python."""
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in found if "kvd.create(" in block and "steps(" in block]


def run(folder: Path, program: Path, *arguments: str, deaths: Sequence[tuple[int, int, str]] = ()) -> set[str]:
    """Runs a program as a job, and returns the digests of its workers.

    Args:
        deaths: which worker dies, in which of its pushes, and when: "before" it or "during" it.
    """
    runner = folder / "runner.py"
    runner.write_text(RUNNER)
    victims = {f"worker-{rank}": (push, when, f"{program.name} {rank}") for rank, push, when in deaths}
    launch = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", str(WORKERS), "-s", "2", "--restart", "1", "--"]
    command = [*launch, sys.executable, str(runner), str(program), json.dumps(victims), str(folder), *arguments]
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for _, _, marker in victims.values():
        assert (folder / marker).exists(), "a worker that was to die has not died"
    digests = re.findall(r"digest of worker (\d+) is (\w+) of", done.stdout)
    assert sorted(int(rank) for rank, _ in digests) == list(range(WORKERS)), done.stdout + done.stderr
    return {digest for _, digest in digests}


@cache
def undisturbed(folder: Path, program: Path, *arguments: str) -> str:
    """The digest of a run in which nobody dies."""
    (digest,) = run(folder, program, *arguments)
    return digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def test_readme_has_a_program() -> None:
    assert blocks()


@pytest.mark.parametrize("block", range(len(blocks())))
def test_readme_survives_the_death_of_each_worker(folder: Path, block: int) -> None:
    program = folder / f"block_{block}.py"
    program.write_text(blocks()[block])
    expected = undisturbed(folder, program)
    deaths = ((0, 1, "before"), (1, 40, "during"))
    assert run(folder, program, deaths=deaths) == {expected}


@pytest.mark.parametrize(
    ("example", "arguments", "death"),
    [
        ("train.py", ("--epochs", "2"), 17),
        pytest.param("digits_group.py", ("--epochs", "1", "--devices", "2"), 50, marks=pytest.mark.soak),
        pytest.param("torch_model.py", ("--epochs", "1", "--devices", "cpu"), 40, marks=pytest.mark.soak),
    ],
)
def test_the_examples_survive_the_death_of_a_worker(
    folder: Path, example: str, arguments: tuple[str, ...], death: int
) -> None:
    if example == "torch_model.py":
        pytest.importorskip("torch")
    program = ROOT / "examples" / example
    expected = undisturbed(folder, program, *arguments)
    assert run(folder, program, *arguments, deaths=[(1, death, "before")]) == {expected}
