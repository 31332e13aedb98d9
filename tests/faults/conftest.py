"""A cluster with two busy workers, while a test sends nonsense to its daemons."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kvd
from kvd.testing.cluster import LocalCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, 2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def stores(cluster: LocalCluster) -> list[kvd.KVStore]:
    stores = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in range(2)])
    for handle in [store.init_async("w", np.zeros(3000, np.float32)) for store in stores]:
        handle.wait()
    return stores
