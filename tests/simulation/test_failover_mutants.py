"""Tests of the simulator: broken builds of replication, each of which a campaign in which servers die must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvd.core.machine import Received
from kvd.core.scheduler import partitions as partitions_module
from kvd.core.scheduler.partitions import Entry, Servers
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import FusedGroup
from kvd.core.server.held_rounds import HeldRounds
from kvd.core.server.leadership import Leadership
from kvd.core.server.records import Answer, Records
from kvd.core.server.replicas import Replicas
from kvd.core.server.syncing import Syncing
from kvd.protocol.messages import SliceId
from kvd.testing.campaign import FAILOVERS, SERVERS_DIE, Campaign
from kvd.testing.mishaps import Mishaps
from kvd.testing.network import NASTY
from tests.simulation.mutants_harness import check_caught

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


def the_deposed_go_on(patch: pytest.MonkeyPatch) -> None:
    """A server that another one has replaced as a leader keeps its slices, and commits."""
    patch.setattr(Leadership, "_give_up", lambda leadership, partition: None)
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


LATE = replace(SERVERS_DIE, within_s=25.0, server_crashes=5)


@pytest.mark.parametrize(
    ("mutate", "campaign", "complaint"),
    [
        (acks_before_the_backup_holds, FAILOVERS["ledger, servers die"], "is not there"),
        (whoever_is_syncing_leads, Campaign("lists", mishaps=LATE, faults=NASTY, replicas=2), ""),
        (clocks_are_forgotten_at_a_promotion, FAILOVERS["ledger, stale by 1, servers die"], "is not there"),
        (backups_hold_nothing, FAILOVERS["lives, servers die"], "is not there"),
        (the_deposed_go_on, Campaign("list training", mishaps=PAUSES, replicas=2), "of partition"),
        (views_are_not_compared, FAILOVERS["list training, servers die"], ""),
        (a_slice_is_not_copied, FAILOVERS["lives, servers die"], "of partition"),
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
