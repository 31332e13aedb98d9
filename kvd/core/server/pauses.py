"""Work on a group of slices between two of its updates.

An update changes the bytes of a group and the state of its optimizer in place. A capture, a comparison with a backup, a
copy for a new backup, a new optimizer, and a job on one slice for a worker each need both at rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvd.core.machine import Job, JobDone, Received
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.keys import KeyTable
from kvd.protocol.messages import ErrorCode


class Pauses:
    """Pauses of the updates of groups, one at a time for each group.

    Args:
        advance: starts the next piece of work of a group, or closes its next round (`Pushes.advance`).
    """

    def __init__(self, advance: Callable[[FusedGroup], None]) -> None:
        self._advance = advance

    def pause(self, group: FusedGroup, work: Callable[[Callable[[], None]], None]) -> None:
        """Call `work` when no update of the group runs, and start none until `work` calls its argument.

        Until then the group is not parted, nor fused with others. If another server comes to lead it, work that has not
        begun is dropped (`GivingUp.forget`).
        """
        group.tasks.append(partial(work, partial(self._resume, group)))
        self._advance(group)

    def _resume(self, group: FusedGroup) -> None:
        group.working = False
        self._advance(group)


class SliceJobs:
    """Jobs on one slice for a worker, each in a pause of its own."""

    def __init__(self, table: KeyTable, effects: ServerEffects, elsewhere: Elsewhere, pauses: Pauses) -> None:
        self._table = table
        self._effects = effects
        self._elsewhere = elsewhere
        self._pauses = pauses

    def find(self, event: Received, request: int, key: str, index: int) -> Slice | None:
        """Return the slice; None if the request was answered, or will be asked again elsewhere."""
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
        """Start the job when no update of the slice runs.

        Args:
            make: makes the job of this number.
            done: gets the end of the job, and the callable that ends the pause. If another server leads the slice by
                then, it is not called: the worker asks there.
            is_refused: called when the turn of the job has come, since updates may have been made meanwhile. True drops
                the job; the worker must have been refused by then.
        """
        group = slice_.group

        def start(resume: Callable[[], None]) -> None:
            def ended(job: JobDone) -> None:
                if group.is_gone:
                    resume()
                else:
                    done(job, resume)

            if is_refused():
                resume()
            else:
                self._effects.start_job(make, ended)

        self._pauses.pause(group, start)
