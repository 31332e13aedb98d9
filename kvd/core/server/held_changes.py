"""What changes slices that another server leads, besides their rounds: carried out here, as its leader has done it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvd.core.machine import Received
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import forget_state
from kvd.core.server.held import HeldPartition, RecordAnswers
from kvd.core.server.installs import Installs
from kvd.core.server.optimizer_names import OptimizerNames
from kvd.errors import KvdError
from kvd.optimizer import changes_from_wire, with_hyperparameters
from kvd.protocol.messages import (
    MOST_COUNTED,
    HoldActivated,
    HoldChange,
    HoldDropped,
    HoldLoop,
    HoldOptimizer,
    HoldPlace,
    HoldPublished,
    HoldState,
    Made,
    SliceId,
)

Handler = Callable[[Received, Any, HeldPartition], None]

_IS_UPDATED = "a slice is being updated"


class HeldChanges:
    """Carries out the records of everything but rounds and new slices."""

    def __init__(
        self, effects: ServerEffects, answers: RecordAnswers, optimizers: OptimizerNames, installs: Installs
    ) -> None:
        self._effects = effects
        self._answers = answers
        self._optimizers = optimizers
        self._installs = installs
        self.handlers: dict[type[Any], Handler] = {
            HoldPublished: self._published,
            HoldDropped: self._dropped,
            HoldActivated: self._activated,
            HoldPlace: self._come_to,
            HoldChange: self._change,
            HoldState: self._state,
            HoldOptimizer: self._optimizer,
            HoldLoop: self._loop,
        }

    # ── keys ──

    def _published(self, event: Received, message: HoldPublished, held: HeldPartition) -> None:
        for key, creation in message.keys:
            first = held.find(SliceId(key, 0, creation))
            if first is not None:
                held.table.live[key] = Made(first.spec, creation)
        self._answers.done(event, held)

    def _dropped(self, event: Received, message: HoldDropped, held: HeldPartition) -> None:
        old = [key for key, creation in message.keys if any(s.creation <= creation for s in held.table.of_key(key))]
        if not all(map(held.table.is_quiescent, old)):
            self._answers.later(event, _IS_UPDATED)
            return
        for _, creation in message.keys:
            held.table.creation = max(held.table.creation, min(creation + 1, MOST_COUNTED))
        for key in sorted(set(old)):
            slices = held.table.of_key(key)
            held.table.remove(key)
            for slice_ in slices:
                held.row_records.drop(slice_.slice_id)
            self._effects.emit(forget_state(slices))
        self._answers.done(event, held)

    # ── ranks ──

    def _activated(self, event: Received, message: HoldActivated, held: HeldPartition) -> None:
        slice_ = held.find(message.slice_id)
        if slice_ is not None and slice_.log.closed < message.closed:
            self._answers.later(event, "records that come before are on their way")
            return
        if slice_ is not None:
            slice_.log.activate(message.rank, message.clock, message.place)
        self._answers.done(event, held)

    def _come_to(self, event: Received, message: HoldPlace, held: HeldPartition) -> None:
        for group in held.table.groups.values():
            group.log.move_to(message.rank, message.place)
        self._answers.done(event, held)

    def _loop(self, event: Received, message: HoldLoop, held: HeldPartition) -> None:
        held.loops[message.first] = message
        self._answers.done(event, held)

    # ── optimizers ──

    def _change(self, event: Received, message: HoldChange, held: HeldPartition) -> None:
        try:
            changes = changes_from_wire(message.changes)
            if held.optimizer is not None:
                held.optimizer = with_hyperparameters(held.optimizer, changes)
            for key, index, creation, from_round in message.slices:
                slice_ = held.find(SliceId(key, index, creation))
                if slice_ is None:
                    continue
                group = slice_.group
                if from_round:
                    group.change_from(from_round, changes)
                elif group.optimizer is not None:
                    group.optimizer = with_hyperparameters(group.optimizer, changes)
        except KvdError as error:
            self._answers.refuse(event, str(error))
        else:
            self._answers.done(event, held)

    def _state(self, event: Received, message: HoldState, held: HeldPartition) -> None:
        slice_ = held.find(message.slice_id)
        if slice_ is None:
            self._answers.done(event, held)
        elif not slice_.group.is_quiescent:
            self._answers.later(event, _IS_UPDATED)
        else:
            slice_.loaded = message.loaded_by, message.loaded
            self._installs.load(event, message, slice_, partial(self._answers.done, event, held))

    def _optimizer(self, event: Received, message: HoldOptimizer, held: HeldPartition) -> None:
        optimizer = self._optimizers.find(message.optimizer)
        as_set = self._optimizers.find(message.as_set)
        if isinstance(optimizer, KvdError) or isinstance(as_set, KvdError):
            text = str(optimizer if isinstance(optimizer, KvdError) else as_set)
            self._answers.refuse(event, f"{text}: install it on all servers")
            return
        if message.generation >= held.generation:
            held.optimizer, held.as_set, held.generation = optimizer, as_set, message.generation
        for group in held.table.groups.values():
            if message.generation > group.generation:
                self._effects.emit(group.renew(optimizer, message.generation))
        self._answers.done(event, held)
