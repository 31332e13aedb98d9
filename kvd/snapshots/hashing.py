"""The checksum of a part, computed while it is written: hashing and writing cost about the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256

from kvd.snapshots.folder import Buffer

SMALLEST_BYTES = 1 << 20  # below, a thread costs more than it saves


def digest_of(content: Sequence[Buffer]) -> str:
    """Return the SHA-256 of these bytes, one after the other."""
    digest = sha256()
    for piece in content:
        digest.update(piece)
    return digest.hexdigest()


class Hashing:
    """The checksum of bytes that nobody changes meanwhile; by a thread, if one can be started."""

    def __init__(self, content: Sequence[Buffer]) -> None:
        self._content = content
        self._digest = ""
        self._thread: threading.Thread | None = None
        if sum(len(piece) for piece in content) >= SMALLEST_BYTES:
            thread = threading.Thread(target=self._run, name="kvd-snapshot-hash")
            with suppress(RuntimeError):  # there are too many threads, or the interpreter ends
                thread.start()
                self._thread = thread

    def digest(self) -> str:
        """Compute the checksum on first use, and return it."""
        self.join()
        if self._thread is None:
            self._run()
        return self._digest

    def join(self) -> None:
        """Wait until all hashing is done."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._digest = digest_of(self._content)


@contextmanager
def hashed_beside(content: Sequence[Buffer]) -> Iterator[Hashing]:
    """Hash these bytes during the block. They may be changed after it."""
    hashing = Hashing(content)
    try:
        yield hashing
    finally:
        hashing.join()
