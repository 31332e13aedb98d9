"""Metrics of a worker, in the registry of its program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as families_in

import kvd
import kvd.metrics
from kvd.errors import NotAllowed
from kvd.testing.cluster import LocalCluster

STEPS = 7
JOB = {"kvd_job": "default"}


def test_a_registry_has_the_metrics_of_a_worker_until_its_end() -> None:
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> Any:
        return registry.get_sample_value(f"kvd_worker_{name}", JOB | labels)

    with LocalCluster(1, 2, path="shm") as cluster:
        store = cluster.store()
        registry.register(kvd.metrics.collector(store))
        assert value("step") == 0
        ones = np.ones(8, np.float32)
        store.init("w", ones)
        for _ in range(STEPS):
            store.pushpull("w", ones, np.empty_like(ones))
        assert value("info", rank="0", type="dist_sync") == 1
        assert value("step") == STEPS
        assert value("open_calls") == 0
        assert value("servers", path="shared memory") == 2
        assert value("members", role="server", state="active") == 2
        assert value("members", role="worker", state="active") == 1
        assert value("scheduler_silence_seconds") >= 0
        store.set_barrier_before_exit(False)
        store.close()
        assert not list(families_in(generate_latest(registry).decode()))


def test_a_store_without_a_cluster_has_none() -> None:
    with kvd.create("local") as store, pytest.raises(NotAllowed, match="'local' has no cluster, and no metrics"):
        kvd.metrics.collector(store)
