"""A folder with snapshots: which there are, which is the newest that can be used, and how many stay."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvd.errors import SnapshotError
from kvd.protocol.messages import BIGGEST
from kvd.snapshots import manifest
from kvd.snapshots.folder import hidden_name
from kvd.snapshots.manifest import Origin
from kvd.snapshots.reader import NewerSnapshot, StoredSnapshot

_NUMBER = re.compile(r"(\d{1,18})$")

logger = logging.getLogger("kvd")


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot in the folder.

    Attributes:
        steps: how many steps were made by then; if the manifest cannot be read, what the name ends with.
        origin: None if the manifest cannot be read.
    """

    path: Path
    steps: int
    origin: Origin | None


def is_snapshot(path: Path) -> bool:
    """Return whether a folder is a snapshot, complete or damaged."""
    return (path / manifest.FILE).exists() or any(path.glob("part-*.safetensors"))


def snapshots_in(folder: Path) -> list[Found]:
    """Return all snapshots of a folder, also damaged ones, ordered by their steps.

    Raises:
        SnapshotError: the folder cannot be read. One that does not exist has none.
    """
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".") and is_snapshot(path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        text = f"{folder}: {error.strerror}: the folder with the snapshots cannot be read"
        raise SnapshotError(text, path=str(folder)) from error
    return sorted(map(_found, paths), key=lambda found: (found.steps, found.path.name))


def _found(path: Path) -> Found:
    try:
        origin = StoredSnapshot.open(path).manifest.origin
    except SnapshotError:
        number = _NUMBER.search(path.name)
        return Found(path, int(number[1]) if number else BIGGEST, None)  # it may be the newest: nobody must miss it
    return Found(path, origin.steps, origin)


def newest_of(found: Sequence[Found], job: str | None, *, or_older: bool) -> StoredSnapshot | None:
    """Return the newest snapshot, verified; None if there is none.

    Args:
        job: whose snapshots may be taken; None: of any job, if all are of one.
        or_older: in place of one that is damaged, take the one before, with a warning.

    Raises:
        SnapshotError: the newest is damaged, or of a newer kvd; or there are those of other jobs only.
    """
    if not found:
        return None
    folder = found[0].path.parent
    jobs = sorted({each.origin.job for each in found if each.origin is not None})
    if job is None and len(jobs) > 1:
        text = f"{folder} has snapshots of several jobs ({', '.join(map(repr, jobs))}): name the one to restore"
        raise SnapshotError(text, path=str(folder))
    own = [each for each in found if job is None or each.origin is None or each.origin.job == job]
    if not own:
        text = (
            f"{folder} has snapshots of job {jobs[0]!r}, and none of this one, which is {job!r}: set job = {jobs[0]} "
            f"to go on with that job, name another folder, or restore one of them with kv.restore"
        )
        raise SnapshotError(text, path=str(folder))
    damage: SnapshotError | None = None
    for each in reversed(own):
        try:
            snapshot = StoredSnapshot.open(each.path)
            snapshot.verify()
        except NewerSnapshot:
            raise
        except SnapshotError as error:
            damage = damage or error
            if not or_older:
                raise
        else:
            if damage is not None:
                logger.warning("%s: restoring %s, the one before", damage, each.path)
            return snapshot
    assert damage is not None
    raise damage


def newest_at(path: Path, *, missing_ok: bool, or_older: bool) -> StoredSnapshot | None:
    """Return the snapshot at `path`, or the newest one in it, verified; None if there is none and `missing_ok`.

    Raises:
        SnapshotError: see `newest_of`; or this is neither a snapshot nor a folder with some.
    """
    if missing_ok and not os.path.lexists(path):
        return None
    if path.is_dir() and not is_snapshot(path):
        found = snapshots_in(path)
        if found:
            return newest_of(found, None, or_older=or_older)
        if missing_ok and all(entry.name.startswith(".") for entry in path.iterdir()):
            return None
    elif or_older and path.is_dir():
        this = _found(path)
        before = [each for each in snapshots_in(path.resolve().parent) if each.path != path.resolve()]
        of_job = None if this.origin is None else this.origin.job
        older = [each for each in before if each.steps < this.steps]
        return newest_of([*older, this], of_job, or_older=True)
    snapshot = StoredSnapshot.open(path)
    snapshot.verify()
    return snapshot


def same_in(path: Path, lineage: str, steps: int) -> StoredSnapshot | None:
    """The snapshot at `path`, or in it, of this lineage and after so many steps; None if it is not there any more.

    Raises:
        SnapshotError: the folder cannot be read.
    """
    found = [_found(path)] if path.is_dir() and is_snapshot(path) else snapshots_in(path)
    if path.is_dir() and is_snapshot(path):
        found += [each for each in snapshots_in(path.resolve().parent) if each.path != path.resolve()]  # or_older
    for each in found:
        if each.origin is not None and (each.origin.lineage, each.origin.steps) == (lineage, steps):
            return StoredSnapshot.open(each.path)
    return None


def check_is_newest(folder: Path, job: str, lineage: str, steps: int) -> None:
    """Raise SnapshotError if the job has snapshots here that are later than `steps` and of an earlier start of it:
    those that come would lie among them. Damaged ones are in nobody's way."""
    for each in reversed(snapshots_in(folder)):
        origin = each.origin
        if origin is None or origin.job != job or origin.lineage == lineage or origin.steps <= steps:
            continue
        if _is_damaged(each.path):
            continue
        text = (
            f"{each.path} is a snapshot of this job after {origin.steps} steps, and the job goes on after {steps}: "
            f"set restore = auto to go on from it, or move it away, or name another snapshot_dir"
        )
        raise SnapshotError(text, path=str(each.path))


def set_aside(path: Path, job: str, lineage: str) -> None:
    """Remove a damaged snapshot, or one of an earlier start of the job, to make room for the next one.

    Raises:
        OSError: it cannot be moved.
    """
    if not path.is_dir() or not is_snapshot(path):
        return
    origin = _found(path).origin
    if origin is None or (origin.job == job and origin.lineage != lineage):
        _remove(path)


def keep_newest(folder: Path, job: str, keep: int) -> None:
    """Remove all but the newest complete snapshots of a job, and leftovers of killed processes.

    Raises:
        SnapshotError: the folder cannot be read.
        OSError: one cannot be removed.
    """
    own = [each for each in snapshots_in(folder) if each.origin is not None and each.origin.job == job]
    for each in own[:-keep]:
        _remove(each.path)


def _is_damaged(path: Path) -> bool:
    try:
        StoredSnapshot.open(path).verify()
    except NewerSnapshot:
        return False
    except SnapshotError:
        return True
    return False


def _remove(path: Path) -> None:
    """Remove a snapshot, its name first, so that nobody finds half of it."""
    gone = path.with_name(hidden_name(path, secrets.token_hex(4)))
    with suppress(FileNotFoundError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
