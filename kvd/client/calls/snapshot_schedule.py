"""Snapshots by a schedule: after which steps, under which names, and how many stay."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from kvd.client.calls.handle import Handle
from kvd.client.calls.promise import Promise
from kvd.config import Config
from kvd.errors import NotAllowed, SnapshotError, StoreClosed
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.shelf import check_is_newest, keep_newest, newest_of, set_aside, snapshots_in

logger = logging.getLogger("kvd")


class SnapshotSchedule:
    """What the settings `snapshot_dir`, `snapshot_every`, `snapshot_keep` and `restore` say.

    Attributes:
        folder: where the snapshots are.
        every: the number of steps from one to the next; 0: none is taken.
        job: whose they are.

    Args:
        lineage: of this run.
    """

    def __init__(self, config: Config, job: str, lineage: Callable[[], str]) -> None:
        self.folder = Path(config.snapshot_dir)
        self.every = config.snapshot_every
        self.job = job
        self._keep = config.snapshot_keep
        self._restore = config.restore
        self._lineage = lineage

    def newest(self) -> StoredSnapshot | None:
        """The snapshot with which a new run begins, verified; None: it begins with its own values.

        Raises:
            SnapshotError: see `newest_of`.
        """
        if self._restore == "off":
            return None
        return newest_of(snapshots_in(self.folder), self.job, or_older=self._restore == "older")

    def is_due(self, steps: int) -> bool:
        """Whether one is taken after this many steps."""
        return bool(self.every) and steps % self.every == 0

    def path(self, steps: int) -> Path:
        """Its folder."""
        return self.folder / f"step-{steps:06d}"

    def check(self, restored: int) -> None:
        """Before the program does anything.

        Args:
            restored: how many steps were made before the snapshot that the store was restored from.

        Raises:
            SnapshotError: the folder cannot be used, or has later snapshots of this job.
        """
        if not self.every:
            return
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            text = f"{self.folder}: {error.strerror}: snapshot_dir is to be a folder that worker 0 can write to"
            raise SnapshotError(text, path=str(self.folder)) from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            text = f"{self.folder}: worker 0 may not write there: set snapshot_dir to a folder of its own"
            raise SnapshotError(text, path=str(self.folder))
        check_is_newest(self.folder, self.job, self._lineage(), restored)

    def check_loop(self) -> None:
        """Raises NotAllowed if snapshots are wanted of a loop whose steps are shared."""
        if self.every:
            raise NotAllowed(
                f"snapshot_every = {self.every}, but workers that share their steps come to no place where all wait "
                f"for a snapshot: set it to 0, and call kv.snapshot after the loop"
            )

    def make_room(self, path: Path) -> None:
        """What is in the way of the next one, and is damaged, goes.

        Raises:
            SnapshotError: it cannot be removed.
        """
        try:
            set_aside(path, self.job, self._lineage())
        except OSError as error:
            raise SnapshotError(f"{path}: {error.strerror}: it is in the way of a snapshot", path=str(path)) from error

    def published(self) -> None:
        """One more is there: the oldest go."""
        try:
            keep_newest(self.folder, self.job, self._keep)
        except (OSError, SnapshotError) as error:
            logger.warning("snapshots that are too old stay in %s: %s", self.folder, error)

    def failed(self, steps: int, error: BaseException) -> None:
        """The training goes on without this one."""
        logger.error("no snapshot after step %d, the training goes on: %s", steps, error)

    def watch(self, steps: int, handle: Handle) -> None:
        """Says what became of one that is being written."""

        def ended(promise: Promise) -> None:
            error = promise.exception()
            if error is not None and not isinstance(error, StoreClosed):  # it ends, and says why
                self.failed(steps, error)

        handle.on_end(ended)

    def ended(self, loops: int) -> None:
        """The program is at its end; it has begun so many loops."""
        if self.every and not loops:
            logger.warning(
                "snapshot_every = %d, but this program has no loop over kv.steps: no snapshot was taken; write the "
                "training as for step in kv.steps(n), or call kv.snapshot",
                self.every,
            )
