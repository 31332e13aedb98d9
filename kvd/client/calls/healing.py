"""Programs that update the weights themselves, and get them from another worker when they are restarted.

Without an optimizer on the servers, weights and optimizer states are in the memory of the workers, alike in all. The
loop over steps here counts the updates that this process has made. Where that differs from the step that is given, the
process lacks the state, and takes it from a worker that has it, before the program goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvd.client.calls.program_steps import ProgramSteps, StepIteration, Steps
from kvd.client.calls.promise import Promise
from kvd.errors import NotAllowed, ProtocolError, StateLost
from kvd.protocol.messages import STATE_PART_BYTES
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.writer import ProgramContent

Array: TypeAlias = np.ndarray[Any, Any]

LAST_STATE_S = 30.0  # how long a worker that was late waits for the others to make the last step of a loop
LOOK_S = 0.2


class StateHolder(Protocol):
    """What a program has in its memory of all steps so far, as bytes. All methods are called on the program's thread,
    while it waits in the store."""

    def title(self) -> str:
        """Return what the state belongs to, for messages."""

    def layout(self) -> bytes:
        """Describe the parts of the state, so that `begin_write` of another worker can check and make them."""

    def nbytes(self) -> int:
        """The size of the state in bytes, without the layout."""

    def read(self, offset: int, target: memoryview) -> None:
        """Fill the target with the bytes of the state from this one on."""

    def weights(self) -> Mapping[str, Array]:
        """Copy the weights, by key. The state begins with them."""

    def weights_nbytes(self) -> int:
        """The bytes that they take at its beginning."""

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

    def write_weight(self, key: str, value: Array) -> None:
        """Overwrite one of the weights, of which there are no bytes then."""

    def end_write(self) -> None:
        """All is written."""


class StatePassing(Protocol):
    """The way of states from one worker to another."""

    def attend(self, holder: StateHolder) -> None:
        """From now on, waits of this thread give the state to those who lack it."""

    def on_this_thread(self) -> AbstractContextManager[None]:
        """A context in which waits of this thread give the state, too, while that of `attend` waits for this one."""

    def has(self, made: int | None) -> None:
        """The state is that after so many steps, until the next call; None: it is that of no step."""

    def take(self, made: int, *, restored: bool) -> bool:
        """Gets the state after so many steps from another worker. False: the rounds went on without this one meanwhile,
        and nobody offers that state.

        Args:
            restored: the run began with that state, which worker 0 has from a snapshot.

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
        self._loops = 0  # begun here
        self._snapshot: StoredSnapshot | None = None  # that the store was restored from, until a loop begins
        self._is_restored = False  # that snapshot has the state of a program

    def hold(self, holder: StateHolder) -> None:
        """From now on this is the state of the program.

        Raises:
            NotAllowed: it has one already.
        """
        if self._holder is not None and self._holder is not holder:
            raise NotAllowed(
                f"this store passes on the state of one optimizer, which is {self._holder.title()}, and "
                f"{holder.title()} asks for it as well: give one optimizer the parameters of both, in groups of their "
                f"own. A program whose optimizers take turns within a step, as those of a GAN do, loops over "
                f"store.steps(total), and loads a checkpoint when a worker is restarted"
            )
        self._holder = holder

    # ── snapshots ──

    def for_snapshot(self, steps: int, *, is_writer: bool) -> ProgramContent | None:
        """A copy of the state after so many steps, on the thread of the program; None: there is none, or others write.

        Raises:
            NotAllowed: the program has another state.
        """
        if self._holder is None:
            if self._snapshot is not None:
                raise NotAllowed(
                    "the state of the snapshot that this job was restored from is not loaded before the first step of "
                    "optimizer.steps(total): take the next snapshot in that loop, or after it"
                )
            return None
        if self._made != steps:
            raise NotAllowed(
                "a snapshot of weights that the workers keep is taken between two steps, before the backward() of a "
                "step, or after a loop that came to its end: a worker that is restarted later in a step never comes to "
                "it. The settings snapshot_dir and snapshot_every take it between two steps"
            )
        if not is_writer:
            return None
        layout, first = self._holder.layout(), self._holder.weights_nbytes()
        state = np.empty(self._holder.nbytes() - first, np.uint8)
        if state.nbytes:
            self._holder.read(first, state.data)
        return ProgramContent(self._holder.weights(), layout, state)

    def restored(self, snapshot: StoredSnapshot | None, *, has_program: bool) -> None:
        """The store was restored.

        Args:
            snapshot: in worker 0, the one that has the state of its program; None: it cannot be read any more, or has
                none.
            has_program: whether it has one.
        """
        self._snapshot, self._is_restored = snapshot, has_program

    def _load(self, snapshot: StoredSnapshot) -> None:
        """Overwrite the state with that of a snapshot.

        Raises:
            SnapshotError: a part is missing or damaged.
            NotAllowed: it is that of another training.
        """
        holder, found = self._holder, snapshot.program()
        assert holder is not None
        assert found is not None
        layout, state = found
        nbytes = holder.begin_write(layout, f"the snapshot {snapshot.path}")
        weights = holder.weights_nbytes()
        if weights + state.nbytes != nbytes:
            raise ProtocolError(
                f"{snapshot.path} has {state.nbytes} bytes of state, its layout says {nbytes - weights}"
            )
        stored = {key.key: key for key in snapshot.manifest.keys}
        for name in holder.weights():
            holder.write_weight(name, snapshot.value(stored[name]))
        for start in range(0, state.nbytes, STATE_PART_BYTES):
            holder.write(weights + start, state[start : start + STATE_PART_BYTES].data)
        holder.end_write()

    # ── the loop ──

    def on_this_thread(self) -> AbstractContextManager[None]:
        """A context in which waits of this thread give the state to those who lack it, as those of the program's own
        thread do. That one waits for this one meanwhile."""
        if self._passing is None or self._holder is None:
            return nullcontext()
        return self._passing.on_this_thread()

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
            NotAllowed: wrong arguments; there is no holder; or the store had another loop before.
        """
        if self._holder is None or keys is None:
            raise NotAllowed("a loop that passes states on needs a state, and the keys that each step pushes")
        if restored and self._made is None and self._goes_on_at is None:
            self._goes_on_at = self._steps.restored_steps or None
        return self._iterate(Steps(StepIteration(self._steps, total, keys, shared=False, restored=True)))

    def _iterate(self, iteration: Steps) -> Iterator[int]:
        assert self._holder is not None
        if self._steps.begun_loops != self._loops:
            raise NotAllowed(
                "a loop over store.steps came before this loop over optimizer.steps. A restarted worker skips its "
                "steps, and no other worker counts what they have changed: make all loops of this store with "
                'optimizer.steps, or give the other loop a store of its own: kvd.create("dist_sync", job="other")'
            )
        self._loops += 1
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
        is_restored = made == self._steps.restored_steps > 0
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None and is_restored:
            self._load(snapshot)
            self._has(made)
            return True
        try:
            if self._passing is not None:
                if not self._passing.take(made, restored=is_restored and self._is_restored):
                    return False
            elif made:
                raise StateLost(f"a store without a cluster has no other worker with the state after {made} steps")
        except StateLost as lost:
            if not is_restored or self._is_restored:
                raise
            raise StateLost(
                "the job was restored from a snapshot that has what the servers keep, and not the weights and "
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
