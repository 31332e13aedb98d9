"""One process of a job."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from kvd.node.launch.child import Child
from kvd.node.launch.plan import ProcessSpec
from kvd.testing.cluster import wait_until
from tests.node.launch.harness import DEADLINE_S, Lines, marked, shell


def test_a_process_that_has_just_ended_may_be_killed(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    """Its exit code belongs to the thread that waits for it: the kill must not take it."""
    children: list[Child] = []
    killed = threading.Event()
    wait_for_end = os.waitid

    def slow(*arguments: Any) -> None:
        wait_for_end(*arguments)
        wait_until(lambda: children, "it is known here")
        children[0].kill()
        killed.set()

    async def main() -> int:
        monkeypatch.setattr(os, "waitid", slow)
        children.append(Child(ProcessSpec("x", ["true"], os.environ), lines.take, lambda *_: None, threading.Lock()))
        return await asyncio.wait_for(children[0].exited, DEADLINE_S)

    assert asyncio.run(main()) == 0
    assert killed.is_set()


def test_what_a_process_left_in_its_session_is_killed_when_it_ends(lines: Lines, mark: dict[str, str]) -> None:
    async def main() -> int:
        spec = ProcessSpec("x", shell("sleep 1000 & echo begun; exit 5"), {**os.environ, **mark})
        return await asyncio.wait_for(Child(spec, lines.take, lambda *_: None, threading.Lock()).exited, DEADLINE_S)

    assert asyncio.run(main()) == 5
    assert lines.of("x") == ["begun"]
    assert marked(mark["JOB_MARK"]) == []


def test_what_never_began_on_its_host_has_not_run(lines: Lines) -> None:
    async def main() -> None:
        never_began = Child(
            ProcessSpec("x", ["true"], os.environ, host="a", order=b"{}"), lines.take, lambda *_: None, threading.Lock()
        )
        ran = Child(ProcessSpec("y", ["true"], os.environ), lines.take, lambda *_: None, threading.Lock())
        for child in (never_began, ran):
            await asyncio.wait_for(child.exited, DEADLINE_S)
        await asyncio.sleep(0)  # for what is done at its end
        assert never_began.ran_s == 0.0
        assert ran.ran_s == ran.ran_s > 0.0, "it has ended: the time stands"

    asyncio.run(main())
