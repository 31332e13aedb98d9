"""How a store ends: closed, left by an error, forgotten, interrupted, in a forked child, in an event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.handle import Handle
from kvd.client.cluster.interrupts import Uninterrupted
from kvd.client.facades.blocking import backend_of
from kvd.errors import ConnectError, KvdError, NotAllowed, RequestTimeout, StoreClosed
from kvd.testing.cluster import LocalCluster, engine_of, wait_until

SLOW_TO_JUDGE: dict[str, Any] = {"worker_timeout_s": 40.0, "request_timeout_s": 50.0}


def ones(count: int = 4) -> Any:
    return np.ones(count, np.float32)


def fail_after(_: Any) -> None:
    raise ZeroDivisionError


def worker_states(kv: kvd.KVStore) -> dict[int, str]:
    members = engine_of(kv).machine.view.members
    return {rank: member.state for (role, rank), member in members.items() if role == "worker"}


def failed_workers(cluster: LocalCluster) -> list[int]:
    """Ranks of the workers whose programs ended with an error, as the scheduler knows."""
    members: Any = cluster.scheduler._daemon.machine.explain(0.0)["members"]  # type: ignore[union-attr]
    return [member["rank"] for member in members if "ended with an error" in member["reason"]]


CALLS: dict[str, Any] = {
    "init": lambda kv: kv.init("v", ones()),
    "init_async": lambda kv: kv.init_async("v", ones()),
    "push": lambda kv: kv.push("w", ones()),
    "push_async": lambda kv: kv.push_async("w", ones()),
    "pull": lambda kv: kv.pull("w"),
    "pull into": lambda kv: kv.pull("w", out=ones()),
    "pull_async": lambda kv: kv.pull_async("w"),
    "pushpull": lambda kv: kv.pushpull("w", ones()),
    "pushpull_async": lambda kv: kv.pushpull_async("w", ones()),
    "broadcast": lambda kv: kv.broadcast("w", ones()),
    "broadcast_async": lambda kv: kv.broadcast_async("w", ones()),
    "flush": lambda kv: kv.flush(),
    "barrier": lambda kv: kv.barrier(),
    "join": lambda kv: kv.join(),
    "clock": lambda kv: kv.clock("w"),
    "version": lambda kv: kv.version("w"),
    "command": lambda kv: kv.send_command_to_servers("ping", b""),
    "set_optimizer": lambda kv: kv.set_optimizer(None),
    "update_optimizer": lambda kv: kv.update_optimizer(learning_rate=1.0),
    "save": lambda kv: kv.save_optimizer_states("nowhere"),
    "num_dead_node": lambda kv: kv.num_dead_node(7),
    "dead_nodes": lambda kv: kv.dead_nodes(),
}


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_closed_store_says_so(kind: str) -> None:
    with LocalCluster(1, 1) as cluster:
        kv = kvd.create("local") if kind == "local" else cluster.store()
        kv.init("w", ones())
        kv.close()
        kv.close()
        for call in CALLS.values():
            with pytest.raises(StoreClosed, match="closed"):
                call(kv)
        assert kv.type == kind
        assert kv.rank == 0


def test_a_blocking_call_in_an_event_loop_names_the_other_facade() -> None:
    async def program(kv: kvd.KVStore) -> None:
        for call in (*CALLS.values(), lambda kv: kv.close()):
            with pytest.raises(NotAllowed, match=r"kvd\.aio"):
                call(kv)
        with pytest.raises(NotAllowed, match=r"kvd\.aio\.create"):
            kvd.create("local")

    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        asyncio.run(program(kv))
        kv.init("w", ones())
        kv.close()


def test_close_waits_for_the_others_unless_told_not_to() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = cluster.store(), cluster.store()
        closing = threading.Thread(target=one.close)
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
        other.close()
        closing.join(10)
        assert not closing.is_alive()
        one, other = cluster.store(), cluster.store()
        one.set_barrier_before_exit(False)
        begun = time.monotonic()
        one.close()
        assert time.monotonic() - begun < 2
        wait_until(lambda: worker_states(other)[one.rank] == "left", "the others see it go")


def test_the_others_do_not_wait_for_one_that_left() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, np.float32))
        kv.set_barrier_before_exit(False)
        return [float(kv.pushpull("w", ones())[0]) for _ in range(2 if kv.rank else 4)]

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == [[2, 2, 1, 1], [2, 2]]


def test_a_with_block_that_fails_leaves_at_once() -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        one, other = cluster.store(), cluster.store()
        handles = [store.init_async("w", np.zeros(4, np.float32)) for store in (one, other)]
        for handle in handles:
            handle.wait()
        begun = time.monotonic()
        with pytest.raises(ZeroDivisionError), one:
            fail_after(one.push("w", ones()))  # its round never closes: nobody waits for that
        assert time.monotonic() - begun < 2
        assert failed_workers(cluster) == [one.rank]


def test_leaving_by_an_error_does_not_wait_for_a_dead_scheduler() -> None:
    with LocalCluster(1, 1, **SLOW_TO_JUDGE) as cluster:
        kv = cluster.store()
        cluster.scheduler.stop()
        begun = time.monotonic()
        with pytest.raises(ZeroDivisionError), kv:
            raise ZeroDivisionError
        assert time.monotonic() - begun < 3


def test_calls_under_way_end_when_the_store_is_closed() -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        one, other = cluster.store(), cluster.store()
        handles = [store.init_async("w", np.zeros(4, np.float32)) for store in (one, other)]
        for handle in handles:
            handle.wait()
        waiting = [
            one.pushpull_async("w", ones()),
            one.pull_async("w"),
            one.pull_async("w", out=ones()),
            one.broadcast_async("w", ones()),
            backend_of(one).rounds.flush(None),
            backend_of(one).rounds.barrier("b", None),
            backend_of(one).rounds.join(),
        ]
        caught: list[BaseException] = []

        def block() -> None:
            try:
                one.pull("w")
            except BaseException as error:  # noqa: BLE001
                caught.append(error)

        thread = threading.Thread(target=block)
        thread.start()
        time.sleep(0.1)
        one.__exit__(RuntimeError, None, None)
        for handle in waiting:
            with pytest.raises(StoreClosed):
                handle.wait(5)
        thread.join(5)
        assert [type(error) for error in caught] == [StoreClosed]


def test_calls_and_close_at_the_same_time_never_hang() -> None:
    for _ in range(5):
        with LocalCluster(1, 1) as cluster:
            kv = cluster.store()
            kv.init("w", np.zeros(4, np.float32))
            ended: list[bool] = []

            def work(kv: kvd.KVStore = kv, ended: list[bool] = ended) -> None:
                try:
                    while True:
                        kv.pushpull("w", ones())
                        kv.pull("w")
                        kv.flush()
                except StoreClosed:
                    ended.append(True)
                except NotAllowed as error:
                    ended.append("left the rounds" in str(error))

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.02)
            closers = [threading.Thread(target=kv.close) for _ in range(2)]
            for thread in closers:
                thread.start()
            for thread in [*closers, *threads]:
                thread.join(10)
            assert ended == [True] * 3


def test_nothing_stays_behind() -> None:
    def descriptors() -> int:
        gc.collect()  # the servers of this cluster are objects of this process, and their memory has descriptors
        return len(os.listdir("/proc/self/fd"))

    def cycle() -> None:
        with LocalCluster(1, 1) as cluster, cluster.store() as kv:
            kv.init("w", ones(100_000))
            kv.pull("w")
        with pytest.raises(ConnectError):
            kvd.create(
                "dist_sync",
                scheduler="tcp://127.0.0.1:1",
                server_timeout_s=0.2,
                worker_timeout_s=0.2,
                heartbeat_interval_s=0.05,
                request_timeout_s=0.3,
            )

    cycle()
    before, threads = descriptors(), threading.active_count()
    for _ in range(4):
        cycle()
    wait_until(lambda: descriptors() <= before and threading.active_count() <= threads, "all is given back", 5)


FORGETS = """
import numpy as np, kvd
def main():
    kv = kvd.create("dist_sync")
    other = kvd.create("dist_sync", node_id="second") if {second} else None
    for store in (kv, other):
        if store is not None:
            handle = store.init_async("w", np.zeros(4, np.float32))
    handle.wait()
    for store in (kv, other):
        if store is not None:
            store.push("w", np.ones(4, np.float32))
main()
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "raise RuntimeError('no')"])
def test_a_script_that_forgets_close_leaves_in_good_order(end: str) -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        kv = cluster.store(node_id="worker-0")
        script = cluster.script(FORGETS.format(second=False, end=end), 1)
        kv.init("w", np.zeros(4, np.float32))
        if not end.startswith("raise Runtime"):
            assert kv.pushpull("w", ones()).tolist() == [2] * 4  # what it pushed last has arrived
        kv.set_barrier_before_exit(not end.startswith("raise Runtime"))  # one that failed is not met again
        kv.close()
        output, _ = script.communicate(timeout=20)
        assert script.returncode == (1 if "Runtime" in end else 0), output.decode()
        assert b"atexit" not in output


def test_a_script_with_two_stores_that_forgets_both() -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        begun = time.monotonic()
        script = cluster.script(FORGETS.format(second=True, end=""), 1)
        output, _ = script.communicate(timeout=30)
        assert script.returncode == 0, output.decode()
        assert output == b""
        assert time.monotonic() - begun < 15


AIO_FORGETS = """
import asyncio, numpy as np, kvd
async def main():
    kv = await kvd.aio.create("dist_sync")
    await kv.init("w", np.zeros(4, np.float32))
    await kv.push("w", np.ones(4, np.float32))
asyncio.run(main())
"""


def test_an_async_script_that_forgets_close() -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        kv = cluster.store(node_id="worker-0")
        script = cluster.script(AIO_FORGETS, 1)
        kv.init("w", np.zeros(4, np.float32))
        assert kv.pushpull("w", ones()).tolist() == [2] * 4
        kv.close()
        output, _ = script.communicate(timeout=20)
        assert (script.returncode, output) == (0, b"")


FORKS = """
import os, sys, numpy as np, kvd
kv = kvd.create("dist_sync")
kv.init("w", np.zeros(4, np.float32))
handle = kv.push("w", np.ones(4, np.float32))
child = os.fork()
if child == 0:
    calls = [lambda: kv.push("w", np.ones(4, np.float32)), lambda: kv.pull("w"), lambda: kv.flush(),
             lambda: kv.barrier(), lambda: kv.dead_nodes(), lambda: kv.clock("w"), lambda: kv.close()]
    for call in calls:
        try:
            call()
        except kvd.StoreClosed as error:
            assert "after the fork" in str(error), error
        else:
            print("a call in the child went through")
    local = kvd.create("local")
    local.init("w", np.zeros(4, np.float32))
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert kv.pull("w").tolist() == [1] * 4
kv.close()
print("fine")
"""


def test_a_forked_child_does_not_use_the_store_of_its_parent() -> None:
    with LocalCluster(1, 2) as cluster:
        output, _ = cluster.script(FORKS, 0).communicate(timeout=30)
        assert output.decode().splitlines() == ["fine"]


# ── Ctrl-C ──


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("what", ["pull", "pull into", "pushpull", "barrier", "flush", "wait", "close"])
def test_ctrl_c_interrupts_a_blocking_call_at_once(what: str) -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        one, other = cluster.store(), cluster.store()
        handles = [store.init_async("w", np.zeros(4, np.float32)) for store in (one, other)]
        for handle in handles:
            handle.wait()
        push = one.push("w", ones())
        call = {**CALLS, "wait": lambda kv: push.wait(), "close": lambda kv: kv.close()}[what]
        begun = time.monotonic()
        timer = interrupt_after(0.2)
        with pytest.raises(KeyboardInterrupt), one:
            call(one)
        assert time.monotonic() - begun < 2.5
        timer.join()
        assert failed_workers(cluster) == [one.rank]


def test_a_handle_survives_ctrl_c() -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        one, other = cluster.store(), cluster.store()
        handles = [store.init_async("w", np.zeros(4, np.float32)) for store in (one, other)]
        for handle in handles:
            handle.wait()
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
                time.sleep(0.002)

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


def test_ctrl_c_is_held_back_and_then_told() -> None:
    turns = 0

    def work() -> None:
        nonlocal turns
        with Uninterrupted(), Uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                turns += 1
        turns = -1

    with pytest.raises(KeyboardInterrupt):
        work()
    assert turns == 1000


def test_ctrl_c_while_the_cluster_is_awaited() -> None:
    timer = interrupt_after(0.3)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        kvd.create("dist_sync", scheduler="tcp://127.0.0.1:1")
    timer.join()
    assert time.monotonic() - begun < 2


# ── the loop thread ──


def test_the_engine_does_not_hold_the_interpreter() -> None:
    """A program that ends while its store waits for somebody ends."""
    code = "import kvd, sys\nkv = kvd.create('dist_sync')\nkv.set_barrier_before_exit(False)\n"
    with LocalCluster(2, 1) as cluster:
        output, _ = cluster.script(code, 0).communicate(timeout=20)
        assert output == b""


def test_a_scheduler_address_that_is_none_ends_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvd.transport.zmq import ZmqTransport

    def refuse(self: Any, peer: Any, address: str) -> None:
        raise ConnectError(f"{address} is no address to connect to", address=address)

    monkeypatch.setattr(ZmqTransport, "connect", refuse)
    begun = time.monotonic()
    with pytest.raises(ConnectError, match="is no address"):
        kvd.create("dist_sync", scheduler="tcp://127.0.0.1:1")
    assert time.monotonic() - begun < 5


def test_handles_without_a_future_of_a_store() -> None:
    assert Handle.of(3).wait() == 3
    assert Handle.of(3).done()
    assert issubclass(RequestTimeout, TimeoutError)
    assert issubclass(StoreClosed, KvdError)
    assert subprocess.run([sys.executable, "-c", "import kvd"], check=False, cwd="/").returncode in (0, 1)
