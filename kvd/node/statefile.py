"""The file in ``state_dir`` that a scheduler starts from again."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvd.core.scheduler.machine import SchedulerMachine
from kvd.errors import ConfigError
from kvd.node.wholefile import replace_file

STATE_FILE = "scheduler.json"


class StateFile:
    """The record of a scheduler, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / STATE_FILE

    def prepare(self) -> None:
        """Make the folder if there is none, and find out whether state can be kept in it.

        Raises:
            ConfigError: it cannot.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._bad_folder(error) from None
        if self._path.is_dir():
            raise _state_error(
                f"{self._path} is a folder, and the state is kept in a file of this name: move the folder away, or "
                "give another --state-dir"
            )

    def load(self) -> dict[str, Any] | None:
        """The record; None if there is none yet.

        Raises:
            ConfigError: it cannot be read, or is none.
        """
        try:
            state: dict[str, Any] = json.loads(self._path.read_text())
            SchedulerMachine.check_record(state)
        except FileNotFoundError:
            return None
        except OSError as error:
            why = error.strerror or error
            raise _state_error(f"cannot read {self._path}: {why}; give it to the user of this process") from None
        except (ValueError, KeyError, TypeError) as error:
            raise self.unusable(error) from None
        return state

    def save(self, record: Mapping[str, object]) -> None:
        """A crash leaves the old record or the new one.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have tidied it away
        replace_file(self._path, lambda file: file.write(json.dumps(record).encode()))

    def save_first(self, record: Mapping[str, object]) -> None:
        """Save the record of a scheduler that is about to start.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self.save(record)
        except OSError as error:
            raise self._bad_folder(error) from None

    def unusable(self, error: Exception) -> ConfigError:
        """What to say of a record that cannot be used."""
        return _state_error(
            f"{self._path} is no state of a scheduler ({error}): move it away to start with an empty one"
        )

    def _bad_folder(self, error: OSError) -> ConfigError:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            text = "is a file, or lies below one: give --state-dir a folder, or a name that is free"
        else:
            why = error.strerror or error
            text = f"cannot be written ({why}): give --state-dir a folder that this process may write and that has room"
        return _state_error(f"state_dir = {str(self._folder)!r} {text}")


def _state_error(text: str) -> ConfigError:
    return ConfigError(text, setting="state_dir")
