"""Runs a campaign on a broken build."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulator.campaign import Campaign, undisturbed_weights

SEEDS = 25


def caught(campaign: Campaign, seeds: int = SEEDS) -> str:
    """What the checkers say of the first seed that fails; "" if none does."""
    for seed in range(seeds):
        try:
            campaign.run(seed)
        except AssertionError as violation:
            return str(violation)
    return ""


def check_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: Campaign, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some seed fails on the broken build, and says one of these words ("": anything)."""
    if campaign.workload.endswith("training"):
        undisturbed_weights(campaign.workload)  # of the unbroken build
    mutate(monkeypatch)
    violation = caught(campaign)
    assert violation
    assert not complaint or any(word in violation for word in complaint.split("|")), violation
