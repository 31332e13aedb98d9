"""Campaigns of ledgers some of whose keys are tables: whatever holds of values holds of rows."""

from __future__ import annotations

from dataclasses import replace

from tests.simulator.absences import ELASTIC, LATENESS, LOSSES, UNEVEN
from tests.simulator.campaign import (
    CAMPAIGNS,
    FAILOVERS,
    LASTING,
    LONG_PAUSES,
    PAUSED_LEADERS,
    SERVERS_DIE,
    SERVERS_DIE_LONG,
    Campaign,
)
from tests.simulator.mishaps import Mishaps
from tests.simulator.network import CALM, LATE_COPIES, NASTY
from tests.simulator.settings import ShellSettings
from tests.simulator.workloads.forms import Forms


def with_tables(campaign: Campaign, *tables: str) -> Campaign:
    """The same with tables in place of these keys."""
    return replace(campaign, forms=Forms(tables=frozenset(tables)))


# Pushes one by one: nothing that was acknowledged is lost, and nothing counts twice.
LEDGERS: dict[str, Campaign] = {
    f"{name}, tables": with_tables({**CAMPAIGNS, **FAILOVERS}[name], *tables)
    for name, tables in {
        "ledger, nasty": "b",
        "ledger, long pauses": "b",
        "ledger, timeouts": "ab",
        "ledger, far ahead": "a",
        "ledger, stale by 0, nasty": "b",
        "list lives": "bdf",
        "stepped ledger, nasty": "a",
        "shared, nasty": "b",
        "ledger, servers die": "b",
        "ledger, async, nasty, servers die": "ab",
        "ledger, stale by 1, servers die": "b",
        "ledger, one way, servers die": "b",
        "ledger, torn records, servers die": "b",
        "list lives, nasty, servers die": "abc",
        "shared, nasty, servers die": "b",
    }.items()
}

# Tables that are deleted while they are used, and made again under their names.
DELETIONS: dict[str, Campaign] = {
    f"{name}, tables": with_tables({**CAMPAIGNS, **FAILOVERS}[name], "b", "big")
    for name in (
        "deletions",
        "deletions, nasty",
        "deletions, slow jobs",
        "deletions, no record",
        "deletions, async, slow jobs",
        "deletions, late copies",
        "deletions, long pauses",
        "deletions, late copies, servers die",
    )
}

# Workers that are lost, late, away, or not there yet.
ABSENCES: dict[str, Campaign] = {
    f"{name}, tables": with_tables(campaign, "b")
    for name, campaign in {**LOSSES, **ELASTIC, **UNEVEN, **LATENESS}.items()
}


# Merged values that are encoded, and keys with merges of their own.
SLOW = ShellSettings(job_s=(0.0, 0.3))
CODED: dict[str, Campaign] = {
    "coded": Campaign("coded"),
    "merges, nasty": Campaign("merges", mishaps=LASTING, faults=NASTY, shell=SLOW),
    "merges, servers die": Campaign("merges", mishaps=SERVERS_DIE, servers=3, replicas=2),
    "coded, nasty": Campaign("coded", merge="mean", mishaps=LASTING, faults=NASTY, shell=SLOW),
    "coded, far ahead": Campaign("coded", rounds_ahead=5, shell=SLOW),
    "coded, long pauses": Campaign("coded", merge="mean", mishaps=LONG_PAUSES),
    "coded, servers die": Campaign("coded", mishaps=SERVERS_DIE, replicas=2),
    "coded, slow jobs, servers die": Campaign(
        "coded", merge="mean", mishaps=SERVERS_DIE, servers=3, replicas=2, shell=SLOW
    ),
    "coded, nasty, servers die": Campaign("coded", mishaps=SERVERS_DIE_LONG, faults=NASTY, servers=3, replicas=2),
    "coded, late copies, servers die": Campaign("coded", mishaps=SERVERS_DIE_LONG, faults=LATE_COPIES, replicas=2),
    "coded, paused leaders": Campaign("coded", mishaps=PAUSED_LEADERS, replicas=2),
}

# Pushes that travel compressed.
CODED_LEDGERS: dict[str, Campaign] = {
    f"{name}, coded": replace(campaign, forms=Forms(coded=frozenset("a")))
    for name, campaign in {**CAMPAIGNS, **FAILOVERS, **LOSSES, **ELASTIC, **LATENESS}.items()
    if name
    in (
        "ledger, nasty",
        "ledger, timeouts",
        "ledger, async, nasty, servers die",
        "lives, nasty",
        "lives, servers die",
        "stepped ledger, nasty",
        "shared, nasty, servers die",
        "losses, servers die",
        "elastic, servers die",
        "late, servers die",
    )
}

# Tables are captured while they are trained, and their servers die.
CAPTURES: dict[str, Campaign] = {
    "captured tables": Campaign("captured tables"),
    "captured tables, nasty": Campaign("captured tables", mishaps=LASTING, faults=NASTY, shell=SLOW),
    "captured tables, servers die": Campaign("captured tables", mishaps=SERVERS_DIE, servers=3, replicas=2),
    "captured tables, nasty, servers die": Campaign(
        "captured tables", mishaps=SERVERS_DIE_LONG, faults=NASTY, servers=3, replicas=2, shell=SLOW
    ),
}

# What each worker has pulled is in what becomes of its gradients.
DELAYS: dict[str, Campaign] = {
    "delays": Campaign("delays", mode="async", mishaps=Mishaps(), faults=CALM),
    "delays, slow jobs": Campaign("delays", mode="async", mishaps=Mishaps(), faults=CALM, shell=SLOW),
    "delays, nasty": Campaign("delays", mode="async", mishaps=LASTING, faults=NASTY, shell=SLOW),
    "delays, stale by 1": Campaign("delays", mode="async", staleness=1),
    "delays, servers die": Campaign("delays", mode="async", mishaps=SERVERS_DIE, replicas=2),
    "delays, nasty, servers die": Campaign(
        "delays", mode="async", mishaps=SERVERS_DIE_LONG, faults=NASTY, servers=3, replicas=2, shell=SLOW
    ),
}

SPARSE = {**LEDGERS, **DELETIONS, **ABSENCES, **CODED, **CODED_LEDGERS, **CAPTURES, **DELAYS}
