"""A program gives a push up: its later changes to the array reach no server."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from kvd.errors import RequestTimeout
from kvd.testing.cluster import LocalCluster
from tests.faults.stopping import stopped

# A server that is stopped here must not be declared dead, however slow the machine is.
PATIENT: dict[str, Any] = {"server_timeout_s": 30.0, "worker_timeout_s": 30.0}
VALUES = np.arange(12 << 20, dtype=np.float32)  # 48 MiB: more than the credit, and than what sockets hold


def prepared(cluster: LocalCluster) -> tuple[Any, Any, Any]:
    """A store with a key, what to push to it, and where to pull it to."""
    kv = cluster.store()
    kv.init("w", np.zeros_like(VALUES))
    return kv, VALUES.copy(), np.zeros_like(VALUES)


@pytest.mark.parametrize("path", ["shm", "ipc", "tcp"])
def test_a_push_whose_program_stopped_waiting_is_sent_unchanged(path: Any) -> None:
    with LocalCluster(processes=True, path=path, **PATIENT) as cluster:
        kv, gradient, out = prepared(cluster)
        with stopped(cluster.servers[0]):
            handle = kv._blocking().values.pushpull("w", gradient, out, 0, 1, False, None)  # as the blocking call does
            with pytest.raises(RequestTimeout) as caught:
                handle.wait(0.5)
            assert caught.value.outcome == "unknown"
            gradient[...] = -1.0
            out[...] = -2.0
        kv.flush()
        assert (out == -2.0).all()
        assert np.array_equal(kv.pull("w"), VALUES)


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_ctrl_c_gives_the_array_back(path: Any) -> None:
    with LocalCluster(processes=True, path=path, **PATIENT) as cluster:
        kv, gradient, out = prepared(cluster)
        with stopped(cluster.servers[0]):
            timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                kv.pushpull("w", gradient, out)
            timer.join()
            gradient[...] = -1.0
            out[...] = -2.0
        kv.flush()
        assert (out == -2.0).all()
        assert np.array_equal(kv.pull("w"), VALUES)
