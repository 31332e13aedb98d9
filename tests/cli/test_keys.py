"""``kvd key`` and ``kvd keypair``: keys that are made, shown, and carried to other hosts."""

from __future__ import annotations

import json
import os
import pty
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvd.node.keys.allowed_keys import AllowedKeys
from kvd.node.keys.keyfiles import KeyKind, key_text, new_cluster_key, new_node_key, parse_key, read_key, write_key
from tests.cli.conftest import Spawn

pytestmark = pytest.mark.keys
Kvd = Callable[..., Result]
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the settings of a user who has no key yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def own(home: Path) -> Path:
    """The key of a user who has one."""
    write_key(home / "kvd" / "cluster.key", new_cluster_key())
    return home / "kvd" / "cluster.key"


# --- new and show ----------------------------------------------------------------------------------------------------


def test_a_new_key(kvd: Kvd, home: Path) -> None:
    result = kvd("key", "new")
    assert result.exit_code == 0, result.output
    path = home / "kvd" / "cluster.key"
    made = read_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made.kind is KeyKind.CLUSTER
    assert str(path) in result.stdout
    assert made.keypair.public in result.stdout
    assert "kvd key export | ssh HOST kvd key import" in result.stderr
    assert made.keypair.secret not in result.output


def test_a_new_key_never_replaces_one(kvd: Kvd, own: Path) -> None:
    before = own.read_text()
    result = kvd("key", "new")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: the key file {own} exists already, and a key that is in use must not be lost" in result.stderr
    assert own.read_text() == before


def test_a_new_key_elsewhere(kvd: Kvd, home: Path, tmp_path: Path) -> None:
    assert kvd("key", "new", "--out", tmp_path / "etc" / "cluster.key").exit_code == 0
    assert read_key(tmp_path / "etc" / "cluster.key").kind is KeyKind.CLUSTER
    assert not home.exists()


@pytest.mark.parametrize("how", ["own", "flag", "variable", "credential"])
def test_show_tells_which_key_is_used_and_never_its_secret(
    how: str, kvd: Kvd, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own if how == "own" else tmp_path / "kvd.key"
    if how != "own":
        write_key(path, new_node_key("trainer-a", read_key(own).keypair.public))
    if how == "variable":
        monkeypatch.setenv("KVD_KEYFILE", "kvd.key")
    if how == "credential":
        path.chmod(0o440)
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    flags = ("--keyfile", str(path)) if how == "flag" else ()
    shown = json.loads(kvd("key", "show", *flags, "-o", "json").stdout)
    key = read_key(path, is_guarded=True)
    assert (shown["file"], shown["kind"], shown["public"]) == (str(path), key.kind, key.keypair.public)
    assert (shown.get("name"), shown.get("scheduler")) == (
        (None, None) if how == "own" else ("trainer-a", read_key(own).keypair.public)
    )
    result = kvd("key", "show", *flags)
    assert key.keypair.public in result.stdout
    assert key.keypair.secret not in result.output


def test_a_user_without_a_key_is_told_how_to_get_one(kvd: Kvd, home: Path) -> None:
    for command in ("show", "export"):
        result = kvd("key", command)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"error: there is no key at {home}/kvd/cluster.key: the first scheduler of this user" in result.stderr
        assert "kvd key export | ssh THIS_HOST kvd key import" in result.stderr
    assert not home.exists(), "nobody but the scheduler makes a key by itself"


def test_a_key_file_that_is_named_has_to_be_there(kvd: Kvd) -> None:
    result = kvd("key", "show", "--keyfile", "no.key")
    assert result.exit_code == 2
    assert "error: the key file no.key does not exist" in result.stderr


@pytest.mark.parametrize("command", ["show", "new", "export", "import"])
def test_a_user_without_a_home_folder(command: str, kvd: Kvd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", "relative")
    result = kvd("key", command, input=key_text(new_cluster_key()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: this user has no home folder for a key: name a key file with --keyfile" in result.stderr


def test_a_home_folder_that_cannot_be_written(kvd: Kvd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    result = kvd("key", "new")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: the key file {tmp_path}/file/kvd/cluster.key cannot be written (Not a directory)" in result.stderr


# --- export and import -----------------------------------------------------------------------------------------------


def test_a_key_travels_through_a_pipe(kvd: Kvd, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = kvd("key", "export")
    assert exported.exit_code == 0
    assert parse_key(exported.stdout, "it") == read_key(own)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other host"))
    for _ in range(2):  # the same key again is fine
        imported = kvd("key", "import", input=exported.stdout)
        assert imported.exit_code == 0, imported.output
        assert read_key(own).keypair.secret not in imported.output
    there = tmp_path / "other host" / "kvd" / "cluster.key"
    assert read_key(there) == read_key(own)
    assert stat.S_IMODE(there.stat().st_mode) == 0o600


def test_an_import_never_replaces_another_key(kvd: Kvd, own: Path) -> None:
    before = own.read_text()
    other = new_cluster_key()
    result = kvd("key", "import", input=key_text(other))
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        f"error: the key file {own} has another key (public key {read_key(own).keypair.public[:8]}…)" in result.stderr
    )
    assert other.keypair.public[:8] in result.stderr
    assert own.read_text() == before
    assert kvd("key", "import", "--out", own.with_name("other.key"), input=key_text(other)).exit_code == 0
    assert read_key(own.with_name("other.key")) == other


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "nothing came through stdin: look for the error of the other command"),
        (b"\n", "nothing came through stdin"),
        (b"error: there is no key\n", "the key file on stdin is not a key file: line "),
        (bytes(range(256)), "what came through stdin is not a key file: it is not text"),
        (b"x" * 100_000, "what came through stdin is not a key file: it has more than 4096 bytes"),
        (b'[trainer-a]\nkey = "x"\nroles = ["worker"]\n', "the key file on stdin has no secret key: it is the public"),
        (key_text(new_cluster_key()).encode()[:-25], "the key file on stdin is not a key file: line "),
    ],
)
def test_what_cannot_be_imported(content: bytes, says: str, kvd: Kvd, home: Path) -> None:
    result = kvd("key", "import", input=content)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {says}" in result.stderr
    assert not home.exists()


def test_a_terminal_gets_no_key_and_gives_none(spawn: Spawn, own: Path) -> None:
    controller, terminal = pty.openpty()
    try:
        for command, stream in (("export", "stdout"), ("import", "stdin")):
            process = spawn("key", command, **{stream: terminal})
            _, err = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 2
            assert f"error: {stream} is a terminal" in err
        process = spawn("key", "export", "--force", stdout=terminal)
        assert process.wait(DEADLINE_S) == 0
        assert read_key(own).keypair.secret in os.read(controller, 10_000).decode()
    finally:
        os.close(controller)
        os.close(terminal)


def test_an_import_without_stdin(spawn: Spawn) -> None:
    process = spawn("key", "import", stdin=None, preexec_fn=lambda: os.close(0))
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "error: nothing came through stdin" in err


def test_a_pipe_that_breaks_is_no_traceback(spawn: Spawn, own: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = spawn("key", "export", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (141, "")


# --- keys of single nodes --------------------------------------------------------------------------------------------


def test_a_key_for_a_node_and_its_entry_for_the_list(kvd: Kvd, own: Path, tmp_path: Path) -> None:
    flags = ["--role", "worker", "--role", "observer", "--job", "vision-*", "--job", "digits"]
    result = kvd("keypair", "new", "trainer-a", *flags)
    assert result.exit_code == 0, result.output
    key = read_key(tmp_path / "trainer-a.key")
    assert (key.kind, key.name, key.scheduler) == (KeyKind.NODE, "trainer-a", read_key(own).keypair.public)
    table = {"key": key.keypair.public, "roles": ["worker", "observer"], "jobs": ["vision-*", "digits"]}
    assert tomllib.loads(result.stdout) == {"trainer-a": table}
    (tmp_path / "allowed.toml").write_text(result.stdout + kvd("keypair", "new", "trainer-b").stdout)
    assert AllowedKeys(tmp_path / "allowed.toml").reload() == 2
    assert key.keypair.secret not in result.output
    assert "the secret part is in trainer-a.key" in result.stderr


def test_the_entry_as_json(kvd: Kvd, own: Path, tmp_path: Path) -> None:
    shown = json.loads(kvd("keypair", "new", "admin", "--role", "operator", "--out", "x.key", "-o", "json").stdout)
    key = read_key(tmp_path / "x.key")
    assert shown == {
        "file": str(tmp_path / "x.key"), "name": "admin", "key": key.keypair.public, "roles": ["operator"], "jobs": [],
    }  # fmt: skip


@pytest.mark.parametrize("form", ["key", "key file", "list", "node key of the scheduler", "node key of another"])
def test_the_key_of_the_scheduler_in_every_form(form: str, kvd: Kvd, tmp_path: Path) -> None:
    entry = kvd("keypair", "new", "scheduler", "--role", "scheduler")
    assert entry.exit_code == 0, entry.output
    scheduler = read_key(tmp_path / "scheduler.key")
    assert scheduler.scheduler == ""
    public = scheduler.keypair.public
    cluster = new_cluster_key()
    write_key(tmp_path / "cluster.key", cluster)
    (tmp_path / "allowed.toml").write_text(entry.stdout)
    write_key(tmp_path / "other.key", new_node_key("other", public))
    given = {
        "key": public,
        "key file": "cluster.key",
        "list": "allowed.toml",
        "node key of the scheduler": "scheduler.key",
        "node key of another": "other.key",
    }[form]
    assert kvd("keypair", "new", "a", "--scheduler-key", given).exit_code == 0
    assert read_key(tmp_path / "a.key").scheduler == (cluster.keypair.public if form == "key file" else public)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a b"], "'a b' is no name for a key"),
        (["../a"], "'../a' is no name for a key"),
        (["a", "--role", "king"], "Invalid value for '--role'"),
        (["a"], "give --scheduler-key, the public key of the scheduler (there is no key at "),
        (["a", "--scheduler-key", "nowhere"], "neither a public key of 40 characters nor a file (No such file"),
        (["a", "--scheduler-key", "."], "neither a public key of 40 characters nor a file (Is a directory)"),
        (["a", "--scheduler-key", "#" * 40], "neither a public key of 40 characters nor a file"),
        (["a", "--scheduler-key", "list.toml"], "the list has 0 keys of a scheduler, not one"),
        (["a", "--scheduler-key", "open.key"], "can be read by other users"),
        (["there", "--role", "scheduler"], "the key file there.key exists already"),
    ],
)
def test_a_key_for_a_node_that_cannot_be_made(arguments: list[str], says: str, kvd: Kvd, tmp_path: Path) -> None:
    (tmp_path / "there.key").touch()
    (tmp_path / "list.toml").write_text("")
    (tmp_path / "open.key").write_text(key_text(new_cluster_key()))
    before = sorted(tmp_path.iterdir())
    result = kvd("keypair", "new", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in " ".join(result.stderr.split())
    assert sorted(tmp_path.iterdir()) == before


def test_no_setting_shows_a_secret(kvd: Kvd, own: Path) -> None:
    for flags in ([], ["--origin"], ["-o", "json"]):
        result: Any = kvd("config", "show", "--keyfile", str(own), *flags)
        assert result.exit_code == 0
        assert str(own) in result.stdout
        assert read_key(own).keypair.secret not in result.output
