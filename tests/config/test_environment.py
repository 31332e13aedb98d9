"""What else the environment says: systemd, colours."""

from __future__ import annotations

import io
import os

import pytest

from kvd.config import local_world_size, systemd_environment, terminal_colour


def test_systemd_environment() -> None:
    environ = {"NOTIFY_SOCKET": "@/run/notify", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}
    found = systemd_environment(environ, pid=7)
    assert (found.notify_socket, found.watchdog_usec) == ("@/run/notify", 30_000_000)
    assert systemd_environment(environ, pid=8).watchdog_usec == 0
    assert systemd_environment(environ).watchdog_usec == 0
    assert systemd_environment({"WATCHDOG_USEC": "5"}).watchdog_usec == 5
    assert systemd_environment({"WATCHDOG_USEC": "soon", "NOTIFY_SOCKET": "vsock:2:1"}) == systemd_environment({})
    assert systemd_environment({"WATCHDOG_USEC": "-5"}).watchdog_usec == 0


def test_systemd_environment_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/n")
    monkeypatch.setenv("WATCHDOG_USEC", "9")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    found = systemd_environment()
    assert (found.notify_socket, found.watchdog_usec) == ("/run/n", 9)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_colour() -> None:
    terminal, file = Terminal(), io.StringIO()
    assert terminal_colour({}, terminal)
    assert terminal_colour({"NO_COLOR": ""}, terminal)
    assert not terminal_colour({"NO_COLOR": "1"}, terminal)
    assert not terminal_colour({"TERM": "dumb"}, terminal)
    assert not terminal_colour({}, file)
    terminal.close()
    assert not terminal_colour({}, terminal)


@pytest.mark.parametrize(("value", "expected"), [("4", 4), ("", 1), ("many", 1), ("0", 1), ("-2", 1), (None, 1)])
def test_the_workers_on_this_host_are_those_that_the_launcher_counts(value: str | None, expected: int) -> None:
    assert local_world_size({} if value is None else {"LOCAL_WORLD_SIZE": value}) == expected
