"""Programs that update the weights themselves, and get them from another worker when they are restarted.

Without an optimizer on the servers, weights and optimizer states are in the memory of the workers, alike in all. The
loop over steps here counts the updates that this process has made. Where that differs from the step that is given, the
process lacks the state, and takes it from a worker that has it, before the program goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from kvd.client.calls.program_steps import ProgramSteps, StepIteration, Steps
from kvd.client.calls.promise import Promise
from kvd.errors import NotAllowed, StateLost

LAST_STATE_S = 30.0  # how long a worker that was late waits for the others to make the last step of a loop
LOOK_S = 0.2


class StateHolder(Protocol):
    """What a program has in its memory of all steps so far, as bytes. All methods are called on the program's thread,
    while it waits in the store."""

    def layout(self) -> bytes:
        """Describe the parts of the state, so that `begin_write` of another worker can check and make them."""

    def nbytes(self) -> int:
        """The size of the state in bytes, without the layout."""

    def read(self, offset: int, target: memoryview) -> None:
        """Fill the target with the bytes of the state from this one on."""

    def begin_write(self, layout: bytes, donor: str) -> int:
        """Prepare to be overwritten by a state of this layout, and return its size in bytes. Nothing is written before
        that; it may be called again when some has been written.

        Args:
            donor: the worker that has it, such as ``"worker 1"``.

        Raises:
            KvdError: it does not fit. The text names what, and the donor.
        """

    def write(self, offset: int, data: memoryview) -> None:
        """Overwrite the state from this byte on. The calls come in order, and without gaps."""

    def end_write(self) -> None:
        """All is written."""


class StatePassing(Protocol):
    """The way of states from one worker to another."""

    def attend(self, holder: StateHolder) -> None:
        """From now on, waits of this thread give the state to those who lack it."""

    def has(self, made: int | None) -> None:
        """The state is that after so many steps, until the next call; None: it is that of no step."""

    def take(self, made: int) -> bool:
        """Gets the state after so many steps from another worker. False: the rounds went on without this one meanwhile,
        and nobody offers that state.

        Raises:
            StateLost: no living worker has it.
        """

    def pass_over(self) -> Promise:
        """The clocks of the keys go on behind the step in which the predecessor stopped."""


class Healing:
    """The steps of a program that has its own optimizer.

    Args:
        passing: None: there are no other workers.
    """

    def __init__(self, steps: ProgramSteps, passing: StatePassing | None) -> None:
        self._steps = steps
        self._passing = passing
        self._holder: StateHolder | None = None
        self._made: int | None = None  # the state is that after so many steps; None: it is not one that others need
        self._goes_on_at: int | None = None  # the number of the step that needs no other state than there is

    def hold(self, holder: StateHolder) -> None:
        """From now on this is the state of the program.

        Raises:
            NotAllowed: it has one already.
        """
        if self._holder is not None and self._holder is not holder:
            raise NotAllowed(
                "this store passes on the state of one optimizer, and has one: wrap one optimizer per store, with all "
                "parameters in its groups"
            )
        self._holder = holder

    def updating(self) -> None:
        """The state is about to change, and is that of no step until the present one ends."""
        if self._holder is None:
            return
        self._has(None)
        if self._steps.is_in_step:
            self._steps.updating()

    def steps(self, total: object, keys: object, *, restored: bool = False) -> Iterator[int]:
        """The steps of a loop, see `kvd.KVStore.steps`. In each of them the program has the state after all steps
        before. One that counts already is not given.

        Args:
            keys: those that each step pushes; all of them are known.
            restored: the program has loaded the state after the steps of the snapshot that the store was restored from.

        Raises:
            NotAllowed: wrong arguments; or there is no holder.
        """
        if self._holder is None or keys is None:
            raise NotAllowed("a loop that passes states on needs a state, and the keys that each step pushes")
        if restored and self._made is None and self._goes_on_at is None:
            self._goes_on_at = self._steps.restored_steps or None
        return self._iterate(Steps(StepIteration(self._steps, total, keys, shared=False, restored=True)))

    def _iterate(self, iteration: Steps) -> Iterator[int]:
        assert self._holder is not None
        if self._passing is not None:
            self._passing.attend(self._holder)
        try:
            for step in iteration:
                number = self._steps.number
                if not self._come_to(number):
                    continue
                try:
                    yield step
                except GeneratorExit:  # an update may be under way: whoever needs the state does not get it from here
                    iteration.close()
                    self._goes_on_at = self._steps.number
                    raise
                self._has(number + 1)
            self._come_to_end(self._steps.number)
        finally:
            iteration.close()

    def _come_to(self, number: int) -> bool:
        """Whether the program makes this step, with the state that it needs; otherwise it counts already."""
        if number in (self._made, self._goes_on_at):
            self._has(number)
            return True
        counts = self._steps.counts_whole
        if not self._take(number + 1 if counts else number):
            self._steps.leave_out()  # the next step is one in which the others wait for this worker
            return False
        if counts and self._passing is not None:
            self._passing.pass_over().result()
            self._steps.pass_over()
        return not counts

    def _come_to_end(self, number: int) -> None:
        """The loop is over. A predecessor that came further needs another state than the one here."""
        if self._made == number or self._steps.is_past:
            return
        until = time.monotonic() + LAST_STATE_S
        while not self._take(number):
            if time.monotonic() > until:
                raise StateLost(
                    f"the others went on without this worker, and are past the end of this loop: no worker has the "
                    f"state after its {number} steps any more",
                    steps=number,
                )
            time.sleep(LOOK_S)

    def _take(self, made: int) -> bool:
        self._has(None)
        try:
            if self._passing is not None:
                if not self._passing.take(made):
                    return False
            elif made:
                raise StateLost(f"a store without a cluster has no other worker with the state after {made} steps")
        except StateLost as lost:
            if made != self._steps.restored_steps:
                raise
            raise StateLost(
                "the job was restored from a snapshot, which has what the servers keep, and not the weights and "
                "optimizer states that the workers keep: load those of the same step from a checkpoint of your own in "
                "all workers, and say so with steps(total, restored=True)",
                steps=made,
            ) from lost
        self._has(made)
        return True

    def _has(self, made: int | None) -> None:
        self._made = made
        self._goes_on_at = made
        if self._passing is not None:
            self._passing.has(made)
