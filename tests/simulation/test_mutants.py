"""Tests of the simulator: broken builds of the machines, each of which a checker must catch within some seeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

from kvd.core.machine import Contribution, Received
from kvd.core.outbox import Entry, Outbox
from kvd.core.scheduler.membership.views import Views
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.server import groups as groups_module
from kvd.core.server.attachments import Attachments
from kvd.core.server.batches import BatchTable
from kvd.core.server.groups import FusedGroup
from kvd.core.server.progress import WorkerProgress
from kvd.core.server.push import Pushes
from kvd.core.server.rounds import PushStatus, Record, SliceLog
from kvd.core.server.router import ServerRouter
from kvd.core.worker.clocks import WorkerClocks
from kvd.core.worker.in_flight import CallState, InFlight
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.machine import WorkerMachine
from kvd.core.worker.push_window import PushWindow
from kvd.core.worker.transfer import Transfer
from kvd.node.jobs.optimizer_states import OptimizerStates
from kvd.protocol.messages import SliceId
from tests.simulation.mutants_harness import SEEDS, caught, check_caught
from tests.simulator.campaign import CAMPAIGNS, Campaign
from tests.simulator.mishaps import Mishaps
from tests.simulator.network import NASTY, Faults
from tests.simulator.settings import ShellSettings
from tests.simulator.trace import Violation

CALM_BUT_OUT_OF_ORDER = Faults(delay_s=(0.0005, 0.2), duplicates=0.3, ordered=False)


def ack_before_applied(patch: pytest.MonkeyPatch) -> None:
    """A push is acknowledged when its round is closed, before its update is done."""
    patch.setattr(SliceLog, "committed_clock", SliceLog.counted_clock)
    close = Pushes.apply

    def hasty(pushes: Pushes, group: FusedGroup, record: Record) -> None:
        close(pushes, group, record)
        pushes._waiters.settle(group)

    patch.setattr(Pushes, "apply", hasty)


def every_push_is_next(patch: pytest.MonkeyPatch) -> None:
    """The clock of a push is not looked at."""
    patch.setattr(SliceLog, "status_of", lambda log, rank, clock: PushStatus.NEXT)


def replaced_may_go_on(patch: pytest.MonkeyPatch) -> None:
    """A server still takes the pushes of an incarnation that was replaced, and that one does not fall silent."""
    patch.setattr(WorkerMachine, "_drop_requests", lambda worker: None)
    rank_of = Attachments.rank_of
    known: dict[tuple[int, int], int] = {}

    def forgiving(attachments: Attachments, event: Received, request: int) -> int | None:
        rank = attachments.find(event.sender)
        if rank is not None:
            known[id(attachments), event.sender] = rank
        rank = known.get((id(attachments), event.sender))
        return rank if rank is not None else rank_of(attachments, event, request)

    patch.setattr(Attachments, "rank_of", forgiving)


def order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """A round is merged in the order in which its contributions came."""
    patch.setattr("kvd.core.server.rounds.sorted", list, raising=False)


def no_window(patch: pytest.MonkeyPatch) -> None:
    """Workers run ahead without limit, and servers accept it."""

    def status_of(log: SliceLog, rank: int, clock: int) -> PushStatus:
        staged = log.staged_clock(rank)
        if clock <= staged:
            return PushStatus.KNOWN
        return PushStatus.NEXT if clock == staged + 1 else PushStatus.OUT_OF_TURN

    patch.setattr(SliceLog, "status_of", status_of)
    patch.setattr(PushWindow, "holds_back", lambda window, limit: False)


def unclosed_stays(patch: pytest.MonkeyPatch) -> None:
    """What a predecessor had staged is not dropped when its successor comes."""
    patch.setattr(SliceLog, "drop_unclosed", lambda log, rank: None)


def incomplete_rounds(patch: pytest.MonkeyPatch) -> None:
    """A round is closed with the contributions that are there."""

    def is_complete(log: SliceLog, clock: int, contributions: Any, required: Any) -> bool:
        return bool(contributions)

    patch.setattr(SliceLog, "_is_complete", is_complete)


def no_staleness_bound(patch: pytest.MonkeyPatch) -> None:
    """The bound of the staleness is not looked at."""
    patch.setattr(SliceLog, "slowest", lambda log, required: 1 << 40)


def any_version_does(patch: pytest.MonkeyPatch) -> None:
    """A pull is answered with the current version, whatever version it asked for."""
    patch.setattr(SliceLog, "at_version", lambda log, version: log.current)
    patch.setattr(SliceLog, "committed_clock", lambda log, rank: 1 << 40)


def copies_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """Values that come after a call was answered are written into the program's memory all the same."""
    copy = Transfer._copy_values

    def careless(transfer: Transfer, call: InFlight, *rest: Any) -> None:
        state, call.state = call.state, CallState.STARTED
        copy(transfer, call, *rest)
        call.state = state

    patch.setattr(Transfer, "_copy_values", careless)


def clocks_start_from_zero(patch: pytest.MonkeyPatch) -> None:
    """A restarted worker does not ask where its predecessor stood."""

    def go_on(clocks: WorkerClocks, key: WorkerKey, told: Collection[Any], then: Callable[[None], None]) -> None:
        then(None)

    patch.setattr(WorkerClocks, "_go_on_from", go_on)


def parting_forgets_what_is_staged(patch: pytest.MonkeyPatch) -> None:
    """The clocks of a group go to its slices, the contributions do not."""
    patch.setattr(SliceLog, "part", lambda log, current, previous, *place: log.copy_for(current, previous))


def parting_forgets_who_waits(patch: pytest.MonkeyPatch) -> None:
    """A request that waited for the group now waits for its first slice only."""

    def part(waiting: Any, slices: Any, groups: Any) -> None:
        own = waiting.slice.position if waiting.slice is not None else 0
        groups[own].waiting.append(waiting._replace(slice=slices[own]))

    patch.setattr(groups_module, "_part_waiting", part)


def parting_mixes_up_the_bytes(patch: pytest.MonkeyPatch) -> None:
    """Each slice takes the first bytes of what was staged for all of them."""
    part = Contribution.part
    patch.setattr(Contribution, "part", lambda given, offset, nbytes: part(given, 0, nbytes))


def fusing_ignores_the_logs(patch: pytest.MonkeyPatch) -> None:
    """Slices become one group though they have come to different clocks, or something is staged for them."""
    patch.setattr(SliceLog, "is_level_with", lambda log, other: (log.previous is None) == (other.previous is None))


def parting_in_the_middle_of_an_update(patch: pytest.MonkeyPatch) -> None:
    """Slices are parted while the update of their group is under way; its result then belongs to no group."""
    patch.setattr(FusedGroup, "is_quiescent", property(lambda group: True))
    part = SliceLog.part

    def hasty(log: SliceLog, *rest: Any) -> SliceLog:
        closing, log.closing = log.closing, None
        parted = part(log, *rest)
        log.closing = closing
        return parted

    patch.setattr(SliceLog, "part", hasty)


def batch_numbers_are_used_again(patch: pytest.MonkeyPatch) -> None:
    """A batch number can be declared again for other slices, and all workers share the numbers."""
    declare = BatchTable.declare

    def shared(table: BatchTable, sender: int, number: int, slice_ids: tuple[SliceId, ...]) -> None:
        declare(table, sender, number, slice_ids)
        batch = table.find(sender, number)
        assert batch is not None
        for batches in table.of.values():
            batches[number] = batch

    patch.setattr(BatchTable, "declare", shared)


def groups_start_with_new_states(patch: pytest.MonkeyPatch) -> None:
    """The optimizer state of a slice is lost when the slice joins another group."""
    leave = OptimizerStates._leave

    def forget(states: OptimizerStates, slice_id: Any) -> Any:
        return type(leave(states, slice_id))()

    patch.setattr(OptimizerStates, "_leave", forget)


def small_pushes_are_taken_for_staged(patch: pytest.MonkeyPatch) -> None:
    """A small push counts as staged as soon as it is sent."""
    sent = Outbox._sent

    def hasty(outbox: Outbox, entry: Entry, now: float) -> Any:
        effect = sent(outbox, entry, now)
        if entry.is_small:
            outbox.mark_staged(entry, now)
        return effect

    patch.setattr(Outbox, "_sent", hasty)


def sources_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A push that the program gave up is sent again from the program's memory."""
    patch.setattr(Outbox, "replace_sources", lambda *rest: None)


def refusals_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A push that was refused and comes again is taken for a new one."""
    patch.setattr(WorkerProgress, "refusal_of", lambda *rest: None)


def changes_are_lost_at_parting(patch: pytest.MonkeyPatch) -> None:
    """Hyperparameters that were to change with a later round of a group do not change for its slices."""
    parted = groups_module.parted

    def forgetful(group: FusedGroup, number: Callable[[], int]) -> list[FusedGroup]:
        group.changes = []
        return parted(group, number)

    patch.setattr("kvd.core.server.keys.parted", forgetful)


def counts_views_that_are_not_saved(patch: pytest.MonkeyPatch) -> None:
    """The scheduler takes the view after the one that was saved for saved, too."""
    saved = Views.saved

    def hasty(views: Views, token: int, peers: Iterable[Any], now: float) -> list[Any]:
        sends = saved(views, token, peers, now)
        if views._saved == views.newest:
            views._saved += 1
        return sends

    patch.setattr(Views, "saved", hasty)


def credit_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A push that was staged or answered keeps its credit."""

    def keep(outbox: Outbox, entry: Entry) -> None:
        if entry.pushes:
            outbox.unstaged -= 1

    patch.setattr(Outbox, "_return_credit", keep)


def retries_are_made_once(patch: pytest.MonkeyPatch) -> None:
    """A request that was sent again is not sent a third time."""
    due = Outbox.due

    def once(outbox: Outbox, now: float) -> list[Any]:
        sends = due(outbox, now)
        again: set[int] = {send.message.request for send in sends}  # type: ignore[union-attr]
        outbox._retries[:] = [retry for retry in outbox._retries if retry[1] not in again]
        return sends

    patch.setattr(Outbox, "due", once)


def settled_pushes_wake_nobody(patch: pytest.MonkeyPatch) -> None:
    """A push that is settled does not start the calls that wait behind it."""
    settle = Transfer.settle

    def quietly(transfer: Transfer, call: InFlight) -> None:
        with pytest.MonkeyPatch.context() as nobody:
            nobody.setattr(transfer, "_wake", lambda key: None)
            settle(transfer, call)

    patch.setattr(Transfer, "settle", quietly)


QUIET = Mishaps(within_s=4.0)
LATE_SUCCESSORS = Campaign("mixed", mishaps=Mishaps(within_s=6.0, crashes=4, restart_after_s=(11.0, 15.0)))
NASTY_TRAINING = Campaign("list training", mishaps=Mishaps(within_s=25.0), faults=NASTY)
HAUNTED = Campaign("lives", mishaps=Mishaps(ghosts=5))
PUSHY = Campaign("ledger", mishaps=Mishaps(pauses=3), faults=CALM_BUT_OUT_OF_ORDER)


@pytest.mark.parametrize(
    ("mutate", "campaign", "complaint"),
    [
        (ack_before_applied, Campaign("ledger", mishaps=QUIET), "is not there"),
        (ack_before_applied, Campaign("lives", mode="async", mishaps=QUIET), "is not there"),
        (every_push_is_next, PUSHY, "counts|holds|staged bytes|not there|is staged, "),
        (
            every_push_is_next,
            replace(PUSHY, mode="async"),
            "counts|holds|staged bytes|not there|did not finish|Contribution",
        ),
        (replaced_may_go_on, HAUNTED, "not there|count"),
        (order_of_arrival, Campaign("rounds"), "other bits"),
        (order_of_arrival, Campaign("training"), "undisturbed"),
        (no_window, Campaign("ledger", mishaps=Mishaps(pauses=3)), "staged bytes|too far ahead"),
        (unclosed_stays, Campaign("lives"), "not there|count"),
        (incomplete_rounds, Campaign("rounds"), ""),
        (no_staleness_bound, Campaign("ledger", mode="async", staleness=1), "the slowest has made"),
        (any_version_does, Campaign("rounds", mishaps=QUIET), "other bits|brought"),
        (copies_after_the_end, Campaign("rounds", mishaps=Mishaps(pauses=6, longest_pause_s=18.0)), "Copy into"),
        (clocks_start_from_zero, Campaign("training"), ""),
        (parting_forgets_what_is_staged, Campaign("mixed"), ""),
        (parting_forgets_who_waits, Campaign("lists"), "not there"),
        (parting_mixes_up_the_bytes, Campaign("mixed"), "other bits"),
        (parting_mixes_up_the_bytes, Campaign("list training", mishaps=QUIET), "undisturbed"),
        (fusing_ignores_the_logs, LATE_SUCCESSORS, "other bits"),
        (
            parting_in_the_middle_of_an_update,
            Campaign("lists", mode="async", shell=ShellSettings(job_s=(0.0, 0.5))),
            "",
        ),
        (batch_numbers_are_used_again, Campaign("mixed"), ""),
        (groups_start_with_new_states, Campaign("list training", mishaps=QUIET), "undisturbed"),
        (small_pushes_are_taken_for_staged, NASTY_TRAINING, "undisturbed"),
        (changes_are_lost_at_parting, Campaign("list training"), "undisturbed"),
        (sources_are_not_kept, CAMPAIGNS["refusals, timeouts"], "the key holds|has an ack"),
        (refusals_are_forgotten, CAMPAIGNS["refusals, async"], "has an ack"),
        (counts_views_that_are_not_saved, Campaign("ledger"), "is saved, the newest is"),
        (credit_is_kept, Campaign("ledger"), "bytes are in flight"),
        (retries_are_made_once, CAMPAIGNS["ledger, nasty"], "is never sent again"),
        (settled_pushes_wake_nobody, Campaign("ledger"), "waits for nothing"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_broken_build_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: Campaign, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(mutate, campaign, complaint, monkeypatch)


@pytest.mark.parametrize("machine", [SchedulerRouter, ServerRouter, WorkerMachine], ids=lambda kind: kind.__name__)
def test_invariants_are_checked_after_every_step(machine: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An invariant that is broken for a single step is noticed in that step."""
    steps, checks = [], []
    step = machine.step

    def counting(self: Any, event: Any, now: float) -> Any:
        steps.append(now)
        return step(self, event, now)

    def breaks_once(self: Any) -> None:
        checks.append(len(steps))
        assert len(checks) != 20, f"step {len(steps)} broke it"

    monkeypatch.setattr(machine, "step", counting)
    monkeypatch.setattr(machine, "validate", breaks_once)
    with pytest.raises(Violation, match=r"seed 4, .* s: (scheduler|server \d|worker \d): step 20 broke it"):
        Campaign("ledger").run(4)
    assert checks == list(range(1, 21))


WHOLE = [
    PUSHY,
    HAUNTED,
    NASTY_TRAINING,
    LATE_SUCCESSORS,
    Campaign("lists", mode="async", shell=ShellSettings(job_s=(0.0, 0.5))),
]


@pytest.mark.parametrize("campaign", WHOLE, ids=lambda campaign: campaign.workload)
def test_whole_build_is_not_caught(campaign: Campaign) -> None:
    assert caught(campaign, 5) == ""


@pytest.mark.soak
@pytest.mark.parametrize("campaign", WHOLE, ids=lambda campaign: campaign.workload)
def test_whole_build_is_not_caught_soak(campaign: Campaign) -> None:
    assert caught(campaign, SEEDS) == ""


def test_checkers_can_complain() -> None:
    with pytest.raises(Violation):
        Campaign("ledger").run(0).fail("checkers can complain")
