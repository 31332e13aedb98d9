"""Whether what is held of another server's partition is what its leader has: checksums of the same version, compared.

A comparison waits for the update before it, and later rounds of its slices wait for it. Whatever was not at the leader
as it is here when it looked proves nothing: a slice at another version, with another optimizer, or with another state
that a worker has stored, is passed over.
"""

from __future__ import annotations

from kvd.core.machine import Checksums, JobDone, Received, Whole
from kvd.core.refusals import refusal_of
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.held import HeldPartition, RecordAnswers
from kvd.core.server.held_rounds import HeldRounds
from kvd.protocol.messages import MAX_TEXT_CHARS, CheckedSlice, Compare, ErrorCode, Refused, SliceId


class HeldChecks:
    """Answers the comparisons of leaders.

    Args:
        rounds: its groups are not updated while they are read.
    """

    def __init__(self, effects: ServerEffects, answers: RecordAnswers, rounds: HeldRounds) -> None:
        self._effects = effects
        self._answers = answers
        self._rounds = rounds
        self._reading: set[FusedGroup] = set()

    def compare(self, event: Received, message: Compare, held: HeldPartition) -> None:
        """Takes what the leader has."""
        pairs = _same_moment(message, held)
        busy = next((slice_.group for slice_, _ in pairs if not slice_.group.is_quiescent), None)
        if busy is not None and (busy.log.closing is not None or busy in self._reading):
            self._rounds.wait(busy, event, held, self.compare)
            return
        if busy is not None:
            self._answers.later(event, "the state of an optimizer is being stored")
            return
        behind = next((slice_ for slice_, _ in pairs if slice_.log.version < message.version), None)
        if behind is not None:
            text = f"its copy of {_named(behind)} is at version {behind.log.version}, the leader's at {message.version}"
            self._refuse(event, text, [(behind, 0)])
            return
        pairs = [pair for pair in pairs if pair[0].log.version == message.version]
        if pairs:
            self._calculate(event, message, held, pairs)
        else:
            self._answers.done(event, held)

    def _calculate(
        self, event: Received, message: Compare, held: HeldPartition, pairs: list[tuple[Slice, CheckedSlice]]
    ) -> None:
        groups = {slice_.group: None for slice_, _ in pairs}
        wholes = tuple([Whole(slice_.key, slice_.index, slice_.span(slice_.log.current)) for slice_, _ in pairs])
        for group in groups:
            group.working = True
        self._reading.update(groups)

        def calculated(done: JobDone) -> None:
            for group in groups:
                group.working = False
            self._reading.difference_update(groups)
            if done.error is not None:
                self._effects.send(event.peer, refusal_of(message.request, done.error))
            else:
                self._answer(event, message, held, pairs, done.result[0])
            for group in groups:
                self._rounds.go_on(group)

        self._effects.start_job(lambda job: Checksums(job, wholes), calculated)

    def _answer(
        self,
        event: Received,
        message: Compare,
        held: HeldPartition,
        pairs: list[tuple[Slice, CheckedSlice]],
        own: tuple[int, ...],
    ) -> None:
        places = {checked: place for place, checked in enumerate(message.slices)}
        differ = [
            (slice_, places[checked])
            for (slice_, checked), checksum in zip(pairs, own, strict=True)
            if checksum != checked.checksum and slice_.group.generation == message.generation  # set anew meanwhile?
        ]
        if not differ:
            self._answers.done(event, held)
            return
        more = len(differ) - 1
        others = f", and of {more} other slice{'s'[: more > 1]}," if more else ""
        what = f"its copy of {_named(differ[0][0])}{others} has other bytes than the leader's"
        self._refuse(event, f"{what} at version {message.version}", differ)

    def _refuse(self, event: Received, text: str, differ: list[tuple[Slice, int]]) -> None:
        request = event.message.request  # type: ignore[union-attr]
        places = tuple([place for _, place in differ])
        refused = Refused(request, ErrorCode.NOT_ALLOWED, text[:MAX_TEXT_CHARS], differ[0][0].key, places=places)
        self._effects.send(event.peer, refused)


def _named(slice_: Slice) -> str:
    return f"slice {slice_.index} of key {slice_.key!r}"


def _same_moment(message: Compare, held: HeldPartition) -> list[tuple[Slice, CheckedSlice]]:
    """The slices that are here, of the same creation, and with the same optimizer and stored state as at the leader."""
    found = []
    for checked in message.slices:
        slice_ = held.find(SliceId(checked.key, checked.slice_index, checked.creation))
        if slice_ is None or slice_.group.generation != message.generation:
            continue
        if slice_.loaded == (checked.loaded_by, checked.loaded) and slice_.log.closed <= message.version:
            found.append((slice_, checked))
    return found
