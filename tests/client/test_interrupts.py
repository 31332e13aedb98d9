"""Ctrl-C at every moment of a store's life."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

import kvd
from kvd.testing.cluster import LocalCluster
from tests.client.harness import CALLS, Pair, failed_workers, ones


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("what", ["pull", "pull into", "pushpull", "barrier", "flush", "wait", "close"])
def test_ctrl_c_interrupts_a_blocking_call_at_once(what: str, slow_cluster: LocalCluster, slow_pair: Pair) -> None:
    one, _ = slow_pair
    push = one.push("w", ones())
    call = {**CALLS, "wait": lambda kv: push.wait(), "close": lambda kv: kv.close()}[what]
    begun = time.monotonic()
    timer = interrupt_after(0.2)
    with pytest.raises(KeyboardInterrupt), one:
        call(one)
    assert time.monotonic() - begun < 2.5
    timer.join()
    assert failed_workers(slow_cluster) == [one.rank]


def test_a_handle_survives_ctrl_c(slow_pair: Pair) -> None:
    one, other = slow_pair
    handle = one.pushpull_async("w", ones())
    interrupt_after(0.1)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert not handle.claimed
    other.push("w", ones())
    assert handle.wait(10).tolist() == [2] * 4
    assert one.pull("w").tolist() == [2] * 4


def test_ctrl_c_never_leaves_the_machine_half_changed() -> None:
    """A flood of signals while calls go out: each call either was made or was not, and the store goes on."""
    gc.collect()  # a signal in the finalizer of an earlier test's loop would be nobody's to catch
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.init("w", np.zeros(4, np.float32))
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        go, stop = threading.Event(), threading.Event()

        def flood() -> None:
            go.wait()
            while not stop.is_set():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.002)  # time itself: the pace of the flood

        thread = threading.Thread(target=flood)
        interrupts = 0
        thread.start()
        deadline = time.monotonic() + 1.0
        try:
            go.set()
            while time.monotonic() < deadline:
                try:
                    while time.monotonic() < deadline:
                        kv.pushpull("w", np.full(4, -1, np.float32))
                except KeyboardInterrupt:
                    interrupts += 1
        except KeyboardInterrupt:
            pass
        finally:
            while True:
                try:
                    stop.set()
                    thread.join()
                    break
                except KeyboardInterrupt:
                    pass
        assert interrupts > 5
        kv.flush()
        clock = kv.clock("w")
        assert clock > 5
        assert kv.pull("w").tolist() == [clock] * 4
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_the_store_waits_for_the_cluster() -> None:
    timer = interrupt_after(0.3)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        kvd.create("dist_sync", scheduler="tcp://127.0.0.1:1")
    timer.join()
    assert time.monotonic() - begun < 2
