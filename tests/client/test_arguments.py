"""What a program may say in a call: checked at the call, with the same words by every type of store."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import ConfigError, KeyExists, KeyNotFound, NotAllowed, ShapeMismatch, StoreClosed
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import FORKS, ones

TYPES = ["local", "dist_sync", "dist_async"]
HALF = "\ud800"  # of a surrogate pair: a str of Python, and nothing that UTF-8 can write
HUGE = 10**5000  # which Python refuses to print


@pytest.fixture(scope="module", params=TYPES)
def kv(request: pytest.FixtureRequest) -> Iterator[kvd.KVStore]:
    """A store with a key "w" of four zeros and "v" of four ones; the tests leave it as it is."""
    if request.param == "local":
        with kvd.create("local") as store:
            store.init(["w", "v"], [np.zeros(4, np.float32), ones()])
            yield store
    else:
        with LocalCluster(1, 2) as cluster:
            store = cluster.store(request.param)
            store.init(["w", "v"], [np.zeros(4, np.float32), ones()])
            yield store


ACCEPTED: dict[str, Any] = {
    "numpy numbers": lambda kv: kv.push("w", np.zeros(4, np.float32), np.int64(3), samples=np.int32(2)).wait(),
    "numpy numbers in a pushpull": lambda kv: kv.pushpull("w", np.zeros(4, np.float32), None, np.int8(1)),
    "a barrier that goes by a number": lambda kv: kv.barrier(np.int64(7)),
    "a timeout of numpy": lambda kv: kv.flush(np.float32(10)),
    "a timeout for ever": lambda kv: kv.pull_async("v").wait(float("inf")),
    "a timeout for ever and a day": lambda kv: kv.flush(HUGE),
    "a node of numpy": lambda kv: kv.num_dead_node(np.int64(7)),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_numbers_of_other_kinds_are_numbers(kv: kvd.KVStore, what: str) -> None:
    ACCEPTED[what](kv)
    assert kv.pull("w").tolist() == [0] * 4


REFUSED: dict[str, Any] = {
    **{
        f"rewind({value!r:.20})": lambda kv, value=value: kv.rewind(value)
        for value in (1.5, True, "a", None, -1, 1 << 62, np.float32(1), [1], float("nan"))
    },
    "rewind of a huge number": lambda kv: kv.rewind(HUGE),
    **{
        f"a barrier called {name!r}": lambda kv, name=name: kv.barrier(name)
        for name in (HALF, HALF * 300, None, 1.5, True, b"b", ["b"])
    },
    "a barrier called by a huge number": lambda kv: kv.barrier(HUGE),
    **{
        f"{call} with timeout {value!r}": lambda kv, call=call, value=value: CALLS_WITH_TIMEOUT[call](kv, value)
        for call in ("barrier", "flush", "wait", "result", "exception")
        for value in ("x", -1, float("nan"), True, [1])
    },
    **{
        f"num_dead_node with timeout {value!r}": lambda kv, value=value: kv.num_dead_node(7, value)
        for value in ("x", -1, float("nan"), None)
    },
    **{f"num_dead_node({value!r})": lambda kv, value=value: kv.num_dead_node(value) for value in (0, True, "w", 1.0)},
    "head": lambda kv: kv.send_command_to_servers(HALF, b""),
    "head of another kind": lambda kv: kv.send_command_to_servers(None, b""),
    "body": lambda kv: kv.send_command_to_servers("ping", HALF),
    "body of another kind": lambda kv: kv.send_command_to_servers("ping", 5),
    "body that is too long": lambda kv: kv.send_command_to_servers("ping", bytes((64 << 20) + 1)),
    "key": lambda kv: kv.pull(HALF),
    "key of a huge number": lambda kv: kv.pull(HUGE),
    "priority": lambda kv: kv.push("w", ones(), "hi"),
    "priority of a pull": lambda kv: kv.pull("w", None, "hi"),
    "priority of a pushpull": lambda kv: kv.pushpull("w", ones(), None, 1.5),
    "priority of a broadcast": lambda kv: kv.broadcast("w", ones(), None, None),
    "samples": lambda kv: kv.push("w", ones(), samples=-1),
    "samples of a pushpull": lambda kv: kv.pushpull("w", ones(), samples=True),
    "samples that are huge": lambda kv: kv.push("w", ones(), samples=HUGE),
    "an out of None": lambda kv: kv.pull(["w", "v"], out=[None, ones()]),
    "an out of numbers": lambda kv: kv.pull("w", out=[0.0] * 4),
    "an out that is a number": lambda kv: kv.pull("w", out=np.float32(1)),
    "an updater": lambda kv: kv.set_updater(3),
    "a path": lambda kv: kv.save_optimizer_states(""),
    "a path with a zero": lambda kv: kv.save_optimizer_states("a\0b"),
    "a path of another kind": lambda kv: kv.load_optimizer_states(5),
    "a path that cannot be written": lambda kv: kv.load_optimizer_states(HALF),
    "33 dimensions made": lambda kv: kv.init("many dimensions", np.zeros((1,) * 33, np.float32)),
    "33 dimensions pushed": lambda kv: kv.push("w", np.zeros((1,) * 33, np.float32)),
    "33 dimensions pulled": lambda kv: kv.pull("w", out=np.zeros((1,) * 33, np.float32)),
    "33 dimensions of two devices": lambda kv: kv.push("w", [np.zeros((1,) * 33, np.float32)] * 2),
    "more bytes than there are": lambda kv: kv.init("large", np.broadcast_to(np.float32(0), (1 << 39,))),
    "more rows than there are": lambda kv: kv.init("long", np.zeros((0, 1 << 41), np.float32)),
    "a text for an optimizer": lambda kv: kv.update_optimizer(learning_rate=HALF),
    "a name of a hyperparameter": lambda kv: kv.update_optimizer(**{HALF: 1.0}),
    "a text that is too long": lambda kv: kv.update_optimizer(learning_rate="x" * 100_000),
}
CALLS_WITH_TIMEOUT: dict[str, Any] = {
    "barrier": lambda kv, timeout: kv.barrier("b", timeout),
    "flush": lambda kv, timeout: kv.flush(timeout),
    "wait": lambda kv, timeout: kv.pull_async("v").wait(timeout),
    "result": lambda kv, timeout: kv.pull_async("v").result(timeout),
    "exception": lambda kv, timeout: kv.pull_async("v").exception(timeout),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_sense_is_refused_at_once(kv: kvd.KVStore, what: str) -> None:
    begun = time.monotonic()
    with pytest.raises(NotAllowed):
        REFUSED[what](kv)
    assert time.monotonic() - begun < 5
    kv.flush()
    assert kv.pull("w").tolist() == [0] * 4


NO_RATES = {"object": object(), "nan": float("nan"), "huge": HUGE, "complex": 1j, "list": [0.5]}


@pytest.mark.parametrize("what", NO_RATES)
def test_hyperparameters_that_no_optimizer_has(kv: kvd.KVStore, what: str) -> None:
    with pytest.raises(ConfigError, match="learning_rate") as caught:
        kv.update_optimizer(learning_rate=NO_RATES[what])
    assert caught.value.setting == "learning_rate"


@pytest.mark.parametrize("value", [5, "SGD", kvd.optimizer.SGD])
def test_values_that_are_no_optimizer_are_refused(kv: kvd.KVStore, value: Any) -> None:
    with pytest.raises(ConfigError, match="is not an optimizer") as caught:
        kv.set_optimizer(value)
    assert caught.value.setting == "optimizer"


@pytest.mark.parametrize("rate", [np.float32(0.5), np.float64(0.5), np.int64(1), 1 << 60, True])
def test_hyperparameters_of_other_kinds_of_numbers(kv: kvd.KVStore, rate: Any) -> None:
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    try:
        if rate is True:
            with pytest.raises(ConfigError, match="learning_rate"):
                kv.update_optimizer(learning_rate=rate)
            rate = 1.0
        else:
            kv.update_optimizer(learning_rate=rate)
        assert kv.pushpull("w", -ones()).tolist() == [float(rate)] * 4
    finally:
        kv.set_optimizer(None)
        kv.pushpull("w", np.zeros(4, np.float32))


def test_32_dimensions_are_not_too_many(kv: kvd.KVStore) -> None:
    value = np.full((1,) * 32, 3, np.float32)
    kv.init("dimensions", value)
    assert kv.pull("dimensions").shape == value.shape


def test_a_rewind_that_was_refused_leaves_no_trace(kv: kvd.KVStore) -> None:
    for wrong in (1.5, True, "a"):
        with pytest.raises(NotAllowed, match="a clock counts pushes"):
            kv.rewind(wrong)  # type: ignore[arg-type]
    before = kv.clock("v")
    kv.pushpull("v", ones())
    assert kv.clock("v") == before + 1


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
@pytest.mark.asyncio
async def test_the_async_facade_refuses_the_same(kind: str) -> None:
    with LocalCluster(1, 1) as cluster:
        async with await kvd.aio.create(kind, **({} if kind == "local" else {"scheduler": cluster.address})) as kv:
            await kv.init("w", ones())
            for wrong in (1.5, True, "a", -1):
                with pytest.raises(NotAllowed, match="a clock counts pushes"):
                    await kv.rewind(wrong)  # type: ignore[arg-type]
            with pytest.raises(NotAllowed, match="barrier"):
                await kv.barrier(HALF)
            with pytest.raises(NotAllowed, match="dimensions"):
                await kv.push("w", np.zeros((1,) * 33, np.float32))
            with pytest.raises(NotAllowed, match="timeout"):
                await kv.num_dead_node(7, "x")  # type: ignore[arg-type]
            one: Any = np.int64(1)
            await kv.push("w", ones(), one, samples=one)
            assert (await kv.pull("w")).tolist() == [1] * 4


# ── what only the store can know is told by the handle ──


def test_the_handle_raises_the_errors_of_the_store(kv: kvd.KVStore) -> None:
    for handle in (kv.pull_async("nokey"), kv.pull_async(["w", "nokey"]), kv.pull_async("nokey", out=ones())):
        with pytest.raises(KeyNotFound, match="'nokey'"):
            handle.wait()
        assert isinstance(handle.exception(), KeyNotFound)
    with pytest.raises(KeyExists):
        kv.init_async("w", ones()).wait()
    with pytest.raises(ShapeMismatch):
        kv.push("w", ones(5)).wait()
    with pytest.raises(ShapeMismatch):
        kv.broadcast_async("w", ones(5)).wait()
    kv.flush()


@pytest.mark.parametrize("told_by", ["the next call", "flush", "close"])
@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_an_unobserved_error_is_raised_later(kind: str, told_by: str) -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store() if kind == "dist_sync" else kvd.create("local")
        kv.init(["w", "v"], [ones(), ones()])
        handle = kv.push("w", ones(5))
        wait_until(handle.done, "the push fails")
        kv.pull("v")  # not its business
        with pytest.raises(ShapeMismatch, match=r"\(5,\)"):
            {"the next call": lambda: kv.pull("w"), "flush": kv.flush, "close": kv.close}[told_by]()
        if told_by != "close":
            kv.close()


@pytest.mark.parametrize("end", ["", "kv.flush()", "with kv: 1 / 0"])
def test_a_script_without_close_gets_unobserved_errors_at_its_end(end: str) -> None:
    code = f"import numpy as np, kvd\nkv = kvd.create('local')\nkv.push('nokey', np.ones(3))\n{end}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.count("KeyNotFound: no key is called 'nokey'") == (0 if "/" in end else 1), done.stderr


def test_a_list_with_one_wrong_value_changes_nothing(kv: kvd.KVStore) -> None:
    for wrong in (["w", "nokey"], ["nokey", "w"]):
        with pytest.raises(KeyNotFound):
            kv.push(wrong, [ones(), ones()]).wait()
        with pytest.raises(KeyNotFound):
            kv.pushpull(wrong, [ones(), ones()])
    assert kv.pull("w").tolist() == [0] * 4


def test_a_forked_child_does_not_use_the_local_store_of_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS.format(type="local")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["fine"], done.stderr


def test_a_closed_store_says_so_before_anything_else() -> None:
    with kvd.create("local") as kv:
        kv.close()
        calls: list[Any] = [lambda: kv.rewind(0), lambda: kv.update_optimizer(wd=0), kv.flush]
        for call in calls:
            with pytest.raises(StoreClosed):
                call()


# ── outs ──


@pytest.mark.parametrize("layout", ["in one piece", "strided", "of two devices"])
def test_an_out_in_foreign_byte_order_is_filled(kv: kvd.KVStore, layout: str) -> None:
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    key = f"foreign {layout}"
    kv.init(key, value)
    foreign = np.zeros((3, 4), ">f4") if layout != "strided" else np.zeros((3, 8), ">f4")[:, ::2]
    out: Any = [foreign, np.zeros((3, 4), np.float32)] if layout == "of two devices" else foreign
    assert kv.pull(key, out=out) is out
    for each in out if isinstance(out, list) else [out]:
        np.testing.assert_array_equal(each, value)
    assert kv.pushpull(key, (value + 1).astype(">f4"), out=out) is out
    np.testing.assert_array_equal(foreign, value + 1)
    assert foreign.dtype == np.dtype(">f4")


def test_a_foreign_out_that_cannot_be_written_to_or_does_not_fit(kv: kvd.KVStore) -> None:
    fixed = np.zeros(4, ">f4")
    fixed.flags.writeable = False
    with pytest.raises(NotAllowed, match="read-only"):
        kv.pull("w", out=fixed)
    with pytest.raises(kvd.DtypeMismatch, match="float32"):
        kv.pull("w", out=np.zeros(4, ">f8"))
    with pytest.raises(ShapeMismatch):
        kv.pull("w", out=np.zeros(5, ">f4"))


def test_an_out_of_python_numbers_is_refused(kv: kvd.KVStore) -> None:
    with pytest.raises(NotAllowed, match="a list of numbers"):
        kv.pull("w", out=[0.0, 0.0])
    with pytest.raises(NotAllowed, match="a number"):
        kv.pull("w", out=0.0)


# ── kvd.aio ──


def test_kvd_aio_is_a_module() -> None:
    code = "import kvd.aio; from kvd.aio import create, KVStore; assert kvd.aio.create is create"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=os.getcwd()).returncode == 0
    module = importlib.import_module("kvd.aio")
    assert module is kvd.aio
    assert module.KVStore is kvd.aio.KVStore


@pytest.mark.parametrize(("store", "create"), [(kvd.KVStore, "kvd.create"), (kvd.aio.KVStore, "await kvd.aio.create")])
def test_a_store_that_is_made_by_its_class_says_what_to_call(store: Any, create: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f'call {create}("dist_async")')):
        store("dist_async")
    with pytest.raises(TypeError, match=re.escape(f'call {create}("dist_sync")')):
        store(None)
