"""Where slices live: by name, the same in every version of kvd."""

from __future__ import annotations

from collections import Counter

import pytest

from kvd.core.membership import EMPTY_SETTINGS, ViewState, name_of
from kvd.core.placement import initial_shards, shard_of
from kvd.protocol.messages import Member, View, ViewNumber

# crc32 of the name in UTF-8, as any other implementation of it says.
GOLDEN = {"w": 0x1C630B12, "weight": 0x07CD5541, "layer1.bias": 0x62843024, "0": 0xF4DBDF21, "ключ": 0x0CAF961A}


@pytest.mark.parametrize(("key", "crc"), GOLDEN.items())
def test_the_shard_of_a_slice_is_its_checksum_plus_its_index(key: str, crc: int) -> None:
    assert shard_of(key, 0, 64) == crc % 64
    assert shard_of(key, 5, 64) == (crc + 5) % 64
    assert shard_of(key, 3, 1) == 0


def test_shards_go_round_the_servers() -> None:
    assert initial_shards(5, 2) == (0, 1, 0, 1, 0)
    assert initial_shards(2, 3) == (0, 1)


def test_keys_and_slices_are_spread_evenly() -> None:
    shards = initial_shards(64, 4)
    servers = Counter(shards[shard_of(f"layer{number}.weight", 0, 64)] for number in range(4000))
    assert max(servers.values()) < 1.15 * 1000
    of_one_key = Counter(shards[shard_of("big", index, 64)] for index in range(256))
    assert set(of_one_key.values()) == {64}


SETTINGS = EMPTY_SETTINGS._replace(num_workers=4, num_servers=2, num_shards=4)


def member(role: str, rank: int, state: str, incarnation: int = 0) -> Member:
    return Member(role, rank, f"{role}{rank}", incarnation or 100 + rank, "", state, "", 0.0)


def viewed(*members: Member) -> ViewState:
    view = ViewState()
    assert view.update(ViewNumber(1, 1), View(SETTINGS, members, (0, 1, 0, 1)))
    return view


@pytest.mark.parametrize(
    ("number", "taken"),
    [((1, 5), False), ((1, 4), False), ((0, 9), False), ((1, 6), True), ((2, 0), True)],
)
def test_only_a_newer_view_is_taken(number: tuple[int, int], taken: bool) -> None:
    view = ViewState()
    view.update(ViewNumber(1, 5), View(SETTINGS, (member("worker", 0, "active"),), (0,)))
    assert view.update(ViewNumber(*number), View(SETTINGS, (), (1,))) is taken
    assert view.number == (number if taken else (1, 5))
    assert view.shards == ((1,) if taken else (0,))
    assert (view.worker(0) is None) is taken
    assert (view.by_incarnation(100) is None) is taken


def test_who_is_waited_for() -> None:
    states = viewed(member("worker", 0, "active"), member("worker", 1, "done"), member("worker", 2, "dead"))
    assert states.required_ranks() == [0, 2, 3]  # 3 has not come yet
    assert list(states.dead_workers()) == [2]
    assert viewed(member("worker", 3, "left"), member("server", 0, "left")).required_ranks() == [0, 1, 2]


def test_servers_that_are_missing() -> None:
    both = viewed(member("server", 1, "active"), member("server", 0, "active"))
    assert [server.rank for server in both.servers()] == [0, 1]
    assert both.all_servers_active()
    assert both.missing_servers() == []
    one_dead = viewed(member("server", 1, "dead"), member("server", 0, "active"))
    assert not one_dead.all_servers_active()
    assert one_dead.missing_servers() == [1]
    assert not viewed(member("server", 0, "active")).all_servers_active()
    assert not ViewState().all_servers_active()


def test_the_server_of_a_slice_comes_from_the_view() -> None:
    crc = GOLDEN["w"]
    assert [viewed().server_of("w", index) for index in range(4)] == [(crc + index) % 4 % 2 for index in range(4)]


def test_nodes_have_names() -> None:
    assert (name_of("server", 1), name_of("scheduler", 0)) == ("server 1", "scheduler")
