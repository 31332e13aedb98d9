"""Whether repeated calls go by plans or not, every message of a run is the same, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.core.machine import Effect, Gathered
from kvd.core.outbox import Outbox
from kvd.core.requests import ListTransfer
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.key_queue import KeyQueue
from kvd.core.worker.keys import KeyGroup
from kvd.core.worker.machine import WorkerMachine
from kvd.core.worker.push_window import PushWindow, begin_pushes
from kvd.core.worker.steps import StepCounter
from kvd.core.worker.transfer import Transfer
from kvd.core.worker.transfer_plans import Whole
from tests.core.small_calls_harness import SmallCallSteps, without_plans
from tests.simulator.campaign import CAMPAIGNS
from tests.simulator.trace import Trace

COMPARED = (
    "rounds, nasty",
    "singles",
    "singles, nasty",
    "mixed, long pauses",
    "casts",
    "list training",
    "refusals, timeouts",
    "tables, nasty",
    "in flight, nasty",
    "in flight, long pauses",
)
NOTICED = (
    "in flight",
    "rounds, nasty",
    "lists, stale by 1",
    "refusals, stale by 1",
    "ledger, async",
    "refusals, nasty",
    "stepped",
    "singles",
    "singles, nasty",
)
NOTICED_BY_READERS = ("watched, uneven, nasty", "watched, uneven")
NOTICED_BY_LISTS = ("mixed, long pauses", "list training")
SEEDS = 1  # of each in `make test`
SOAK_SEEDS = 100


class Seen:
    """How many calls began by plans, those on lists among them, while how many others were in flight; and how many
    small calls began and ended without a step."""

    def __init__(self, steps: SmallCallSteps) -> None:
        self.planned = self.listed = self.joined = 0
        self.steps = steps


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Every second small call begins and ends without a step.

    Ticks are left out of the digests: a machine may be woken for the deadline of a call that is over.
    """
    seen, start, record = Seen(SmallCallSteps(WorkerMachine.step, every=2)), Transfer.start, Trace.record

    def starting(transfer: Transfer, call: InFlight, request: Any) -> Any:
        if call.plan is not None:
            seen.planned += 1
            seen.listed += call.listed is not None
            seen.joined += any(key.clock and window.is_in_use for key in call.plan.keys for window in call.plan.windows)
        return start(transfer, call, request)

    def stepping(machine: WorkerMachine, event: Any, now: float) -> list[Effect]:
        return seen.steps.step(machine, event, now)

    def recording(trace: Trace, text: str) -> None:
        if not text.endswith("Tick"):
            record(trace, text)

    monkeypatch.setattr(Transfer, "start", starting)
    monkeypatch.setattr(WorkerMachine, "step", stepping)
    monkeypatch.setattr(Trace, "record", recording)
    return seen


def compare(name: str, seed: int) -> None:
    by_plans = CAMPAIGNS[name].run(seed).digest()
    with without_plans():
        assert CAMPAIGNS[name].run(seed).digest() == by_plans, f"seed {seed}"


def test_plans_change_nothing(seen: Seen) -> None:
    for name in COMPARED:
        for seed in range(SEEDS):
            compare(name, seed)
    # Undisturbed trainings are run once for all tests of a process, so another test may have had theirs.
    assert seen.planned > 100
    assert seen.listed > 20
    assert seen.joined > 20
    assert seen.steps.begun > seen.steps.ended > 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_plans_change_nothing_soak(name: str, seen: Seen) -> None:
    for seed in range(SOAK_SEEDS):
        compare(name, seed)


def nothing(*arguments: Any) -> Any:
    return None


def tell_nobody(transfer: Transfer, plan: Any, priority: int) -> None:
    """The batch counts as declared, and no server is told."""
    transfer._plans.declare(plan, transfer._servers.peer_of(plan.partition))


def steps_of_one(steps: StepCounter, call: InFlight, clocks: Sequence[int]) -> tuple[int, int]:
    """As if no other push were in flight."""
    call.step = max(clocks)
    return call.step, call.step - 1


def never_due(machine: WorkerMachine) -> None:
    """Nothing has to be done before a small call."""
    machine.due_at = float("inf")


def pushes_of_keys(windows: Sequence[PushWindow], **how: bool) -> list[int]:
    """Only those of single keys move their clock on."""
    clocks = begin_pushes(windows, **how)
    if len(windows) == 1 and windows[0].base_clock == clocks[0] - 1 > 0:  # a group begins with its clock as its base
        windows[0].clock -= 1
    return clocks


def stay_together(group: KeyGroup) -> None:
    """The keys do not get their clocks back."""
    group.is_parted = True


def first_ones(whole: Whole, sources: Sequence[Any]) -> Gathered:
    """Whichever a message is to bring."""
    return Gathered(sources[: len(whole.nbytes)], whole.gaps)


# What a call by a plan must look at, and keep. Without it, a run differs or a checker complains.
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "batches that the server does not know": lambda patch: patch.setattr(Transfer, "declare", tell_nobody),
    "request numbers": lambda patch: patch.setattr(Asker, "number", lambda asker: asker.last_request),
    "retries that are due": lambda patch: patch.setattr(Outbox, "due", lambda *arguments: []),
    "what is due before a small call": lambda patch: patch.setattr(WorkerMachine, "next_deadline", never_due),
    "what concerns those in flight": lambda patch: patch.setattr(KeyQueue, "lets_start", lambda *arguments: True),
    "request numbers of those that ended": lambda patch: patch.setattr(Outbox, "settle", nothing),
    "small calls in the book": lambda patch: patch.setattr(CallBook, "enter", nothing),
    "clocks": lambda patch: patch.setattr("kvd.core.worker.transfer.settle_pushes", nothing),
    "clocks of pushes": lambda patch: patch.setattr(
        "kvd.core.worker.transfer.begin_pushes", lambda windows, **how: [window.clock + 1 for window in windows]
    ),
}

MUTANTS_OF_STEPS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "steps": lambda patch: patch.setattr(StepCounter, "begin", steps_of_one),
    "steps that were said": lambda patch: patch.setattr(StepCounter, "queued", nothing),
}

MUTANTS_OF_LISTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the clock of a list": lambda patch: patch.setattr("kvd.core.worker.transfer.begin_pushes", pushes_of_keys),
    "a key that moves alone": lambda patch: patch.setattr(KeyGroup, "part", stay_together),
    "the clocks of keys that part": lambda patch: patch.setattr(PushWindow, "take_over", nothing),
    "which values of a list": lambda patch: patch.setattr(Whole, "gathered", first_ones),
    "what is due": lambda patch: patch.setattr(WorkerMachine, "_do_what_is_due", nothing),
    "a list in full": lambda patch: patch.setattr(ListTransfer, "in_full", lambda listed: listed.transfer),
}


@pytest.mark.parametrize(
    ("name", "campaigns", "seeds"),
    [
        *((name, NOTICED, 2) for name in MUTANTS),
        *((name, NOTICED_BY_LISTS, 2) for name in MUTANTS_OF_LISTS),
        *((name, NOTICED_BY_READERS, 25) for name in MUTANTS_OF_STEPS),
    ],
)
def test_a_broken_plan_is_noticed(
    name: str, campaigns: Sequence[str], seeds: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    (MUTANTS | MUTANTS_OF_LISTS | MUTANTS_OF_STEPS)[name](monkeypatch)

    def run_all() -> None:
        for seed in range(seeds):
            for campaign in campaigns:
                compare(campaign, seed)

    with pytest.raises(Exception):  # noqa: B017, PT011  a checker's, an assertion's, or the machine's own
        run_all()
