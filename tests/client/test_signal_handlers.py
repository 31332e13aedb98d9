"""Signal handlers of the program: whatever they raise, and wherever it comes, it reaches the program and leaves the
store as it should be."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.held_signals import HeldSignals, signals, uninterrupted
from kvd.testing.cluster import LocalCluster
from tests.client.harness import MEGABYTE, ONE_PUSH, Pair, ones

SIGNAL = signal.SIGUSR1
STEP_OF_COROUTINE = "_stepped"


class Boom(Exception):
    """What the handler raises."""


def raise_boom(number: int, frame: FrameType | None) -> None:
    raise Boom("from a handler")


@contextmanager
def handler(number: int, handle: Any) -> Iterator[None]:
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


class Arrival:
    """Sends this process signals at chosen moments of a call: before its n-th line or bytecode, wherever it is.

    Args:
        moments: when, with what is sent then.
        by_bytecode: whether bytecodes are counted, and not lines.
        within: only moments within a call of a function of this name count.
    """

    def __init__(self, moments: dict[int, int], *, by_bytecode: bool, within: str = "") -> None:
        self._moments = moments
        self._by_bytecode = by_bytecode
        self._within = within
        self._passed = 0
        self.places: list[str] = []

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = self._by_bytecode
        if event == ("opcode" if self._by_bytecode else "line") and self._counts(frame):
            self._passed += 1
            number = self._moments.get(self._passed)
            if number is not None:
                self.places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                signal.raise_signal(number)
        return self._trace

    def _counts(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename.endswith("_weakrefset.py"):
                return False  # Python discards what is raised in the callback of a weak reference
            if self._within in ("", frame.f_code.co_name):
                return True
            frame = frame.f_back
        return False

    def during(self, call: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(None)


def interrupt_everywhere(
    call: Callable[[], object], check: Callable[[], object], *, by_bytecode: bool = False, stride: int = 1
) -> None:
    """Makes the call again and again, until it ended before the signal came. Each time the exception must arrive, alone
    and once, the handlers must be those of the program, and `check` must hold."""
    moment = 1
    with handler(SIGNAL, raise_boom):
        while True:
            arrival, caught = Arrival({moment: SIGNAL}, by_bytecode=by_bytecode), None
            try:
                arrival.during(call)
            except Boom as error:
                caught = error
            assert signal.getsignal(SIGNAL) is raise_boom, arrival.places
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, arrival.places
            if not arrival.places:
                break
            assert caught is not None, arrival.places
            assert caught.__cause__ is None, arrival.places
            assert isinstance(caught.__context__, StopIteration | None), arrival.places  # which an iteration ended with
            try:
                check()
            except BaseException as error:
                error.add_note(f"after a signal at {arrival.places}")
                raise
            moment += stride
    assert caught is None
    assert moment > 20 * stride  # it was interrupted at many moments


# ── at every moment of a call ──


SMALL, LARGE = 4, 100_000


class Calls:
    """The calls of a program in a cluster with an optimizer that adds 1 for each push, and what must hold after."""

    def __init__(self, store: kvd.KVStore) -> None:
        self.store = store
        self.names = [f"list {number}" for number in range(10)]
        self.small, self.large = np.full(SMALL, -1, np.float32), np.full(LARGE, -1, np.float32)
        self.outs = [np.empty(SMALL, np.float32) for _ in self.names]
        store.init(["w", "large", *self.names], [0 * self.small, 0 * self.large, *[0 * self.small] * len(self.names)])
        store.set_optimizer(kvd.optimizer.SGD(1.0))
        self.made = 0
        self.loop: Any = None

    def check(self) -> None:
        """The store goes on, and each key has the value that its clock says."""
        store, self.loop = self.store, None  # Python discards what is raised in a finalizer
        store.flush()
        for key in ("w", "large", self.names[3]):
            clock = store.clock(key)
            assert (store.pull(key) == clock).all()
        assert (store.pushpull("w", self.small, self.outs[0]) == store.clock("w")).all()

    def pushpull(self) -> None:
        self.store.pushpull("w", self.small, self.outs[0])

    def pushpull_large(self) -> None:
        self.store.pushpull("large", self.large, np.empty(LARGE, np.float32))

    def pushpull_list(self) -> None:
        self.store.pushpull(self.names, [self.small] * len(self.names), self.outs)

    def push(self) -> None:
        self.store.push(self.names[3], self.small)

    def pull(self) -> None:
        self.store.pull("w")

    def pull_into(self) -> None:
        self.store.pull(self.names, self.outs)

    def handle(self) -> None:
        self.store.pushpull_async("w", self.small, self.outs[0]).wait()

    def handle_of_push(self) -> None:
        self.store.push(self.names[3], self.small).wait(30)

    def barrier(self) -> None:
        self.store.barrier()

    def flush(self) -> None:
        self.store.push("w", self.small)
        self.store.flush()

    def init(self) -> None:
        self.made += 1
        self.store.init(f"made {self.made}", self.small)

    def broadcast(self) -> None:
        self.made += 1
        self.store.broadcast(f"made {self.made}", self.small)

    def bind(self) -> None:
        gradient, weight = self.store.bind("large")
        gradient[...] = -1
        self.store.pushpull("large", gradient, weight)

    def optimizer(self) -> None:
        self.made += 1
        self.store.set_optimizer(kvd.optimizer.SGD(1.0, clip_gradient=float(self.made)))

    def command(self) -> None:
        self.store.send_command_to_servers("ping", b"")

    def steps(self) -> None:
        self.loop = self.store.steps(2, keys=["w"])
        try:
            for _ in self.loop:
                self.store.pushpull("w", self.small, self.outs[0])
        finally:
            self.loop.close()


HOT = ["pushpull", "handle", "pushpull_list"]
STRIDES = {"pushpull": 3, "handle": 5, "pushpull_list": 29}  # of bytecodes, of which the last one has many


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    with LocalCluster(1, 1) as cluster:
        store = cluster.store()
        yield Calls(store)
        store.close()


@pytest.mark.parametrize(
    "name",
    [
        *HOT,
        *["pushpull_large", "push", "pull", "pull_into", "handle_of_push", "barrier", "flush", "init", "broadcast"],
        *["bind", "optimizer", "command", "steps"],
    ],
)
def test_an_exception_before_any_line_of_a_call(name: str, calls: Calls) -> None:
    for _ in range(5):
        getattr(calls, name)()
    interrupt_everywhere(getattr(calls, name), calls.check, stride=1 if name in HOT else 3)


@pytest.mark.parametrize("name", HOT)
def test_an_exception_before_any_bytecode_of_a_repeated_call(name: str, calls: Calls) -> None:
    for _ in range(5):
        getattr(calls, name)()
    interrupt_everywhere(getattr(calls, name), calls.check, by_bytecode=True, stride=STRIDES[name])


def local_calls() -> dict[str, Callable[[kvd.KVStore], object]]:
    value, out = -np.ones(4, np.float32), np.empty(4, np.float32)
    return {
        "push": lambda store: store.push("w", value),
        "pushpull": lambda store: store.pushpull("w", value, out),
        "list": lambda store: store.pushpull(["w", "v"], [value, value], [out, out.copy()]),
        "pull": lambda store: store.pull("w"),
        "rows": lambda store: store.push("rows", ([1, 2], -np.ones((2, 3), np.float32))),
    }


@pytest.mark.parametrize("name", local_calls())
def test_an_exception_before_any_line_of_a_call_of_a_local_store(name: str) -> None:
    store, call = kvd.create("local"), local_calls()[name]
    store.init(["w", "v"], [np.zeros(4, np.float32)] * 2)
    store.init("rows", kvd.RowSparse((8, 3), "float32"))
    store.set_optimizer(kvd.optimizer.SGD(1.0))

    def check() -> None:
        for key in ("w", "v"):
            assert (store.pull(key) == store.version(key)).all()
        assert (store.row_sparse_pull("rows", [1, 2]) == store.version("rows")).all()

    interrupt_everywhere(lambda: call(store), check)
    store.close()


def test_an_exception_before_any_line_of_create_and_close() -> None:
    """Whatever was interrupted has left the cluster, which would not take so many jobs otherwise."""
    jobs = count()
    with LocalCluster(1, 1) as cluster:
        settings = {**cluster.settings, "scheduler": cluster.address}

        def call() -> None:
            kvd.create("dist_sync", job=f"job-{next(jobs)}", **settings).close()

        interrupt_everywhere(call, call, stride=211)


# ── in waits ──


def send_after(seconds: float, number: int) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.start()
    return timer


ERRORS: list[BaseException] = [
    TimeoutError("the step takes too long"),
    kvd.errors.RequestTimeout("not one of kvd", outcome="unknown"),
    SystemExit(3),
    RuntimeError("a DataLoader worker was killed"),
    StopIteration(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCHLD, signal.SIGRTMIN])
def test_what_a_handler_raises_ends_a_wait_unchanged(error: BaseException, number: int, pair: Pair) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        raise error

    one, other = pair
    with handler(number, handle):
        for wait in (one.pushpull_async("w", ones()).wait, one.flush, lambda: one.pull("w"), one.barrier):
            timer = send_after(0.05, number)
            with pytest.raises(type(error)) as raised:
                wait()
            assert raised.value is error
            assert error.__context__ is None
            timer.join()
    other.pushpull_async("w", ones())
    assert one.pull("w").tolist() == [2] * 4


def test_a_wait_goes_on_when_a_handler_returns(pair: Pair) -> None:
    """Handlers that tick, as those of profilers do, run while a call waits, and do not end it."""
    one, other = pair
    ticks, ticked = [], threading.Event()

    def tick(number: int, frame: FrameType | None) -> None:
        ticks.append(number)
        if len(ticks) == 20:
            ticked.set()

    def push() -> None:
        ticked.wait(60)
        other.push("w", ones())

    stop = threading.Event()

    def send() -> None:
        while not stop.wait(0.002):
            os.kill(os.getpid(), SIGNAL)

    threads = [threading.Thread(target=push), threading.Thread(target=send)]
    with handler(SIGNAL, tick):
        for thread in threads:
            thread.start()
        assert one.pushpull("w", ones()).tolist() == [2] * 4
        stop.set()
        for thread in threads:
            thread.join()
    assert len(ticks) >= 20


def test_a_handler_may_use_the_store(pair: Pair) -> None:
    one, other = pair
    seen: list[Any] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(one.version("w"))
        one.init_async("by the handler", ones())
        other.push("w", ones())  # what the interrupted call waits for

    with handler(SIGNAL, handle):
        timer = send_after(0.1, SIGNAL)
        assert one.pushpull("w", ones()).tolist() == [2] * 4
        timer.join()
    assert seen == [0]


def test_an_exception_while_a_push_waits_for_memory() -> None:
    with LocalCluster(2, 1, slice_bytes="1MiB") as cluster:
        one, other = cluster.open_stores(**ONE_PUSH)
        value = np.ones(MEGABYTE // 4, np.float32)
        made = [store.init_async("w", value) for store in (one, other)]
        for handle in made:
            handle.wait()
        first = one.push("w", value)
        with handler(SIGNAL, raise_boom):
            timer = send_after(0.1, SIGNAL)
            with pytest.raises(Boom):
                one.push("w", value)
            timer.join()
        other.push("w", value)
        first.wait()
        one.push("w", value)
        other.push("w", value)
        assert (one.pull("w") == 2).all()


def test_an_exception_while_a_store_is_created() -> None:
    with handler(SIGNAL, raise_boom):
        timer = send_after(0.3, SIGNAL)
        begun = time.monotonic()
        with pytest.raises(Boom):
            kvd.create("dist_sync", scheduler="tcp://127.0.0.1:1")
        timer.join()
    assert time.monotonic() - begun < 30


def test_an_updater_can_be_interrupted() -> None:
    """It is code of the program, which may take as long as it likes."""
    store = kvd.create("local")
    store.init("w", ones())
    in_updater = threading.Event()

    def updater(key: Any, received: Any, stored: Any) -> None:
        in_updater.set()
        while True:
            pass

    def send() -> None:
        in_updater.wait(60)
        os.kill(os.getpid(), SIGNAL)

    store.set_updater(updater)
    thread = threading.Thread(target=send)
    with handler(SIGNAL, raise_boom):
        thread.start()
        with pytest.raises(Boom):
            store.push("w", ones())
        thread.join()
    store.set_updater(None)
    assert store.pushpull("w", 3 * ones()).tolist() == [3] * 4


def test_an_exception_before_any_line_of_a_reader() -> None:
    value = np.arange(4, dtype=np.float32)
    with LocalCluster(1, 1) as cluster:
        cluster.store().init("w", value)
        with cluster.observer() as reader:

            def check() -> None:
                assert (reader.pull("w") == value).all()

            interrupt_everywhere(check, check, stride=5)


# ── in an event loop ──


def test_an_exception_before_any_line_of_coroutines() -> None:
    """While the loop itself runs code of its own, what a handler raises is its business."""
    value = np.full(4, -1, np.float32)

    async def main(store: kvd.aio.KVStore) -> None:
        await store.pushpull("w", value, np.empty(4, np.float32))
        await store.push("w", value)
        await store.flush()

    with LocalCluster(1, 1) as cluster, asyncio.Runner() as runner:
        loop = runner.get_loop()
        store = runner.run(kvd.aio.create("dist_sync", **{**cluster.settings, "scheduler": cluster.address}))
        runner.run(store.init("w", np.zeros(4, np.float32)))
        runner.run(store.set_optimizer(kvd.optimizer.SGD(1.0)))

        async def check() -> None:
            await store.flush()
            clock = await store.clock("w")
            assert (await store.pull("w") == clock).all()

        moment = 1
        with handler(SIGNAL, raise_boom):
            while True:
                arrival, is_caught = Arrival({moment: SIGNAL}, by_bytecode=False, within=STEP_OF_COROUTINE), False
                try:
                    arrival.during(lambda: loop.run_until_complete(main(store)))
                except Boom:
                    is_caught = True
                if not arrival.places:
                    break
                assert is_caught, arrival.places
                runner.run(check())
                moment += 5
        assert moment > 100
        runner.run(store.close())


# ── the mechanism ──


def test_signals_are_held_until_the_end() -> None:
    done: list[str] = []

    @uninterrupted
    def work() -> None:
        for number in (SIGNAL, signal.SIGUSR2, SIGNAL):
            signal.raise_signal(number)
            done.append("worked")

    with handler(SIGNAL, lambda *_: done.append("first")), handler(signal.SIGUSR2, lambda *_: done.append("second")):
        work()
    assert done == ["worked"] * 3 + ["first", "second"]


def test_all_handlers_run_though_one_raises() -> None:
    ran: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        ran.append(number)
        raise Boom(number)

    @uninterrupted
    def work() -> None:
        signal.raise_signal(SIGNAL)
        signal.raise_signal(signal.SIGUSR2)

    with handler(SIGNAL, handle), handler(signal.SIGUSR2, handle), pytest.raises(Boom) as raised:
        work()
    assert ran == [SIGNAL, signal.SIGUSR2]
    assert raised.value.args == (signal.SIGUSR2,)
    assert isinstance(raised.value.__context__, Boom)


def test_two_signals_at_any_two_moments_run_their_handlers_once_each() -> None:
    """Also while the handlers are replaced and restored."""
    ran: list[int] = []

    @uninterrupted
    def work() -> None:
        ran.append(0)

    def note(number: int, frame: FrameType | None) -> None:
        ran.append(number)

    with handler(SIGNAL, note), handler(signal.SIGUSR2, note):
        moments = 0
        for first in range(1, 10_000, 3):
            last = first
            for second in range(first + 1, 10_000, 13):
                ran.clear()
                arrival = Arrival({first: SIGNAL, second: signal.SIGUSR2}, by_bytecode=True)
                arrival.during(work)
                assert signal.getsignal(SIGNAL) is signal.getsignal(signal.SIGUSR2) is note
                if len(arrival.places) < 2:
                    break
                assert sorted(ran) == [0, *sorted([SIGNAL, signal.SIGUSR2])], arrival.places
                last, moments = second, moments + 1
            if last == first:
                break
        assert moments > 100


def test_a_handler_is_held_from_the_moment_of_its_installation() -> None:
    """Also in a section of a handler that runs while `signal.signal` is under way."""
    is_open, early = threading.Event(), []

    @uninterrupted
    def work() -> None:
        is_open.set()
        signal.raise_signal(signal.SIGCHLD)
        is_open.clear()

    def note(number: int, frame: FrameType | None) -> None:
        if is_open.is_set():
            early.append(number)

    def install() -> None:
        signal.signal(signal.SIGCHLD, note)

    with handler(SIGNAL, lambda number, frame: work()), handler(signal.SIGCHLD, signal.SIG_DFL):
        moment = 1
        while True:
            arrival = Arrival({moment: SIGNAL}, by_bytecode=True)
            arrival.during(install)
            work()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if not arrival.places:
                break
            moment += 1
    assert moment > 20
    assert not early


def test_a_section_of_another_thread_leaves_handlers_alone() -> None:
    seen: list[Any] = []

    @uninterrupted
    def work() -> None:
        seen.append(signal.getsignal(SIGNAL))

    with handler(SIGNAL, raise_boom):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [raise_boom]


def test_a_child_that_another_thread_forks_has_the_handlers_of_the_program() -> None:
    forked, status = threading.Event(), []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            is_raised = False
            try:
                signal.raise_signal(SIGNAL)
            except Boom:
                is_raised = True
            os._exit(0 if is_raised and signal.getsignal(SIGNAL) is raise_boom else 1)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        forked.set()

    @uninterrupted
    def work() -> None:
        thread = threading.Thread(target=fork)
        thread.start()
        assert forked.wait(60)
        thread.join()

    with handler(SIGNAL, raise_boom):
        work()
    assert status == [0]


def test_a_signal_of_a_child_wakes_no_wait_of_its_parent() -> None:
    woken: list[str] = []
    held = HeldSignals()
    with handler(SIGNAL, lambda number, frame: None):
        held.hold()
        held.begin_wait(lambda: woken.append("parent"))
        held.forked()
        held.hold()
        signal.raise_signal(SIGNAL)
        held.release()
    assert not woken


def test_there_is_one_state_of_handlers() -> None:
    assert isinstance(signals, HeldSignals)
    assert not signals.is_held


def test_a_finalizer_that_runs_while_the_interpreter_exits() -> None:
    """An error in a loop over steps may keep the loop until the modules have lost their globals."""
    program = (
        "import sys\n"
        "from kvd.client.calls.held_signals import uninterrupted\n"
        "class Loop:\n"
        "    def __init__(self, write):\n"
        "        self.write = write\n"
        "    @uninterrupted\n"
        "    def close(self):\n"
        "        self.write('closed')\n"
        "    def __del__(self):\n"
        "        self.close()\n"
        "sys.kept = [Loop(sys.stdout.write), *sys.modules.values()]\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert (ended.stdout, ended.stderr) == ("closed", "")


def test_what_a_library_in_c_has_installed_stays(tmp_path: Path) -> None:
    """faulthandler prints the stack, and calls the handler of the program then."""
    ran: list[int] = []

    @uninterrupted
    def work() -> None:
        signal.raise_signal(SIGNAL)

    with handler(SIGNAL, lambda number, _: ran.append(number)), (tmp_path / "stack").open("w+") as file:
        faulthandler.register(SIGNAL, file, all_threads=False, chain=True)
        try:
            for _ in range(3):
                work()
            signal.raise_signal(SIGNAL)
        finally:
            faulthandler.unregister(SIGNAL)
        file.seek(0)
        assert file.read().count("Stack (most recent call first)") == 4
    assert len(ran) == 4
