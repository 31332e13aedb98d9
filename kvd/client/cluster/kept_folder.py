"""The directory in which a worker keeps what compression has left over of its keys, for itself after a restart."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from kvd.client.cluster.kept_files import Kept, KeptFile, Unusable, read, remove
from kvd.errors import ConfigError
from kvd.files import new_file
from kvd.protocol.specs import KeySpec

_SUFFIX = ".kept"

_log = logging.getLogger(__name__)


class KeptFolder:
    """The files of one worker.

    Args:
        folder: what the program names; the workers of a job may share it.
        rank: of this worker.

    Attributes:
        path: of this worker's own directory in it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder.absolute() / f"worker-{rank}"
        self._has_failed = False

    def open(self, *, emptied: bool) -> None:
        """Makes the directory. `emptied`: what is there belongs to no predecessor of this worker.

        Raises:
            ConfigError: it cannot be made, or not written to.
        """
        try:
            self.path.mkdir(0o700, parents=True, exist_ok=True)
            probe = self.path / "probe.part"
            new_file(probe, is_private=True).close()
            probe.unlink(missing_ok=True)
        except OSError as error:
            text = f"state_dir: {str(self.path)!r} cannot be written to: {error.strerror or error}"
            raise ConfigError(text, setting="state_dir") from None
        if emptied:
            self.clear()

    def clear(self) -> None:
        """Removes all files."""
        for path in [*self.path.glob(f"*{_SUFFIX}"), *self.path.glob("*.part")]:
            remove(path)

    def remove(self, name: str, spec: KeySpec) -> None:
        """Removes the file of a key."""
        remove(self._path(name, spec))

    def read(
        self, name: str, spec: KeySpec, sizes: Sequence[int], clock_of: Callable[[str], int]
    ) -> tuple[Kept, int] | None:
        """What the predecessor kept after the last of its pushes that this worker goes on from, and the clock of that;
        None: nothing, and if there is a file, a warning says why it is of no use."""
        path = self._path(name, spec)
        if not path.exists():
            return None
        try:
            return read(path, _identity(name, spec, sizes), sizes, clock_of(name))
        except Unusable as error:
            text = "what compression had left over of key %r begins at 0: %s is of no use: %s"
            _log.warning(text, name, path, error)
            return None

    def file(
        self, name: str, spec: KeySpec, sizes: Sequence[int], present: KeptFile | None, last: Kept, clock: int
    ) -> KeptFile | None:
        """The file for arrays of these sizes: the present one, or a new one that begins with `last`. None: it cannot
        be made, as a warning has said."""
        identity = _identity(name, spec, sizes)
        if present is not None and present.identity == identity:
            return present
        if self._has_failed:
            return None
        if present is not None:
            clock = present.clock_of(last.ordinal)
        try:
            return KeptFile(self._path(name, spec), identity, sizes, last if last.ordinal else None, clock)
        except OSError as error:
            self._has_failed = True
            text = "state_dir: what compression leaves over does not survive a restart of this worker: %s: %s"
            _log.warning(text, self.path, error.strerror or error)
            self.clear()
            return None

    def _path(self, name: str, spec: KeySpec) -> Path:
        return self.path / (hashlib.sha256(_identity(name, spec, ())).hexdigest()[:40] + _SUFFIX)


def _identity(name: str, spec: KeySpec, sizes: Sequence[int]) -> bytes:
    """What the content of a file depends on, beside its rank."""
    said = repr((name, spec.dtype, spec.shape, spec.slice_bytes, tuple(sizes)))
    return hashlib.sha256(said.encode()).digest()
