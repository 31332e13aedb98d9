"""The settings: where they come from, what they accept, what they refuse and how the refusal helps."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import config as config_module
from kvd.config import (
    Address,
    Config,
    Setting,
    child_environment,
    load,
    machine_memory_bytes,
    parse_address,
    settings,
    systemd_environment,
    terminal_colour,
)
from kvd.errors import ConfigError

NOTHING: Mapping[str, str] = {}


@pytest.fixture(autouse=True)
def _no_files_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_module, "FILES", (Path("kvd.toml"), tmp_path / "etc" / "kvd.toml"))


def setting(name: str) -> Setting:
    return next(s for s in settings() if s.name == name)


def refusal(overrides: Mapping[str, object] = {}, environ: Mapping[str, str] = NOTHING) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(overrides, environ=environ)
    return caught.value


# --- where a value comes from ----------------------------------------------------------------------------------------


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
    (tmp_path / "kvd.toml").write_text('merge = "mean"\nmetrics_bind = "127.0.0.1:9100"\n')
    loaded = load(environ={"KVD_MERGE": "", "KVD_METRICS_BIND": "", "KVD_NUM_WORKERS": " ", "RANK": ""})
    assert (loaded.config.merge, loaded.origin["merge"]) == ("mean", "kvd.toml:1")
    assert (loaded.config.metrics_bind, loaded.origin["metrics_bind"]) == ("", "KVD_METRICS_BIND")
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


@pytest.mark.parametrize(
    ("present", "missing"),
    [("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"), ("DMLC_PS_ROOT_PORT", "DMLC_PS_ROOT_URI")],
)
def test_half_an_address_is_refused(present: str, missing: str) -> None:
    error = refusal(environ={present: "1"})
    assert missing in str(error)
    assert error.setting == "scheduler"


# --- the file --------------------------------------------------------------------------------------------------------


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


def test_a_closed_folder_holds_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("slice_byte = 1\n", "slice_byte (from kvd.toml:1) is no setting: did you mean slice_bytes?"),
        ("\n[server]\nbind = 'x'\n", "server (from kvd.toml:2) is no setting"),
        ("merge = sum\n", "kvd.toml is not TOML"),
        ("\nmerge = 'max'\n", "merge = 'max' (from kvd.toml:2): expected sum or mean or weighted"),
        ("num_workers = true\n", "num_workers = True (from kvd.toml:1): expected a whole number, at least 0"),
        ("num_workers = 1.0\n", "num_workers = 1.0"),
        ("scheduler = ['a']\n", "scheduler = ['a']"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "kvd.toml").write_text(text)
    assert says in str(refusal())


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load(environ=NOTHING, file=tmp_path / "absent.toml")
    assert "absent.toml" in str(refusal(environ={"KVD_CONFIG": "absent.toml"}))
    (tmp_path / "kvd.toml").write_bytes(b"\xff\xfe")
    assert "is not TOML" in str(refusal())


# --- names that are not settings -------------------------------------------------------------------------------------


def test_an_unknown_keyword_gets_the_closest_name() -> None:
    error = refusal({"worker_timeout": 3})
    assert "did you mean worker_timeout_s?" in str(error)
    assert error.setting == "worker_timeout"
    assert "kvd config show" in str(refusal({"xyzzy": 3}))


def test_a_misspelt_variable_is_noted_and_a_foreign_one_is_not() -> None:
    environ = {"KVD_SLICE_BYTE": "1MiB", "KVD_WORKER_COMMAND": "python train.py", "KVD_CONFIG": "", "PATH": "/bin"}
    assert load(environ=environ).notes == ("KVD_SLICE_BYTE is no setting: did you mean KVD_SLICE_BYTES?",)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 1 << 16),
        ("512KiB", 512 << 10),
        ("512 kib", 512 << 10),
        ("1MiB", 1 << 20),
        ("8M", 8 << 20),
        ("8MB", 8 << 20),
        ("0.5M", 1 << 19),
        ("4096B", 4096),
        ("1G", 1 << 30),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert setting("memory_limit_bytes").parse(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("300ms", 0.3),
        ("2s", 2.0),
        ("1m", 60.0),
        ("1.5 h", 5400.0),
        ("20", 20.0),
        ("0.25", 0.25),
        (3, 3.0),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert setting("worker_timeout_s").parse(text) == seconds


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("no", False), ("0", False)])
def test_booleans(text: str, value: bool) -> None:
    assert load(environ={"KVD_INSECURE": text}).config.insecure is value


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("memory_limit_bytes", "1.3KiB"),
        ("memory_limit_bytes", "0.3B"),
        ("memory_limit_bytes", "-1"),
        ("memory_limit_bytes", "1e6"),
        ("memory_limit_bytes", "9" * 30),
        ("memory_limit_bytes", 1.5),
        ("memory_limit_bytes", "٣"),
        ("slice_bytes", "4095"),
        ("slice_bytes", "17MiB"),
        ("num_workers", "two"),
        ("num_workers", "1_000"),
        ("num_workers", "-1"),
        ("num_workers", True),
        ("num_shards", "0"),
        ("rounds_ahead", 0),
        ("staleness", "-1"),
        ("replicas", 3),
        ("heartbeat_interval_s", "0"),
        ("heartbeat_interval_s", "nan"),
        ("heartbeat_interval_s", float("nan")),
        ("heartbeat_interval_s", float("inf")),
        ("heartbeat_interval_s", "1e999"),
        ("heartbeat_interval_s", "1 day"),
        ("heartbeat_interval_s", True),
        ("heartbeat_interval_s", b"1"),
        ("insecure", "maybe"),
        ("insecure", 1),
        ("shared_memory", "on"),
        ("log_format", "xml"),
        ("log_level", "loud"),
        ("role", "joint"),
        ("on_worker_loss", "ignore"),
        ("scheduler", 9191),
        ("state_dir", "a\0b"),
    ],
)
def test_a_bad_value_is_named_with_its_origin_and_what_is_accepted(name: str, raw: object) -> None:
    error = refusal({name: raw})
    assert error.setting == name
    assert str(error) == f"{name} = {raw!r} (from flag): expected {setting(name).accepted()}"
    with pytest.raises(ConfigError, match="from keyword"):
        Config(**{name: raw})  # type: ignore[arg-type]
    if isinstance(raw, str) and "\0" not in raw:
        assert f"from KVD_{name.upper()}" in str(refusal(environ={f"KVD_{name.upper()}": raw}))


def test_config_takes_text_and_holds_numbers() -> None:
    config = Config(slice_bytes="64KiB", heartbeat_interval_s="250ms", keyfile=Path(__file__))  # type: ignore[arg-type]
    assert (config.slice_bytes, config.heartbeat_interval_s, config.keyfile) == (65536, 0.25, __file__)


# --- values that must agree ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "name", "advice"),
    [
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
        ({"replicas": 2}, "replicas", "set replicas = 1"),
        ({"on_worker_loss": "shrink"}, "on_worker_loss", "set it to fail or wait"),
        ({"node_id": "two words"}, "node_id", "without spaces"),
        ({"node_id": "n" * 129}, "node_id", "128"),
        ({"keyfile": "absent.key"}, "keyfile", "check path and owner"),
        ({"keyfile": "."}, "keyfile", "check path and owner"),
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
        ({"metrics_bind": "9100"}, "metrics_bind", "HOST:PORT"),
    ],
)
def test_values_that_disagree(overrides: dict[str, object], name: str, advice: str) -> None:
    error = refusal(overrides)
    assert error.setting == name
    assert advice in str(error)
    assert name in str(error)
    assert f"{name} from flag" in str(error)


def test_a_disagreement_names_the_origin_of_both() -> None:
    error = refusal({"slice_bytes": "2MiB"}, {"KVD_CREDIT_BYTES": "1MiB"})
    assert str(error).endswith("(slice_bytes from flag, credit_bytes from KVD_CREDIT_BYTES)")


def test_timeouts_that_just_fit() -> None:
    Config(heartbeat_interval_s=0.05, server_timeout_s=0.1, worker_timeout_s=0.1, request_timeout_s=0.2)


# --- what daemons check ----------------------------------------------------------------------------------------------


def test_the_scheduler_must_know_the_cluster() -> None:
    with pytest.raises(ConfigError, match="--num-workers N") as caught:
        Config(num_servers=1).check_role("scheduler")
    assert caught.value.setting == "num_workers"
    with pytest.raises(ConfigError, match="--num-servers N"):
        Config(num_workers=1).check_role("scheduler")
    Config(num_workers=1, num_servers=1).check_role("scheduler")
    Config().check_role("server")


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:0", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://localhost:1", "tcp://lo:1", "ipc:///run/x"],
)
def test_local_addresses_need_nothing(address: str) -> None:
    Config().check_exposure(address)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:1", "tcp://[::]:1", "tcp://10.0.0.1:1", "tcp://db:1"])
def test_other_addresses_need_insecure(address: str) -> None:
    with pytest.raises(ConfigError, match="--insecure") as caught:
        Config().check_exposure(address)
    assert caught.value.setting == "insecure"
    Config(insecure=True).check_exposure(address)


def test_a_keyfile_alone_does_not_open_the_door() -> None:
    with pytest.raises(ConfigError, match="keyfile does not protect"):
        Config(keyfile=__file__).check_exposure("tcp://*:1")


def test_listen_address() -> None:
    config = Config(scheduler="tcp://10.0.0.1:9191")
    assert config.listen_address("scheduler") == "tcp://10.0.0.1:9191"
    assert config.listen_address("server") == "tcp://127.0.0.1:0"
    assert Config(bind="tcp://*:7").listen_address("server") == "tcp://*:7"
    assert Config(bind="tcp://*:7").listen_address("scheduler") == "tcp://*:7"


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


# --- passing settings on ---------------------------------------------------------------------------------------------


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
    assert setting(name).show(value) == text
    assert setting(name).parse(text) == value


def test_what_was_set_back_to_its_default_wins_in_the_child_too(tmp_path: Path) -> None:
    (tmp_path / "kvd.toml").write_text('slice_bytes = "2MiB"\nstaleness = 4\nmetrics_bind = "127.0.0.1:1"\n')
    loaded = load({"slice_bytes": "1MiB", "staleness": None, "metrics_bind": ""}, environ=NOTHING)
    passed = loaded.environment()
    assert passed == {"KVD_SLICE_BYTES": "1MiB", "KVD_STALENESS": "none", "KVD_METRICS_BIND": ""}
    assert load(environ=passed).config == loaded.config


def test_child_environment_keeps_what_systemd_said_to_itself() -> None:
    environ = {"PATH": "/bin", "NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "KVD_ROLE": "x"}
    assert child_environment({"KVD_ROLE": "worker"}, environ) == {"PATH": "/bin", "KVD_ROLE": "worker"}


# --- what the command line is made from ------------------------------------------------------------------------------


def test_every_setting_is_described() -> None:
    for each in settings():
        assert each.help
        assert not each.help.endswith(".")
        assert each.env == "KVD_" + each.name.upper()
        assert each.flag == "--" + each.name.replace("_", "-")
        assert each.used_by or each.name == "cpu_affinity"  # which those who start the roles act on
        assert each.parse(each.default) == each.default
        assert each.parse(each.show(each.default)) == each.default
    assert [s.name for s in settings()] == [field.name for field in dataclasses.fields(Config)]
    assert setting("slice_bytes").unit == "bytes"
    assert setting("worker_timeout_s").kind == "duration"
    assert setting("staleness").optional
    assert setting("role").accepted() == "nothing or scheduler or server or worker"


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:9191", Address("tcp", host="127.0.0.1", port=9191)),
        ("tcp://*:0", Address("tcp", host="*", port=0)),
        ("tcp://[fe80::1%eth0]:80", Address("tcp", host="fe80::1%eth0", port=80)),
        ("ipc:///run/kvd/scheduler", Address("ipc", path="/run/kvd/scheduler")),
        ("ipc://@kvd", Address("ipc", path="@kvd")),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


# --- the rest of the environment -------------------------------------------------------------------------------------


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
