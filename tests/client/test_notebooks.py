"""Blocking calls where a person enters code: a cell of a notebook, a line of a shell that runs an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

import kvd
from kvd.errors import NotAllowed
from kvd.testing.cluster import LocalCluster
from tests.environments import without_settings

DEADLINE_S = 100.0

#: Cells, and what each prints. In all but the last two the store is the blocking one.
CELLS = [
    ("import asyncio, numpy as np, kvd\nkv = kvd.create({kind!r}, {settings})\nprint(kv.num_workers)", "1"),
    ("kv.init('w', np.zeros(2)); kv.set_optimizer(kvd.optimizer.SGD(1.0))\nprint(kv.pull('w'))", "[0. 0.]"),
    ("def train():\n    for step in kv.steps(2):\n        kv.push('w', np.ones(2))\n    return kv.pull('w')", ""),
    ("print(train())", "[-2. -2.]"),
    ("await asyncio.sleep(0)\nprint(kv.pushpull('w', np.ones(2)))", "[-3. -3.]"),
    ("print(*[kv.version(key) for key in ('w',)], (lambda: kv.pull('w').sum())())", "3 -6.0"),
    ("with kvd.Observer({settings}) as observer:\n    print(observer.version())", "3"),
    ("pritn(1)", "NameError: name 'pritn' is not defined"),
    (
        "async def serve():\n"
        "    try:\n        kv.pull('w')\n"
        "    except kvd.NotAllowed as error:\n        print(error)\n"
        "await serve()",
        "a blocking call would stop the running event loop: use kvd.aio there, and await it",
    ),
    (
        "def later():\n"
        "    try:\n        kv.pull('w')\n"
        "    except kvd.NotAllowed:\n        done.set_result('refused')\n"
        "done = asyncio.get_running_loop().create_future()\n"
        "_ = asyncio.get_running_loop().call_soon(later)\n"
        "print(await done)",
        "refused",
    ),
    ("kv.close()", ""),
    (
        "async with await kvd.aio.create({kind!r}, {settings}) as other:\n    print(other.rank, other.num_workers)",
        "0 1",
    ),
]


@pytest.fixture(scope="module")
def cell() -> Any:
    """Runs a cell in IPython's kernel and returns what it prints, with the last line of an error."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=without_settings())
    client: BlockingKernelClient = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE_S)

        def run(code: str, interrupt_at: str = "") -> str:
            printed: list[str] = []

            def take(message: dict[str, Any]) -> None:
                if message["msg_type"] == "stream":
                    printed.append(message["content"]["text"])
                    if interrupt_at and interrupt_at in printed[-1]:
                        manager.interrupt_kernel()
                elif message["msg_type"] == "error":
                    printed.append("{ename}: {evalue}".format(**message["content"]))

            client.execute_interactive(code, timeout=DEADLINE_S, output_hook=take)
            return "".join(printed).strip()

        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_the_blocking_store_works_in_the_cells_of_a_notebook(kind: str, cell: Callable[[str], str]) -> None:
    with LocalCluster(1, 1) as cluster:
        given = {"scheduler": cluster.address, "insecure": bool(cluster.settings.get("insecure"))}
        settings = ", ".join(f"{name}={value!r}" for name, value in given.items())
        for code, printed in CELLS:
            if "Observer" in code and kind == "local":
                continue
            if "aio" in code and kind == "dist_sync":
                continue  # the rank of the worker that has left is taken by a restarted one only
            code = code.replace("{kind!r}", repr(kind)).replace("{settings}", "" if kind == "local" else settings)
            assert cell(code) == printed, code


def test_a_cell_that_waits_can_be_interrupted(cell: Callable[..., str]) -> None:
    with LocalCluster(1, 1) as cluster:
        begin = "import numpy as np, kvd; kv = kvd.create('dist_sync', scheduler={!r}, insecure={!r})"
        assert cell(begin.format(cluster.address, bool(cluster.settings.get("insecure")))) == ""
        assert cell("kv.init('w', np.zeros(2))") == ""
        waits = "print('waits', flush=True)\nwhile True:\n    kv.pushpull('w', np.ones(2))"
        assert cell(waits, interrupt_at="waits").endswith("KeyboardInterrupt:")
        assert cell("print(kv.pull('w'))") in ("[0. 0.]", "[1. 1.]")
        assert cell("kv.close()") == ""


def test_lines_of_the_asyncio_shell_may_block() -> None:
    lines = [
        "import kvd, numpy as np",
        "kv = kvd.create('local')",
        "kv.init('w', np.ones(2))",
        "print('pulled', kv.pull('w'))",
        "print('awaited', (await asyncio.sleep(0, 1)), kv.pull('w'))",
        "async def serve():\n    return kv.pull('w')\n",
        "await serve()",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "asyncio"],
        input="\n".join([*lines, ""]),
        env=without_settings(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "pulled [1. 1.]" in done.stdout
    assert "awaited 1 [1. 1.]" in done.stdout
    assert "NotAllowed: a blocking call would stop" in done.stderr


SERVER = """
import asyncio, kvd
kv = kvd.create("local")

def refused():
    try:
        kv.flush()
    except kvd.NotAllowed:
        print("refused")
    else:
        print("went through")

async def main():
    refused()
    class Inside:
        refused()
    asyncio.get_running_loop().call_soon(refused)
    await asyncio.sleep(0)
    import lazy

asyncio.run(main())
"""


@pytest.mark.parametrize("arguments", [["server.py"], ["-m", "server"]])
def test_a_program_that_runs_a_loop_may_not_block_it(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "lazy.py").write_text("import __main__\n__main__.refused()\n")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=without_settings(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout.split() == ["refused"] * 4, done.stderr


def test_a_loop_in_another_thread_does_not_matter() -> None:
    async def main() -> None:
        with pytest.raises(NotAllowed):
            kvd.create("local")
        kv = await asyncio.to_thread(kvd.create, "local")
        await asyncio.to_thread(kv.close)

    asyncio.run(main())
