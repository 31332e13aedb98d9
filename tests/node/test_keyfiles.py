"""Key files: what is written, and everything that is refused instead of being used as a key."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.core.principals import KeyRole
from kvd.errors import ConfigError
from kvd.node.keys.allowed_keys import AllowedKeys
from kvd.node.keys.keyfiles import (
    MAX_FILE_BYTES,
    KeyKind,
    NodeKey,
    key_text,
    new_cluster_key,
    new_node_key,
    parse_key,
    public_part,
    read_key,
    write_key,
)
from kvd.transport.zmq.curve import new_keypair

CLUSTER = new_cluster_key()
NODE = new_node_key("trainer-a", CLUSTER.keypair.public)


@pytest.mark.parametrize("key", [CLUSTER, NODE, new_node_key("scheduler")], ids=["cluster", "node", "scheduler"])
def test_a_key_is_read_as_it_was_written(key: NodeKey, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.key"
    write_key(path, key)
    assert read_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["x.key"]


@pytest.mark.parametrize("name", ['a"b', "a\\b", "ä ö", "[x]"])
def test_any_name_survives_the_file_and_the_list(name: str, tmp_path: Path) -> None:
    key = new_node_key(name, CLUSTER.keypair.public)
    assert parse_key(key_text(key), "it") == key
    (tmp_path / "allowed.toml").write_text(public_part(key, ["worker", "observer"], ["a-*"]))
    found = AllowedKeys(tmp_path / "allowed.toml").find(key.keypair.public)
    assert found is not None
    assert (found.name, found.jobs) == (name, ("a-*",))
    assert found.roles == {KeyRole.WORKER, KeyRole.OBSERVER}


def test_a_umask_that_is_open_does_not_open_the_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_key(tmp_path / "x.key", CLUSTER)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.key").stat().st_mode) == 0o600


def test_a_file_that_exists_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.key"
    write_key(path, CLUSTER)
    with pytest.raises(ConfigError, match=f"the key file {path} exists already, and a key that is in use"):
        write_key(path, NODE)
    assert read_key(path) == CLUSTER
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        write_key(tmp_path / "dangling", CLUSTER)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dangling", "x.key"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written \(File exists\)"):
        write_key(tmp_path / "file" / "x.key", CLUSTER)


# --- what is no key file ---------------------------------------------------------------------------------------------

TEXT = key_text(CLUSTER)
CONTENTS = {
    "empty": (b"", "is empty: remove it, and make a key"),
    "blank": (b" \n\n", "is empty"),
    "binary": (bytes(range(256)), "is not a key file: it is not text"),
    "another kind": (b'kind = "party"\nsecret = "x"\n', "it has no line kind"),
    "other text": (b"ssh-ed25519 AAAA\n", "is no comment and not NAME"),
    "other TOML": (b"slice_bytes = 1\n", "line 1 is no comment and not NAME"),
    "deep": (b"x = " + b"[" * 4000, "is no comment and not NAME"),
    "list as kind": (b"kind = [1]\nsecret = 1\n", "line 1 is no comment"),
    "large": (b"x" * (5 << 20), f"it has more than {MAX_FILE_BYTES} bytes"),
    "truncated": (TEXT[:-20].encode(), "is no comment and not NAME"),
    "truncated line": (TEXT.partition("secret")[0].encode(), "has no secret key: it is the public part"),
    "public part": (public_part(NODE, ["worker"]).encode(), "public part, which goes into lists of allowed keys"),
    "short secret": (TEXT.replace(CLUSTER.keypair.secret, "abc").encode(), "is damaged: its secret key must be"),
    "impossible secret": (TEXT.replace(CLUSTER.keypair.secret, "#" * 40).encode(), "is damaged: its secret key must"),
    "number as secret": (b'kind = "cluster"\nsecret = 1\n', "line 2 is no comment"),
    "other public key": (
        TEXT.replace(CLUSTER.keypair.public, new_keypair().public).encode(),
        "is damaged: its public key does not belong to its secret key",
    ),
    "bad scheduler": (
        key_text(NODE).replace(CLUSTER.keypair.public, "nobody").encode(),
        "is damaged: the key of the scheduler",
    ),
}


@pytest.mark.parametrize("what", CONTENTS)
def test_a_file_that_is_no_key_file(what: str, tmp_path: Path) -> None:
    content, says = CONTENTS[what]
    path = tmp_path / "x.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=says) as caught:
        read_key(path)
    assert str(path) in str(caught.value)
    assert caught.value.setting == "keyfile"
    assert CLUSTER.keypair.secret not in str(caught.value), "messages go to logs"


def _fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _with_mode(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        write_key(path, CLUSTER)
        path.chmod(mode)

    return make


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "does not exist: check the name, or make a key with kvd key new"),
    "missing folder": (lambda path: None, "does not exist"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "does not exist"),
    "folder": (lambda path: path.mkdir(mode=0o700), "is not a file"),
    "pipe": (_fifo, "is not a file"),
    "socket": (_socket, r"cannot be read \(No such device or address\)"),
    "device": (lambda path: path.symlink_to("/dev/null"), "is not a file"),
    "read by all": (_with_mode(0o644), r"can be read by other users \(mode 644\), so it may not be secret any more"),
    "written by the group": (_with_mode(0o620), "can be read by other users"),
    "written by all": (_with_mode(0o602), "can be read by other users"),
}


@pytest.mark.parametrize("what", PLACES)
def test_a_place_that_is_no_private_file(what: str, tmp_path: Path) -> None:
    make, says = PLACES[what]
    path = tmp_path / "none" / "x.key" if what == "missing folder" else tmp_path / "x.key"
    make(path)
    with pytest.raises(ConfigError, match=says):
        read_key(path)


def test_a_link_to_a_private_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    write_key(tmp_path / "x.key", CLUSTER)
    (tmp_path / "link").symlink_to("x.key")
    assert read_key(tmp_path / "link") == CLUSTER


def test_modes_do_not_count_where_the_folder_keeps_others_out(tmp_path: Path) -> None:
    _with_mode(0o440)(tmp_path / "kvd.key")
    assert read_key(tmp_path / "kvd.key", is_guarded=True) == CLUSTER


# --- files of others -------------------------------------------------------------------------------------------------


def _read_as(user: int, path: Path) -> str:
    """What a process of another user says that reads the file."""
    receiver, sender = multiprocessing.Pipe(False)

    def run() -> None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        try:
            sender.send(read_key(path).keypair.public)
        except ConfigError as error:
            sender.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0
    return str(receiver.recv())


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that every user can enter, as those above it are."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    return tmp_path


@needs_root
def test_root_uses_the_key_of_a_user_as_in_a_container(tmp_path: Path) -> None:
    write_key(tmp_path / "x.key", CLUSTER)
    os.chown(tmp_path / "x.key", 1000, 1000)
    assert read_key(tmp_path / "x.key") == CLUSTER


@needs_root
def test_a_user_cannot_use_the_key_of_another(open_folder: Path) -> None:
    write_key(open_folder / "x.key", CLUSTER)
    os.chown(open_folder / "x.key", 2000, 2000)
    said = _read_as(1000, open_folder / "x.key")
    assert "cannot be read (Permission denied): make this process's user its owner" in said
    os.chown(open_folder / "x.key", 1000, 1000)
    assert _read_as(1000, open_folder / "x.key") == CLUSTER.keypair.public


def test_a_file_of_another_user_is_refused_even_if_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an access control list, or on a file system without modes."""
    write_key(tmp_path / "x.key", CLUSTER)
    owner = os.geteuid() or 1000
    os.chown(tmp_path / "x.key", owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, and this process runs as user {owner + 1}"):
        read_key(tmp_path / "x.key")


# --- files of root for a group, as in volumes of Kubernetes -----------------------------------------------------------

REFUSED = "can be read by other users"
VOLUMES = [
    (0o440, 0, 1000, ""),
    (0o640, 0, 1000, ""),
    (0o600, 1000, 1000, ""),
    (0o400, 0, 1000, "cannot be read (Permission denied): let a group of this process read it (as root: chgrp 1000 "),
    (0o440, 0, 2000, "cannot be read (Permission denied): let a group of this process read it"),
    (
        0o644,
        0,
        1000,
        "as root, with a group of this process (1000); for a volume of a Kubernetes Secret set defaultMode",
    ),
    (0o460, 0, 1000, REFUSED),
    (0o440, 1000, 1000, REFUSED),
    (0o440, 2000, 1000, REFUSED),
    (0o604, 2000, 2000, REFUSED),
]


def _volume(folder: Path) -> Path:
    """A key in a volume with links, as the kubelet lays it for the group 1000."""
    volume = folder / "etc-kvd"
    (volume / "..2026").mkdir(parents=True)
    write_key(volume / "..2026" / "cluster.key", CLUSTER)
    (volume / "..data").symlink_to("..2026")
    (volume / "cluster.key").symlink_to("..data/cluster.key")
    os.chown(volume, 0, 1000)
    volume.chmod(0o3777)
    return volume / "cluster.key"


@needs_root
@pytest.mark.parametrize(("mode", "owner", "group", "says"), VOLUMES)
def test_a_file_of_root_may_be_read_by_a_group_of_the_process(
    mode: int, owner: int, group: int, says: str, open_folder: Path
) -> None:
    path = _volume(open_folder)
    os.chown(path, owner, group)
    path.chmod(mode)
    said = _read_as(1000, path)
    assert says in said if says else said == CLUSTER.keypair.public


@needs_root
@pytest.mark.parametrize("what", ["folder", "link"])
def test_a_file_of_root_that_others_can_replace_is_refused(what: str, open_folder: Path) -> None:
    path = _volume(open_folder)
    os.chown(path, 0, 1000)
    path.chmod(0o440)
    if what == "folder":
        path.parent.chmod(0o777)
    else:
        os.lchown(path, 1000, 1000)  # one that the process made itself is as good
        assert _read_as(1000, path) == CLUSTER.keypair.public
        os.lchown(path, 2000, 2000)
    assert f"since all may change the folder {path.parent}: chmod o-w" in _read_as(1000, path)
    write_key(path.parent / "own.key", CLUSTER)
    os.chown(path.parent / "own.key", 1000, 1000)
    assert _read_as(1000, path.parent / "own.key") == CLUSTER.keypair.public  # nobody else can make such a file


def test_the_kinds() -> None:
    assert {CLUSTER.kind, NODE.kind} == set(KeyKind)
    assert CLUSTER.scheduler == CLUSTER.keypair.public
    assert NODE.scheduler == CLUSTER.keypair.public
    for key in (CLUSTER, NODE):
        assert key.keypair.secret not in repr(key)


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_a_key_has_a_name_that_is_its_own_and_that_a_view_can_carry(name: str, tmp_path: Path) -> None:
    """The cluster's key has the empty one: its holder would be taken for this one's."""
    path = tmp_path / "allowed.toml"
    path.write_text(public_part(new_node_key(name), ["worker"]))
    with pytest.raises(ConfigError, match=f"a key with a name of {len(name)} characters: a name has 1 to 64"):
        AllowedKeys(path)
