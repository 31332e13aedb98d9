"""Files with keys: what is in them, how they are written, and whom they are refused to.

A file has lines ``NAME = "VALUE"`` and comments. One with the key of a cluster is all that a node needs; whoever has it
may do everything. One with the key of a single node also names the scheduler's public key; what its holder may do is
said by the lists of allowed keys (`kvd.node.keys.allowed_keys`).
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvd.errors import ConfigError
from kvd.transport.zmq.curve import Keypair, is_key, new_keypair, public_key_of

MAX_FILE_BYTES: Final = 4096
MOST_LINKS: Final = 40  # as the kernel follows
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_LINE: Final = re.compile(r'\s*(?:(?P<name>[a-z]+) *= *"(?P<value>(?:[^"\\]|\\["\\])*)"\s*)?(?:#.*)?')
_PUBLIC_PART: Final = "has no secret key: it is the public part, which goes into lists of allowed keys"


class KeyKind(StrEnum):
    """Whose key it is."""

    CLUSTER = "cluster"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class NodeKey:
    """What a key file contains.

    Attributes:
        name: of the node, for people; "" for the key of a cluster.
        scheduler: the public key of the scheduler; for the key of a cluster its own, and "" if the node is the
            scheduler.
    """

    kind: KeyKind
    keypair: Keypair
    name: str = ""
    scheduler: str = ""


def new_cluster_key() -> NodeKey:
    """A key for a whole cluster."""
    keypair = new_keypair()
    return NodeKey(KeyKind.CLUSTER, keypair, "", keypair.public)


def new_node_key(name: str, scheduler: str = "") -> NodeKey:
    """A key for one node; `scheduler`: see `NodeKey`."""
    return NodeKey(KeyKind.NODE, new_keypair(), name, scheduler)


def key_text(key: NodeKey) -> str:
    """The content of the key's file."""
    whose = "the whole cluster: whoever has it may do everything" if key.kind is KeyKind.CLUSTER else key.name
    lines = [
        f"# kvd: the key of {whose}. Keep it private (chmod 600).",
        f'kind = "{key.kind}"',
        *([f"name = {_quoted(key.name)}", f'scheduler = "{key.scheduler}"'] if key.kind is KeyKind.NODE else []),
        f'public = "{key.keypair.public}"',
        f'secret = "{key.keypair.secret}"',
    ]
    return "\n".join(lines) + "\n"


def parse_key(text: str, where: str) -> NodeKey:
    """The key in the content of a file.

    Args:
        where: names the file in errors.

    Raises:
        ConfigError: it is not the content of a key file.
    """
    table = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None and line.startswith("["):
            raise _unusable(where, _PUBLIC_PART)
        if match is None:
            raise _unusable(where, f'is not a key file: line {number} is no comment and not NAME = "VALUE"')
        if match["name"]:
            table[match["name"]] = re.sub(r"\\(.)", r"\1", match["value"])
    kind, secret = table.get("kind"), table.get("secret")
    if kind not in tuple(KeyKind):
        raise _unusable(where, 'is not a key file: it has no line kind = "cluster" or kind = "node"')
    if "secret" not in table:
        raise _unusable(where, _PUBLIC_PART)
    if secret is None or not is_key(secret):
        raise _unusable(where, "is damaged: its secret key must be 40 characters of Z85")
    public = public_key_of(secret)
    if table.get("public") != public:
        raise _unusable(where, "is damaged: its public key does not belong to its secret key")
    name, scheduler = table.get("name", ""), table.get("scheduler", "")
    if scheduler and not is_key(scheduler):
        raise _unusable(where, "is damaged: the key of the scheduler must be 40 characters of Z85")
    keypair = Keypair(public, secret)
    if kind == KeyKind.CLUSTER:
        return NodeKey(KeyKind.CLUSTER, keypair, "", public)
    return NodeKey(KeyKind.NODE, keypair, name, scheduler)


def read_key(path: Path, *, is_guarded: bool = False) -> NodeKey:
    """The key in a file that only this user can read; one of root may be readable for a group of this process.

    Args:
        is_guarded: whether the folder of the file keeps others out, as that of systemd's credentials does. Then its
            mode and owner do not count.

    Raises:
        ConfigError: there is none, it cannot be read, others could read, change or replace it, or it is not a key file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    except FileNotFoundError:
        raise _unusable(str(path), "does not exist: check the name, or make a key with kvd key new") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        _check_privacy(path, os.fstat(descriptor), is_guarded=is_guarded)
        content = os.read(descriptor, MAX_FILE_BYTES + 1)  # of a regular file it gives all
    except OSError as error:
        raise _unusable(str(path), f"cannot be read ({error.strerror})") from None
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE_BYTES:
        raise _unusable(str(path), f"is not a key file: it has more than {MAX_FILE_BYTES} bytes")
    if not content.strip():
        raise _unusable(str(path), "is empty: remove it, and make a key with kvd key new, or import one")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise _unusable(str(path), "is not a key file: it is not text") from None
    return parse_key(text, str(path))


def write_key(path: Path, key: NodeKey) -> None:
    """Write a new file that only this user can read. A reader finds the whole content, or no file.

    Raises:
        ConfigError: there is a file already, or it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".kvd-key-", dir=path.parent)  # of mode 0600
    except OSError as error:
        raise _unusable(str(path), f"cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(key_text(key))
            file.flush()
            os.fsync(descriptor)
        os.link(temporary, path)  # unlike a rename, it fails if there is a file already
    except FileExistsError:
        raise _unusable(str(path), "exists already, and a key that is in use must not be lost: move it away") from None
    except OSError as error:
        raise _unusable(str(path), f"cannot be written ({error.strerror})") from None
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _check_privacy(path: Path, status: os.stat_result, *, is_guarded: bool) -> None:
    """Refuse a key file that others can read, that another user has written, or that others can replace.

    A file of root may be readable for a group of this process: root has chosen who is in that group.
    """
    if not stat.S_ISREG(status.st_mode):
        raise _unusable(str(path), "is not a file")
    if is_guarded:
        return
    me, owner, mode = os.geteuid(), status.st_uid, stat.S_IMODE(status.st_mode)
    is_for_group = owner == 0 and status.st_gid in (os.getegid(), *os.getgroups())
    if mode & (OTHERS & ~stat.S_IRGRP if is_for_group else OTHERS):
        text = f"can be read by other users (mode {mode:o}), so it may not be secret any more"
        raise _unusable(str(path), f"{text}: {_privacy_advice(path, owner)}")
    if me not in (0, owner) and owner != 0:  # root reads the files of users, as in a container
        raise _unusable(
            str(path), f"belongs to user {owner}, and this process runs as user {me}: make this user or root its owner"
        )
    folder = _open_folder(path, (0, me, owner)) if owner != me or mode & OTHERS else None
    if folder is not None:
        raise _unusable(
            str(path),
            f"can be replaced by other users, since all may change the folder {folder}: chmod o-w {folder}, or move "
            "the key",
        )


def _privacy_advice(path: Path, owner: int) -> str:
    if owner == 0 and os.geteuid() != 0:
        return (
            f"chmod 640 {path} as root, with a group of this process ({os.getegid()}); for a volume of a Kubernetes "
            "Secret set defaultMode: 0440, and securityContext.fsGroup of the pod"
        )
    return f"chmod 600 {path}, or make a new one"


def _unreadable(path: Path, error: OSError) -> ConfigError:
    owner = None
    with suppress(OSError):
        owner = path.stat().st_uid
    if owner == 0 and isinstance(error, PermissionError):
        return _unusable(
            str(path),
            f"cannot be read ({error.strerror}): let a group of this process read it (as root: chgrp {os.getegid()} "
            f"{path}, chmod 640 {path}); for a volume of a Kubernetes Secret set securityContext.fsGroup of the pod",
        )
    return _unusable(str(path), f"cannot be read ({error.strerror}): make this process's user its owner")


def _open_folder(path: Path, trusted: Sequence[int]) -> str | None:
    """Return a folder on the way to a file, through all links, in which everyone may replace the next step.

    In a folder with the sticky bit, as /tmp and a volume of Kubernetes are, only the owner of an entry may do that.

    Args:
        path: of the file.
        trusted: users that may own such an entry.
    """
    at, rest = "/", list(path.absolute().parts[1:])
    links = 0
    while rest:
        name = rest.pop(0)
        if name == "..":
            at = os.path.dirname(at)
            continue
        entry = os.path.join(at, name)
        folder_mode, status = os.stat(at).st_mode, os.lstat(entry)
        is_sticky = folder_mode & stat.S_ISVTX and status.st_uid in trusted
        if folder_mode & stat.S_IWOTH and not is_sticky:
            return at
        if stat.S_ISLNK(status.st_mode) and links < MOST_LINKS:
            links += 1
            target = Path(os.readlink(entry))
            at, rest = ("/", [*target.parts[1:], *rest]) if target.is_absolute() else (at, [*target.parts, *rest])
        else:
            at = entry
    return None


def _unusable(where: str, problem: str) -> ConfigError:
    return ConfigError(f"the key file {where} {problem}", setting="keyfile")


def public_part(key: NodeKey, roles: Sequence[str], jobs: Sequence[str] = ()) -> str:
    """The entry of a list of allowed keys for this key.

    Args:
        roles: what its holder may be.
        jobs: patterns of the jobs that it may be part of; none: all.
    """
    lines = [f"[{_quoted(key.name)}]", f'key = "{key.keypair.public}"', f"roles = {_listed(roles)}"]
    return "\n".join([*lines, *([f"jobs = {_listed(jobs)}"] if jobs else [])]) + "\n"


def _listed(words: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, words))}]"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
