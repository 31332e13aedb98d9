"""The systemd units: systemd itself reads them without complaint, the sandbox is tight, the examples hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvd.config import Config, all_settings, load
from kvd.node.keys.keyring import CREDENTIAL

DEPLOY = Path(__file__).parent.parent / "deploy"
UNITS = DEPLOY / "systemd"
SERVICES = ("kvd-scheduler.service", "kvd-server@.service", "kvd-worker@.service")
DROP_INS = ("backoff", "gpu", "jit", "network")
BACKOFF_SINCE = 254
"""The version of systemd that knows `RestartSteps` and `RestartMaxDelaySec`."""
OF_ONE_PROCESS = {"node_id", "state_dir", "preferred_rank", "local_rank", "role", "parent_pid"}
"""Settings that make no sense in a file that all processes of a host read."""


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; `apt-get install systemd` (Debian, Ubuntu) brings it")
    return path


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with a program that exists, which systemd checks."""
    for path in (*UNITS.glob("*.service"), *UNITS.glob("*.target")):
        (tmp_path / path.name).write_text(
            path.read_text().replace("ExecStart=/opt/kvd/bin/kvd ", "ExecStart=/bin/true ")
        )
    return tmp_path


def directives(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


def systemd_version() -> int:
    found = re.search(r"systemd (\d+)", run(tool("systemd-analyze"), "--version").stdout)
    return 0 if found is None else int(found[1])


def complaints(unit: Path) -> list[str]:
    result = run(tool("systemd-analyze"), "verify", "--man=no", unit)
    # units of this machine may be wrong in ways of their own
    found = [line for line in result.stdout.splitlines() if "kvd" in line]
    return found or ([result.stdout] if result.returncode else [])


# --- what systemd says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SERVICES, "kvd.target"])
def test_verify_is_clean(units: Path, name: str) -> None:
    assert complaints(units / name) == []


def test_verify_would_complain(units: Path) -> None:
    with (units / "kvd-scheduler.service").open("a") as unit:
        unit.write("\n[Service]\nNoSuchDirective=yes\n")
    assert any("NoSuchDirective" in line for line in complaints(units / "kvd-scheduler.service"))


@pytest.mark.parametrize("drop_in", DROP_INS)
@pytest.mark.parametrize("name", SERVICES)
def test_drop_ins_verify(units: Path, name: str, drop_in: str) -> None:
    folder = units / f"{name}.d"
    folder.mkdir()
    shutil.copy(UNITS / f"{drop_in}.conf.example", folder / f"{drop_in}.conf")
    found = complaints(units / name)
    if drop_in == "backoff" and systemd_version() < BACKOFF_SINCE:
        unknown = re.findall(r"Unknown key(?: name)? '(\w+)'", "\n".join(found))
        assert (len(found), unknown) == (2, ["RestartSteps", "RestartMaxDelaySec"])
    else:
        assert found == []


@pytest.mark.parametrize("name", SERVICES)
def test_exposure_is_at_most_1_5(units: Path, name: str) -> None:
    analyze = tool("systemd-analyze")
    if systemd_version() < 250:
        pytest.skip("systemd-analyze of systemd 250 or newer is needed to judge a unit that is not loaded")
    tenths = "--threshold=15"
    result = run(analyze, "security", "--no-pager", "--offline=yes", tenths, units / name)
    score = re.search(r"Overall exposure level for \S+: ([0-9.]+)", result.stdout)
    assert score, result.stdout
    assert float(score[1]) <= 1.5
    assert result.returncode == 0, result.stdout


def test_enabling_ties_the_instances_to_the_target(tmp_path: Path) -> None:
    """The commands of deploy/README.md, on a file system of their own."""
    systemctl, installed = tool("systemctl"), tmp_path / "etc" / "systemd" / "system"
    installed.mkdir(parents=True)
    for path in (*UNITS.glob("*.service"), *UNITS.glob("*.target")):
        shutil.copy(path, installed)
    enabled = [
        "kvd.target",
        "kvd-scheduler.service",
        "kvd-server@0.service",
        "kvd-server@1.service",
        "kvd-worker@0.service",
    ]
    result = run(systemctl, f"--root={tmp_path}", "enable", *enabled)
    assert result.returncode == 0, result.stdout
    assert [path.name for path in (installed / "multi-user.target.wants").iterdir()] == ["kvd.target"]
    assert sorted(path.name for path in (installed / "kvd.target.wants").iterdir()) == sorted(enabled[1:])
    templates = ["kvd.target", *SERVICES]
    result = run(systemctl, f"--root={tmp_path}", "disable", *templates)
    assert result.returncode == 0, result.stdout
    assert not [path for path in installed.rglob("*") if path.is_symlink()]


def test_the_account_can_be_made(tmp_path: Path) -> None:
    result = run(tool("systemd-sysusers"), "--dry-run", f"--root={tmp_path}", UNITS / "kvd.sysusers.conf")
    assert result.returncode == 0, result.stdout
    assert "Creating user 'kvd'" in result.stdout


def test_the_folder_of_settings_can_be_made(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the folder belongs to root, and only root can make it so: run the tests as root to check it")
    result = run(tool("systemd-tmpfiles"), "--create", f"--root={tmp_path}", UNITS / "kvd.tmpfiles.conf")
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "etc" / "kvd").stat().st_mode & 0o777 == 0o755


# --- what the units promise ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_tied_watched_and_restarted(name: str) -> None:
    found = dict(directives(UNITS / name))
    expected = {
        "PartOf": "kvd.target",
        "WantedBy": "kvd.target",
        "Type": "notify",
        "NotifyAccess": "main",
        "WatchdogSec": "30s",
        "Restart": "on-failure",
        "RestartPreventExitStatus": "2",
        "User": "kvd",
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found["StateDirectory"] == found["RuntimeDirectory"]


@pytest.mark.parametrize("name", SERVICES)
def test_restarts_have_a_limit_and_come_before_others_give_up(name: str) -> None:
    found = dict(directives(UNITS / name))
    assert (found["StartLimitIntervalSec"], found["StartLimitBurst"]) == ("10min", "30")
    waits = dict(directives(UNITS / "backoff.conf.example"))
    for value in (found["RestartSec"], waits["RestartSec"], waits["RestartMaxDelaySec"]):
        assert 0 < float(value.removesuffix("s")) < Config().worker_timeout_s


def test_the_waits_of_the_drop_in_are_those_that_it_names() -> None:
    """By systemd's rule: in `RestartSteps` equal factors from `RestartSec` to `RestartMaxDelaySec`."""
    text = (UNITS / "backoff.conf.example").read_text()
    waits = dict(directives(UNITS / "backoff.conf.example"))
    first_s, longest_s = (float(waits[name].removesuffix("s")) for name in ("RestartSec", "RestartMaxDelaySec"))
    steps = int(waits["RestartSteps"])
    delays = [round(first_s * (longest_s / first_s) ** (step / steps)) for step in range(steps + 1)]
    assert delays == [1, 2, 4, 8, 16]
    said = " ".join(text.replace("#", "").split())
    assert "after 1 s, the next ones after 2, 4 and 8 s, all others after 16 s" in said


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_gets_the_key_as_a_credential_and_daemons_read_their_list_again(name: str) -> None:
    found = directives(UNITS / name)
    assert [value for key, value in found if key == "LoadCredential"] == [f"{CREDENTIAL}:/etc/kvd/cluster.key"]
    assert ("ExecReload", "/bin/kill -HUP $MAINPID") in found or "worker" in name
    assert not [value for _key, value in found if "KVD_KEYFILE" in value]


def test_the_sandbox_is_the_same_everywhere() -> None:
    def sandbox(name: str) -> list[tuple[str, str]]:
        found = directives(UNITS / name)
        return found[found.index(("NoNewPrivileges", "yes")) : found.index(("WantedBy", "kvd.target"))]

    scheduler, server, worker = (sandbox(name) for name in SERVICES)
    assert scheduler == server == worker


@pytest.mark.parametrize("name", SERVICES)
def test_zeromq_may_list_the_interfaces(name: str) -> None:
    """Where AF_NETLINK is forbidden, libzmq aborts the process when it listens on a named address."""
    assert "AF_NETLINK" in dict(directives(UNITS / name))["RestrictAddressFamilies"].split()


def test_the_command_of_a_worker_is_split_and_not_read_by_a_shell() -> None:
    # "$NAME" as a word of its own is split at spaces with quotes respected; "${NAME}" would be one word
    assert dict(directives(UNITS / "kvd-worker@.service"))["ExecStart"] == (
        "/opt/kvd/bin/kvd worker -- $KVD_WORKER_COMMAND"
    )


# --- the examples ----------------------------------------------------------------------------------------------------


def test_every_variable_is_a_setting() -> None:
    known = {setting.env for setting in all_settings()} | {"KVD_WORKER_COMMAND"}
    for path in UNITS.iterdir():
        used = set(re.findall(r"\bKVD_[A-Z_]+", path.read_text()))
        assert used <= known, path.name


def test_the_example_file_shows_every_default(tmp_path: Path) -> None:
    text = (UNITS / "kvd.toml.example").read_text()
    file = tmp_path / "kvd.toml"
    file.write_text(re.sub(r"(?m)^#(?=\w+ = )", "", text))
    loaded = load(environ={}, file=file)
    assert loaded.config == Config()
    shown = {name for name, origin in loaded.origin.items() if origin != "default"}
    assert shown == {setting.name for setting in all_settings()} - OF_ONE_PROCESS
    file.write_text(text)
    assert set(load(environ={}, file=file).origin.values()) == {"default"}


def test_the_example_variables_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    for path in UNITS.glob("*.env.example"):
        variables = dict(re.findall(r"(?m)^#?(\w+)=(.*)$", path.read_text()))
        assert variables
        assert load(environ=variables, file=tmp_path / "empty.toml").notes == ()


def test_the_readme_speaks_of_every_file() -> None:
    readme = (DEPLOY / "README.md").read_text()
    assert [path.name for path in UNITS.iterdir() if path.name not in readme] == []
