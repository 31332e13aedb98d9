"""Counters of a server, compared with what a program has done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import KeyNotFound
from kvd.testing.cluster import LocalCluster

SMALL, LARGE = 256, 1 << 18  # elements: one goes in a frame of a link, the other through shared memory
STEPS = 20


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_each_way_counts_what_a_program_has_done(path: Any) -> None:
    with LocalCluster(2, 1, path=path) as cluster:

        def totals() -> Any:
            with cluster.observer() as observer:
                [server] = observer.status()["servers"]
            return server["counters"]

        def program(store: kvd.KVStore) -> None:
            for name, elements in (("small", SMALL), ("large", LARGE)):
                value = np.ones(elements, np.float32)
                store.init(name, value)
                store.barrier()
                for _ in range(STEPS):
                    store.pushpull(name, value, np.empty_like(value))
            if store.rank == 0:
                with pytest.raises(KeyNotFound):
                    store.pull("nobody made it", np.empty(1, np.float32))

        before = totals()
        cluster.run(program)
        after = totals()
        sent = 2 * STEPS * 4 * (SMALL + LARGE)  # two workers, four bytes each
        assert after["updates"] - before["updates"] == 2 * STEPS
        assert after["update_s"] > before["update_s"]
        assert after["received_bytes"] - before["received_bytes"] >= sent + 4 * (SMALL + LARGE)  # and the first values
        assert after["sent_bytes"] - before["sent_bytes"] >= sent
        pushes = sum(after["received"].get(kind, 0) for kind in ("push", "push_batch"))
        assert pushes >= 2 * 2 * STEPS
        assert after["sent"]["values"] >= 2 * 2 * STEPS
        assert after["received"]["init"] >= 2
        assert after["invalid_frames"] == 0
