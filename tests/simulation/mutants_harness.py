"""Runs a campaign on a broken build."""

from __future__ import annotations

from kvd.testing.campaign import Campaign

SEEDS = 25


def caught(campaign: Campaign, seeds: int = SEEDS) -> str:
    """What the checkers say of the first seed that fails; "" if none does."""
    for seed in range(seeds):
        try:
            campaign.run(seed)
        except AssertionError as violation:
            return str(violation)
    return ""
