"""The file in ``state_dir`` from which a scheduler continues after a restart."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvd.core.scheduler.router import SchedulerRouter
from kvd.errors import ConfigError
from kvd.files import read_file
from kvd.node.storage.state_lock import InUse, StateLock
from kvd.node.storage.swapped_file import SwappedFile

STATE_FILE = "scheduler.json"
OWNER_ONLY_FOLDER = 0o700
MOST_WHY_CHARS = 200


class SchedulerStateFile:
    """The record of a scheduler, in a directory of its own. It can be saved while all descriptors are in use.

    Args:
        folder: the directory.
        holder: who uses it, in words for others that want to; "": it is not locked.
    """

    def __init__(self, folder: Path, holder: str = "") -> None:
        self._folder = folder
        self._path = folder / STATE_FILE
        self._file = SwappedFile(self._path)
        self._lock = StateLock(folder, holder) if holder else None
        self._writing = threading.Lock()
        self._is_closed = False

    def prepare(self) -> None:
        """Make the directory if there is none, check that state can be kept in it, and lock it.

        Raises:
            ConfigError: it cannot.
        """
        try:
            self._folder.mkdir(OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise self._bad_folder(error) from None
        if self._path.is_dir():
            raise _state_error(
                f"{self._path} is a directory, but the state is kept in a file with this name: move the directory "
                "away, or give another --state-dir"
            )
        if self._path.exists() and not self._path.is_file():
            raise _state_error(f"{self._path} is no file: move it away, or give another --state-dir")
        if self._lock is not None:
            try:
                self._lock.take()
            except InUse as in_use:
                raise _state_error(
                    f"state_dir = {str(self._folder)!r} is in use by {in_use}: end that one first, or give this one "
                    "another --state-dir"
                ) from None
            except OSError as error:
                raise self._bad_folder(error) from None

    def load(self) -> dict[str, Any] | None:
        """The record; None if there is none yet.

        Raises:
            ConfigError: it cannot be read, or is not a record.
        """
        try:
            state: dict[str, Any] = json.loads(read_file(self._path))
            json.dumps(state, ensure_ascii=False).encode()  # fails for half characters, which no message can carry
            SchedulerRouter.check_record(state)
        except FileNotFoundError:
            return None
        except OSError as error:
            why = error.strerror or error
            raise _state_error(f"cannot read {self._path}: {why}; make this process's user its owner") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.unusable(error) from None
        return state

    def save(self, record: Mapping[str, object]) -> None:
        """Save a record. A crash leaves the old one or the new one.

        Raises:
            OSError: it cannot be written.
            InUse: the lock was taken away, and another scheduler has it.
        """
        try:
            with self._writing:
                self._folder.mkdir(OWNER_ONLY_FOLDER, parents=True, exist_ok=True)  # somebody may have removed it
                if self._lock is not None:
                    self._lock.keep()
                self._file.write(json.dumps(record).encode())
        finally:
            if self._is_closed:
                self._unlock()

    def save_first(self, record: Mapping[str, object]) -> None:
        """Save the record of a scheduler that is about to start.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self.save(record)
        except OSError as error:
            self.close()
            raise self._bad_folder(error) from None

    def close(self) -> None:
        """Give back the descriptors, and the lock once nothing is being written any more. The record stays."""
        self._is_closed = True
        self._file.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None and self._writing.acquire(blocking=False):
            try:
                self._lock.release()
            finally:
                self._writing.release()

    def unusable(self, error: Exception) -> ConfigError:
        """The error to raise for a record that cannot be used."""
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        text = f"{self._path} is not the state of a scheduler ({why[:MOST_WHY_CHARS]})"
        return _state_error(f"{text}: move it away to start with an empty one")

    def _bad_folder(self, error: OSError) -> ConfigError:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            text = "is a file, or lies below one: give --state-dir a directory, or a name that is free"
        else:
            why = error.strerror or error
            text = f"cannot be written ({why}): give --state-dir a directory that is writable and has room"
        return _state_error(f"state_dir = {str(self._folder)!r} {text}")


def _state_error(text: str) -> ConfigError:
    return ConfigError(text, setting="state_dir")
