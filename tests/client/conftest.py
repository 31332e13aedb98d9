"""What the tests of the client share: stores in clusters of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.testing.cluster import LocalCluster
from tests.client.harness import SLOW_TO_JUDGE, Pair, init_all


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two workers of one cluster, with a key "w" of four zeros."""
    with LocalCluster(2, 2) as cluster:
        one, other = stores = cluster.open_stores()
        init_all(stores)
        yield one, other


@pytest.fixture
def slow_cluster() -> Iterator[LocalCluster]:
    """Two workers and a server; the cluster waits for a dead worker longer than a test takes."""
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        yield cluster


@pytest.fixture
def slow_pair(slow_cluster: LocalCluster) -> Pair:
    """The two workers of the slow cluster, with a key "w" of four zeros."""
    one, other = stores = slow_cluster.open_stores()
    init_all(stores)
    return one, other
