"""Which keys a process uses, and whom it lets in, as its settings say.

The key comes from ``keyfile``; else from the credentials that systemd gave this service; else from the user's own
cluster key, which the first scheduler of the user makes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.config import Config, Role, config_home, credentials_directory
from kvd.core.principals import HOLDER, Principal
from kvd.errors import ConfigError
from kvd.node.keys.allowed_keys import AllowedKeys
from kvd.node.keys.keyfiles import KeyKind, NodeKey, new_cluster_key, read_key, write_key
from kvd.transport.zmq.curve import Curve

CREDENTIAL: Final = "kvd.key"
"""The name of systemd's credential: ``LoadCredential=kvd.key:/etc/kvd/cluster.key``."""


def user_key_path() -> Path:
    """Where the user's own cluster key lies.

    Raises:
        ConfigError: the user has no home folder.
    """
    home = config_home()
    if home is None:
        raise ConfigError(
            "this user has no home folder for a key: name a key file with --keyfile (KVD_KEYFILE), or set "
            "XDG_CONFIG_HOME to a folder of this user",
            setting="keyfile",
        )
    return home / "kvd" / "cluster.key"


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where a process finds its key.

    Attributes:
        is_guarded: as of `read_key`.
        is_users: whether it is the user's own cluster key, and no setting named it.
    """

    path: Path
    is_guarded: bool = False
    is_users: bool = False

    @property
    def is_missing(self) -> bool:
        """Whether it is the user's own key, and no scheduler of the user has made it yet."""
        return self.is_users and not os.path.exists(
            self.path
        )  # unlike Path.exists, for a folder that may not be searched

    def read(self) -> NodeKey:
        """The key.

        Raises:
            ConfigError: there is none, or none that can be used.
        """
        if self.is_missing:
            raise no_key(self.path)
        return read_key(self.path, is_guarded=self.is_guarded)


def key_source(keyfile: str) -> KeySource:
    """Where this process finds its key; `keyfile` is the setting.

    Raises:
        ConfigError: no setting names a key, and the user has no home folder.
    """
    if keyfile:
        return KeySource(Path(keyfile))
    credentials = credentials_directory()
    if credentials is not None and os.path.exists(credentials / CREDENTIAL):
        return KeySource(credentials / CREDENTIAL, is_guarded=True)
    return KeySource(user_key_path(), is_users=True)


def missing_key(config: Config, role: Role | str) -> Path | None:
    """Return where the key of this process will appear when a scheduler of the user makes it; None: nothing is missing.

    Raises:
        ConfigError: as `key_source`.
    """
    if config.insecure or role == "scheduler":
        return None
    source = key_source(config.keyfile)
    return source.path if source.is_missing else None


class Keyring:
    """The keys of one process. Reading a key file is its first act, so that a bad one ends the process at once.

    Args:
        config: the settings.
        role: of this process.

    Attributes:
        curve: for the sockets; None if the settings say ``insecure``.

    Raises:
        ConfigError: there is no key, or none that can be used; the text names the file, and what to do.
    """

    def __init__(self, config: Config, role: Role | str) -> None:
        self.curve: Curve | None = None
        self._allowed: AllowedKeys | None = None
        self._cluster_key = ""
        if config.insecure:
            return
        source = key_source(config.keyfile)
        if source.is_missing and role == "scheduler":
            _make(source.path)
        key = source.read()
        is_daemon = role in ("scheduler", "server")
        if config.allowed_keys and is_daemon:
            self._allowed = AllowedKeys(Path(config.allowed_keys))
        _check(key, role, source.path, has_list=self._allowed is not None)
        own_scheduler = key.keypair.public if role == "scheduler" else key.scheduler
        if key.kind is KeyKind.CLUSTER:
            self._cluster_key = key.keypair.public
        self.curve = Curve(
            key.keypair,
            own_scheduler,
            "" if key.kind is KeyKind.CLUSTER else key.keypair.public,
            self._admit,
            f"the key {source.path}",
            HOLDER if key.kind is KeyKind.CLUSTER and self._allowed is None else None,
        )

    def reload(self) -> str:
        """Read the list of allowed keys again; return what a person should know.

        Raises:
            ConfigError: it is wrong; the keys stay as they were.
        """
        if self._allowed is None:
            return "there is no list of allowed keys to read again"
        return f"{self._allowed.reload()} keys are allowed now"

    def _admit(self, key: str) -> Principal | None:
        if key == self._cluster_key:
            return HOLDER
        return None if self._allowed is None else self._allowed.find(key)


def _make(path: Path) -> None:
    """Make the user's key. Of two schedulers that start for the first time, one makes it, and both use it."""
    try:
        write_key(path, new_cluster_key())
    except ConfigError:
        if not path.exists():
            raise


def no_key(path: Path) -> ConfigError:
    """That the user has no key yet, and how to get one."""
    return ConfigError(
        f"there is no key at {path}: the first scheduler of this user makes one there. If the scheduler runs on "
        "another host, run there: kvd key export | ssh THIS_HOST kvd key import. If it runs with a key file of its "
        "own, name that file with --keyfile (KVD_KEYFILE). If it runs without keys, give --insecure (KVD_INSECURE=1)",
        setting="keyfile",
    )


def _check(key: NodeKey, role: Role | str, path: Path, *, has_list: bool) -> None:
    """Refuse a key with which this process could do nothing."""
    if key.kind is KeyKind.CLUSTER:
        return
    if role in ("scheduler", "server") and not has_list:
        raise ConfigError(
            f"{path} is the key of one node, and a {role} with such a key needs to know whom it lets in: name a list "
            "of allowed keys with --allowed-keys (KVD_ALLOWED_KEYS)",
            setting="allowed_keys",
        )
    if role != "scheduler" and not key.scheduler:
        raise ConfigError(
            f"{path} does not say what the scheduler's public key is: make it with "
            f"kvd keypair new {key.name or 'NAME'} --scheduler-key KEY",
            setting="keyfile",
        )
