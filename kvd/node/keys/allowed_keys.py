"""The list of allowed keys: who may come in besides the holders of the cluster's key, and as what.

A file is TOML, one table per key::

    [trainer-a]
    key = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
    roles = ["worker", "observer"]
    jobs = ["vision-*"]          # optional: patterns of job names; all jobs if it is missing
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final

from kvd.core.principals import KeyRole, Principal
from kvd.errors import ConfigError
from kvd.files import open_file
from kvd.transport.zmq.curve import is_key

MAX_FILE_BYTES: Final = 1 << 20
MAX_KEYS: Final = 4096
MAX_JOBS: Final = 64
MAX_NAME_CHARS: Final = 64  # views carry it
_FIELDS: Final = {"key", "roles", "jobs"}


class AllowedKeys:
    """The keys of one file. Reading it again replaces all of them, or none.

    Raises:
        ConfigError: the file cannot be read, others could change it, or it is wrong.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._principals = self._read({})

    def find(self, key: str) -> Principal | None:
        """Who holds this public key; None if the list does not have it. On any thread."""
        return self._principals.get(key)

    def holders_of(self, role: KeyRole) -> list[Principal]:
        """Those who may be this."""
        return [principal for principal in self._principals.values() if role in principal.roles]

    def reload(self) -> int:
        """Read the file again; return how many keys it has.

        Raises:
            ConfigError: as above; the keys stay as they were.
        """
        self._principals = self._read(self._principals)
        return len(self._principals)

    def _read(self, known: dict[str, Principal]) -> dict[str, Principal]:
        """The keys of the file. One whose entry has not changed stays the same object."""
        principals: dict[str, Principal] = {}
        for name, entry in self._table().items():
            principal = self._principal(name, entry)
            before = known.get(principal.key)
            if before is not None and _fields_of(before) == _fields_of(principal):
                principal = before
            if principal.key in principals:
                raise self._wrong(f"{principals[principal.key].name} and {name} have the same key")
            principals[principal.key] = principal
        return principals

    def _table(self) -> dict[str, Any]:
        import tomllib  # most nodes have no list

        try:
            with open_file(self._path) as file:
                status = os.fstat(file.fileno())
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise self._wrong(f"cannot be read ({error.strerror})") from None
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise self._wrong(f"can be changed by other users: chmod 644 {self._path}")
        try:
            table = tomllib.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"is not TOML: {error}") from None
        if len(content) > MAX_FILE_BYTES or len(table) > MAX_KEYS:
            raise self._wrong(f"is too long: at most {MAX_KEYS} keys in {MAX_FILE_BYTES} bytes")
        return table

    def _principal(self, name: str, entry: object) -> Principal:
        if not isinstance(entry, dict):
            raise self._wrong(f"has a line {name} outside of the table of a key: each key has a table [NAME]")
        if not 0 < len(name) <= MAX_NAME_CHARS:  # "" stands for the cluster's key
            raise self._wrong(f"has a key with a name of {len(name)} characters: a name has 1 to {MAX_NAME_CHARS}")
        unknown = sorted(entry.keys() - _FIELDS)
        if unknown:
            raise self._wrong(f"[{name}] has {unknown[0]}, which means nothing: there are key, roles and jobs")
        key, roles, jobs = entry.get("key"), entry.get("roles"), entry.get("jobs", ["*"])
        if not isinstance(key, str) or not is_key(key):
            raise self._wrong(f"[{name}] needs key = a public key of 40 characters, as kvd keypair new prints it")
        known = ", ".join(KeyRole)
        if not isinstance(roles, list) or not roles or any(role not in tuple(KeyRole) for role in roles):
            raise self._wrong(f"[{name}] needs roles = a list of some of {known}")
        if not isinstance(jobs, list) or len(jobs) > MAX_JOBS or any(not isinstance(job, str) for job in jobs):
            raise self._wrong(f'[{name}] has jobs that are no list of up to {MAX_JOBS} patterns such as "vision-*"')
        return Principal(name, frozenset(map(KeyRole, roles)), tuple(jobs), key)

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"the list of allowed keys {self._path}: {problem}", setting="allowed_keys")


def _fields_of(principal: Principal) -> tuple[object, ...]:
    return principal.name, principal.roles, principal.jobs
