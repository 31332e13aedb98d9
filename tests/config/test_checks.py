"""Values that must agree, and what daemons check."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.config import Config, machine_memory_bytes
from kvd.errors import ConfigError

Refusal = Callable[..., ConfigError]


@pytest.mark.parametrize(
    ("overrides", "name", "advice"),
    [
        ({"round_timeout_s": 59}, "round_timeout_s", "set it to 60 or more"),
        ({"request_timeout_s": 21}, "request_timeout_s", "set it to more than 21 (worker_timeout_s + heart"),
        (
            {"request_timeout_s": 30, "server_timeout_s": 30},
            "request_timeout_s",
            "more than 31 (server_timeout_s + heart",
        ),
        ({"server_timeout_s": 1.5}, "server_timeout_s", "set it to 2 or more"),
        ({"worker_timeout_s": 1.5}, "worker_timeout_s", "set it to 2 or more"),
        ({"slice_bytes": 4100}, "slice_bytes", "4096 is"),
        ({"slice_bytes": 70001}, "slice_bytes", "69952 is"),
        ({"credit_bytes": "512KiB"}, "credit_bytes", "slice_bytes = 4MiB or more"),
        ({"memory_limit_bytes": "1MiB"}, "memory_limit_bytes", "credit_bytes = 32MiB or more, or to 0"),
        (
            {"replicas": 2, "num_servers": 1},
            "replicas",
            "2 servers, one for each copy, and there is 1 server: set num_s",
        ),
        ({"on_worker_loss": "shrink", "num_workers": 1}, "on_worker_loss", "needs at least 2 workers"),
        ({"quorum": 4, "num_workers": 3}, "quorum", "is more than num_workers = 3: set it to 2 or less"),
        ({"quorum": 2, "staleness": 1}, "quorum", "is about the rounds of dist_sync, and staleness = 1"),
        ({"quorum": 1, "quorum_grace_s": "30m"}, "quorum_grace_s", "is not shorter than round_timeout_s = 1800"),
        ({"max_workers": 2, "num_workers": 3}, "max_workers", "with which the job begins"),
        ({"node_id": "two words"}, "node_id", "without spaces"),
        ({"node_id": "n" * 129}, "node_id", "128"),
        ({"scheduler": "127.0.0.1:9191"}, "scheduler", "tcp://HOST:PORT or ipc://PATH"),
        ({"scheduler": ""}, "scheduler", "tcp://HOST:PORT or ipc://PATH"),
        ({"scheduler": "udp://a:1"}, "scheduler", "tcp://HOST:PORT or ipc://PATH"),
        ({"scheduler": "tcp://host"}, "scheduler", "HOST:PORT"),
        ({"scheduler": "tcp://host:65536"}, "scheduler", "0 to 65535"),
        ({"scheduler": "tcp://::1:80"}, "scheduler", "brackets"),
        ({"scheduler": "tcp://host:0"}, "scheduler", "give port 0 to bind"),
        ({"scheduler": "tcp://0.0.0.0:9191"}, "scheduler", "name the address that others connect to"),
        ({"bind": "tcp://a b:1"}, "bind", "HOST:PORT"),
        ({"bind": "ipc://"}, "bind", "1 to 107 bytes"),
        ({"bind": "ipc:///" + "x" * 107}, "bind", "1 to 107 bytes"),
    ],
)
def test_values_that_disagree(overrides: dict[str, object], name: str, advice: str, refusal: Refusal) -> None:
    error = refusal(overrides)
    assert error.setting == name
    assert advice in str(error)
    assert name in str(error)
    assert f"{name} from flag" in str(error)


def test_a_disagreement_names_the_origin_of_both(refusal: Refusal) -> None:
    error = refusal({"slice_bytes": "2MiB"}, {"KVD_CREDIT_BYTES": "1MiB"})
    assert str(error).endswith("(slice_bytes from flag, credit_bytes from KVD_CREDIT_BYTES)")


def test_timeouts_that_just_fit() -> None:
    Config(heartbeat_interval_s=0.05, server_timeout_s=0.1, worker_timeout_s=0.1, request_timeout_s=0.2)


def test_a_quorum_without_the_number_of_workers_is_left_to_the_scheduler() -> None:
    Config(quorum=4)
    Config(quorum=3, num_workers=3)  # as good as none, and the scheduler says so
    Config(quorum_grace_s="1h")  # type: ignore[arg-type]


def test_the_scheduler_must_know_the_cluster() -> None:
    with pytest.raises(ConfigError, match="--num-workers N") as caught:
        Config(num_servers=1).check_role("scheduler")
    assert caught.value.setting == "num_workers"
    with pytest.raises(ConfigError, match="--num-servers N"):
        Config(num_workers=1).check_role("scheduler")
    Config(num_workers=1, num_servers=1).check_role("scheduler")
    Config().check_role("server")


@pytest.mark.parametrize("name", ["keyfile", "allowed_keys"])
def test_keys_and_insecure_contradict_each_other(name: str) -> None:
    with pytest.raises(ConfigError, match="insecure is set, which turns keys off") as caught:
        Config(insecure=True, **{name: "a file"})  # type: ignore[arg-type]
    assert caught.value.setting == name


def test_memory_bound() -> None:
    assert Config(memory_limit_bytes=1 << 30).memory_bound_bytes() == 1 << 30
    assert Config().memory_bound_bytes() == machine_memory_bytes() * 3 // 4
    assert 1 << 20 < machine_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "groups" / "system.slice" / "kvd.service"
    inside.mkdir(parents=True)
    (inside / "memory.max").write_text("max\n")
    (inside.parent / "memory.max").write_text("1048576\n")
    (tmp_path / "cgroup").write_text("0::/system.slice/kvd.service\n")
    assert machine_memory_bytes(cgroup=tmp_path / "cgroup", groups=tmp_path / "groups") == 1 << 20
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine_memory_bytes(cgroup=tmp_path / "absent", groups=tmp_path / "groups") == everything
