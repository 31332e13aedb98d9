"""The runs of a cluster: which there are, and which one a node belongs to.

`choose` is the one place that decides where a worker's Join goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvd.core.principals import key_text
from kvd.core.scheduler.machine import SchedulerMachine
from kvd.core.shares import Shares
from kvd.protocol.messages import MAX_RUNS, Join, MemberState, RunEntry, RunPhase

MAX_LIVE = 16  # runs that are not over
FEW_LIVE = 1  # of these, that each key may have as long as there is room at all
MAX_KEPT = 8  # runs that are over and can still be read
MAX_GONE = MAX_RUNS - MAX_LIVE - MAX_KEPT  # remembered, so that their processes learn that they have ended


@dataclass(slots=True)
class RunSlot:
    """One run. Its machine is None once its values are given up.

    Attributes:
        begun_by: name of the key of the node that began it; "" for the cluster's key, or if that is not known.
    """

    run: int
    job: str
    token: str
    machine: SchedulerMachine | None
    begun_by: str = ""

    @property
    def owner(self) -> str:
        """Name of the key that has this run in its share; "" for the cluster's key."""
        return self.begun_by or ("" if self.machine is None else self.machine.roster.first_worker_key())

    @property
    def phase(self) -> RunPhase:
        return RunPhase.GONE if self.machine is None else self.machine.phase

    @property
    def num_workers(self) -> int:
        return 0 if self.machine is None else self.machine.num_workers

    @property
    def is_over(self) -> bool:
        return self.phase.is_over

    @property
    def is_prepared(self) -> bool:
        """Whether it has keys that an operator has restored, and waits for its program."""
        return self.machine is not None and self.phase is RunPhase.FAILED and self.machine.is_prepared

    def bind(self, join: Join) -> bool:
        """A run that an operator has prepared belongs to the first program that comes; True if that is news."""
        if not self.is_prepared or join.operator or self.token == join.token:
            return False
        self.token = join.token
        return True

    @property
    def title(self) -> str:
        """The name under which this run alone can be read."""
        return f"{self.job}@{self.run:x}"

    def entry(self) -> RunEntry:
        return RunEntry(self.run, self.job, self.token, self.phase, self.num_workers)

    # ── for people ──

    def describe(self) -> dict[str, object]:
        """For `kvd jobs`."""
        states = [] if self.machine is None else self.machine.roster.worker_states()
        most = 0 if self.machine is None else self.machine.most_workers
        is_elastic = most > self.num_workers
        there = [state for state in states if state is not MemberState.LEFT] if is_elastic else states
        return {
            "job": self.job,
            "run": f"{self.run:x}",
            "phase": self._phase_shown(),
            "workers": len(there),
            "num_workers": self.num_workers,
            "max_workers": most,
        }

    def _phase_shown(self) -> str:
        """The phase, or what is about to change it: "failing" if the processes of all workers have ended, until the
        time to start them again is over."""
        if self.is_prepared:
            return "prepared"
        has_begun = self.phase in (RunPhase.FORMING, RunPhase.RUNNING)
        if has_begun and self.machine is not None and self.machine.roster.worker_states() and self.machine.seems_lost():
            return "failing"
        return self.phase

    def ended_text(self) -> str:
        """For a process of this run, which has ended."""
        return (
            f"the run of job {self.job!r} that this process belongs to has ended (run {self.run:x}): "
            f"start the program again as a whole"
        )

    def closing_text(self) -> str:
        """For a process of the next start of the program."""
        return f"the earlier run of job {self.job!r} is coming to its end"

    def busy_text(self) -> str:
        """For a process of another start of the program."""
        return (
            f"job {self.job!r} is running (run {self.run:x}, {self.num_workers} workers), and this process does "
            f"not belong to it: wait for its end, end it with kvd jobs end {self.job}, or start yours under another "
            f"name (KVD_JOB)"
        )


class Choice(Enum):
    """What becomes of a worker that wants to join."""

    ENTER = "enter"  # the run
    BEGIN = "begin"  # a new run
    WAIT = "wait"  # until the run is over
    JOB_ENDED = "ended"  # its run has ended
    JOB_BUSY = "busy"  # another program's run is alive
    TOO_MANY = "too many"  # no further run can begin


class Decision(NamedTuple):
    """A choice, and the run that it concerns; None for BEGIN and TOO_MANY."""

    choice: Choice
    slot: RunSlot | None


class Runs:
    """All runs in the order in which they began, those that are gone included."""

    def __init__(self, slots: Iterable[RunSlot] = ()) -> None:
        self._slots = {slot.run: slot for slot in slots}

    def __iter__(self) -> Iterator[RunSlot]:
        return iter(list(self._slots.values()))

    def find(self, run: int) -> RunSlot | None:
        return self._slots.get(run)

    def add(self, slot: RunSlot) -> None:
        self._slots[slot.run] = slot

    def newest(self, job: str) -> RunSlot | None:
        """The latest run of the job whose values are there."""
        return next((slot for slot in self._latest(job) if slot.machine is not None), None)

    def readable(self, job: str) -> RunSlot | None:
        """The run that a reader of this job sees: the latest one that all workers have joined. NAME@RUN names one."""
        name, _, number = job.partition("@")
        if number:
            return next((slot for slot in self if slot.title == job and slot.machine is not None), None)
        complete = (slot for slot in self._latest(name) if slot.phase not in (RunPhase.FORMING, RunPhase.GONE))
        return next(complete, None) or self.newest(name)

    def is_superseded(self, slot: RunSlot) -> bool:
        """Whether the job has a later run."""
        return next(self._latest(slot.job), slot) is not slot

    def has_room(self, phase: RunPhase, key: str = "") -> bool:
        """Whether one more run in this phase can be kept for the holder of this key; "": of the cluster's key, where
        each run is counted alone."""
        kept = [slot for slot in self if slot.machine is not None and slot.is_over == phase.is_over]
        if phase.is_over:
            return len(kept) < MAX_KEPT
        shares = Shares(FEW_LIVE)
        for slot in kept:
            shares.take(slot.owner or slot.run, 1)
        return shares.has_room(key or None, 1, MAX_LIVE)

    def full_text(self, key: str) -> str:
        """Why no further run can begin for the holder of this key."""
        live = [slot for slot in self if not slot.is_over]
        what = "wait for one, or end one with kvd jobs end NAME"
        if len(live) >= MAX_LIVE:
            return f"{MAX_LIVE} jobs are running, and no more can: {what}"
        own = sum(slot.owner == key for slot in live)
        return (
            f"{key_text(key)} has {own} of the {len(live)} jobs that are running, and the rest of {MAX_LIVE} is kept "
            f"for other keys: {what}"
        )

    def excess(self) -> RunSlot | None:
        """The run whose values must be given up next, because too many that are over are kept: the oldest of the key
        that has most of them."""
        over = [slot for slot in self if slot.is_over and slot.machine is not None]
        if len(over) <= MAX_KEPT:
            return None
        counts = Counter(slot.owner for slot in over)
        most = max(counts.values())
        return next(slot for slot in over if counts[slot.owner] == most)

    def forget_oldest_gone(self) -> None:
        gone = [slot.run for slot in self if slot.machine is None]
        for run in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._slots[run]

    def entries(self) -> tuple[RunEntry, ...]:
        return tuple(slot.entry() for slot in self)

    # ── who belongs where ──

    def choose(self, join: Join, key: str = "") -> Decision:
        """Where a worker goes that names no run, and joins under the key of this name."""
        if join.operator:
            newest = self.newest(join.job)
            return self._begin(key) if newest is None else Decision(Choice.ENTER, newest)
        if join.token:
            own = next((slot for slot in self._latest(join.job) if slot.token == join.token), None)
            if own is not None:
                return self._of_own_run(own)
        return self._of_the_job(join, key)

    def _of_own_run(self, own: RunSlot) -> Decision:
        """For a process whose token is that of this run."""
        if own.phase in (RunPhase.FORMING, RunPhase.RUNNING):
            return Decision(Choice.ENTER, own)
        if own.phase is RunPhase.FAILED and not self.is_superseded(own):
            return Decision(Choice.ENTER, own)
        return Decision(Choice.JOB_ENDED, own)

    def _of_the_job(self, join: Join, key: str) -> Decision:
        """For a process without a token, or with the token of a run that has not begun."""
        newest = self.newest(join.job)
        if newest is not None and newest.is_prepared and not self.is_superseded(newest):
            return Decision(Choice.ENTER, newest)
        alive = next((slot for slot in self._latest(join.job) if not slot.is_over), None)
        if alive is None or alive.machine is None:
            return self._begin(key)
        if not join.token and alive.phase is RunPhase.FORMING:
            return Decision(Choice.ENTER, alive)
        if (
            not join.token
            and alive.phase is RunPhase.RUNNING
            and (
                (alive.machine.takes_newcomers and not alive.machine.seems_lost())
                or alive.machine.roster.has_worker_named(join.node_id)
            )
        ):
            return Decision(Choice.ENTER, alive)
        if alive.phase is RunPhase.CLOSING or alive.machine.seems_lost():
            return Decision(Choice.WAIT, alive)
        return Decision(Choice.JOB_BUSY, alive)

    def _begin(self, key: str) -> Decision:
        return Decision(Choice.BEGIN if self.has_room(RunPhase.FORMING, key) else Choice.TOO_MANY, None)

    def _latest(self, job: str) -> Iterator[RunSlot]:
        return (slot for slot in reversed(list(self._slots.values())) if slot.job == job)
