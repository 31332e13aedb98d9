"""Captures: slices with the states of their optimizers, kept as they were at one moment while training goes on.

An operator takes a snapshot from the command line in this way: no worker is asked. It names a step (asynchronous: a
version), and each slice is kept as it was after that: its bytes, which never change, by reference; its optimizer's
state, and the rows of tables, as a copy, which is made between two rounds of the slice and alone holds the training up.
Then the operator fetches what was kept, and says when it is done.

A slice is at the wanted moment as long as no round of a later step has closed. One that is behind is waited for; one
that is past it is answered at once with the steps that there are, and the operator names a later one. Only committed
rounds count: nothing is captured while one is being applied, or held. One operator at a time has a capture, which takes
at most the memory of all values and states that this server leads, and is forgotten when the operator is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvd.core.machine import JobDone, KeptRows, Received
from kvd.core.membership import ViewState
from kvd.core.refusals import refusal_of
from kvd.core.server.captured import (
    CaptureRequest,
    KeptSlice,
    OpenCapture,
    captured,
    copy_of,
    kept_slice,
    next_moment,
    no_room,
    page_of,
    rows_nbytes,
    version_for,
)
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.images import OptimizerState
from kvd.core.server.keys import KeyTable
from kvd.core.server.pauses import Pauses
from kvd.core.server.readings import Readings
from kvd.core.server.rounds import NoVersion, Record
from kvd.errors import KvdError
from kvd.optimizer import Optimizer
from kvd.protocol.messages import (
    Capture,
    CaptureDone,
    CaptureWhen,
    Done,
    ErrorCode,
    FetchCaptured,
    NotYetReason,
    Values,
)

EXPIRES_S = 60.0
LOOK_S = 0.5  # between two looks whether keys were deleted that are waited for


class Captures:
    """The captures of a server.

    Args:
        copy_error: why there is no memory to copy so many bytes of a table; empty if there is.

    Attributes:
        is_on: whether there is one: otherwise nothing is due.
        now: the time of the step that is under way.
    """

    def __init__(
        self,
        view: ViewState,
        table: KeyTable,
        effects: ServerEffects,
        readings: Readings,
        pauses: Pauses,
        copy_error: Callable[[str, int], str],
    ) -> None:
        self._view = view
        self._table = table
        self._effects = effects
        self._readings = readings
        self._pauses = pauses
        self._copy_error = copy_error
        self.is_on = False
        self._open: OpenCapture | None = None
        self._ended = (0, 0)  # the sender and number of the one before
        self.now = 0.0

    # ── time ──

    def tick(self, now: float) -> None:
        """Forgets an operator that has been silent for too long, and slices that are gone."""
        own = self._open
        if own is None:
            return
        if own.expires_at <= now:
            self._forget(own)
        elif own.look_at <= now:
            own.look_at = now + LOOK_S
            for request in {own.wanted[slice_]: None for slice_ in own.wanted if slice_.group.is_gone}:
                self._refuse_deleted(own, request)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        if (own := self._open) is None:
            return None
        return min(own.expires_at, own.look_at) if own.wanted else own.expires_at

    # ── what an operator asks ──

    @property
    def handlers(self) -> dict[type[Any], Callable[[Received, Any], None]]:
        """What takes each message."""
        return {Capture: self.capture, FetchCaptured: self.fetch, CaptureDone: self.done}

    def capture(self, event: Received, message: Capture) -> None:
        """Some slices at a moment: answered when they are kept."""
        if not self._view.is_sync and message.when in (CaptureWhen.OVER, CaptureWhen.BEFORE_NEXT):
            text = "this cluster trains asynchronously: its workers share no steps"
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text)
            return
        if self._open is not None and self._open.sender != event.sender:
            text = "another snapshot of this job is being taken"
            self._effects.not_yet(event.peer, message.request, NotYetReason.BUSY, text)
            return
        if self._open is not None and message.number > self._open.number:
            self._forget(self._open)
        own = self._open
        if own is not None and self._came_before(own, event, message):
            return
        slices = self._readings.find_slices(event, message.request, message.slice_ids)
        if slices is None:
            return
        has_ended = self._ended[0] == event.sender and message.number <= self._ended[1]
        if has_ended or (own is not None and message.number < own.number):
            self._effects.send(event.peer, self._readings.surveyed(message.request, slices))
            return
        if own is None:
            own = self._open = OpenCapture(event.sender, message.number, 0.0, self.now + LOOK_S)
            self.is_on = True
        own.expires_at = self.now + EXPIRES_S
        self._enter(own, CaptureRequest(event.peer, message, slices))

    def _came_before(self, own: OpenCapture, event: Received, message: Capture) -> bool:
        """Whether this very request is open, or was answered: the sender may have a new connection."""
        if message.number != own.number:
            return False
        own.expires_at = self.now + EXPIRES_S
        request, answer = own.waiting.get(message.request), own.answered.get(message.request)
        if request is not None:
            request.peer = event.peer
        elif answer is not None:
            self._effects.send(event.peer, answer)
        return request is not None or answer is not None

    def _enter(self, own: OpenCapture, request: CaptureRequest) -> None:
        """What is kept of this very step stays; the rest is wanted. Earlier requests for it have been given up."""
        message = request.message
        wanted = [slice_ for slice_ in request.slices if not own.has(slice_.slice_id, message)]
        for slice_ in wanted:
            earlier = own.wanted.get(slice_)
            if earlier is not None:
                self._pass(own, earlier)
        request.remaining = len(wanted)
        own.waiting[message.request] = request
        for slice_ in wanted:
            own.wanted[slice_] = request
            own.kept.pop(slice_.slice_id, None)
        if not wanted:
            self._end(own, request)
        for group in {slice_.group: None for slice_ in wanted}:
            self._look(own, group)

    def fetch(self, event: Received, message: FetchCaptured) -> None:
        """What is kept of some slices; of a part of a table, some of its rows."""
        own = self._open
        if own is None or own.sender != event.sender or own.number != message.number:
            own = None
        else:
            own.expires_at = self.now + EXPIRES_S
        kept = [] if own is None else [own.kept.get(slice_id) for slice_id in message.slice_ids]
        found = [each for each in kept if each is not None]
        if len(found) < len(message.slice_ids):
            self._effects.send(event.peer, self._readings.surveyed(message.request, ()))
            return
        if any(each.rows is not None for each in found):
            self._fetch_rows(event, message, found)
        else:
            spans = tuple([span for each in found for span in each.spans])
            self._effects.send(event.peer, Values(message.request, tuple([each.version for each in found])), spans)

    def _fetch_rows(self, event: Received, message: FetchCaptured, found: Sequence[KeptSlice]) -> None:
        if len(found) > 1:
            text, key = "the rows of a table are fetched one part at a time", message.slice_ids[0].key
            self._effects.refuse(event.peer, message.request, ErrorCode.PROTOCOL_ERROR, text, key)
            return

        def read(job: JobDone) -> None:
            failed = None if job.error is None else refusal_of(message.request, job.error)
            values = Values(message.request, (found[0].version,))
            self._effects.send(event.peer, failed or values, () if failed else (job.result,))

        self._effects.start_job(partial(page_of, found[0], message), read)

    def done(self, event: Received, message: CaptureDone) -> None:
        """The operator needs this capture no more, and those before it."""
        own = self._open
        if own is not None and own.sender == event.sender and own.number <= message.number:
            self._forget(own)
        if event.sender != self._ended[0] or message.number > self._ended[1]:
            self._ended = (event.sender, message.number)
        self._effects.send(event.peer, Done(message.request))

    # ── what happens meanwhile ──

    @property
    def kept_nbytes(self) -> int:
        """Bytes that are kept, as far as they are not the present versions."""
        return 0 if self._open is None else sum(kept.nbytes for kept in self._open.kept.values())

    @property
    def copied_nbytes(self) -> int:
        """The memory of rows of tables, which are copies."""
        return 0 if self._open is None else self._open.copied_nbytes

    def give_up(self) -> bool:
        """Others need the memory of the copies: the operator may try again. False: there are none."""
        if self._open is None or not self.copied_nbytes:
            return False
        self._forget(self._open)
        return True

    def before_apply(self, group: FusedGroup, record: Record, then: Callable[[], None]) -> None:
        """A round has closed, and will be applied when `then` is called: what it would replace is kept first."""
        own, log = self._open, group.log
        due = {} if own is None else own.due(group, next_moment(log, record))
        if own is None or not due:
            then()
        else:
            self._keep(own, group, due, group.optimizer_for(record.number), then)

    def committed(self, group: FusedGroup) -> None:
        """The group has a new version."""
        if self._open is not None:
            self._look(self._open, group)

    def step_is_over(self) -> None:
        """A worker has said that a step is over."""
        own = self._open
        if own is not None:
            waiting = [slice_ for slice_, of in own.wanted.items() if of.message.when is CaptureWhen.COMPLETE]
            for group in {slice_.group: None for slice_ in waiting}:
                self._look(own, group)

    def drop_slices(self, slices: Iterable[Slice]) -> None:
        """Another server leads them: the operator asks there."""
        for slice_ in slices:
            if (own := self._open) is not None and (request := own.wanted.get(slice_)) is not None:
                self._close(own, request)

    # ── a group comes to the moment ──

    def _look(self, own: OpenCapture, group: FusedGroup) -> None:
        """Whether wanted slices of the group are at their moment, or past it."""
        if group.is_gone or not own.wanted:
            return
        found = False
        for slice_ in group.slices:
            request = own.wanted.get(slice_)
            if request is None:
                continue
            version = version_for(request.message, group.log, self._readings.over)
            if version is NoVersion.GONE:
                self._pass(own, request)
            else:
                found = found or version is not NoVersion.LATER
        if found:
            self._pauses.pause(group, partial(self._between_rounds, own, group))

    def _between_rounds(self, own: OpenCapture, group: FusedGroup, resume: Callable[[], None]) -> None:
        due = {
            slice_: request
            for slice_ in group.slices
            if (request := own.wanted.get(slice_)) is not None
            and not isinstance(version_for(request.message, group.log, self._readings.over), NoVersion)
        }
        if own is not self._open or group.is_gone or not due:
            resume()
        else:
            self._keep(own, group, due, group.optimizer_for(group.log.closed + 1), resume)

    def _keep(
        self,
        own: OpenCapture,
        group: FusedGroup,
        due: Mapping[Slice, CaptureRequest],
        optimizer: Optimizer | None,
        then: Callable[[], None],
    ) -> None:
        """Keeps these slices for the requests that wait for them, and calls `then` when all states are copied."""
        if optimizer is None and not group.is_of_table:
            for slice_, request in due.items():
                self._kept(own, slice_, request, OptimizerState(), None)
            then()
            return
        if (refused := no_room(due, self._copy_error)) is not None:
            self._fail(own, *refused)
            then()
            return
        remaining = len(due)

        def exported(slice_: Slice, request: CaptureRequest, nbytes: int, done: JobDone) -> None:
            nonlocal remaining
            remaining -= 1
            own.copying_nbytes -= nbytes
            if done.error is not None:
                self._fail(own, slice_, done.error)
            elif not group.is_gone:
                rows = done.result if isinstance(done.result, KeptRows) else None
                self._kept(own, slice_, request, OptimizerState(*(() if rows else done.result)), optimizer, rows)
            if not remaining:
                then()

        for slice_, request in due.items():
            own.copying_nbytes += (nbytes := rows_nbytes(slice_))
            self._effects.start_job(partial(copy_of, slice_), partial(exported, slice_, request, nbytes))

    def _kept(
        self,
        own: OpenCapture,
        slice_: Slice,
        request: CaptureRequest,
        state: OptimizerState,
        optimizer: Optimizer | None,
        rows: KeptRows | None = None,
    ) -> None:
        if own.wanted.get(slice_) is not request:
            return  # it was given up meanwhile
        del own.wanted[slice_]
        own.kept[slice_.slice_id] = kept_slice(request.message.step, slice_, state, optimizer, rows)
        request.remaining -= 1
        if not request.remaining:
            self._end(own, request)

    def _end(self, own: OpenCapture, request: CaptureRequest) -> None:
        """All slices are there."""
        answer = captured(request.message.request, [own.kept[slice_.slice_id] for slice_ in request.slices])
        del own.waiting[request.message.request]
        own.answered[request.message.request] = answer
        self._effects.send(request.peer, answer)

    # ── the end ──

    def _close(self, own: OpenCapture, request: CaptureRequest) -> None:
        """The request waits no more."""
        own.waiting.pop(request.message.request, None)
        for slice_ in request.slices:
            if own.wanted.get(slice_) is request:
                del own.wanted[slice_]

    def _pass(self, own: OpenCapture, request: CaptureRequest) -> None:
        """It is too late for this moment."""
        self._close(own, request)
        self._effects.send(request.peer, self._readings.surveyed(request.message.request, request.slices))

    def _fail(self, own: OpenCapture, slice_: Slice, error: KvdError) -> None:
        request = own.wanted.get(slice_)
        if request is not None:
            self._close(own, request)
            self._effects.send(request.peer, refusal_of(request.message.request, error))

    def _refuse_deleted(self, own: OpenCapture, request: CaptureRequest) -> None:
        key = next(slice_.key for slice_ in request.slices if slice_.group.is_gone)
        self._close(own, request)
        text = f"key {key!r} was deleted"
        self._effects.refuse(request.peer, request.message.request, ErrorCode.KEY_NOT_FOUND, text, key)

    def _forget(self, own: OpenCapture) -> None:
        """Nothing of it is kept any more."""
        for request in list(own.waiting.values()):
            self._pass(own, request)
        self._ended, self._open, self.is_on = (own.sender, own.number), None, False

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError unless the open capture is consistent."""
        if self._open is not None:
            self._open.validate(self._readings.over)
