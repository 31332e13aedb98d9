"""How a snapshot or a restore ended for worker 0, as a note to the others."""

from __future__ import annotations

import json
from typing import NamedTuple

from kvd.errors import SnapshotError
from kvd.protocol.messages import BIGGEST, MAX_TEXT_CHARS


class Outcome(NamedTuple):
    """What all workers learn.

    Attributes:
        steps: how many steps of its loops the program had made.
        lineage: of the snapshot.
        error: what went wrong; "" if nothing did.
        path: the file or folder of the error.
        is_missing: there is no snapshot, and none was needed.
        token: of a snapshot that was read, and is yet to be written: no other has the same.
        has_program: the snapshot has the state of a program that updates the weights itself.
    """

    steps: int = 0
    lineage: str = ""
    error: str = ""
    path: str = ""
    is_missing: bool = False
    token: str = ""
    has_program: bool = False

    @classmethod
    def of_error(cls, error: BaseException) -> Outcome:
        return cls(error=str(error) or type(error).__name__, path=getattr(error, "path", ""))

    def to_note(self) -> str:
        """A text that fits into a message."""
        error, path = self.error, self.path
        while True:
            plain = [*self._replace(error=_sendable(error), path=_sendable(path))]
            note = json.dumps(plain, ensure_ascii=False)
            if len(note) <= MAX_TEXT_CHARS:
                return note
            error, path = error[: len(error) * 3 // 4], path[: len(path) * 3 // 4]

    @classmethod
    def from_note(cls, note: str) -> Outcome | None:
        """What `to_note` said; None if nothing was said, or something else."""
        try:
            fields = json.loads(note)
            outcome = cls(*fields)
        except (ValueError, TypeError):
            return None
        if len(fields) < len(cls._fields) or [type(entry) for entry in outcome] != [
            int,
            str,
            str,
            str,
            bool,
            str,
            bool,
        ]:
            return None
        return outcome if 0 <= outcome.steps <= BIGGEST else None

    def check(self, call: str) -> None:
        """Raises SnapshotError if something went wrong."""
        if self.error:
            raise SnapshotError(f"{call} failed in worker 0, and so in all: {self.error}", path=self.path)


def _sendable(text: str) -> str:
    """The text without the halves of surrogate pairs that names of files may have."""
    return text.encode(errors="replace").decode()
