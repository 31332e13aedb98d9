"""The file that says where a daemon listens. Its existence says that the daemon is ready."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from kvd.errors import KvdError
from kvd.files import new_file
from kvd.node.daemon.process_limits import NO_DESCRIPTOR
from kvd.observe.log import event

logger = logging.getLogger("kvd.node")


class ReadyFile:
    """Appears with its whole content when the daemon is ready, and disappears when the daemon ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + ".part")

    def check(self) -> None:
        """Find out whether it can be written, before anyone is told of the daemon.

        Raises:
            KvdError: it cannot.
        """
        try:
            self._write("\n")  # not empty: even a full disk has room for an empty file
        except OSError as error:
            raise self._problem(error) from None
        finally:
            self._remove_temporary()

    def write(self, address: str) -> bool:
        """Say that the daemon is ready, and where it listens. False: no descriptor is left now, try again.

        Raises:
            KvdError: it cannot be written.
        """
        try:
            self._write(address + "\n")
            self._temporary.rename(self._path)
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                return False
            raise self._problem(error) from None
        finally:
            self._remove_temporary()
        return True

    def remove(self) -> None:
        """Remove it. Warns if that fails: its readers would believe that the daemon is there."""
        try:
            self._path.unlink(missing_ok=True)
        except NotADirectoryError:
            pass  # it was never there
        except OSError as error:
            event(logger, logging.WARNING, f"cannot remove {self._path}: {error.strerror or error}; remove it by hand")

    def _write(self, content: str) -> None:
        with new_file(self._temporary) as file:
            file.write(content.encode())

    def _remove_temporary(self) -> None:
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def _problem(self, error: OSError) -> KvdError:
        return KvdError(
            f"cannot write the ready file {self._path}: {error.strerror or error}; "
            "give --ready-file a name in a writable directory that has room"
        )
