"""The file that says where a daemon listens, and by being there that it is ready."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from kvd.errors import KvdError
from kvd.observe.log import event

logger = logging.getLogger("kvd.node")


class ReadyFile:
    """It appears when the daemon is ready, with its whole content, and goes when the daemon ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = path.with_name(path.name + ".part")

    def check(self) -> None:
        """Find out whether it can be written, before anyone has been told that there is a daemon.

        Raises:
            KvdError: it cannot.
        """
        try:
            self._aside.write_text("\n")  # not nothing, for which even a full disk has room
        except OSError as error:
            raise self._problem(error) from None
        finally:
            self._tidy()

    def write(self, address: str) -> None:
        """Say that the daemon is ready, and where.

        Raises:
            KvdError: it cannot be written.
        """
        try:
            self._aside.write_text(address + "\n")
            self._aside.rename(self._path)
        except OSError as error:
            raise self._problem(error) from None
        finally:
            self._tidy()

    def remove(self) -> None:
        """Take it away. What cannot be removed is told: whoever finds it would think that the daemon is there."""
        try:
            self._path.unlink(missing_ok=True)
        except NotADirectoryError:
            pass  # it never was there
        except OSError as error:
            event(logger, logging.WARNING, f"cannot remove {self._path}: {error.strerror or error}; remove it by hand")

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):
            self._aside.unlink(missing_ok=True)

    def _problem(self, error: OSError) -> KvdError:
        return KvdError(
            f"cannot write the ready file {self._path}: {error.strerror or error}; "
            "give --ready-file a name in a folder that exists, may be written, and has room"
        )
