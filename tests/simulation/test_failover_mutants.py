"""Tests of the simulator: broken builds of replication, each of which a campaign in which servers die must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvd.core.machine import Apply, Received
from kvd.core.scheduler.placement import partitions as partitions_module
from kvd.core.scheduler.placement.partitions import Entry, Servers
from kvd.core.scheduler.runs.record import RecordCheck
from kvd.core.server import handover as handover_module
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.giving_up import GivingUp
from kvd.core.server.groups import FusedGroup
from kvd.core.server.handover import Handovers
from kvd.core.server.held_rounds import HeldRounds
from kvd.core.server.leadership import Leadership
from kvd.core.server.records import Answer, Records
from kvd.core.server.replicas import Replicas
from kvd.core.server.rounds import SliceLog
from kvd.core.server.syncing import Syncing
from kvd.node.jobs.runner import JobRunner
from kvd.protocol.messages import SliceId
from tests.simulation.mutants_harness import check_caught
from tests.simulator.campaign import FAILOVERS, SERVERS_DIE, Campaign
from tests.simulator.mishaps import Mishaps
from tests.simulator.network import NASTY
from tests.simulator.scenario.script import Scenario, ScenarioError
from tests.simulator.settings import ShellSettings

PAUSES = Mishaps(within_s=25.0, pauses=5, longest_pause_s=18.0)  # of leaders too, which others replace meanwhile


def acks_before_the_backup_holds(patch: pytest.MonkeyPatch) -> None:
    """The leader commits a round as soon as its record is sent."""
    hold_round = Records.hold_round

    def hasty(
        records: Records, partition: int, message: Any, then: Answer, payload: tuple[Any, ...], first: SliceId
    ) -> None:
        hold_round(records, partition, message, lambda refused: None, payload, first)
        then(None)

    patch.setattr(Records, "hold_round", hasty)


def whoever_is_syncing_leads(patch: pytest.MonkeyPatch) -> None:
    """A server that has not got everything yet is taken for a backup when the leader dies."""
    without_the_gone = partitions_module._without_the_gone

    def careless(entry: Entry, servers: Servers) -> Entry:
        backup = entry.backup or entry.syncing
        return without_the_gone(entry._replace(backup=backup, syncing=entry.syncing and entry.backup and None), servers)

    patch.setattr(partitions_module, "_without_the_gone", careless)


def clocks_are_forgotten_at_a_promotion(patch: pytest.MonkeyPatch) -> None:
    """A new leader does not know which pushes it has counted."""
    adopt = Leadership._adopt

    def forgetful(leadership: Leadership, group: FusedGroup) -> None:
        group.log.progress.clear()
        adopt(leadership, group)

    patch.setattr(Leadership, "_adopt", forgetful)


def backups_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """A backup says that it holds a round, and does not."""
    patch.setattr(HeldRounds, "hold", lambda rounds, event, message, held: rounds._answers.confirm(event))


def old_records_are_believed(patch: pytest.MonkeyPatch) -> None:
    """A restarted scheduler takes its record for the newest, whatever the nodes know."""
    patch.setattr(RecordCheck, "is_open", property(lambda check: False))
    patch.setattr(RecordCheck, "is_refuted", lambda check, event, role: False)


def the_deposed_go_on(patch: pytest.MonkeyPatch) -> None:
    """A server that another one has replaced as a leader keeps its slices, and commits."""
    patch.setattr(GivingUp, "forget", lambda giving_up, partition: None)
    patch.setattr(Leadership, "validate", lambda leadership: None)


def views_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A server answers about all of its slices though the sender thinks that it leads others."""
    patch.setattr(Elsewhere, "postpones", lambda elsewhere, event: False)
    patch.setattr(Elsewhere, "_is_unsettled", lambda elsewhere, event: False)


def a_slice_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    """A server becomes the backup without one of the slices."""
    go_on = Syncing._go_on

    def skipping(syncing: Syncing, sync: Any) -> None:
        if not sync.holder.copied:
            groups = [group for group in syncing._table.groups.values() if group.partition == sync.holder.partition]
            sync.holder.copied.update([slice_.slice_id for group in groups[-1:] for slice_ in group.slices])
        go_on(syncing, sync)

    patch.setattr(Syncing, "_go_on", skipping)


def any_sender_is_a_leader(patch: pytest.MonkeyPatch) -> None:
    """A backup takes the records of a server that was deposed."""

    def careless(replicas: Replicas, event: Received, partition: int) -> bool:
        return partition < len(replicas._view.partitions)

    patch.setattr(Replicas, "_is_from_leader", careless)


def hands_over_before_its_records_are_held(patch: pytest.MonkeyPatch) -> None:
    """The leader does not wait for its last records, nor for its successor to apply them."""
    patch.setattr(Handovers, "_is_held", lambda handovers, handover: True)
    patch.setattr(handover_module, "_is_ready", lambda handover: handover.is_resting)
    done = handover_module._Asked(is_ready=True)
    patch.setattr(Handovers, "_ask", lambda handovers, handover: setattr(handover, "asked", done))
    patch.setattr(Handovers, "validate", lambda handovers: None)


def rounds_close_while_it_winds_down(patch: pytest.MonkeyPatch) -> None:
    """A leader that hands a partition over goes on with the rounds of it, and takes pushes for them."""
    view_changed = Handovers.view_changed

    def busy(handovers: Handovers, led: list[int]) -> None:
        view_changed(handovers, led)
        handovers._elsewhere.leaving.clear()

    patch.setattr(Handovers, "view_changed", busy)
    patch.setattr(Handovers, "_is_held", lambda handovers, handover: not handovers._is_handing_over())
    patch.setattr(Handovers, "validate", lambda handovers: None)


def clocks_are_forgotten_when_a_leader_becomes_a_replica(patch: pytest.MonkeyPatch) -> None:
    """The old leader does not know which pushes have counted, should it lead again."""
    patch.setattr(SliceLog, "drop_staged", lambda log: log.progress.clear())


def backups_apply_records_twice(patch: pytest.MonkeyPatch) -> None:
    """The merged gradient of a round is applied to a replica, and to the outcome again."""
    apply = JobRunner._apply

    def twice(runner: JobRunner, job: Apply) -> Any:
        made = apply(runner, job)
        return apply(runner, job._replace(current=made)) if job.is_merged else made

    patch.setattr(JobRunner, "_apply", twice)


def contents_begin_without_a_new_lineage(patch: pytest.MonkeyPatch) -> None:
    """A server that takes the place of one whose values nobody else has is taken for that one."""
    without_the_gone = partitions_module._without_the_gone
    patch.setattr(
        partitions_module,
        "_without_the_gone",
        lambda entry, servers: without_the_gone(entry, servers)._replace(lineage=entry.lineage),
    )


SLOW_UPDATES = Campaign("list training", mishaps=SERVERS_DIE, replicas=2, shell=ShellSettings(job_s=(0.0, 0.3)))
LATE = replace(SERVERS_DIE, within_s=25.0, server_crashes=5)


@pytest.mark.parametrize(
    ("mutate", "campaign", "complaint"),
    [
        (acks_before_the_backup_holds, FAILOVERS["ledger, servers die"], "is not there"),
        (whoever_is_syncing_leads, Campaign("lists", mishaps=LATE, faults=NASTY, replicas=2), ""),
        (clocks_are_forgotten_at_a_promotion, FAILOVERS["ledger, stale by 1, servers die"], "is not there"),
        (backups_hold_nothing, FAILOVERS["lives, servers die"], "is not there"),
        pytest.param(
            the_deposed_go_on, Campaign("list training", mishaps=PAUSES, replicas=2), "", marks=pytest.mark.soak
        ),
        pytest.param(
            views_are_not_compared, FAILOVERS["list training, servers die"], "", marks=pytest.mark.soak
        ),  # it takes many seeds
        (old_records_are_believed, FAILOVERS["ledger, old record, servers die"], ""),
        (a_slice_is_not_copied, FAILOVERS["lives, servers die"], "of partition"),
        (hands_over_before_its_records_are_held, FAILOVERS["lists, servers die"], "holds round"),
        (rounds_close_while_it_winds_down, SLOW_UPDATES, "holds round"),
        pytest.param(
            clocks_are_forgotten_when_a_leader_becomes_a_replica,
            FAILOVERS["ledger, stale by 1, servers die"],
            "",
            marks=pytest.mark.soak,
        ),
        (backups_apply_records_twice, FAILOVERS["list training, servers die"], "finds another value"),
        pytest.param(
            any_sender_is_a_leader,
            FAILOVERS["ledger, async, nasty, servers die"],
            "come to rest",
            marks=pytest.mark.soak,
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_broken_replication_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: Campaign, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(mutate, campaign, complaint, monkeypatch)


LAST_COPY = """
cluster replicas=2 server_timeout_s=5
spawn 1 scheduler 2 servers 1 workers
init w 0.0
kill server 1
advance 10s
kill server 0 noticed
restart server 0
advance 2s
worker 0 push w 1.0
expect error worker 0 NodeLost server
"""


def test_values_that_are_lost_are_not_taken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a new lineage tells workers that a partition which is led again has lost its contents."""
    Scenario("last copy", LAST_COPY, 1).run()
    contents_begin_without_a_new_lineage(monkeypatch)
    with pytest.raises(ScenarioError, match="NodeLost"):
        Scenario("last copy", LAST_COPY, 1).run()
