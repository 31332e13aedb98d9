"""The command line without a cluster: flags, settings, errors, completion."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

from kvd import __version__
from kvd.config import Config, all_settings
from kvd.errors import ConfigError, ConnectError, KeyNotFound, KvdError, RequestTimeout
from kvd.node.daemon.exit_codes import exit_code_of
from kvd.observe import log
from kvd_cli import cluster
from kvd_cli.options import OF_ONE_PROCESS, Options, with_deadline
from kvd_cli.program import COMMANDS, cli

Kvd = Callable[..., Result]
Spawn = Callable[..., "subprocess.Popen[str]"]


def flags_of(*names: str) -> set[str]:
    command: click.Command = cli
    context = click.Context(cli)
    for name in names:
        assert isinstance(command, click.Group)
        found = command.get_command(context, name)
        assert found is not None
        command = found
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}


# --- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_every_setting_of_a_daemon_is_a_flag(role: str) -> None:
    wanted = {setting.flag for setting in all_settings() if role in setting.used_by and setting.name != "role"}
    assert wanted <= flags_of(role)


def test_a_server_is_not_offered_what_only_workers_use(kvd: Kvd) -> None:
    assert "--credit-bytes" in flags_of("worker")
    assert "--credit-bytes" not in flags_of("server")
    result = kvd("server", "--credit-bytes", "64MiB")
    assert result.exit_code == 2
    assert "No such option" in result.stderr


def all_commands(command: click.Command = cli, *path: str) -> Iterator[tuple[str, ...]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from all_commands(found, *path, name)
    if path:
        yield path


def test_an_output_format_is_offered_where_there_is_output() -> None:
    silent = {
        "scheduler", "server", "worker", "launch", "shutdown", "jobs end", "init", "push", "barrier", "key export",
        "completion", "top",
    }  # fmt: skip
    without = {" ".join(path) for path in all_commands() if not flags_of(*path) & {"--output", "--format"}}
    assert without == silent | {"config", "snapshot"}


def test_the_daemons_of_a_job_have_no_port_for_metrics_in_common(kvd: Kvd) -> None:
    result = kvd("launch", "-n", "1", "--metrics-bind", "127.0.0.1:9190", "--", "true")
    assert result.exit_code == 2
    assert "need ports of their own: give port 0" in result.stderr


@pytest.mark.parametrize(
    ("role", "others"),
    [
        ("scheduler", ["--credit-bytes", "--notice-s", "--round-timeout-s"]),
        ("server", ["--merge", "--staleness", "--rounds-ahead", "--num-shards", "--worker-timeout-s", "--notice-s"]),
        ("worker", ["--server-timeout-s", "--worker-timeout-s", "--on-worker-loss", "--quorum"]),
        ("demo", ["--metrics-bind", "--merge", "--staleness", "--snapshot-every", "--restore"]),
        ("bench", ["--merge", "--staleness", "--snapshot-every", "--restore"]),
        ("key show", ["--scheduler", "--timeout", "--job"]),
        ("completion", ["--scheduler", "--timeout", "--config"]),
        ("launch", ["--on"]),
    ],
)
def test_what_would_change_nothing_is_not_offered(role: str, others: list[str], kvd: Kvd) -> None:
    assert not set(others) & flags_of(*role.split())
    shown = kvd(*role.split(), "--help").stdout
    assert not [flag for flag in others if f" {flag} " in shown]


def test_a_job_has_the_flags_that_its_processes_share() -> None:
    wanted = {setting.flag for setting in all_settings() if setting.name not in OF_ONE_PROCESS}
    assert wanted | {"-n", "-s", "--restart"} <= flags_of("launch")
    assert "--node-id" not in flags_of("launch")


@pytest.mark.parametrize(
    "name",
    [
        *[name for name in COMMANDS if name not in ("config", "bench", "snapshot", "key", "keypair", "completion")],
        "snapshot save",
        "snapshot restore",
    ],
)
def test_commands_of_a_cluster_have_the_common_options(name: str) -> None:
    assert {"-S", "--scheduler", "--timeout", "--config", "-v", "--verbose"} <= flags_of(*name.split())


def test_help_names_every_command(kvd: Kvd) -> None:
    result = kvd("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout
        assert kvd(name, "--help").exit_code == 0
    assert "[KVD_SLICE_BYTES; default: 4MiB]" in " ".join(kvd("scheduler", "--help").stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["scheduler", "--slice-bytes", "many"],
        ["scheduler", "--merge", "median"],
        ["status", "--timeout", "soon"],
        ["worker"],
        ["launch", "-n", "0", "-s", "1", "--", "true"],
        ["launch", "-s", "1", "--", "true"],
        ["demo", "--workers", "5", "--batch", "4"],
        ["launch", "-n", "1", "-s", "1"],
        ["completion", "tcsh"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], kvd: Kvd) -> None:
    result = kvd(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error: " in result.stderr


@pytest.mark.parametrize("word", ["json", "table"])
@pytest.mark.parametrize("command", [("pull", "w"), ("pushpull", "w", "in.npy")])
def test_an_output_format_is_not_taken_for_a_file(command: tuple[str, ...], word: str, kvd: Kvd) -> None:
    result = kvd(*command, "-o", word)
    assert (result.exit_code, result.stdout) == (2, "")
    said = " ".join(result.stderr.split())
    assert f"-o takes a file here. For the output format give --format {word}" in said
    assert f"to write to a file of this name, -o ./{word}" in said


def test_the_version_needs_no_installed_distribution(kvd: Kvd, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    result = kvd("--version")
    assert (result.exit_code, result.stdout) == (0, f"kvd, version {__version__}\n")


def test_a_wrong_setting_is_2(kvd: Kvd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SLICE_BYTES", "4097")
    result = kvd("config", "show")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: slice_bytes = 4097")


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_and_where_they_come_from(kvd: Kvd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("num_servers = 3\nmerge = 'mean'\n")
    monkeypatch.setenv("KVD_NUM_WORKERS", "4")
    monkeypatch.setenv("KVD_MERGE", "weighted")
    result = kvd(
        "config", "show", "--origin", "-o", "json", "--config", file, "--slice-bytes", "64KiB", "--timeout", "90s"
    )
    shown = json.loads(result.stdout)
    assert shown["slice_bytes"] == {"value": 65536, "origin": "flag"}
    assert shown["num_workers"] == {"value": 4, "origin": "KVD_NUM_WORKERS"}
    assert shown["num_servers"] == {"value": 3, "origin": f"{file}:1"}
    assert shown["merge"] == {"value": "weighted", "origin": "KVD_MERGE"}
    assert shown["staleness"] == {"value": None, "origin": "default"}
    assert shown["request_timeout_s"] == {"value": 90.0, "origin": "flag"}
    assert list(shown) == [setting.name for setting in all_settings()]


def test_settings_as_a_table(kvd: Kvd) -> None:
    plain = kvd("config", "show", "--staleness", "none", "--insecure")
    lines = [line.split() for line in plain.stdout.splitlines()]
    assert lines[0] == ["SETTING", "VALUE"]
    assert ["slice_bytes", "4MiB"] in lines
    assert ["insecure", "true"] in lines
    with_origin = kvd("config", "show", "--origin", "--no-insecure")
    assert ["insecure", "false", "flag"] in [line.split() for line in with_origin.stdout.splitlines()]
    values = json.loads(kvd("config", "show", "-o", "json").stdout)
    assert values["slice_bytes"] == 4 << 20


def test_options_of_the_group_hold_for_the_command(kvd: Kvd) -> None:
    result = kvd("-S", "tcp://127.0.0.1:1", "-o", "json", "config", "show")
    assert json.loads(result.stdout)["scheduler"] == "tcp://127.0.0.1:1"
    result = kvd("-S", "tcp://127.0.0.1:1", "config", "show", "-o", "json", "-S", "tcp://127.0.0.1:2")
    assert json.loads(result.stdout)["scheduler"] == "tcp://127.0.0.1:2", "the command's own option wins"


def test_a_misspelt_variable_is_noted_on_stderr(kvd: Kvd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SLICE_BYTE", "1")
    result = kvd("config", "show", "-o", "json")
    json.loads(result.stdout)
    assert "did you mean KVD_SLICE_BYTES?" in result.stderr


def test_a_daemon_notes_a_misspelt_variable_once(spawn: Spawn) -> None:
    flags = ["--num-workers", "1", "--num-servers", "1", "--bind", "tcp://8.8.8.8:0", "--insecure"]
    process = spawn("scheduler", *flags, environment={"KVD_SLICE_BYTE": "1"})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert err.count("did you mean KVD_SLICE_BYTES?") == 1
    assert "cannot listen at tcp://8.8.8.8:0: this machine has no such address" in err


@pytest.mark.parametrize("timeout_s", [0.02, 0.5, 3.0, 1000.0])
def test_any_deadline_gives_consistent_settings(timeout_s: float) -> None:
    if timeout_s < 0.2:  # shorter than two heartbeats can be
        with pytest.raises(ConfigError):
            with_deadline(Config(), timeout_s)
    else:
        config = with_deadline(Config(), timeout_s)
        assert (config.request_timeout_s, config.round_timeout_s) == (timeout_s, timeout_s)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (ConnectError("x"), 3),
        (RequestTimeout("x"), 4),
        (KeyNotFound("x"), 1),
        (KvdError("x"), 1),
    ],
)
def test_exit_codes(error: KvdError, code: int) -> None:
    assert exit_code_of(error) == code


def raising(error: BaseException) -> Callable[..., Any]:
    def observer(doing: str, job: str = "") -> Any:
        raise error

    return observer


def test_an_error_is_one_line_and_with_v_a_traceback(kvd: Kvd, monkeypatch: pytest.MonkeyPatch) -> None:
    error = KvdError("it is broken")
    error.add_note("and something else")
    monkeypatch.setattr(cluster, "observer", raising(error))
    result = kvd("status")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: it is broken\n  and something else\n"
    result = kvd("status", "-v")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "it is broken" in result.stderr


def test_an_interrupt_is_130(kvd: Kvd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "observer", raising(KeyboardInterrupt()))
    result = kvd("status")
    assert (result.exit_code, result.output) == (130, "")


def test_nobody_answers_is_3_within_the_deadline(spawn: Spawn) -> None:
    process = spawn("status", "-S", "tcp://127.0.0.1:9", "--timeout", "1s")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")
    assert err.startswith("error: no scheduler answers at tcp://127.0.0.1:9")
    assert "kvd scheduler" in err


# --- completion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, kvd: Kvd) -> None:
    result = kvd("completion", shell)
    assert result.exit_code == 0
    assert f"_KVD_COMPLETE={shell}_complete" in result.stdout


def test_completion_completes(spawn: Spawn) -> None:
    words = {"_KVD_COMPLETE": "bash_complete", "COMP_WORDS": "kvd scheduler --merge w", "COMP_CWORD": "3"}
    out, _ = spawn(environment=words).communicate(timeout=60)
    assert out.split() == ["plain,weighted"]


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ((), "info"),
        (("-v",), "debug"),
        (("-v", "--log-level", "warning"), "warning"),
        (("--log-level", "error"), "error"),
    ],
)
def test_verbose_logs_everything_unless_a_level_is_given(kvd: Kvd, flags: tuple[str, ...], level: str) -> None:
    assert json.loads(kvd("config", "show", "-o", "json", *flags).stdout)["log_level"] == level


@pytest.mark.parametrize(("given", "level"), [({}, "warning"), ({"log_level": "info"}, "info")])
def test_a_client_command_logs_warnings_unless_a_level_is_given(
    given: dict[str, object], level: str, monkeypatch: pytest.MonkeyPatch, clean_environment: None
) -> None:
    configured: list[str] = []
    monkeypatch.setattr(log, "configure", lambda form, level, name: configured.append(level))
    Options(settings=given).load_client()
    assert configured == [level]
