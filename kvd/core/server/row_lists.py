"""Which rows a part of a table has: a worker that exports the table asks for them in pages."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import JobDone, Received
from kvd.core.machine import ListRows as ListRowsJob
from kvd.core.refusals import refusal_of
from kvd.core.server.attachments import Attachments
from kvd.core.server.effects import ServerEffects
from kvd.core.server.pauses import SliceJobs
from kvd.protocol.messages import ErrorCode, ListRows, RowList
from kvd.protocol.specs import no_table_text

IDS_AT_ONCE = 1 << 21


class RowLists:
    """Answers `ListRows`."""

    def __init__(self, effects: ServerEffects, attachments: Attachments, jobs: SliceJobs) -> None:
        self._effects = effects
        self._attachments = attachments
        self._jobs = jobs

    def list(self, event: Received, message: ListRows) -> None:
        """Reads the ids when no update of the part runs."""
        if self._attachments.rank_of(event, message.request) is None:
            return
        slice_ = self._jobs.find(event, message.request, message.key, message.index)
        if slice_ is None:
            return
        if slice_.spec.table is None:
            text = no_table_text(message.key)
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text, message.key)
            return

        def make(job: int) -> ListRowsJob:
            since, after = message.since, message.after
            return ListRowsJob(job, message.key, message.index, since, after, message.evicted, IDS_AT_ONCE)

        def done(job: JobDone, go_on: Callable[[], None]) -> None:
            if job.error is not None:
                self._effects.send(event.peer, refusal_of(message.request, job.error))
            else:
                version, more, span = job.result
                self._effects.send(event.peer, RowList(message.request, version, more), (span,))
            go_on()

        self._jobs.between_updates(slice_, make, done)
