"""The declarations, and how settings are passed on to child processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.config import Config, all_settings, child_environment, load, named_setting

NOTHING: Mapping[str, str] = {}


def test_every_setting_is_described() -> None:
    for each in all_settings():
        assert each.help
        assert not each.help.endswith(".")
        assert each.env == "KVD_" + each.name.upper()
        assert each.flag == "--" + each.name.replace("_", "-")
        assert each.used_by or each.name == "cpu_affinity"  # which those who start the roles act on
        assert each.parse(each.default) == each.default
        assert each.parse(each.show(each.default)) == each.default
    assert [s.name for s in all_settings()] == [field.name for field in dataclasses.fields(Config)]
    assert named_setting("slice_bytes").unit == "bytes"
    assert named_setting("worker_timeout_s").kind == "duration"
    assert named_setting("staleness").optional
    assert named_setting("role").accepted() == "nothing or scheduler or server or worker"


def test_environment_names_only_what_is_not_the_default() -> None:
    assert Config().environment() == {}
    assert Config(slice_bytes=512 << 10, staleness=0, insecure=True, heartbeat_interval_s=0.5).environment() == {
        "KVD_SLICE_BYTES": "512KiB",
        "KVD_STALENESS": "0",
        "KVD_INSECURE": "true",
        "KVD_HEARTBEAT_INTERVAL_S": "0.5s",
    }


@given(
    slice_bytes=st.integers(64, 1 << 18).map(lambda n: n * 64),
    credit_bytes=st.integers(16 << 20, 1 << 45),
    heartbeat=st.floats(0.01, 100.0),
    staleness=st.none() | st.integers(0, 1 << 40),
    insecure=st.booleans(),
    node_id=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=128),
    merge=st.sampled_from(["sum", "mean", "weighted"]),
)
def test_environment_gives_the_same_settings_back(
    slice_bytes: int,
    credit_bytes: int,
    heartbeat: float,
    staleness: int | None,
    insecure: bool,
    node_id: str,
    merge: str,
) -> None:
    config = Config(
        slice_bytes=slice_bytes,
        credit_bytes=credit_bytes,
        heartbeat_interval_s=heartbeat,
        server_timeout_s=2 * heartbeat,
        worker_timeout_s=3 * heartbeat,
        request_timeout_s=5 * heartbeat,
        staleness=staleness,
        insecure=insecure,
        node_id=node_id,
        merge=merge,
    )
    assert load(environ=config.environment()).config == config


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("parent_pid", 4194304, "4194304"),
        ("worker_timeout_s", 1e6, "1e+06s"),
        ("worker_timeout_s", 0.1 + 0.2, "0.30000000000000004s"),
        ("worker_timeout_s", 20.0, "20s"),
        ("slice_bytes", 4160, "4160"),
        ("memory_limit_bytes", 3 << 30, "3GiB"),
        ("memory_limit_bytes", 0, "0"),
        ("staleness", None, "none"),
        ("insecure", False, "false"),
    ],
)
def test_text_of_values(name: str, value: str | int | float | None, text: str) -> None:
    assert named_setting(name).show(value) == text
    assert named_setting(name).parse(text) == value


def test_what_was_set_back_to_its_default_wins_in_the_child_too(tmp_path: Path) -> None:
    (tmp_path / "kvd.toml").write_text('slice_bytes = "2MiB"\nstaleness = 4\nstate_dir = "/state"\n')
    loaded = load({"slice_bytes": "1MiB", "staleness": None, "state_dir": ""}, environ=NOTHING)
    passed = loaded.environment()
    assert passed == {"KVD_SLICE_BYTES": "1MiB", "KVD_STALENESS": "none", "KVD_STATE_DIR": ""}
    assert load(environ=passed).config == loaded.config


def test_child_environment_leaves_out_what_systemd_told_this_process() -> None:
    environ = {"PATH": "/bin", "NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "KVD_ROLE": "x"}
    assert child_environment({"KVD_ROLE": "worker"}, environ) == {"PATH": "/bin", "KVD_ROLE": "worker"}
