"""The rows of tables on their way to a server that becomes a backup: piece by piece, before the slices themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from kvd.core.machine import JobDone, ReadPart, TableVersion
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import Slice
from kvd.core.server.records import Holder, Records
from kvd.protocol.messages import InstallRows, Refused

PIECE_NBYTES = 4 << 20


class CopiedRows:
    """Sends the rows of parts that rest.

    Args:
        fail: a server cannot be sent them, for this reason.
    """

    def __init__(self, effects: ServerEffects, records: Records, fail: Callable[[Holder, str], None]) -> None:
        self._effects = effects
        self._records = records
        self._fail = fail

    def send(self, holder: Holder, slices: Iterable[Slice], then: Callable[[], None]) -> None:
        """Sends what there is of these parts of tables, and calls `then` when the server has it; never, if the view
        names it no more."""
        left = deque(filter(_was_updated, slices))

        def send_next(_: Refused | None = None) -> None:
            if holder.is_over:
                return
            if not left:
                then()
                return
            self._read(holder, left.popleft(), 0, send_next)

        send_next()

    def _read(self, holder: Holder, slice_: Slice, position: int, then: Callable[[Refused | None], None]) -> None:
        self._effects.start_job(
            lambda job: ReadPart(job, slice_.key, slice_.index, position, PIECE_NBYTES),
            partial(self._send, holder, slice_, then),
        )

    def _send(self, holder: Holder, slice_: Slice, then: Callable[[Refused | None], None], done: JobDone) -> None:
        if holder.is_over:
            return
        if done.error is not None:
            self._fail(holder, f"the rows of table {slice_.key!r} cannot be read: {done.error}")
            return
        piece, following = done.result

        def held(refused: Refused | None) -> None:
            if not holder.is_over:
                self._read(holder, slice_, following, then)

        message = InstallRows(0, holder.partition, slice_.slice_id, slice_.spec)
        self._records.copy(holder, message, then if following is None else held, (piece,))


def _was_updated(slice_: Slice) -> bool:
    """Whether it is a part of a table that is not as it was made."""
    version = slice_.log.current
    return isinstance(version, TableVersion) and version.number > 0
