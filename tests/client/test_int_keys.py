"""Keys that are whole numbers come back as whole numbers: to an updater, and in an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import DtypeMismatch, KeyExists, KeyNotFound, NotAllowed, RemoteError, ShapeMismatch
from kvd.testing.cluster import LocalCluster
from tests.client.test_repeated_keys import run

Fail = Callable[[kvd.KVStore, Any], Any]


def flush_after(kv: kvd.KVStore, key: Any) -> None:
    """A push whose handle nobody waits for."""
    kv.push(key, np.ones(9, np.float32))
    kv.flush()


def test_an_updater_gets_the_key_as_the_program_wrote_it() -> None:
    seen: list[Any] = []

    def update(key: Any, received: Any, stored: Any) -> None:
        seen.append(key)
        stored += received

    with kvd.create("local") as kv:
        kv.init([3, "3a", np.int64(-4)], [np.zeros(2, np.float32)] * 3)
        kv.set_updater(update)
        kv.push([3, "3a", np.int32(-4)], [np.ones(2, np.float32)] * 3)
        kv.push("3", np.ones(2, np.float32))
        assert kv.pull(3).tolist() == [2, 2]
    assert seen == [3, "3a", -4, "3"]
    assert [type(key) for key in seen] == [int, str, int, str]


FAILURES: dict[str, tuple[type[RemoteError], Fail]] = {
    "pull": (KeyNotFound, lambda kv, key: kv.pull(key)),
    "pull into": (ShapeMismatch, lambda kv, key: kv.pull(key, out=np.empty(9, np.float32))),
    "push": (DtypeMismatch, lambda kv, key: kv.push(key, np.ones(2)).wait()),
    "push in a list": (DtypeMismatch, lambda kv, key: kv.push(["w", key], [np.ones(2, np.float32), np.ones(2)]).wait()),
    "unobserved push": (ShapeMismatch, lambda kv, key: flush_after(kv, key)),
    "pushpull": (ShapeMismatch, lambda kv, key: kv.pushpull(key, np.ones(9, np.float32))),
    "another out": (
        ShapeMismatch,
        lambda kv, key: kv.pushpull(key, np.ones(2, np.float32), out=np.ones(3, np.float32)),
    ),
    "init": (KeyExists, lambda kv, key: kv.init(key, np.ones(2, np.float32))),
    "clock": (KeyNotFound, lambda kv, key: kv.clock(key)),
    "version": (KeyNotFound, lambda kv, key: kv.version(key)),
    "bind": (KeyNotFound, lambda kv, key: kv.bind(key)),
    "broadcast": (ShapeMismatch, lambda kv, key: kv.broadcast(key, np.ones(5, np.float32))),
}
MISSING = {"pull", "clock", "version", "bind"}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("store_type", ["local", "dist_sync"])
def test_an_error_names_the_key_as_the_program_wrote_it(store_type: str, what: str) -> None:
    kind, fail = FAILURES[what]

    def program(kv: kvd.KVStore) -> Any:
        kv.init(["w", 7, "x7"], [np.zeros(2, np.float32)] * 3)
        caught = []
        for key in (8, "8") if what in MISSING else (7, "7", np.int64(7)):
            with pytest.raises(kind) as error:
                fail(kv, key)
            caught.append((error.value.key, type(error.value.key), repr(error.value.key) in str(error.value)))
            assert ("'" in str(error.value).split(":")[0]) == isinstance(key, str) or what == "push in a list"
        return caught

    if store_type == "local":
        with kvd.create("local") as kv:
            found = program(kv)
    else:
        with LocalCluster(1, 1) as cluster:
            (found,) = cluster.run(program)
    number = 8 if what in MISSING else 7
    wanted = [(number, int, True), (str(number), str, True)]
    assert found == wanted if what in MISSING else found == [*wanted, (number, int, True)]


@pytest.mark.parametrize("store_type", ["local", "dist_sync"])
def test_what_the_store_does_not_allow(store_type: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.set_optimizer(kvd.optimizer.SGD(0.1))
        kv.init(5, np.zeros(2, np.int32))
        with pytest.raises(NotAllowed) as error:
            kv.push(5, np.ones(2, np.int32)).wait()
        return error.value.key

    assert set(run(store_type, program)) == {5}
