"""Who leads what: the rules of the table of partitions, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core.scheduler.placement.partitions import Entry, Partitions, Server
from kvd.protocol.messages import NO_VIEW, Epoch, Partition
from tests.core.fakes import server_id
from tests.core.partitions_harness import Table, everything_done, everything_synced, pid

A, B, C, D = (server_id(rank) for rank in range(4))


def test_without_copies_there_is_no_table() -> None:
    partitions = Partitions(0)
    assert partitions.is_known
    partitions.begin({0: Server(A, True, True)}, Epoch(1, 1))
    assert partitions.public() == ()
    assert partitions.follow({0: Server(A, False, False)}, Epoch(1, 2)) == []
    assert not partitions.heard(A, Epoch(1, 2))
    assert not partitions.synced(0, A, B, Epoch(1, 2), Epoch(1, 3))
    assert partitions.report() == []


def test_at_the_beginning_each_server_leads_its_own_and_the_next_one_is_its_backup() -> None:
    assert Table(3).rows() == [(0, 1, -1, A), (1, 2, -1, B), (2, 0, -1, C)]
    assert Table(2).partitions.public()[0] == Partition(0, 1, -1, A)


def test_a_run_that_begins_without_some_servers_is_led_by_the_others() -> None:
    assert Table(3, dead=(0,)).rows() == [(1, 2, -1, B), (1, 2, -1, B), (2, 1, -1, C)]
    assert Table(2, dead=(0, 1)).rows() == [(0, -1, -1, A), (1, -1, -1, B)]
    assert Table(2, dead=(1,)).rows() == [(0, -1, -1, A), (0, -1, -1, A)]


Act = Callable[[Table], Any]
DEATHS: list[tuple[str, int, list[Act], list[tuple[int, int, int, int]]]] = [
    ("its leader dies", 2, [lambda t: t.kill(0)], [(1, -1, -1, A), (1, -1, -1, B)]),
    ("its leader is replaced", 2, [lambda t: t.replace(0)], [(1, -1, 0, A), (1, -1, 0, B)]),
    ("of three, one dies", 3, [lambda t: t.kill(0)], [(1, -1, 2, A), (1, 2, -1, B), (2, -1, 1, C)]),
    (
        "both die, the leader of all last",
        2,
        [lambda t: t.kill(0), lambda t: t.kill(1)],
        [(1, -1, -1, A), (1, -1, -1, B)],
    ),
    (
        "both die, and the one comes back that is behind",
        2,
        [lambda t: t.kill(0), lambda t: t.kill(1), lambda t: t.wake(0)],
        [(1, -1, -1, A), (1, -1, -1, B)],
    ),
    (
        "both die, and the one comes back that has everything",
        2,
        [lambda t: t.kill(0), lambda t: t.kill(1), lambda t: t.wake(1)],
        [(1, -1, -1, A), (1, -1, -1, B)],
    ),
    (
        "both die, and both come back",
        2,
        [lambda t: t.kill(0), lambda t: t.kill(1), lambda t: t.wake(1), lambda t: t.wake(0)],
        [(1, -1, 0, A), (1, -1, 0, B)],
    ),
    (
        "the last one that has everything is replaced: it is lost",
        2,
        [lambda t: t.kill(0), lambda t: t.replace(1)],
        [(1, -1, -1, server_id(1, 1)), (1, -1, -1, server_id(1, 1))],
    ),
    (
        "the last one dies and is replaced, while the other is back",
        2,
        [lambda t: t.kill(0), lambda t: t.kill(1), lambda t: t.wake(0), lambda t: t.replace(1)],
        [(1, -1, 0, server_id(1, 1)), (1, -1, 0, server_id(1, 1))],
    ),
    ("a paused leader is heard again", 2, [lambda t: t.kill(0), lambda t: t.wake(0)], [(1, -1, 0, A), (1, -1, 0, B)]),
    (
        "who is syncing dies",
        2,
        [lambda t: t.replace(0), lambda t: t.kill(0)],
        [(1, -1, -1, A), (1, -1, -1, B)],
    ),
    (
        "who is syncing is replaced: it starts over",
        2,
        [lambda t: t.replace(0), lambda t: t.replace(0, 2)],
        [(1, -1, 0, A), (1, -1, 0, B)],
    ),
    (
        "the leader dies while another is synced: that one is not promoted",
        2,
        [lambda t: t.replace(0), lambda t: t.kill(1)],
        [(1, -1, -1, A), (1, -1, -1, B)],
    ),
    (
        "the leader is replaced while another is synced: it is lost",
        2,
        [lambda t: t.replace(0), lambda t: t.replace(1)],
        [(1, -1, 0, server_id(1, 1)), (1, -1, 0, server_id(1, 1))],
    ),
    (
        "of four, two neighbours die one after the other",
        4,
        [lambda t: t.kill(0), everything_synced, lambda t: t.kill(1)],
        [(2, -1, 3, A), (2, -1, 3, B), (2, 3, -1, C), (3, -1, 2, D)],
    ),
    (
        "of four, two neighbours die before the first is made up for",
        4,
        [lambda t: t.kill(0), lambda t: t.kill(1)],
        [(1, -1, -1, A), (2, -1, 3, B), (2, 3, -1, C), (3, -1, 2, D)],
    ),
]


@pytest.mark.parametrize(("what", "count", "acts", "rows"), DEATHS, ids=[what for what, *_ in DEATHS])
def test_what_becomes_of_partitions(what: str, count: int, acts: list[Act], rows: Any) -> None:
    table = Table(count)
    for act in acts:
        act(table)
    assert table.rows() == rows, what


def test_a_server_that_comes_back_is_synced_and_then_leads_its_own_again() -> None:
    table = Table(2)
    table.kill(0)
    table.replace(0)
    assert table.sync(0)
    assert table.rows() == [(1, 0, -1, A), (1, -1, 0, B)]
    assert table.sync(1)
    assert table.rows() == [(1, 0, -1, A), (1, 0, -1, B)]
    assert table.successors() == [0, -1]
    assert table.hand_over(0)
    assert table.rows() == [(0, 1, -1, A), (1, 0, -1, B)]
    assert table.successors() == [-1, -1]
    table.kill(1)
    assert table.rows() == [(0, -1, -1, A), (0, -1, -1, B)]
    assert table.entry(0).leader == pid(0, 1)


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_once_all_are_back_and_synced_each_leader_has_the_next_one_as_its_backup(count: int) -> None:
    table = Table(count)
    for rank in range(count - 1):
        table.kill(rank)
        everything_synced(table)
    assert {row.leader for row in table.partitions.public()} == {count - 1}
    for rank in range(count - 1):
        table.replace(rank)
        everything_done(table)
    rows = table.partitions.public()
    assert [row.leader for row in rows] == list(range(count)), "each leads its own again"
    assert all(row.backup == (row.leader + 1) % count for row in rows)
    assert [row.lineage for row in rows] == [server_id(rank) for rank in range(count)], "nothing was lost"


def test_the_next_one_is_synced_beside_the_backup() -> None:
    table = Table(3)
    table.kill(0)
    everything_synced(table)
    assert table.rows() == [(1, 2, -1, A), (1, 2, -1, B), (2, 1, -1, C)]
    table.replace(0)
    assert table.rows() == [(1, 2, 0, A), (1, 2, -1, B), (2, 1, -1, C)]
    table.kill(1)
    assert table.rows()[0] == (2, -1, 0, A), "the backup leads, and not who was still syncing"


# ── saying that somebody is synced ──


def test_only_what_the_table_says_can_be_synced() -> None:
    table = Table(2)
    table.replace(0)
    leader, syncing = pid(1), pid(0, 1)
    for wrong in [
        (2, leader, syncing, None),
        (0, syncing, syncing, None),
        (0, leader, pid(0), None),
        (0, leader, leader, None),
        (0, leader, syncing, NO_VIEW),
    ]:
        assert not table.say_synced(*wrong)
        assert table.rows() == [(1, -1, 0, A), (1, -1, 0, B)]
    assert table.say_synced(0, leader, syncing)
    assert not table.say_synced(0, leader, syncing), "it is the backup already"
    assert table.rows()[0] == (1, 0, -1, A)


def test_a_copy_that_was_broken_off_does_not_count_for_the_next_one() -> None:
    """The leader has missed both views between: it takes the new copy for the old one, of which nothing is left."""
    table = Table(2)
    table.kill(0)
    table.wake(0)
    assert table.rows()[0] == (1, -1, 0, A)
    early = table.epoch
    table.deaf.add(1)
    table.kill(0)
    table.wake(0)
    assert table.rows()[0] == (1, -1, -1, A), "the leader does not know yet that there was none"
    assert not table.say_synced(0, pid(1), pid(0), early)
    table.deaf.clear()
    table.settle()
    assert table.rows()[0] == (1, -1, 0, A)
    assert not table.say_synced(0, pid(1), pid(0), early)
    assert table.sync(0)


def test_nobody_is_chosen_that_may_still_have_parts_of_an_earlier_copy() -> None:
    table = Table(2)
    table.deaf.add(0)
    table.kill(0)
    table.wake(0)
    assert table.rows()[0] == (1, -1, -1, A)
    table.deaf.clear()
    table.settle()
    assert table.rows()[0] == (1, -1, 0, A)


@pytest.mark.parametrize("sender", [0, 1])
def test_a_backup_that_is_out_of_sync_is_made_anew(sender: int) -> None:
    table = Table(2)
    table.deaf.add(1)
    table.change += 1
    said = (server_id(sender), table.epoch)
    assert not table.partitions.out_of_sync(0, server_id(1), 777, table.epoch), "somebody else says so"
    assert not table.partitions.out_of_sync(0, server_id(0), *said), "it leads"
    assert not table.partitions.out_of_sync(9, server_id(1), *said)
    assert table.partitions.out_of_sync(0, server_id(1), *said)
    table.follow()
    table.settle()
    assert table.rows() == [(0, -1, -1, A), (1, 0, -1, B)], "it may not know yet that it begins from nothing"
    table.deaf.clear()
    table.settle()
    assert table.rows() == [(0, -1, 1, A), (1, 0, -1, B)]
    table.change += 1
    assert table.partitions.out_of_sync(0, server_id(1), server_id(sender), table.epoch)
    assert table.partitions.public()[0].syncing == -1


# ── for people ──


def test_it_says_who_leads_what_by_name() -> None:
    table = Table(2)
    assert table.kill(0) == ["server 1 leads, in place of server 0, partition 0"]
    assert table.replace(0) == ["server 0 is made the backup of server 1 for partitions 0, 1"]
    assert table.partitions.report()[0] == {
        "partition": 0,
        "leader": "server 1",
        "backup": None,
        "syncing": "server 0",
        "successor": None,
    }
    table.kill(1)
    (lost, *_) = table.replace(1)
    assert lost == "server 1 starts over, without the contents of partitions 0, 1"


BROKEN = [
    ("two roles", Entry(pid(0), pid(0), None, A)),
    ("two roles", Entry(pid(0), pid(1), pid(1), A)),
    ("is not there", Entry(pid(0), pid(2), None, A)),
    ("is not there", Entry(pid(0), pid(1, 1), None, A)),
    ("is not there", Entry(pid(0), None, pid(2), A)),
    ("has no leader", Entry(pid(2), pid(1), None, A)),
    ("was replaced by", Entry(pid(0, 1), None, None, A)),
    ("no lineage", Entry(pid(0), None, None, 0)),
    ("cannot take over", Entry(pid(0), None, None, A, pid(1))),
    ("cannot take over", Entry(pid(0), pid(1), None, A, pid(0))),
]


@pytest.mark.parametrize(("text", "entry"), BROKEN)
def test_a_table_that_cannot_be_is_found(text: str, entry: Entry) -> None:
    partitions = Partitions(1)
    partitions.restore([(entry, NO_VIEW)])
    servers = {0: Server(A, True, True), 1: Server(B, True, True), 2: Server(C, False, False)}
    with pytest.raises(AssertionError, match=text):
        partitions.validate(servers)
