"""Signals to a launcher in a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.node.launch.harness import WAIT_FOR_SERVERS, Launcher, marked, python, shell, wait_until_gone

POLITE = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("here", flush=True)
    signal.sigwait({signal.SIGTERM})
    print("bye", flush=True)
"""
STUBBORN = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("here", flush=True)
    while True:
        signal.sigwait({signal.SIGTERM})
        print("no", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_the_job_in_order(
    number: int, launcher: Callable[..., Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_IS_UP", str(tmp_path / "up"))
    job = launcher(command=python(WAIT_FOR_SERVERS, POLITE))
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    job.process.send_signal(number)
    code, said = job.end()
    assert code == 128 + number
    assert not marked(job.mark)
    order = [
        said.index(f"{name} stdout {word}")
        for name, word in (
            ("worker-0", "bye"),
            ("server-0", "down server-0"),
            ("scheduler", "down scheduler"),
        )
    ]
    assert order == sorted(order)


def test_signals_that_are_ignored_at_the_start_stay_ignored(
    launcher: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under nohup, in a background job of a script. The workers' handlers are those of the launcher."""
    code = """
        import signal
        print([signal.getsignal(n).name for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)], flush=True)
        print("got", signal.sigwait({signal.SIGTERM}).name, flush=True)
    """
    ignored = [signal.SIGHUP, signal.SIGINT]
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        job = launcher(command=python("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15})", code), workers=1)
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
    job.wait_for("worker-0 stdout ['SIG_IGN', 'SIG_IGN', 'SIG_DFL']")
    for number in ignored:
        job.process.send_signal(number)
    job.process.send_signal(signal.SIGTERM)
    exit_code, said = job.end()
    assert exit_code == 128 + signal.SIGTERM
    assert "worker-0 stdout got SIGTERM" in said
    assert not any("SIGHUP" in line or "SIGINT" in line for line in said if line.startswith("launch "))


def test_the_second_signal_kills(launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=python(STUBBORN), grace_s=1000)
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("worker-0 stdout no", "worker-1 stdout no")
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 128 + signal.SIGINT
    assert not marked(job.mark)
    assert any("SIGINT again: killing everything" in line for line in said)


def test_nothing_outlives_a_killed_launcher(launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=shell("sleep 1000 & setsid sleep 1000 & echo here; sleep 1000; exit 0"))
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    assert len(marked(job.mark)) >= 1 + 2 + 2 * 3  # launcher, daemons, and for each worker guard, shell and sleeps
    job.process.kill()
    job.process.wait()
    wait_until_gone(job.mark)


def test_a_stubborn_worker_does_not_outlive_a_killed_launcher(launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=python(STUBBORN))
    job.wait_for("worker-0 stdout here", "worker-1 stdout here")
    job.process.kill()
    job.process.wait()
    wait_until_gone(job.mark)
