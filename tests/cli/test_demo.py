"""``kvd demo``: whole runs, and the views of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.node.launch import Stream
from kvd_cli.demo_view import LiveView, PlainView

Spawn = Callable[..., "subprocess.Popen[str]"]
DEADLINE_S = 100.0


def demo(spawn: Spawn, *flags: str) -> subprocess.Popen[str]:
    return spawn("demo", "--seed", "3", *flags)


def test_the_demo_learns(spawn: Spawn) -> None:
    process = demo(spawn)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert sum(line.startswith("epoch") for line in lines) == 20
    assert lines[-3].startswith("test accuracy  9")
    assert lines[-1].startswith("digest         ")


def test_the_demo_ends_in_the_same_bits_when_workers_are_killed(spawn: Spawn) -> None:
    undisturbed = demo(spawn, "--epochs", "3", "-o", "json")
    out, err = undisturbed.communicate(timeout=DEADLINE_S)
    wanted = json.loads(out)
    assert undisturbed.returncode == (0 if wanted["learned"] else 1), err

    disturbed = demo(spawn, "--epochs", "3", "-o", "json")
    assert disturbed.stderr is not None
    killed = 0
    for line in disturbed.stderr:  # ends with the process
        if line.startswith(("epoch   1", "epoch   2")):
            kill_worker(disturbed.pid, killed)
            killed += 1
    assert disturbed.stdout is not None
    assert json.loads(disturbed.stdout.read())["digest"] == wanted["digest"]
    assert killed == 2


def kill_worker(launcher: int, number: int) -> None:
    """SIGKILL to the program of a worker, not to its guard."""
    for entry in os.listdir("/proc"):
        try:
            arguments = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0") if entry.isdigit() else []
            if arguments[1:3] == [b"-m", b"kvd_cli.demo_worker"]:
                variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                if f"KVD_NODE_ID=worker-{number}".encode() in variables and is_below(int(entry), launcher):
                    os.kill(int(entry), signal.SIGKILL)
        except OSError:
            continue  # it has ended


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process was started by another, perhaps through others."""
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


def test_the_view_takes_what_workers_print(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(workers=2, servers=1)

    def worker(rank: int, line: str, stream: Stream = "stdout") -> None:
        view.take(f"worker-{rank}", stream, line.encode())

    for rank in range(2):
        worker(rank, json.dumps({"event": "start", "worker": rank, "step": 0, "steps": 44, "steps_per_epoch": 22}))
        report = {"event": "step", "worker": rank, "step": 22, "loss": 1.0 + rank, "bytes": 2e6, "t": 2.0}
        worker(rank, json.dumps(report | ({"accuracy": 0.5} if rank else {})))
    worker(0, "a print of a library")
    worker(0, '{"event": "step", "worker": 9}')
    worker(0, "[1, 2]")
    worker(1, "a warning", "stderr")
    view.take("launch", "stderr", b"worker-0 failed")
    worker(0, json.dumps({"event": "start", "worker": 0, "step": 22, "steps": 44, "steps_per_epoch": 22}))
    assert (view.epoch(), view.mean_loss(), view.megabytes_per_s()) == (1, 1.5, 2.0)
    worker(0, json.dumps({"event": "end", "worker": 0, "accuracy": 0.75, "digest": "aa"}))
    worker(1, json.dumps({"event": "end", "worker": 1, "accuracy": 0.75, "digest": "bb"}))
    assert (view.final_accuracy(), view.digests()) == (0.75, ["aa", "bb"])
    assert capsys.readouterr().out.splitlines() == [
        "epoch   1  loss 1.5000  test accuracy 50.00%     2.0 MB/s  clocks 22 22",
        "worker-0 failed",
        "worker 0 is back and continues with step 22",
    ]
    view.print_last_words()
    assert "worker-1 | a warning" in capsys.readouterr().err


def test_lines_and_the_live_picture_do_not_block_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines come while the picture is drawn: neither may wait forever for the other."""
    view = LiveView(workers=1, servers=1)
    start = {"event": "start", "worker": 0, "step": 0, "steps": 2000, "steps_per_epoch": 1000}
    with view:

        def draw() -> None:
            for _ in range(100):
                view._live.refresh()

        drawer = threading.Thread(target=draw)
        drawer.start()
        for step in range(100):
            view.take("worker-0", "stdout", json.dumps(start).encode())  # each but the first is a restart
            report = {"event": "step", "worker": 0, "step": step, "loss": 1.0, "bytes": 1e6 * step, "t": step}
            view.take("worker-0", "stdout", json.dumps(report | {"accuracy": 0.5}).encode())
        drawer.join(DEADLINE_S)
        assert not drawer.is_alive()
    out = capsys.readouterr().out
    assert out.count("worker 0 is back and continues with step 0") == 99
    assert "restarted 99×" in out
    assert "50.00%" in out
    assert "0 / 2" in out
