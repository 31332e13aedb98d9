"""Which server leads which slice: by name, the same in every version of kvd; and what a node reads in a view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256

import pytest

from kvd.core.membership import EMPTY_SETTINGS, ViewState, name_of
from kvd.core.placement import initial_shards, shard_of
from kvd.protocol.messages import Epoch, Member, MemberState, Partition, View
from kvd_cli.bench_work import resnet50_sizes

# crc32 of the name in UTF-8, as any other implementation of it says.
GOLDEN = {"w": 0x1C630B12, "weight": 0x07CD5541, "layer1.bias": 0x62843024, "0": 0xF4DBDF21, "ключ": 0x0CAF961A}


@pytest.mark.parametrize(("key", "crc"), GOLDEN.items())
def test_the_shard_of_a_slice_is_its_checksum_plus_its_index(key: str, crc: int) -> None:
    assert shard_of(key, 0, 64) == crc % 64
    assert shard_of(key, 5, 64) == (crc + 5) % 64
    assert shard_of(key, 3, 1) == 0


def test_shards_are_given_to_the_servers_round_robin() -> None:
    assert initial_shards(5, 2) == (0, 1, 0, 1, 0)
    assert initial_shards(2, 3) == (0, 1)


def test_keys_and_slices_are_spread_evenly() -> None:
    shards = initial_shards(64, 4)
    servers = Counter(shards[shard_of(f"layer{number}.weight", 0, 64)] for number in range(4000))
    assert max(servers.values()) < 1.15 * 1000
    of_one_key = Counter(shards[shard_of("big", index, 64)] for index in range(256))
    assert set(of_one_key.values()) == {64}


# ── how evenly bytes spread: the bytes of the fullest server, divided by the mean ──

MIB = 1 << 20
RESNET50 = [4 * size for size in resnet50_sizes()]


def imbalance(keys: Iterable[tuple[str, int]], servers: int, slice_bytes: int, num_shards: int = 64) -> float:
    """The bytes of the fullest server, divided by the mean over all servers."""
    shards = initial_shards(num_shards, servers)
    led = [0] * servers
    for key, nbytes in keys:
        for index, begin in enumerate(range(0, nbytes, slice_bytes)):
            led[shards[shard_of(key, index, num_shards)]] += min(slice_bytes, nbytes - begin)
    return max(led) * servers / sum(led)


def namings(count: int) -> list[list[str]]:
    """Random names of 161 keys, the same in every run."""
    return [[sha256(f"{naming}/{number}".encode()).hexdigest() for number in range(161)] for naming in range(count)]


@pytest.mark.parametrize(("servers", "most"), [(2, 1.0), (4, 1.0), (8, 1.01)])
def test_many_small_keys_with_numbers_spread_evenly(servers: int, most: float) -> None:
    """Checksums of names that differ only in digits are spread evenly; a hash that mixes better would reach 1.1."""
    for pattern in ("1KiBx1000/{}", "{}", "layer{}.weight"):
        keys = [(pattern.format(number), 1024) for number in range(1000)]
        assert imbalance(keys, servers, 2 * MIB) <= most + 0.011


@pytest.mark.parametrize(("servers", "most"), [(2, 1.0), (3, 1.125), (4, 1.0), (8, 1.0)])
def test_one_large_key_spreads_evenly(servers: int, most: float) -> None:
    """Neither 32 slices nor 64 shards can be divided by 3: three servers cannot lead the same number."""
    for name in ("w", "big", "fc.weight", "64MiB/0"):
        assert imbalance([(name, 64 * MIB)], servers, 2 * MIB) <= most
        assert imbalance([(name, 64 * MIB)], servers, 2 * MIB, num_shards=840) <= min(most, 11 * 3 / 32)


@pytest.mark.parametrize(
    ("servers", "slice_bytes", "middle", "ninth_of_ten"),
    [
        (2, 2 * MIB, 1.06, 1.13),
        (4, 2 * MIB, 1.19, 1.35),
        (8, 2 * MIB, 1.45, 1.73),
        (2, MIB, 1.03, 1.09),
        (4, MIB // 2, 1.05, 1.09),
        (8, MIB // 4, 1.08, 1.12),
    ],
)
def test_a_real_model_spreads_as_evenly_as_its_slices_are_small(
    servers: int, slice_bytes: int, middle: float, ninth_of_ten: float
) -> None:
    """ResNet-50 has 49 slices of 2 MiB and many small ones: no rule that looks at one name at a time can spread them
    evenly over 8 servers. Slices of 2 MiB divided by the number of servers keep the imbalance below 1.15."""
    found = sorted(imbalance(zip(names, RESNET50, strict=True), servers, slice_bytes) for names in namings(100))
    assert found[50] <= middle
    assert found[90] <= ninth_of_ten


@pytest.mark.parametrize("servers", [2, 3, 4, 5, 6, 7, 8])
def test_a_number_of_shards_with_many_divisors_gives_each_server_the_same(servers: int) -> None:
    assert set(Counter(initial_shards(840, servers)).values()) == {840 // servers}


SETTINGS = EMPTY_SETTINGS._replace(num_workers=4, num_servers=2, num_shards=4)


def member(role: str, rank: int, state: str, incarnation: int = 0) -> Member:
    return Member(role, rank, f"{role}{rank}", incarnation or 100 + rank, "", MemberState(state), "", 0.0)


def viewed(*members: Member) -> ViewState:
    view = ViewState()
    assert view.update(Epoch(1, 1), View(SETTINGS, members, (0, 1, 0, 1)))
    return view


def with_partitions(states: ViewState, *partitions: Partition) -> None:
    """The next view has the same members."""
    epoch = Epoch(1, states.epoch.change + 1)
    assert states.update(epoch, View(SETTINGS, tuple(states.members.values()), states.shards, (), partitions))


@pytest.mark.parametrize(
    ("number", "taken"),
    [((1, 5), False), ((1, 4), False), ((0, 9), False), ((1, 6), True), ((2, 0), True)],
)
def test_only_a_newer_view_is_taken(number: tuple[int, int], taken: bool) -> None:
    view = ViewState()
    view.update(Epoch(1, 5), View(SETTINGS, (member("worker", 0, "active"),), (0,)))
    assert view.update(Epoch(*number), View(SETTINGS, (), (1,))) is taken
    assert view.epoch == (number if taken else (1, 5))
    assert view.shards == ((1,) if taken else (0,))
    assert (view.worker(0) is None) is taken
    assert (view.by_incarnation(100) is None) is taken


def test_rounds_wait_for_workers_that_have_not_left_them() -> None:
    states = viewed(member("worker", 0, "active"), member("worker", 1, "done"), member("worker", 2, "dead"))
    assert states.required_ranks() == [0, 2, 3]  # 3 has not joined yet
    assert list(states.dead_workers()) == [2]
    assert viewed(member("worker", 3, "left"), member("server", 0, "left")).required_ranks() == [0, 1, 2]


def test_servers_that_are_dead_or_have_not_joined_are_missing() -> None:
    both = viewed(member("server", 1, "active"), member("server", 0, "active"))
    assert [server.rank for server in both.servers()] == [0, 1]
    assert both.all_leaders_active()
    assert both.missing_servers() == []
    one_dead = viewed(member("server", 1, "dead"), member("server", 0, "active"))
    assert not one_dead.all_leaders_active()
    assert one_dead.missing_servers() == [1]
    assert not viewed(member("server", 0, "active")).all_leaders_active()
    assert not ViewState().all_leaders_active()


def test_only_the_leaders_of_partitions_are_missing() -> None:
    states = viewed(member("server", 1, "dead"), member("server", 0, "active"))
    assert states.leads() == {0: 0, 1: 1}
    with_partitions(states, Partition(0, 1, -1, 7), Partition(1, -1, -1, 8))
    assert states.missing_servers() == [1]
    with_partitions(states, Partition(0, -1, -1, 7), Partition(0, -1, -1, 8))
    assert states.leads() == {0: 0}
    assert states.missing_servers() == []
    assert states.all_leaders_active()


def test_a_partition_that_a_view_does_not_know_has_not_begun_anew() -> None:
    """No scheduler forgets one; somebody who speaks in its name may."""
    states = viewed(member("server", 0, "active"), member("server", 1, "active"))
    with_partitions(states, Partition(0, -1, -1, 7))
    assert states.has_begun_anew(0, 6)
    assert not states.has_begun_anew(1, 6)


def test_a_partition_begins_anew_with_another_lineage() -> None:
    states = viewed(member("server", 0, "active"), member("server", 1, "active"))
    first = states.lineage_of(0)
    assert not states.has_begun_anew(0, first)
    assert states.has_begun_anew(0, first + 1)
    assert not states.has_begun_anew(0, 0)  # nothing was known of it
    with_partitions(states, Partition(1, -1, -1, first), Partition(1, -1, -1, 8))
    assert not states.has_begun_anew(0, first)  # it moved
    with_partitions(states)
    assert states.leader_of(0) == 1  # a view that names no partitions changes none
    states.forget()
    assert states.leader_of(0) == 0  # in the views of another run


def test_the_server_of_a_slice_comes_from_the_view() -> None:
    crc = GOLDEN["w"]
    assert [viewed().partition_of("w", index) for index in range(4)] == [(crc + index) % 4 % 2 for index in range(4)]


def test_nodes_have_names() -> None:
    assert (name_of("server", 1), name_of("scheduler", 0)) == ("server 1", "scheduler")


def test_without_a_word_of_the_partitions_nothing_has_begun_anew() -> None:
    """An observer that hears of another scheduler, and has no view of it yet: a server was replaced meanwhile."""
    states = viewed(member("server", 0, "active"), member("server", 1, "active"))
    settings = SETTINGS._replace(replicas=2)
    partitions = (Partition(0, 1, -1, 7), Partition(1, 0, -1, 8))
    states.update(Epoch(1, 2), View(settings, tuple(states.members.values()), states.shards, (), partitions))
    states.begin_with(1)
    states.begin_with(2)
    assert states.partitions == ()
    assert not states.has_begun_anew(0, 7)
