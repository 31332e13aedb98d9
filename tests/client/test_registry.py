"""Stores of others: registered in this process, as a class, or as an entry point."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client import registry
from kvd.errors import ConfigError, NotAllowed


class Echo(kvd.KVStoreBase):
    """The store of one worker: the sum over its devices."""

    def __init__(self, factor: float = 1.0, **others: Any) -> None:
        self.factor = factor
        self.others = others

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> Any:
        out[...] = value
        return out

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Any:
        total = self.factor * sum(value) if isinstance(value, list) else self.factor * value
        target = value if out is None else out
        target[...] = total
        return target

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False

    @property
    def type(self) -> str:
        return "echo"

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", {})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with entry points in the group `kvd.stores`."""
    module = types.ModuleType("echo_of_the_test")
    module.Echo, module.number = Echo, 3  # type: ignore[attr-defined]
    entries = [
        EntryPoint("Echo-Store", "echo_of_the_test:Echo", "kvd.stores"),
        EntryPoint("byteps", "echo_of_the_test:Echo", "kvd.stores"),
        EntryPoint("local", "echo_of_the_test:Echo", "kvd.stores"),
        EntryPoint("number", "echo_of_the_test:number", "kvd.stores"),
        EntryPoint("gone", "echo_of_the_test:gone", "kvd.stores"),
    ]
    monkeypatch.setitem(sys.modules, "echo_of_the_test", module)
    known = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **match: entries if match.get("group") == "kvd.stores" else known(**match),
    )
    return module


def test_a_registered_store_is_created_by_its_name() -> None:
    kvd.register_store("Echo", Echo)
    store = kvd.create("eCHO", factor=2.0, colour="red")
    assert isinstance(store, Echo)
    assert store.others == {"colour": "red"}
    out = np.zeros(2)
    assert store.pushpull("w", [np.ones(2), np.ones(2)], out=out) is out
    assert out.tolist() == [4, 4]


def test_a_function_may_be_the_factory() -> None:
    kvd.register_store("half", lambda **settings: Echo(0.5, **settings))
    assert kvd.create("half").factor == 0.5


def test_a_class_registers_itself_as_in_mxnet() -> None:
    @kvd.KVStoreBase.register
    class TestStore(Echo):
        pass

    assert isinstance(kvd.create("teststore"), TestStore)
    assert kvd.create("TestStore").is_capable(kvd.KVStoreBase.OPTIMIZER) is False


def test_kvds_own_store_is_one_too() -> None:
    with kvd.create("local") as kv:
        assert isinstance(kv, kvd.KVStoreBase)
        assert kv.is_capable(kvd.KVStoreBase.OPTIMIZER)


def test_what_a_store_does_not_have() -> None:
    store = Echo()
    calls: list[Callable[[], Any]] = [
        lambda: store.set_optimizer(None),
        lambda: store.save_optimizer_states("x"),
        lambda: store.load_optimizer_states("x"),
    ]
    for call in calls:
        with pytest.raises(NotAllowed, match="a store of type 'echo' has no optimizer"):
            call()
    with pytest.raises(TypeError, match="abstract"):
        kvd.KVStoreBase()  # type: ignore[abstract]


def test_a_name_of_mxnet_may_be_taken_but_none_of_kvd() -> None:
    kvd.register_store("byteps", Echo)
    assert isinstance(kvd.create("BytePS"), Echo)
    for name in ("local", "Dist_Sync", "dist"):
        with pytest.raises(ConfigError, match=f"{name!r} is a type of kvd's own"):
            kvd.register_store(name, Echo)


def test_a_name_belongs_to_the_first_factory() -> None:
    kvd.register_store("echo", Echo)
    kvd.register_store("Echo", Echo)  # as a module that is imported twice does
    with pytest.raises(ConfigError, match="another store is registered as 'ECHO'"):
        kvd.register_store("ECHO", lambda: Echo())


@pytest.mark.parametrize("name", ["", "x" * 101, 3, None, b"echo"], ids=repr)
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(ConfigError, match="the name of a store is a str"):
        kvd.register_store(name, Echo)


def test_what_is_no_factory() -> None:
    wrong: Any = Echo()
    with pytest.raises(ConfigError, match="a factory of stores is a class or a function"):
        kvd.register_store("echo", wrong)
    with pytest.raises(ConfigError, match="is not a class"):
        kvd.KVStoreBase.register(wrong)
    kvd.register_store("dict", dict)
    with pytest.raises(ConfigError, match="the factory of 'dict' gave a dict, which has no broadcast and no pushpull"):
        kvd.create("dict")


def test_the_errors_of_a_factory_are_its_own() -> None:
    def fails(**settings: Any) -> Any:
        raise RuntimeError("no such fabric")

    kvd.register_store("fails", fails)
    with pytest.raises(RuntimeError, match="no such fabric"):
        kvd.create("fails")


def test_entry_points(installed: types.ModuleType) -> None:
    assert isinstance(kvd.create("echo-store"), Echo)
    assert isinstance(kvd.create("byteps"), Echo)
    with kvd.create("local") as kv:
        assert isinstance(kv, kvd.KVStore)
    with pytest.raises(
        ConfigError, match=r"the store 'gone' \(echo_of_the_test:gone\) cannot be loaded: AttributeError"
    ):
        kvd.create("gone")
    with pytest.raises(ConfigError, match=r"the store 'number' .* is neither a class nor a function"):
        kvd.create("number")
    kvd.register_store("echo-store", lambda: Echo(7))
    assert kvd.create("Echo-Store").factor == 7


def test_an_unknown_name_is_answered_with_those_that_are_registered(installed: types.ModuleType) -> None:
    kvd.register_store("mine", Echo)
    with pytest.raises(
        ConfigError, match=r"there are: local.*; also: byteps, echo-store, gone, mine, number, local_update"
    ):
        kvd.create("unknown")


def test_an_event_loop_makes_no_registered_store() -> None:
    kvd.register_store("echo", Echo)

    async def program() -> None:
        with pytest.raises(ConfigError, match=r"make it with kvd\.create"):
            await kvd.aio.create("echo")
        assert isinstance(kvd.create("echo"), Echo)

    asyncio.run(program())
