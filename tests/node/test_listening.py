"""Where a daemon listens: the default of a server is the address from which it reaches the scheduler."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import Address, Config, parse_address
from kvd.errors import ConfigError
from kvd.node.daemon.listening import address_towards, listen_address
from kvd.transport.reaching import UnknownNameError
from tests.environments import without_settings

DEADLINE_S = 60.0


def nobody(other: Address) -> str:
    raise AssertionError(f"asked for the way to {other}")


def test_what_is_given_is_used() -> None:
    config = Config(scheduler="tcp://10.0.0.1:9191", bind="tcp://*:7")
    assert listen_address(config, "server", nobody) == "tcp://*:7"
    assert listen_address(config, "scheduler", nobody) == "tcp://*:7"


def test_a_scheduler_listens_at_its_own_address() -> None:
    assert listen_address(Config(scheduler="tcp://10.0.0.1:9191"), "scheduler", nobody) == "tcp://10.0.0.1:9191"


@pytest.mark.parametrize("scheduler", ["tcp://127.0.0.1:9191", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///run/x"])
def test_a_server_beside_its_scheduler_listens_on_loopback(scheduler: str) -> None:
    assert listen_address(Config(scheduler=scheduler), "server", nobody) == "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    ("scheduler", "number", "expected"),
    [
        ("tcp://10.0.0.1:9191", "10.0.0.2", "tcp://10.0.0.2:0"),
        ("tcp://trainer:9191", "10.0.0.2", "tcp://10.0.0.2:0"),
        ("tcp://[fd00::1]:9191", "fd00::2", "tcp://[fd00::2]:0"),
        ("tcp://this-host:9191", "127.0.1.1", "tcp://127.0.0.1:0"),
    ],
)
def test_a_server_listens_where_it_reaches_the_scheduler(scheduler: str, number: str, expected: str) -> None:
    asked: list[Address] = []

    def towards(other: Address) -> str:
        asked.append(other)
        return number

    assert listen_address(Config(scheduler=scheduler), "server", towards) == expected
    assert asked == [parse_address(scheduler)]


def test_the_log_says_which_address_was_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvd.node"):
        listen_address(Config(scheduler="tcp://10.0.0.1:9191"), "server", lambda other: "10.0.0.2")
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "no --bind is given: listening on 10.0.0.2, from where this host reaches the scheduler at tcp://10.0.0.1:9191"
    )


def test_a_server_without_a_way_to_the_scheduler_needs_bind() -> None:
    def towards(other: Address) -> str:
        raise OSError(101, "Network is unreachable")

    with pytest.raises(ConfigError, match=r"tcp://10\.0\.0\.1:9191 \(Network is unreachable\).*give --bind") as caught:
        listen_address(Config(scheduler="tcp://10.0.0.1:9191"), "server", towards)
    assert caught.value.setting == "bind"


@pytest.mark.parametrize("error", [UnknownNameError(-2, "?"), ConnectionRefusedError(), TimeoutError()])
def test_a_scheduler_that_is_not_there_yet_may_be_waited_for(error: OSError) -> None:
    def towards(other: Address) -> str:
        raise error

    with pytest.raises(type(error)):
        listen_address(Config(scheduler="tcp://trainer:9191"), "server", towards)


def test_the_way_to_this_host() -> None:
    assert address_towards(parse_address("tcp://127.0.0.1:9")) == "127.0.0.1"


CLUSTER = """
ip link set lo up && ip address add 10.99.0.1/32 dev lo || exit 77
"$1" -m kvd_cli.main server --scheduler tcp://10.98.0.1:9191 2>nowhere; echo $? >code
"$1" -m kvd_cli.main scheduler --scheduler tcp://10.99.0.1:9191 --num-workers 1 --num-servers 1 2>scheduler &
"$1" -m kvd_cli.main server --scheduler tcp://10.99.0.1:9191 --ready-file ready 2>server &
for _ in $(seq 300); do test -e ready && break; sleep 0.1; done
cp ready address
kill %1 %2
wait
"""


def test_a_server_joins_a_scheduler_that_is_not_on_loopback(tmp_path: Path) -> None:
    """In a network namespace of its own, which has no way out."""
    unshare = shutil.which("unshare")
    allowed = unshare and not subprocess.run([unshare, "-rn", "true"], capture_output=True, check=False).returncode
    if unshare is None or not allowed or shutil.which("ip") is None:
        pytest.skip("this needs ip (iproute2), and a kernel that lets this user make a network namespace")
    subprocess.run(
        [unshare, "-rn", "bash", "-c", CLUSTER, "bash", sys.executable],
        env=without_settings(KVD_LOG_FORMAT="text"),
        cwd=tmp_path,
        timeout=DEADLINE_S,
        check=True,
    )
    told = {name: (tmp_path / name).read_text() for name in ("nowhere", "server")}
    assert (tmp_path / "code").read_text().split() == ["2"], told
    assert "Network is unreachable): check the network, or give --bind" in told["nowhere"]
    assert (tmp_path / "address").read_text().startswith("tcp://10.99.0.1:"), told
    assert "no --bind is given: listening on 10.99.0.1, from where" in told["server"]
