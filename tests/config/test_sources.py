"""Where a value comes from, and what is refused with its origin."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvd.config import Config, load, rank_contradictions
from kvd.errors import ConfigError

Refusal = Callable[..., ConfigError]
NOTHING: Mapping[str, str] = {}


def test_defaults_are_consistent_and_say_so() -> None:
    loaded = load(environ=NOTHING)
    assert loaded.config == Config()
    assert set(loaded.origin) == {field.name for field in dataclasses.fields(Config)}
    assert set(loaded.origin.values()) == {"default"}
    assert loaded.notes == ()


def test_each_source_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    (tmp_path / "kvd.toml").write_text("# sizes\n\nnum_workers = 3\n")
    environ = {"DMLC_NUM_WORKER": "2", "WORLD_SIZE": "1"}

    def found(overrides: Mapping[str, object], environ: Mapping[str, str]) -> tuple[int, str]:
        loaded = load(overrides, environ=environ)
        return loaded.config.num_workers, loaded.origin["num_workers"]

    assert found({"num_workers": 5}, environ | {"KVD_NUM_WORKERS": "4"}) == (5, "flag")
    assert found({}, environ | {"KVD_NUM_WORKERS": "4"}) == (4, "KVD_NUM_WORKERS")
    assert found({}, environ) == (3, "kvd.toml:3")
    (tmp_path / "kvd.toml").unlink()
    assert found({}, environ) == (2, "DMLC_NUM_WORKER")
    assert found({}, {"WORLD_SIZE": "1"}) == (1, "WORLD_SIZE")
    assert found({}, {}) == (0, "default")


def test_the_caller_names_the_origin_of_overrides() -> None:
    assert load({"merge": "mean"}, environ=NOTHING, overrides_from="keyword").origin["merge"] == "keyword"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SLICE_BYTES", "512KiB")
    assert load().config.slice_bytes == 512 << 10


def test_none_among_the_overrides_is_a_value_only_where_it_can_be_one() -> None:
    environ = {"KVD_STALENESS": "3", "KVD_MERGE": "mean"}
    loaded = load({"staleness": None, "merge": None}, environ=environ)
    assert (loaded.config.staleness, loaded.origin["staleness"]) == (None, "flag")
    assert (loaded.config.merge, loaded.origin["merge"]) == ("mean", "KVD_MERGE")


def test_an_empty_variable_is_not_set_unless_empty_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "kvd.toml").write_text('merge = "mean"\nstate_dir = "/state"\n')
    loaded = load(environ={"KVD_MERGE": "", "KVD_STATE_DIR": "", "KVD_NUM_WORKERS": " ", "RANK": ""})
    assert (loaded.config.merge, loaded.origin["merge"]) == ("mean", "kvd.toml:1")
    assert (loaded.config.state_dir, loaded.origin["state_dir"]) == ("", "KVD_STATE_DIR")
    assert loaded.origin["num_workers"] == loaded.origin["preferred_rank"] == "default"


@pytest.mark.parametrize(
    ("environ", "name", "value", "origin"),
    [
        ({"DMLC_ROLE": "server"}, "role", "server", "DMLC_ROLE"),
        ({"DMLC_ROLE": "server", "KVD_ROLE": "worker"}, "role", "worker", "KVD_ROLE"),
        ({"DMLC_NUM_SERVER": "2"}, "num_servers", 2, "DMLC_NUM_SERVER"),
        ({"RANK": "3"}, "preferred_rank", 3, "RANK"),
        ({"LOCAL_RANK": "1"}, "local_rank", 1, "LOCAL_RANK"),
        ({"KVD_PARENT_PID": "77"}, "parent_pid", 77, "KVD_PARENT_PID"),
        (
            {"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000"},
            "scheduler",
            "tcp://10.0.0.1:9000",
            "DMLC_PS_ROOT_URI",
        ),
        ({"DMLC_PS_ROOT_URI": "::1", "DMLC_PS_ROOT_PORT": "9"}, "scheduler", "tcp://[::1]:9", "DMLC_PS_ROOT_URI"),
        (
            {"DMLC_PS_ROOT_URI": "10.0.0.1", "KVD_SCHEDULER": "ipc:///run/kvd"},
            "scheduler",
            "ipc:///run/kvd",
            "KVD_SCHEDULER",
        ),
    ],
)
def test_variables_of_other_launchers(environ: dict[str, str], name: str, value: object, origin: str) -> None:
    loaded = load(environ=environ)
    assert (getattr(loaded.config, name), loaded.origin[name]) == (value, origin)


@pytest.mark.parametrize("text", ["pod-0", "-1", "x", "1.5", "0x1", "9" * 30])
def test_ranks_that_are_no_numbers_are_not_meant_for_kvd(text: str) -> None:
    loaded = load(environ=dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK"), text))
    assert loaded.config == Config()
    assert set(loaded.origin.values()) == {"default"}


def test_what_only_kvd_reads_has_to_be_right(refusal: Refusal) -> None:
    for name in ("DMLC_NUM_WORKER", "KVD_PREFERRED_RANK"):
        assert f"(from {name}): expected a whole number" in str(refusal(environ={name: "pod-0"}))


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, {}),
        ({"RANK": "1", "WORLD_SIZE": "4"}, {}),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": 0, "WORLD_SIZE": 1}),
        ({"RANK": "1", "WORLD_SIZE": "8"}, {"WORLD_SIZE": 8}),
        ({"RANK": "2"}, {"RANK": 2}),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, {"SLURM_PROCID": 3}),
        ({"RANK": "pod-0", "WORLD_SIZE": "x", "SLURM_PROCID": "3"}, {"SLURM_PROCID": 3}),
        ({"RANK": "-1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "y"}, {"OMPI_COMM_WORLD_RANK": 0}),
        # programs read the variables of torch, if there are any
        ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {}),
    ],
)
def test_variables_that_contradict_the_rank(environ: dict[str, str], found: dict[str, int]) -> None:
    assert rank_contradictions(1, 4, environ) == found


@pytest.mark.parametrize(
    ("present", "missing"),
    [("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"), ("DMLC_PS_ROOT_PORT", "DMLC_PS_ROOT_URI")],
)
def test_half_an_address_is_refused(present: str, missing: str, refusal: Refusal) -> None:
    error = refusal(environ={present: "1"})
    assert missing in str(error)
    assert error.setting == "scheduler"


def test_files_are_looked_for_in_order(tmp_path: Path) -> None:
    named, explicit, etc = tmp_path / "named.toml", tmp_path / "explicit.toml", tmp_path / "etc" / "kvd.toml"
    etc.parent.mkdir()
    for number, path in enumerate((etc, tmp_path / "kvd.toml", named, explicit), start=1):
        path.write_text(f"rounds_ahead = {number}\n")
    environ = {"KVD_CONFIG": str(named)}
    assert load(environ=environ, file=explicit).origin["rounds_ahead"] == f"{explicit}:1"
    assert load(environ=environ).config.rounds_ahead == 3
    assert load(environ=NOTHING).config.rounds_ahead == 2
    (tmp_path / "kvd.toml").unlink()
    assert load(environ=NOTHING).config.rounds_ahead == 1


def test_a_file_in_an_unreadable_directory_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_args: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", closed)
    assert load(environ=NOTHING).config == Config()


def test_every_kind_of_value_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "kvd.toml").write_text(
        'scheduler = "tcp://db:1"\ninsecure = true\nslice_bytes = 65536\n"credit_bytes" = "2MiB"\n'
        'heartbeat_interval_s = 1\nserver_timeout_s = 2.5\nworker_timeout_s = "4s"\nstaleness = "none"\n'
    )
    loaded = load(environ=NOTHING)
    assert loaded.config == Config(
        scheduler="tcp://db:1",
        insecure=True,
        slice_bytes=65536,
        credit_bytes=2 << 20,
        heartbeat_interval_s=1.0,
        server_timeout_s=2.5,
        worker_timeout_s=4.0,
    )
    assert isinstance(loaded.config.heartbeat_interval_s, float)
    assert loaded.origin["credit_bytes"] == "kvd.toml:4"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slice_byte = 1\n", "slice_byte (from kvd.toml:1) is not a setting: did you mean slice_bytes?"),
        ("\n[server]\nbind = 'x'\n", "server (from kvd.toml:2) is not a setting"),
        ("merge = sum\n", "kvd.toml as TOML"),
        ("\nmerge = 'max'\n", "merge = 'max' (from kvd.toml:2): expected sum or mean or weighted"),
        (
            "num_workers = true\n",
            "num_workers = True (from kvd.toml:1): expected a whole number that fits 64 bits, at least 0",
        ),
        ("num_workers = 1.0\n", "num_workers = 1.0"),
        ("scheduler = ['a']\n", "scheduler = ['a']"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str, refusal: Refusal) -> None:
    (tmp_path / "kvd.toml").write_text(text)
    assert says in str(refusal())


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path, refusal: Refusal) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load(environ=NOTHING, file=tmp_path / "absent.toml")
    assert "absent.toml" in str(refusal(environ={"KVD_CONFIG": "absent.toml"}))
    (tmp_path / "kvd.toml").write_bytes(b"\xff\xfe")
    assert "as TOML" in str(refusal())


def test_an_unknown_keyword_gets_the_closest_name(refusal: Refusal) -> None:
    error = refusal({"worker_timeout": 3})
    assert "did you mean worker_timeout_s?" in str(error)
    assert error.setting == "worker_timeout"
    assert "kvd config show" in str(refusal({"xyzzy": 3}))


def test_a_misspelt_variable_is_noted_and_a_foreign_one_is_not() -> None:
    environ = {"KVD_SLICE_BYTE": "1MiB", "KVD_WORKER_COMMAND": "python train.py", "KVD_CONFIG": "", "PATH": "/bin"}
    assert load(environ=environ).notes == ("KVD_SLICE_BYTE is not a setting: did you mean KVD_SLICE_BYTES?",)
