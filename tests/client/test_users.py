"""Who uses a store, and whether all of them wait: a census of threads and coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from kvd.client.calls.promise import Promise
from kvd.client.cluster.open_calls import OpenCalls
from kvd.client.cluster.users import Coroutines, StoreUsers
from kvd.core.machine import CensusTaken, Complete
from kvd.errors import KvdError
from kvd.testing.cluster import wait_until


class Store:
    """The parts of an engine that a census reads."""

    def __init__(self) -> None:
        self.users = StoreUsers()
        self.calls = OpenCalls()
        self.coroutines = Coroutines(self.users, self.calls.written)

    def promise(self) -> Promise:
        return Promise(self.users)

    def call(self) -> tuple[Promise, int]:
        promise = self.promise()
        return promise, self.calls.begin(promise)

    def census(self) -> CensusTaken:
        return self.calls.census(self.users, self.coroutines)

    def thread(self, work: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def end(self, number: int, result: Any = None) -> None:
        assert self.calls.end(Complete(number, result))


def test_nobody_has_used_the_store() -> None:
    assert Store().census() == CensusTaken(False, 0, ())


def test_a_thread_waits_for_a_call() -> None:
    store = Store()
    promise, number = store.call()
    thread = store.thread(promise.result)
    wait_until(lambda: store.census().everyone, "the thread waits")
    assert store.census() == CensusTaken(True, 1, (number,))
    store.end(number)
    thread.join()
    assert store.census() == CensusTaken(False, 1, ())


def test_a_wait_with_a_timeout_is_none() -> None:
    store = Store()
    promise, number = store.call()
    began = threading.Event()

    def work() -> None:
        store.users.this_thread()
        began.set()
        promise.result(60)

    thread = store.thread(work)
    began.wait(60)
    assert store.census() == CensusTaken(False, 0, ())
    store.end(number)
    thread.join()


def test_a_thread_that_does_something_else_may_call() -> None:
    store = Store()
    promise, number = store.call()
    waiting = store.thread(promise.result)
    may_end = threading.Event()
    noted = threading.Event()

    def busy() -> None:
        store.users.this_thread()
        noted.set()
        may_end.wait(60)

    other = store.thread(busy)
    noted.wait(60)
    wait_until(lambda: store.census().calls == (number,), "the first waits")
    assert not store.census().everyone
    may_end.set()
    other.join()
    assert store.census().everyone  # it has ended, and calls no more
    store.end(number)
    waiting.join()


def test_a_call_that_has_ended_frees_its_thread_at_once() -> None:
    store = Store()
    promise, number = store.call()
    with store.users.waiting(promise):
        assert store.census().everyone
        store.end(number)
        assert store.census() == CensusTaken(False, 1, ())


def test_every_wait_counts() -> None:
    store = Store()
    promise, _ = store.call()
    for count in (1, 2, 3):
        with store.users.waiting(promise):
            assert store.census().entered == count
    threads = [store.thread(lambda: _wait_once(store, promise)) for _ in range(5)]
    for thread in threads:
        thread.join()
    assert store.census().entered == 8  # also of those that are gone


def _wait_once(store: Store, promise: Promise) -> None:
    with store.users.waiting(promise):
        pass


def test_a_coroutine_and_the_thread_that_waits_for_it() -> None:
    store = Store()
    loop = asyncio.new_event_loop()
    runner = store.thread(loop.run_forever)
    call, number = store.call()
    goes_on = asyncio.Event()
    whole = store.promise()

    async def work() -> str:
        await store.coroutines.result_of(call)
        await goes_on.wait()  # neither waits for a call, nor has ended
        return "done"

    loop.call_soon_threadsafe(store.coroutines.start, work(), whole)
    waiting = store.thread(whole.result)
    wait_until(lambda: store.census().everyone, "both wait")
    assert store.census().calls == (number,)
    store.end(number)
    wait_until(lambda: store.census().calls == (), "the coroutine goes on")
    assert not store.census().everyone
    loop.call_soon_threadsafe(goes_on.set)
    assert whole.result(60) == "done"
    waiting.join()
    wait_until(lambda: not store.coroutines.runs(whole), "the coroutine is forgotten")
    loop.call_soon_threadsafe(loop.stop)
    runner.join()
    loop.close()


def test_a_promise_of_nobody_knows_what_proves_nothing() -> None:
    store = Store()
    with store.users.waiting(store.promise()):
        assert store.census() == CensusTaken(False, 1, ())


def test_calls_that_begin_after_the_end_fail_at_once() -> None:
    store, error = Store(), KvdError("over")
    before, _ = store.call()
    store.calls.fail_all(error)
    after, _ = store.call()
    assert before.exception(0) is after.exception(0) is error
    assert store.census().calls == ()
