"""Messages to systemd, against a real datagram socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.observe.systemd import MAX_STATUS, Notifier


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket that plays systemd, and its name as ``NOTIFY_SOCKET`` would give it."""
    abstract = request.param == "abstract"
    name = f"@kvd-test-{os.getpid()}-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name[1:]}" if abstract else name)
        sock.settimeout(5)
        yield sock, name


def test_the_life_of_a_service(listener: tuple[socket.socket, str]) -> None:
    sock, name = listener
    notifier = Notifier(name, 30_000_000)
    assert notifier.watchdog_interval_s == 15.0
    assert notifier.ready("serving on tcp://127.0.0.1:9191")
    assert sock.recv(4096) == b"READY=1\nSTATUS=serving on tcp://127.0.0.1:9191"
    assert notifier.watchdog()
    assert sock.recv(4096) == b"WATCHDOG=1"
    assert notifier.status("3 of 4 workers")
    assert sock.recv(4096) == b"STATUS=3 of 4 workers"
    assert notifier.stopping()
    assert sock.recv(4096) == b"STOPPING=1"
    notifier.close()
    assert not notifier.stopping()
    notifier.close()


def test_a_status_is_one_short_line(listener: tuple[socket.socket, str]) -> None:
    sock, name = listener
    notifier = Notifier(name)
    notifier.status("a\nMAINPID=1\ud800" + "x" * 5000)
    text = sock.recv(65536).decode()
    assert text.startswith("STATUS=a MAINPID=1 x")
    assert len(text) == len("STATUS=") + MAX_STATUS
    notifier.close()


def test_without_a_watchdog_no_sign_of_life_is_sent(listener: tuple[socket.socket, str]) -> None:
    sock, name = listener
    notifier = Notifier(name)
    assert notifier.watchdog_interval_s is None
    assert not notifier.watchdog()
    notifier.ready()
    assert sock.recv(4096) == b"READY=1"
    notifier.close()


def test_outside_systemd_nothing_happens() -> None:
    notifier = Notifier("", 30_000_000)
    assert notifier.watchdog_interval_s is None
    assert [notifier.ready(), notifier.watchdog(), notifier.status("x"), notifier.stopping("x")] == [False] * 4
    notifier.close()


def test_a_socket_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    notifier = Notifier(str(path), 2_000_000)
    assert not notifier.ready()
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.bind(str(path))
            assert notifier.watchdog()
        path.unlink()
        assert not notifier.watchdog()
    notifier.close()


def test_a_full_queue_does_not_block(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        notifier = Notifier(str(tmp_path / "notify"), 2_000_000)
        assert any(not notifier.watchdog() for _ in range(100_000))
        sock.recv(4096)
        assert notifier.watchdog()
        notifier.close()


def test_a_path_that_is_too_long_for_a_socket() -> None:
    notifier = Notifier("/" + "x" * 200)
    assert not notifier.ready()
    notifier.close()


def test_no_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    notifier = Notifier("/run/notify", 2_000_000)
    assert notifier.watchdog_interval_s is None
    assert not notifier.ready()


def test_children_do_not_inherit_the_socket(listener: tuple[socket.socket, str]) -> None:
    notifier = Notifier(listener[1])
    assert notifier._socket is not None
    assert not notifier._socket.get_inheritable()
    notifier.close()
