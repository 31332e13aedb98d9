"""``kvd top`` against a real cluster: in tmux, in a pipe, and when the cluster is not there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from rich.console import Console

from kvd.testing.cluster import LocalCluster, wait_until
from kvd_cli.top_view import SAMPLES, Order, TopView, sparkline
from tests.cli.conftest import DEADLINE_S, ROOT, Kvd
from tests.cli.reports import member, report, server


class Terminal:
    """A window of tmux, with a server of its own."""

    def __init__(self, width: int, height: int, *command: str) -> None:
        self._name = f"kvd-test-{uuid.uuid4().hex}"
        path = f"{ROOT}{os.pathsep}{ROOT / 'cli'}"
        self._run(
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            str(width),
            "-y",
            str(height),
            "-e",
            f"PYTHONPATH={path}",
            *command,
        )

    def _run(self, *arguments: str) -> str:
        run = subprocess.run(
            ["tmux", "-L", self._name, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        return run.stdout

    def shown(self) -> list[str]:
        return self._run("capture-pane", "-p").splitlines()

    def press(self, key: str) -> None:
        self._run("send-keys", key)

    def resize(self, width: int, height: int) -> None:
        self._run("resize-window", "-x", str(width), "-y", str(height))

    def is_open(self) -> bool:
        return bool(self._run("list-sessions"))

    def close(self) -> None:
        self._run("kill-server")


@contextmanager
def terminal(width: int, height: int, *command: str) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed; `apt-get install tmux` (Debian, Ubuntu) brings it")
    window = Terminal(width, height, *command)
    try:
        yield window
    finally:
        window.close()


@contextmanager
def stuck_job() -> Iterator[LocalCluster]:
    """Worker 1 does not come to the third step, for which worker 0 waits."""
    over = threading.Event()
    with LocalCluster(2, 1) as cluster:
        stores = cluster.open_stores()
        ones = np.ones(1 << 16, np.float32)

        def work(rank: int) -> None:
            stores[rank].init("w", ones)
            for step in range(3):
                if rank == 1 and step == 2:
                    over.wait(DEADLINE_S)
                stores[rank].pushpull("w", ones, np.empty_like(ones))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield cluster
        finally:
            over.set()
            for thread in threads:
                thread.join(DEADLINE_S)


def test_a_job_that_stands_still_in_a_terminal_and_in_a_pipe(kvd: Kvd) -> None:
    with stuck_job() as cluster:
        place = cluster.address

        def waits() -> bool:
            result = kvd("top", "-S", place, "-n", "1")
            return result.exit_code == 0 and "for worker 1 (process" in result.stdout

        wait_until(waits, "the wait is said", DEADLINE_S)
        result = kvd("top", "-S", place, "-n", "2")
        assert result.exit_code == 0
        first, second = result.stdout.splitlines()
        assert re.match(
            r"step 2  - steps/s  0 pushes/s  0 B/s  round 3 of 'w' waits [0-9.]+ s for worker 1 \(pro", first
        )
        assert re.match(r"step 2  0\.0 steps/s  \d+ pushes/s  ", second)

        with terminal(80, 24, sys.executable, "-m", "kvd_cli.main", "top", "-S", place) as window:
            wait_until(lambda: any("round 3" in line for line in window.shown()), "the picture is there", DEADLINE_S)
            shown = window.shown()
            assert len(shown) == 24
            assert max(map(len, shown)) <= 80
            assert shown[0] == f"kvd top  {place}  job default"
            assert shown[2].split() == ["NODE", "STATE", "STEP", "PUSHES/S", "BYTES/S", "MEMORY", "NOTES"]
            assert shown[3].startswith("server 0 active")
            assert "a round waits" in shown[3]
            assert shown[5].split() == ["worker", "1", "active", "awaited;", "shared", "memory"]
            assert re.match(r"round 3 of 'w' waits [0-9.]+ m?s", shown[6])
            window.resize(200, 50)
            wait_until(lambda: any("MEMORY OF LIMIT" in line for line in window.shown()), "it is wider", DEADLINE_S)
            assert len(window.shown()) == 50
            window.press("s")
            wait_until(lambda: any("by traffic" in line for line in window.shown()), "it is sorted", DEADLINE_S)
            window.press("q")
            wait_until(lambda: not window.is_open(), "q ends it", DEADLINE_S)
    result = kvd("top", "-S", place, "-n", "1")
    assert result.exit_code == 3
    assert result.stdout.startswith(f"no cluster: no scheduler answers at {place} (Connection refused)")


def look(pushes: int, step: int, text: str = "") -> dict[str, object]:
    figures = {"incarnation": "1a", "step": step, "open_rounds": [], "memory_of_live_runs_bytes": 1 << 20}
    counters = {"received": {"push_batch": pushes}, "received_bytes": 1024 * pushes, "sent_bytes": 0}
    given = {**server(0), **figures, "memory_limit_bytes": 1 << 30, "counters": counters}
    members = [member("server", 0), *({**member("worker", rank), "reason": text} for rank in range(40))]
    return report(given, members=[{**each, "is_silent": False} for each in members])


def drawn(view: TopView, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(view.picture(width, height))
    return capture.get().splitlines()


def test_rates_are_differences_and_rows_scroll() -> None:
    view = TopView("here")
    view.take(look(100, 10), 50.0)
    assert [row.pushes_per_s for row in view.rows if row.pushes_per_s is not None] == []
    view.take(look(160, 16), 52.0)
    assert (view.rows[0].pushes_per_s, view.rows[0].bytes_per_s) == (30.0, 30.0 * 1024)
    assert view.line().startswith("step 16  3.0 steps/s  30 pushes/s  30.0 KiB/s")
    picture = drawn(view, 80, 24)
    assert len(picture) <= 24
    assert max(map(len, picture)) <= 80
    assert picture[-1].endswith("23 more")
    view.scroll(100, 24)
    assert "worker 39" in drawn(view, 80, 24)[-3]
    view.order = Order.TRAFFIC.following().following()
    assert view.order is Order.NODE


def test_names_from_the_network_move_no_cursor() -> None:
    view = TopView("<script>\x1b[2J")
    given = look(1, 1, "<b>\n\x1b]0;x")
    for each in given["members"]:  # type: ignore[attr-defined]
        each["state"] = "dead"
    view.take(given, 1.0)
    text = "\n".join(drawn(view, 120, 60)) + view.line()
    assert "\x1b" not in text
    assert "<script>\\x1b[2J" in text
    assert "<b>\\n\\x1b]0;x" in text


def test_a_sparkline_is_relative_to_its_largest_value() -> None:
    assert sparkline([0, 1, 4, 8]) == "▁▂▅█"
    assert sparkline([]) == ""
    assert sparkline([0.0] * SAMPLES) == "▁" * SAMPLES
