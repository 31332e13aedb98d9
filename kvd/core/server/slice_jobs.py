"""Jobs on one slice that run while no update of it does."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import Job, JobDone, Received
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.keys import KeyTable
from kvd.protocol.messages import ErrorCode


class SliceJobs:
    """Finds the slices that messages name, and runs jobs on them.

    Args:
        advance: starts the next job of a group.
    """

    def __init__(
        self,
        table: KeyTable,
        effects: ServerEffects,
        elsewhere: Elsewhere,
        advance: Callable[[FusedGroup], None],
    ) -> None:
        self._table = table
        self._effects = effects
        self._elsewhere = elsewhere
        self._advance = advance

    def find(self, event: Received, request: int, key: str, index: int) -> Slice | None:
        """The slice; None if the request was answered, or will be asked again elsewhere."""
        slice_ = self._table.slices.get((key, index))
        if slice_ is not None and self._elsewhere.leaves((slice_,)):
            slice_ = None
        if slice_ is None and not self._elsewhere.has(event, request, key, index):
            text = f"no slice {index} of {key!r} is here"
            self._effects.refuse(event.peer, request, ErrorCode.KEY_NOT_FOUND, text, key)
        return slice_

    def between_updates(
        self,
        slice_: Slice,
        make: Callable[[int], Job],
        done: Callable[[JobDone, Callable[[], None]], None],
        is_refused: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts the job when no update of the slice runs. None begins before `done`, which gets its end, has called
        what it gets besides.

        Args:
            is_refused: asked when the turn of the job has come, as updates may have been made since: whether it is not
                to run any more. Whoever wants it was told by then.
        """
        group = slice_.group  # a group with tasks is not parted

        def go_on() -> None:
            group.working = False
            self._advance(group)

        def ended(job: JobDone) -> None:
            if group.is_gone:  # another server leads it, and is asked now
                go_on()
            else:
                done(job, go_on)

        def start() -> None:
            if is_refused():
                go_on()
            else:
                self._effects.start_job(make, ended)

        group.tasks.append(start)
        self._advance(group)
