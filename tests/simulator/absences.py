"""Campaigns in which workers are not there for some rounds: lost, late, idle at a point, not there yet, or without the
state that they train."""

from __future__ import annotations

from dataclasses import replace

from tests.simulator.campaign import HARD, LASTING, LATE, LOSING, SERVERS_DIE, SLOW_DISK, Campaign
from tests.simulator.mishaps import Mishaps
from tests.simulator.network import LATE_COPIES, NASTY

SERVERS_DIE_TOO = replace(LOSING, server_crashes=3, cuts=1)

# The others go on without a worker that is lost, and it comes back.
SHRINKS = Campaign("losses", merge="mean", on_worker_loss="shrink", worker_timeout_s=2.0, mishaps=LOSING)
SHRINKS_AND_FAILS_OVER = replace(SHRINKS, mishaps=SERVERS_DIE_TOO, servers=3, replicas=2)
LOSSES: dict[str, Campaign] = {
    "losses": SHRINKS,
    "losses, nasty": replace(SHRINKS, faults=NASTY),
    "losses, servers die": SHRINKS_AND_FAILS_OVER,
}

# Workers come and leave while others train, and die.
ELASTIC: dict[str, Campaign] = {
    "elastic": replace(SHRINKS, workload="elastic"),
    "elastic, nobody is lost": Campaign(
        "elastic", merge="mean", on_worker_loss="wait", mishaps=replace(HARD, within_s=40.0), faults=NASTY
    ),
    "elastic, torn records": replace(
        SHRINKS, workload="elastic", mishaps=replace(LOSING, scheduler_restarts=5), shell=SLOW_DISK
    ),
    "elastic, late": replace(SHRINKS, workload="elastic", quorum=2, faults=NASTY),
    "elastic, servers die": replace(SHRINKS_AND_FAILS_OVER, workload="elastic"),
}

# Workers whose data ends in different steps wait for each other at the end of each epoch.
UNEVEN: dict[str, Campaign] = {
    "uneven": Campaign("uneven", merge="mean"),
    "uneven, nasty": Campaign("uneven", merge="mean", mishaps=LASTING, faults=NASTY),
    "uneven, late": Campaign("uneven", merge="mean", mishaps=LATE),
    "uneven, wait": Campaign("uneven", merge="mean", on_worker_loss="wait", mishaps=LATE),
    "uneven, torn records": Campaign(
        "uneven", merge="mean", mishaps=replace(LASTING, scheduler_restarts=5), shell=SLOW_DISK
    ),
    "uneven, one way": Campaign(
        "uneven", merge="mean", mishaps=Mishaps(within_s=14.0, crashes=1, pauses=2, one_way_cuts=30)
    ),
    "uneven, async, stale by 1": Campaign("uneven", mode="async", staleness=1),
    "uneven, servers die": Campaign("uneven", merge="mean", mishaps=SERVERS_DIE, servers=3, replicas=2),
    "uneven, losses": replace(SHRINKS, workload="uneven losses"),
    "uneven, late, servers die": replace(SHRINKS_AND_FAILS_OVER, workload="uneven losses", quorum=2),
}

# Two go on without a third that holds them up for more than a moment, whatever happens to it.
LATENESS: dict[str, Campaign] = {
    "late": Campaign("lateness", merge="mean", quorum=2, on_worker_loss="wait", mishaps=Mishaps()),
    "late, losses": replace(SHRINKS, quorum=2, on_worker_loss="wait", faults=NASTY),
    "late, shrinks": replace(SHRINKS, quorum=2),
    "late, servers die": replace(SHRINKS_AND_FAILS_OVER, quorum=2, on_worker_loss="wait"),
}

# Workers with an optimizer of their own die, and get their state from another one.
HEALS = Campaign("healed", on_worker_loss="wait", mishaps=replace(HARD, crashes=4, ghosts=1, within_s=14.0))
HEALED: dict[str, Campaign] = {
    "healed": HEALS,
    "healed, nasty": replace(HEALS, faults=NASTY, mishaps=replace(LASTING, crashes=5, ghosts=1, cuts=0)),
    "healed, late copies": replace(HEALS, faults=LATE_COPIES),
    "healed, long pauses": replace(HEALS, mishaps=replace(LATE, crashes=2, ghosts=0, longest_pause_s=12.0)),
    "healed, servers die": replace(
        HEALS, mishaps=replace(SERVERS_DIE, crashes=3, within_s=14.0), servers=3, replicas=2
    ),
}
