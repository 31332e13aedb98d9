"""The benchmark of encryption between hosts runs, and measures every kind of connection."""

from __future__ import annotations

import pytest

from benchmarks.two_hosts import KINDS, measure
from tests.node.launch.lan_harness import missing_for_lan


def test_every_kind_of_connection_is_measured() -> None:
    missing = missing_for_lan()
    if missing:
        pytest.skip(missing)
    medians = measure("1KiB", rounds=1, steps=2)
    assert list(medians) == list(KINDS)
    assert all(len(found) == 1 and found[0] > 0 for found in medians.values())
