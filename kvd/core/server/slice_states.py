"""What belongs to a slice besides its bytes, read and stored for a worker: the state of its optimizer.

Of a part of a table it is the rows, with what the optimizer keeps of them: some at a time, in pieces
(`kvd.tables.stored_rows`).
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import Export, Job, JobDone, Load, ReadStored, Received, Span, TableVersion
from kvd.core.refusals import refusal_of
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import Slice
from kvd.core.server.optimizer_records import OptimizerRecords
from kvd.core.server.pauses import SliceJobs
from kvd.core.server.records import LED_ELSEWHERE, Records
from kvd.protocol.messages import (
    STATE_OF_ROWS,
    Done,
    ErrorCode,
    FetchState,
    HoldState,
    NotYetReason,
    Refused,
    State,
    StoreState,
)
from kvd.protocol.specs import KeySpec

PAGE_NBYTES = 4 << 20  # of rows


class SliceStates:
    """Answers `FetchState` and `StoreState`.

    Args:
        row_error: why there is no memory for so many bytes of rows of a table; empty if there is.
    """

    def __init__(
        self,
        effects: ServerEffects,
        records: Records,
        jobs: SliceJobs,
        row_error: Callable[[str, KeySpec, int], str],
        optimizers: OptimizerRecords,
    ) -> None:
        self._effects = effects
        self._records = records
        self._jobs = jobs
        self._row_error = row_error
        self._optimizers = optimizers

    def fetch(self, event: Received, message: FetchState) -> None:
        """Reads it when no update of the slice runs."""
        slice_ = self._jobs.find(event, message.request, message.key, message.index)
        if slice_ is None:
            return
        is_table = slice_.spec.table is not None

        def read(job: int) -> Job:
            if is_table:
                return ReadStored(job, message.key, message.index, message.first, PAGE_NBYTES)
            return Export(job, message.key, message.index)

        def done(job: JobDone, go_on: Callable[[], None]) -> None:
            if job.error is not None:
                self._effects.send(event.peer, refusal_of(message.request, job.error))
            elif is_table:
                self._effects.send(event.peer, State(message.request, 0, ()), (job.result,))
            else:
                step, slots, spans = job.result
                self._effects.send(event.peer, State(message.request, step, slots), spans)
            go_on()

        self._jobs.between_updates(slice_, read, done)

    def store(self, event: Received, message: StoreState) -> None:
        """Stores it when no update of the slice runs, and has it held."""
        slice_ = self._jobs.find(event, message.request, message.key, message.index)
        if slice_ is None or self._is_refused(event, message, slice_) or self._came_before(event, message, slice_):
            return
        source = Span(event.payload, 0, event.nbytes)
        before, slice_.loaded = slice_.loaded, (event.sender, message.request)
        slice_.is_loading = True

        def done(job: JobDone, go_on: Callable[[], None]) -> None:
            if job.error is not None:
                if slice_.loaded == (event.sender, message.request):
                    slice_.loaded, slice_.is_loading = before, False  # it may be asked for again
                self._effects.send(event.peer, refusal_of(message.request, job.error))
                go_on()
                return
            if isinstance(job.result, TableVersion):
                slice_.log.current = job.result

            def held(refused: Refused | None) -> None:
                if slice_.loaded == (event.sender, message.request):
                    slice_.is_loading = False
                if refused is not LED_ELSEWHERE:
                    self._effects.send(event.peer, Done(message.request))
                go_on()

            slice_id, sender, step, slots = slice_.slice_id, event.sender, message.step, message.slots
            record = HoldState(0, slice_.partition, slice_id, sender, message.request, step, slots)
            payload = (source,) if event.nbytes else ()
            self._records.hold_round(slice_.partition, record, held, payload, slice_id)

        def load(job: int) -> Load:
            return Load(job, message.key, message.index, message.step, message.slots, source)

        def is_refused() -> bool:
            is_late = self._was_pushed_to(event, message, slice_)
            if is_late and slice_.loaded == (event.sender, message.request):
                slice_.loaded, slice_.is_loading = before, False
            return is_late

        self._jobs.between_updates(slice_, load, done, is_refused)

    def _is_refused(self, event: Received, message: StoreState, slice_: Slice) -> bool:
        """Whether it cannot be stored; the sender was told."""
        request, key = message.request, message.key
        if slice_.creation != message.creation:
            text = f"key {key!r} was deleted, and made again"
            self._effects.refuse(event.peer, request, ErrorCode.KEY_NOT_FOUND, text, key)
            return True
        if slice_.spec.table is None:
            return False
        if self._was_pushed_to(event, message, slice_):
            return True
        text = self._row_error(key, slice_.spec, event.nbytes)
        if text:
            self._effects.refuse(event.peer, request, ErrorCode.NOT_ALLOWED, text, key)
        return bool(text)

    def _was_pushed_to(self, event: Received, message: StoreState, slice_: Slice) -> bool:
        """Whether rows that are stored could undo a push, or do so by the time when it is their turn; the sender was
        told. The optimizer's state alone undoes none."""
        if slice_.spec.table is None or not slice_.log.version or message.slots == STATE_OF_ROWS:
            return False
        text = f"table {message.key!r} was pushed to: rows are stored in a new table, as restore makes it"
        self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text, message.key)
        return True

    def _came_before(self, event: Received, message: StoreState, slice_: Slice) -> bool:
        """Whether it is stored, or being stored, or has to wait: a second load would undo the updates since the
        first."""
        sender, request = slice_.loaded
        if self._optimizers.is_open:
            text = "the optimizer was changed just now"
            self._effects.not_yet(event.peer, message.request, NotYetReason.BUSY, text, message.key)
            return True
        if slice_.is_loading and (sender, request) == (event.sender, message.request):
            return True  # it is asked again, and this will be done by then
        if sender == event.sender and message.request <= request:
            self._effects.send(event.peer, Done(message.request))
            return True
        return False
