"""The ways in which a program with an open store ends, and which of them are failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvd
from kvd.client.calls.exits import ends_well
from kvd.testing.cluster import LocalCluster
from tests.client.harness import SLOW_TO_JUDGE, init_all, ones
from tests.environments import without_settings

DEADLINE_S = 100.0

#: A store that says how it is left. The line is written at once, to be seen even if the process dies next.
PROBE = """
import os, sys
from sys import exit as by_name
from kvd.client.calls.exits import forget, leave_at_exit

class Store:
    def __init__(self, name=""):
        self.name = name
        leave_at_exit(self)
    def claim_end(self, forget=forget):  # IPython empties its namespace at the end
        forget(self)
        return True
    def begin_close(self, *, barrier):
        return barrier
    def end_close(self, leaving):
        self.say("well, meets the others" if leaving else "well")
    def abandon(self, *, failed):
        self.say("failed" if failed else "left")
    def say(self, how, write=os.write):
        write(1, ("@" f"@ {self.name}{how}\\n").encode())
"""

WITH_PROPERTY = "class E(SystemExit):\n    @property\n    def code(self):\n        return {code}"

#: How a program ends: by which code, and whether that is a failure. None: it never says.
WAYS: dict[str, tuple[str, bool | None]] = {
    "the end": ("pass", False),
    "exit()": ("sys.exit()", False),
    "exit(None)": ("sys.exit(None)", False),
    "exit(0)": ("sys.exit(0)", False),
    "exit(False)": ("sys.exit(False)", False),
    "exit(256)": ("sys.exit(256)", False),  # the system keeps 8 bits
    "exit(3)": ("sys.exit(3)", True),
    "exit(-1)": ("sys.exit(-1)", True),
    "exit(True)": ("sys.exit(True)", True),
    "exit(text)": ("sys.exit('no data')", True),
    "exit('')": ("sys.exit('')", True),
    "exit(object)": ("sys.exit(object())", True),
    "exit(0.0)": ("sys.exit(0.0)", True),
    "exit(tuple)": ("sys.exit((0, 0))", True),
    "exit(SystemExit)": ("sys.exit(SystemExit(3))", True),
    "raise SystemExit": ("raise SystemExit", False),
    "raise SystemExit(0)": ("raise SystemExit(0)", False),
    "raise SystemExit(3)": ("raise SystemExit(3)", True),
    "quit(3)": ("import builtins; builtins.quit(3)", True),
    "exit by name": ("by_name(3)", True),
    "argparse": ("import argparse; argparse.ArgumentParser().parse_args(['--no-such-option'])", True),
    "argparse help": ("import argparse; argparse.ArgumentParser().parse_args(['--help'])", False),
    "an exit that a finally sees": ("try:\n    sys.exit(3)\nfinally:\n    pass", True),
    "an exit with another code": ("try:\n    sys.exit(3)\nexcept SystemExit as e:\n    e.code = 0\n    raise", False),
    "a class with its own code": ("class E(SystemExit):\n    code = 3\nraise E", True),
    "a class whose instances have another one": (
        "class E(SystemExit):\n    code = 3\nerror = E()\nassert E.code == 3\nerror.code = 0\nraise error",
        False,
    ),
    "a class with a property": (f"{WITH_PROPERTY.format(code=3)}\nraise E(0)", True),
    "a class with a property, 0": (f"{WITH_PROPERTY.format(code=0)}\nclass F(E):\n    pass\nraise F(3)", False),
    "a class that is older than the store": ("raise Older", True),
    "a subclass of an older one": ("class E(Older):\n    code = 0\nraise E(3)", False),
    "an exit that is caught": ("try:\n    sys.exit(3)\nexcept SystemExit as e:\n    assert e.code == 3", False),
    "caught, then another one": ("try:\n    sys.exit(0)\nexcept SystemExit:\n    sys.exit(3)", True),
    "caught, then an error": ("try:\n    sys.exit(0)\nexcept SystemExit:\n    1 / 0", True),
    "an exit in a thread": (
        "import threading; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()",
        False,
    ),
    "an error in a thread": (
        "import threading; t = threading.Thread(target=int, args=('',)); t.start(); t.join()",
        False,
    ),
    "an error": ("1 / 0", True),
    "an error that is caught": ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", False),
    "a hook for errors that exits": ("sys.excepthook = lambda *_: sys.exit(0)\n1 / 0", False),
    "a hook for errors that hides it": ("sys.excepthook = lambda *_: None\n1 / 0", True),
    "an error that a library printed": ("import code; code.InteractiveInterpreter().runsource('1 / 0')", False),
    "Ctrl-C": ("import signal; signal.raise_signal(signal.SIGINT)", True),
    "SIGTERM with a handler": (
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\nsignal.raise_signal(signal.SIGTERM)",
        True,
    ),
    "an error in an exit handler": ("import atexit; atexit.register(int, '')", False),
    "an exit in an exit handler": ("import atexit; atexit.register(sys.exit, 3)", False),
    "asyncio, exit(3)": ("import asyncio\nasync def main():\n    sys.exit(3)\nasyncio.run(main())", True),
    "asyncio, exit(0)": ("import asyncio\nasync def main():\n    sys.exit(0)\nasyncio.run(main())", False),
    "asyncio, an error": ("import asyncio\nasync def main():\n    1 / 0\nasyncio.run(main())", True),
    "_exit": ("os._exit(0)", None),
    "SIGTERM": ("import signal; signal.raise_signal(signal.SIGTERM)", None),
}

ENDS_IN_EVERY_WAY = """
import json

class Older(SystemExit):
    code = 3

for name, code in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        os.close(2)  # errors are printed there
        os.open(os.devnull, os.O_WRONLY)
        Store(f"{name}: ")
        exec(code)
        break
    os.waitpid(child, 0)
"""


def said_by(*arguments: str, **options: Any) -> list[str]:
    """What the stores of a program of Python said. It may fail."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=without_settings(IPYTHONDIR=os.devnull),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        **options,
    )
    return [line.partition("@@ ")[2] for line in done.stdout.splitlines() if "@@ " in line]  # a prompt may come first


def wanted(failed: bool) -> str:
    return "failed" if failed else "well, meets the others"


def test_the_exit_status_decides_whether_a_program_failed() -> None:
    code = json.dumps({name: code for name, (code, _) in WAYS.items()})
    assert said_by("-c", PROBE + ENDS_IN_EVERY_WAY, code) == [
        f"{name}: {wanted(failed)}" for name, (_, failed) in WAYS.items() if failed is not None
    ]


SEVERAL = """
class Interrupted(Store):
    def end_close(self, leaving):
        super().end_close(leaving)
        if not seen:
            seen.append(self)
            raise KeyboardInterrupt

seen = []
stores = [Interrupted() for _ in range(3)]
"""


def test_all_stores_leave_though_a_signal_handler_raises_while_one_is_waited_for() -> None:
    assert said_by("-c", PROBE + SEVERAL) == ["well, meets the others", "failed", "failed"]


TYPO = "pritn(1)\n"


@pytest.mark.parametrize(
    ("arguments", "typed", "failed"),
    [
        (["-i", "-q"], TYPO + "exit()\n", False),
        (["-i", "-q"], TYPO, False),  # the end of the input
        (["-i", "-q"], TYPO + "exit(3)\n", True),
        (["-i", "-q"], "def f():\n    1 / 0\n\nf()\nraise SystemExit\n", False),
        (["-i", "-q", "program.py"], "exit()\n", False),  # the program failed, its shell did not
        (["-i", "-q", "program.py"], "exit(3)\n", True),
        (["-m", "IPython", "--simple-prompt"], TYPO + "exit()\n", False),
        (["-m", "IPython", "--simple-prompt"], TYPO, False),
        (["-m", "IPython", "program.py"], "", True),
        (["program.py"], "", True),
        (["-m", "program"], "", True),
        (["-"], TYPO, True),
        (["-"], "sys.exit(3)\n", True),
        (["-"], "sys.exit(0)\n", False),
    ],
)
def test_an_error_that_a_shell_printed_is_no_failure(
    arguments: list[str], typed: str, failed: bool, tmp_path: Path
) -> None:
    program = PROBE + "Store()\n"
    if any("program" in argument for argument in arguments):
        (tmp_path / "program.py").write_text(program + TYPO)
    else:
        typed = f"exec({program!r})\n{typed}"
    assert said_by(*arguments, input=typed, cwd=tmp_path) == [wanted(failed)]


CHILDREN = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

def end(how):
    Store(f"{how}: ")
    if how == "exit":
        sys.exit()
    if how == "exit(3)":
        sys.exit(3)
    if how == "error":
        1 / 0

def work(how):
    Store(f"{how}: ")
    return how

def ways(context):
    Store("parent: ")
    children = [context.Process(target=end, args=(how,)) for how in ("return", "exit", "exit(3)", "error")]
    for child in children:
        child.start()
    for child in children:
        child.join()
    with ProcessPoolExecutor(1, context) as executor:
        executor.submit(work, "executor").result()
    with context.Pool(1) as pool:
        pool.apply(work, ("pool",))
        pool.close()
        pool.join()

if __name__ == "__main__":
    ways(multiprocessing.get_context(sys.argv[1]))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_leave_when_their_function_ends(method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROBE + CHILDREN)
    assert sorted(said_by(str(program), method)) == [
        "error: failed",
        "executor: well",
        "exit(3): failed",
        "exit: well",
        "parent: well, meets the others",
        "pool: well",
        "return: well",
    ]


GENERATIONS = """
import multiprocessing
left = [os.pipe() for generation in range(3)]

class Member(Store):
    def __init__(self, generation):
        super().__init__(f"{generation}: ")
        self.generation = generation
    def say(self, how):
        super().say(how)
        os.write(left[self.generation][1], b"x")

def live(generation):
    Member(generation)
    if generation < 2:
        multiprocessing.get_context("fork").Process(target=live, args=(generation + 1,)).start()
    if generation:
        os.read(left[generation - 1][0], 1)

live(0)
"""


def test_a_process_leaves_before_it_waits_for_its_children() -> None:
    """Here each child ends when its parent has left, as if it waited for it in a round."""
    assert said_by("-c", PROBE + GENERATIONS) == ["0: well, meets the others", "1: well", "2: well"]


# ── in a cluster ──

FORKS = """
import multiprocessing, sys, numpy as np, kvd
SIZE, PUSHES = 1_000_000, 5

def work():
    kv = kvd.create("dist_async")
    kv.init("w", np.zeros(SIZE, np.float32))
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    for _ in range(PUSHES):
        kv.push("w", np.ones(SIZE, np.float32))

children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(2)]
for child in children:
    child.start()
for child in children:
    child.join()
sys.exit(sum(child.exitcode for child in children))
"""


def test_the_pushes_of_forked_children_count() -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        output, _ = cluster.script(FORKS, 0, node_id="").communicate(timeout=DEADLINE_S)
        assert output == b""
        with cluster.observer() as observer:
            assert observer.pull("w")[0] == -10
            members = [member for member in observer.status()["members"] if member["role"] == "worker"]
        assert [member["state"] for member in members] == ["left", "left"]


BLOCK = """
import numpy as np, kvd
with kvd.create("dist_sync") as kv:
    kv.init("w", np.zeros(4, np.float32))
    kv.push("w", np.ones(4, np.float32))
    raise SystemExit({status!r})
"""

AIO_BLOCK = """
import asyncio, numpy as np, kvd
async def main():
    async with await kvd.aio.create("dist_sync") as kv:
        await kv.init("w", np.zeros(4, np.float32))
        await kv.push("w", np.ones(4, np.float32))
        raise SystemExit({status!r})
asyncio.run(main())
"""


@pytest.mark.parametrize("program", [BLOCK, AIO_BLOCK], ids=["blocking", "aio"])
@pytest.mark.parametrize("status", [0, 3])
def test_a_block_that_an_exit_leaves(program: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        script = cluster.script(program.format(status=status), 1)
        kv = cluster.store(node_id="worker-0")
        init_all([kv])
        if status == 0:
            assert kv.pushpull("w", ones()).tolist() == [2] * 4
        kv.set_barrier_before_exit(status == 0)
        kv.close()
        output, _ = script.communicate(timeout=DEADLINE_S)
        assert (script.returncode, output) == (status, b"")
    assert ("worker 1: its program ended with an error" in caplog.text) == (status != 0)


def test_a_generator_that_is_closed_leaves_its_block_well() -> None:
    def steps() -> Any:
        with kvd.create("local") as kv:
            kv.push("missing", ones())
            yield

    generator = steps()
    next(generator)
    with pytest.raises(kvd.KeyNotFound):
        generator.close()
    assert not ends_well(KeyboardInterrupt, KeyboardInterrupt())
