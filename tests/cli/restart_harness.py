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
"""Holds the first process of each worker in its 50th push, until it is told to go on."""
import os, time
folder = os.environ.get("HOLD_IN", "")
held = os.path.join(folder, os.environ.get("KVD_NODE_ID", "") + ".held")
calls = 0
def holding(method):
    def call(self, *arguments, **keywords):
        global calls
        calls += 1
        if calls == 50:
            with open(held + ".part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(held + ".part", held)
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.01)
        return method(self, *arguments, **keywords)
    return call
if folder and os.environ.get("KVD_ROLE") == "worker" and not os.path.exists(held):
    import kvd
    for name in ("push", "pushpull"):
        setattr(kvd.KVStore, name, holding(getattr(kvd.KVStore, name)))
'''

RESTARTABLE: Final = """
import numpy as np
import kvd

kv = kvd.create("dist_sync")
kv.init("w", np.zeros(4, np.float32))
kv.set_optimizer(kvd.optimizer.SGD(learning_rate=0.1, momentum=0.9))
first = kv.clock("w")
kv.rewind(first)
weights = kv.pull("w")
for step in range(first, 100):
    gradient = 2 * (weights - np.array([1, 2, 3, 4], np.float32)) / kv.num_workers
    kv.pushpull("w", gradient, out=weights)
print(kv.rank, *weights)
kv.close()
"""
"""A program that goes back to the step in which its predecessor died."""


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def readme_program() -> str:
    """The program that README calls ``train.py``."""
    blocks = re.findall(r"^```python\n(.*?)^```", readme(), re.DOTALL | re.MULTILINE)
    found = [block for block in blocks if 'kvd.create("dist_sync"' in block]
    assert found, "README has a program"
    return str(found[0])


def weights_after(steps: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What `RESTARTABLE` ends with, by the formula of SGD with momentum 0.9 and learning rate 0.1."""
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
            "OMP_NUM_THREADS": "1",
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
