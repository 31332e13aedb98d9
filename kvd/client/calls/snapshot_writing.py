"""The thread that writes a snapshot while the program goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvd.client.calls.promise import Promise
from kvd.errors import StoreClosed
from kvd.snapshots.series import NextSnapshot
from kvd.snapshots.writer import KeyContent, ProgramContent

STOP_S = 5.0  # for the part that is being written when the store is given up


class SnapshotWriting:
    """Writes what was read, and lets go of it piece by piece. It has a thread of its own, which the end of the
    interpreter waits for: an executor takes no work any more by then.

    Attributes:
        promise: how it ended.

    Args:
        contents: of the keys of each group.
        program: the state of the program; None: there is none.
        published: called when the snapshot has its name.
    """

    def __init__(
        self,
        snapshot: NextSnapshot,
        contents: Iterable[Sequence[KeyContent]],
        program: ProgramContent | None = None,
        published: Callable[[], None] | None = None,
    ) -> None:
        self.promise = Promise()
        self._snapshot = snapshot
        self._contents = deque(contents)
        self._program = program
        self._published = published
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-snapshot")
        self._thread.start()

    def give_up(self) -> None:
        """Nobody wants it any more: what was written goes, unless it has its name already."""
        self._given_up.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001  the promise raises it
            self._snapshot.abort()
            self._contents.clear()
            self._program = None
            self.promise.set_exception(error)
        else:
            if self._published is not None:
                self._published()
            self.promise.set_result(None)

    def _write(self) -> None:
        while self._contents:
            self._snapshot.add_group(self._contents.popleft())
            if self._given_up.is_set():
                raise StoreClosed("the store was closed before the snapshot was written: nothing of it is there")
        program, self._program = self._program, None
        if program is not None:
            self._snapshot.add_program(program)
        self._snapshot.finish()
