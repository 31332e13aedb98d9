"""The key of a job: the one that its settings name, or one that is made for it and ends with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvd.config import child_environment, load

KEY_FILE: Final = "cluster.key"
"""The name of the file with a key that was made for one job."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """What the processes of a job need to know of its key.

    Attributes:
        settings: the variables that name the key's file on this host, or say that there are no keys. They never
            contain the key: every process of this user can read them.
        text: the content of the file, for other hosts; "": there are no keys.
    """

    settings: Mapping[str, str]
    text: str = field(default="", repr=False)


def job_key(environment: Mapping[str, str], folder: Path) -> JobKey:
    """The key for a job. A new one, if its settings name none and do not say ``insecure``.

    Args:
        environment: the variables of the job, as of `kvd.node.launch.job.Job`.
        folder: of this run. Nobody but this user may enter it.

    Raises:
        ConfigError: the settings name a key that cannot be used, or are wrong.
    """
    from kvd.node.keys.keyfiles import key_text, new_cluster_key, read_key, write_key  # `kvd --help` needs no keys

    config = load({}, environ=child_environment(environment)).config
    if config.insecure:
        return JobKey({"KVD_INSECURE": "1"})
    if config.keyfile:
        path = Path(config.keyfile).absolute()
        key = read_key(path)
    else:
        path, key = folder / KEY_FILE, new_cluster_key()
        write_key(path, key)
    return JobKey({"KVD_KEYFILE": str(path)}, key_text(key))
