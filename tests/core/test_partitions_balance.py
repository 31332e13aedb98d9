"""The load is spread evenly: which partition is handed over next, and to whom; and that this comes to an end."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvd.core.scheduler.placement.partitions import Partitions
from kvd.protocol.messages import NO_VIEW
from tests.core.fakes import server_id
from tests.core.partitions_harness import Table, everything_done, everything_synced, pid

A, B, C = (server_id(rank) for rank in range(3))


def back(count: int = 2) -> Table:
    """Server 0 died, and came back; it is the backup of what server 1 leads, and is to lead partition 0 again."""
    table = Table(count)
    table.kill(0)
    table.replace(0)
    everything_synced(table)
    return table


def test_the_home_of_a_server_is_handed_to_it_before_others() -> None:
    table = Table(2)
    table.kill(1)
    table.replace(1)
    everything_synced(table)
    assert table.rows() == [(0, 1, -1, A), (0, 1, -1, B)]
    assert table.successors() == [-1, 1]
    assert table.hand_over(1)
    assert table.rows() == [(0, 1, -1, A), (1, 0, -1, B)]
    assert table.successors() == [-1, -1]


def test_people_are_told_of_it() -> None:
    table = Table(2)
    table.kill(0)
    table.replace(0)
    assert table.sync(0)
    table.change += 1
    entry = table.entry(1)
    assert entry.syncing is not None
    known = table.epoch
    assert table.partitions.synced(1, entry.leader.incarnation, entry.syncing.incarnation, known, table.epoch)
    assert table.follow() == ["server 0 is to lead, in place of server 1, partition 0"]
    assert table.partitions.report()[0]["successor"] == "server 0"


def test_who_is_no_backup_is_made_one_first() -> None:
    table = Table(3)
    table.kill(0)
    everything_synced(table)
    assert table.rows() == [(1, 2, -1, A), (1, 2, -1, B), (2, 1, -1, C)]
    table.replace(0)
    assert table.rows()[0] == (1, 2, 0, A), "its home, beside the backup that it has"
    assert table.successors() == [-1, -1, -1]
    assert table.sync(0)
    assert table.rows()[0] == (1, 0, -1, A)
    assert table.successors() == [0, -1, -1]
    assert table.hand_over(0)
    assert table.rows()[0] == (0, 1, -1, A)
    everything_done(table)
    assert table.rows() == [(0, 1, -1, A), (1, 2, -1, B), (2, 0, -1, C)]


def test_one_partition_is_handed_over_at_a_time() -> None:
    table = Table(4)
    for rank in (0, 1, 2):
        table.kill(rank)
        everything_synced(table)
    for rank in (0, 1, 2):
        table.replace(rank)
    for _ in range(100):
        assert sum(successor >= 0 for successor in table.successors()) <= 1
        rows = table.partitions.public()
        syncing = [partition for partition, row in enumerate(rows) if row.syncing >= 0]
        assert not syncing or max(table.successors()) < 0, "and nobody is synced meanwhile"
        if syncing:
            table.sync(syncing[0])
        elif max(table.successors()) >= 0:
            table.hand_over(table.successors().index(max(table.successors())))
        else:
            break
    assert [row[0] for row in table.rows()] == [0, 1, 2, 3]


def test_nobody_is_to_lead_before_both_know_that_it_is_the_backup() -> None:
    table = Table(2)
    table.kill(0)
    table.replace(0)
    assert table.sync(0)
    table.deaf.add(0)
    assert table.sync(1)
    table.settle()
    table.deaf.add(1)
    table.deaf.discard(0)
    assert table.successors() == [0, -1], "of partition 0 they have known for longer"
    table = Table(2)
    table.kill(0)
    table.replace(0)
    assert table.sync(1)
    table.deaf.add(0)
    assert table.sync(0)
    assert table.successors() == [-1, -1]
    table.deaf.clear()
    table.settle()
    assert table.successors() == [0, -1]


def test_only_what_the_table_says_can_be_handed_over() -> None:
    table = back()
    leader, successor = pid(1), pid(0, 1)
    for wrong in [
        (2, leader, successor, None),
        (1, leader, successor, None),
        (0, successor, successor, None),
        (0, leader, pid(0), None),
        (0, leader, leader, None),
        (0, leader, successor, NO_VIEW),
    ]:
        assert not table.say_handed_over(*wrong)
        assert table.rows()[0] == (1, 0, -1, A)
    assert table.say_handed_over(0, leader, successor)
    assert not table.say_handed_over(0, leader, successor), "it leads already"
    assert table.rows()[0] == (0, 1, -1, A)


def test_what_was_said_of_an_earlier_handover_does_not_count_for_the_next_one() -> None:
    table = back()
    early = table.epoch
    table.partitions.out_of_sync(0, server_id(0, 1), server_id(0, 1), table.epoch)
    table.change += 1
    table.follow()
    table.settle()
    everything_synced(table)
    assert table.successors() == [0, -1]
    assert not table.say_handed_over(0, pid(1), pid(0, 1), early)
    assert table.hand_over(0)


@pytest.mark.parametrize("dies", [0, 1])
def test_a_death_ends_a_handover(dies: int) -> None:
    table = back()
    table.kill(dies)
    assert table.successors() == [-1, -1]
    assert table.rows() == [(1 - dies, -1, -1, A), (1 - dies, -1, -1, B)]


def test_a_backup_that_is_out_of_sync_is_to_lead_no_more() -> None:
    table = back()
    table.change += 1
    assert table.partitions.out_of_sync(0, server_id(0, 1), server_id(1), table.epoch)
    table.follow()
    assert table.successors() == [-1, -1]


def test_after_a_restart_the_table_is_made_even() -> None:
    table = back()
    entries = [(entry._replace(successor=None), since) for entry, since in table.partitions.saved()]
    table.partitions = Partitions(2)
    table.partitions.restore(entries)
    table.settle()
    assert table.successors() == [0, -1]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_whatever_happens_the_load_is_even_in_the_end(count: int) -> None:
    """Servers die and come back in any order, in the middle of copies and handovers too."""
    for seed in range(60):
        draw = random.Random(seed * 7 + count)
        table = Table(count)
        lives = dict.fromkeys(range(count), 0)
        for _ in range(draw.randrange(2, 12)):
            rank = draw.randrange(count)
            living = [other for other, server in table.servers.items() if server.is_living]
            if table.servers[rank].is_living and len(living) > 1:
                table.kill(rank)
            elif not table.servers[rank].is_living:
                lives[rank] += 1
                table.replace(rank, lives[rank])
            for _ in range(draw.randrange(4)):
                _one_step(table, draw)
        for rank, server in list(table.servers.items()):
            if not server.is_living:
                lives[rank] += 1
                table.replace(rank, lives[rank])
        changes = everything_done(table)
        rows = table.partitions.public()
        led = Counter(row.leader for row in rows)
        text = f"seed {seed}: {table.rows()}"
        assert max(led.values()) - min(led[rank] for rank in range(count)) <= 1, text
        assert all(row.backup == (row.leader + 1) % count for row in rows), text
        assert changes <= 5 * count, f"{text}, after {changes} changes"


def _one_step(table: Table, draw: random.Random) -> None:
    rows = list(enumerate(table.partitions.public()))
    able = [(table.sync, partition) for partition, row in rows if row.syncing >= 0]
    able += [(table.hand_over, partition) for partition, row in rows if row.successor >= 0]
    if able:
        act, partition = draw.choice(able)
        act(partition)
