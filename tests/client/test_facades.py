"""What the two façades share: the properties of a store, and its life."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

import kvd
from kvd.client.calls import exits
from kvd.client.calls.backend import StoreFacts
from kvd.client.calls.handle import Handle
from kvd.client.facades.life import StoreLife
from kvd.client.facades.open import open_backend
from kvd.client.facades.properties import StoreProperties
from kvd.errors import KeyNotFound

FACTS = StoreFacts("dist_sync", 2, 1, 4, 3, "mean", True, True, True, 9.0)


class Closing:
    """Remembers how it was closed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_close(self, barrier: bool) -> Handle:
        self.calls.append(f"begin {barrier}")
        return Handle.of(None)

    def end_close(self, leaving: Handle) -> None:
        assert leaving.done()
        self.calls.append("end")

    def abandon(self, *, failed: bool) -> None:
        self.calls.append(f"abandon {failed}")

    def withdraw(self) -> None:
        self.calls.append("withdraw")


def life_of(closing: Closing, *, distributed: bool) -> StoreLife:
    local = open_backend("local", {})
    facts = FACTS._replace(distributed=distributed)
    return StoreLife(replace(local, facts=facts, closing=closing))


def test_the_properties_are_those_of_the_facts() -> None:
    store = StoreProperties(FACTS)
    names = {name for name, value in inspect.getmembers(StoreProperties) if isinstance(value, property)}
    inside = {"distributed", "versioned", "round_timeout_s", "viewed_nbytes", "taking_part"}
    assert names == set(StoreFacts._fields) - inside | {"ranks"}
    facts = {name: getattr(FACTS, name) for name in names - {"ranks"}} | {"ranks": tuple(range(FACTS.num_workers))}
    assert {name: getattr(store, name) for name in names} == facts
    for name in names:
        with pytest.raises(AttributeError):
            setattr(store, name, 0)


def test_the_number_of_workers_is_that_of_the_newest_round() -> None:
    store = StoreProperties(FACTS._replace(taking_part=lambda: (0, 2, 5)))
    assert (store.num_workers, store.ranks) == (3, (0, 2, 5))


def test_capabilities() -> None:
    answers = {name: kvd.KVStore.is_capable(name) for name in ("optimizer", "compression", "row_sparse", "bind")}
    assert answers == {"optimizer": True, "compression": True, "row_sparse": True, "bind": True}
    with pytest.raises(ValueError, match="no capability is called 'magic'; there are: optimizer, compression"):
        kvd.aio.KVStore.is_capable("magic")


@pytest.mark.parametrize("barrier", [True, False])
def test_the_end_of_a_store_is_claimed_once(barrier: bool) -> None:
    closing = Closing()
    life = life_of(closing, distributed=False)
    life.barrier_before_exit = barrier
    assert life.is_open
    assert life.claim_end()
    assert not life.is_open
    assert not life.claim_end()
    life.close()
    assert closing.calls == [f"begin {barrier}", "end"]


@pytest.mark.parametrize("failed", [True, False])
def test_a_store_that_is_abandoned_is_not_closed_again(failed: bool) -> None:
    closing = Closing()
    life = life_of(closing, distributed=False)
    life.abandon(failed=failed)
    assert not life.claim_end()
    assert closing.calls == [f"abandon {failed}"]


def test_only_stores_of_a_cluster_leave_when_the_process_ends() -> None:
    alone, worker = Closing(), Closing()
    kept = [life_of(alone, distributed=False), life_of(worker, distributed=True)]
    assert kept[0] not in exits._stores
    assert kept[1] in exits._stores
    kept[1].abandon(failed=False)
    assert kept[1] not in exits._stores


def test_stores_that_nobody_closed_all_begin_before_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "_stores", set())
    monkeypatch.setattr(exits, "_errors", set())
    closing = Closing()
    stores = [life_of(closing, distributed=True) for _ in range(2)]
    exits._leave(failed=False, barrier=True)
    assert closing.calls == ["begin True"] * 2 + ["end"] * 2
    assert not any(store.is_open for store in stores)
    exits._leave(failed=False, barrier=True)
    assert len(closing.calls) == 4


def test_the_first_error_at_the_end_of_the_process_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Closing):
        def end_close(self, leaving: Handle) -> None:
            super().end_close(leaving)
            raise KeyNotFound("no key is called 'w'", key="w")

    monkeypatch.setattr(exits, "_stores", set())
    monkeypatch.setattr(exits, "_errors", set())
    closing = Failing()
    kept = [life_of(closing, distributed=True) for _ in range(2)]
    with pytest.raises(KeyNotFound):
        exits._leave(failed=False, barrier=True)
    assert closing.calls == ["begin True"] * 2 + ["end"] * 2
    assert not any(store.is_open for store in kept)
