"""README's program, and a way to stop it in the middle of its training without changing it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[2]
DEADLINE_S: Final = 60.0

HOLD: Final = '''
"""Holds each first process of a worker in its 50th pushpull, until it is told to go on."""
import os, time
folder = os.environ.get("HOLD_IN", "")
node = os.environ.get("KVD_NODE_ID", "")
if folder and os.environ.get("KVD_ROLE") == "worker" and not os.path.exists(os.path.join(folder, node + ".held")):
    import kvd
    pushpull, calls = kvd.KVStore.pushpull, 0
    def held(self, *arguments, **keywords):
        global calls
        calls += 1
        if calls == 50:
            with open(os.path.join(folder, node + ".part"), "w") as file:
                file.write(str(os.getpid()))
            os.rename(os.path.join(folder, node + ".part"), os.path.join(folder, node + ".held"))
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.01)
        return pushpull(self, *arguments, **keywords)
    kvd.KVStore.pushpull = held
'''


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def readme_program() -> str:
    """The program that README calls ``train.py``."""
    section = readme().partition("## A program\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None, "README has a section 'A program' with a program"
    return found[1]


def restartable_program() -> str:
    """The same, with the lines that README gives for a worker that may be restarted."""
    found = re.search(r"```python\n(step = min\(kv\.clock\(key\) for key in keys\).*?)```", readme(), re.DOTALL)
    assert found is not None, "README has the lines of a program that is restarted"
    program = readme_program()
    loop, pull = "for step in range(100):", 'weights = kv.pull("w")\n'
    assert program.count(loop) == program.count(pull) == 1
    resume = "keys = ['w']\n" + found[1] + "[weights] = weights\n"
    return program.replace(pull, resume).replace(loop, "for step in range(step, 100):")


def weights_after(steps: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What the program ends with, by the formula of SGD with momentum 0.9 and learning rate 0.1."""
    goal, weights, momentum = np.array([1.0, 2.0, 3.0, 4.0]), np.zeros(4), np.zeros(4)
    for _ in range(steps):
        momentum = 0.9 * momentum + 2 * (weights - goal)
        weights = weights - 0.1 * momentum
    return weights


class Hold:
    """A folder through which the workers of a test are held and let go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "sitecustomize.py").write_text(HOLD)
        self.environment = {
            "HOLD_IN": str(folder),
            "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "cli"))),
        }

    def wait_for(self, *nodes: str) -> list[int]:
        """Wait until these workers are held; the pids of their programs."""
        deadline = time.monotonic() + DEADLINE_S
        paths = [self._folder / f"{node}.held" for node in nodes]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, sorted(path.name for path in self._folder.iterdir())
            time.sleep(0.02)
        return [int(path.read_text()) for path in paths]

    def let_go(self) -> None:
        (self._folder / "go").touch()


def trained(line: str) -> tuple[int, list[float]]:
    """Rank and weights in a line that README's program prints."""
    rank, _, weights = line.partition(" ")
    return int(rank), [float(word) for word in weights.strip("[]").split()]
