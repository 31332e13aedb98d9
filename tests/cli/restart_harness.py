"""README's program, and a way to stop it in the middle of its training without changing it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from kvd.testing.cluster import wait_until

ROOT: Final = Path(__file__).resolve().parents[2]
DEADLINE_S: Final = 200.0  # programs import torch, and the machine may be busy

HOLD: Final = '''
"""Holds the first process of each worker in its 50th push, until it is told to go on."""
import os, time
from kvd.testing.cluster import wait_until
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
                time.sleep(0.01)  # nothing more is imported here
        return method(self, *arguments, **keywords)
    return call
if folder and os.environ.get("KVD_ROLE") == "worker" and not os.path.exists(held):
    import kvd
    from kvd.client.cluster.values import ClusterValues
    for cls, name in ((kvd.KVStore, "push"), (kvd.KVStore, "pushpull"), (ClusterValues, "pushpull_bound")):
        setattr(cls, name, holding(getattr(cls, name)))
'''


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def readme_program() -> str:
    """The program that README calls ``train.py``."""
    blocks = re.findall(r"^```python\n(.*?)^```", readme(), re.DOTALL | re.MULTILINE)
    found = [block for block in blocks if 'kvd.create("dist_sync"' in block]
    assert found, "README has a program"
    return str(found[0])


def readme_results(num_workers: int) -> list[str]:
    """What the workers of that program print, as README says."""
    found = re.search(r"^Both workers print `([^`]+)`", readme(), re.MULTILINE)
    assert found is not None
    return [f"worker {rank}: {found[1]}" for rank in range(num_workers)]


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
        paths = [self._folder / f"{node}.held" for node in nodes]
        wait_until(lambda: all(path.exists() for path in paths), f"{nodes} are held", DEADLINE_S)
        return [int(path.read_text()) for path in paths]

    def let_go(self) -> None:
        (self._folder / "go").touch()
