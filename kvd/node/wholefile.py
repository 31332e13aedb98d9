"""Files that are replaced as a whole: whoever reads one finds the old content or the new one, whatever crashes."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, save: Callable[[BinaryIO], object]) -> None:
    """Written aside, synced and renamed. A file that is there keeps its mode, and its owner where that is allowed; a
    link stays one, and what it leads to is replaced.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    place = Path(os.path.realpath(path))
    aside = place.with_name(f".{place.name[:60]}.{secrets.token_hex(4)}.part")
    try:
        with aside.open("xb") as file:
            with suppress(FileNotFoundError):
                _take_after(place.stat(), file.fileno())
            save(file)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(place)
    except BaseException:
        with suppress(OSError):  # it is the first error that counts
            aside.unlink()
        raise


def _take_after(old: os.stat_result, descriptor: int) -> None:
    with suppress(OSError):  # only root may give a file to somebody else
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
