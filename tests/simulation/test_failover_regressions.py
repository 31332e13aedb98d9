"""Mistakes that campaigns in which servers die have found, each as a seed that showed it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.core.server import checks
from tests.simulator.campaign import FAILOVERS, HARD, LASTING, LONG_PAUSES, NO_DEATHS, Campaign
from tests.simulator.mishaps import Mishaps
from tests.simulator.network import LATE_COPIES, NASTY, ROUGH, Faults
from tests.simulator.settings import ShellSettings

DYING = replace(HARD, server_crashes=3)
DYING_LONG = replace(LASTING, server_crashes=4)
TWO_DYING_LONG = replace(NO_DEATHS, within_s=25.0, server_crashes=2)
SLOW = ShellSettings(job_s=(0.0, 0.5))
DYING_TWICE = replace(HARD, server_crashes=2)
NO_RECORD = ShellSettings(state_dir=False, job_s=(0.0, 0.02))


def run(
    workload: str,
    servers: int,
    mishaps: Mishaps,
    faults: Faults,
    seed: int,
    shell: ShellSettings | None = None,
    mode: str = "sync",
    staleness: int = -1,
    rounds_ahead: int = 2,
) -> None:
    shell = shell or ShellSettings(job_s=(0.0, 0.02))
    campaign = Campaign(workload, mode, staleness, mishaps, faults, rounds_ahead, replicas=2, shell=shell)
    replace(campaign, servers=servers).run(seed)


def test_groups_that_are_copied_when_their_partition_moves_are_forgotten() -> None:
    run("watched", 3, replace(LONG_PAUSES, server_crashes=2), ROUGH, 100)


def test_a_server_that_is_synced_beside_a_backup_keeps_what_it_was_sent() -> None:
    run("ledger", 3, DYING, ROUGH, 100, mode="async", staleness=1)


def test_readers_hold_no_more_than_they_may_when_partitions_move() -> None:
    run("watched", 3, DYING_LONG, LATE_COPIES, 100)


def test_clocks_are_not_asked_of_a_server_that_led_the_key_once() -> None:
    run("mixed", 2, DYING, LATE_COPIES, 300)


def test_a_partition_gets_a_copy_after_the_scheduler_was_restarted() -> None:
    run("list lives", 3, DYING, LATE_COPIES, 300)


@pytest.mark.parametrize("workload", ["rounds", "casts"])
def test_a_view_without_nodes_takes_nothing_from_servers(workload: str) -> None:
    """A scheduler without its record has told them of no member yet: they know no more than before."""
    run(workload, 3, DYING_TWICE, NASTY, 400, NO_RECORD)


def test_a_server_that_comes_later_knows_who_rests() -> None:
    """Else the others wait for a worker that has no shared step to make."""
    run("shared", 2, DYING_LONG, LATE_COPIES, 300, mode="async", staleness=1)


def test_a_leader_that_does_not_know_that_it_handed_over_may_close_a_round() -> None:
    """The scheduler died between: the leader has waited, and gone on. Nobody holds that round; it is forgotten."""
    run("watched, uneven", 2, TWO_DYING_LONG, NASTY, 506, SLOW, rounds_ahead=3)


def test_a_push_that_was_staged_and_never_counted_is_no_difference_between_copies() -> None:
    """It was made at another place of its program than the pushes that count; only the leader has seen it."""
    FAILOVERS["tangles, servers die"].run(104)


@pytest.mark.parametrize(("name", "seed"), [("lists, servers die", 15), ("ledger, stale by 1, servers die", 10)])
def test_copies_may_be_compared_at_any_moment(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that was compared counted as used; a leader that had handed over went on, and was no copy any more."""
    monkeypatch.setattr(checks, "PAUSE_S", 0.4)
    FAILOVERS[name].run(seed)


def test_a_late_message_of_an_earlier_copy_does_not_empty_the_present_one() -> None:
    FAILOVERS["deletions, late copies, servers die"].run(512)
