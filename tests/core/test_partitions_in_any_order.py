"""The table of partitions in any order of events: a leader always holds what is committed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvd.core.scheduler.placement import partitions as module
from kvd.core.scheduler.placement.partitions import Entry, Holder, Partitions, Server
from kvd.protocol.messages import NO_VIEW, Epoch
from tests.core.fakes import server_id
from tests.core.partitions_harness import Table

after_losses = module._without_the_gone
said_synced = Partitions.synced


class Model:
    """What the servers hold of each partition, as a number of records, while they do what the table's views say.

    A server learns of views perhaps late, and with gaps. A leader commits what all hold that it has to wait for; once
    it has copied everything, it waits for who is syncing as well. What was committed in the present lineage must be
    held by the leader that the newest view names, and by its backup.

    A leader that the view tells to hand over says so, and may go on all the same. One that is the backup when it learns
    that another server leads keeps what it holds if it has said so, and done nothing since; else it begins anew.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.table = Table(count)
        self.table.deaf = set(range(count))  # they learn of views here
        self.count = count
        self.lives = dict.fromkeys(range(count), 0)
        self.paused: set[int] = set()
        self.views: list[tuple[Epoch, tuple[Entry, ...]]] = []
        self.seen = {server_id(rank): NO_VIEW for rank in range(count)}
        self.held: list[dict[int, int]] = [{} for _ in range(count)]  # by partition: incarnation → its records
        self.copied: dict[tuple[int, int], Holder] = {}  # (partition, leader) → whom it has given everything
        self.committed: list[tuple[int, int]] = [(0, 0)] * count  # by partition: the lineage, and records committed
        self.mail: list[tuple[int, int, Holder, Epoch]] = []  # partition, leader, whom it has synced, its view
        self.fallen: list[tuple[int, int]] = []  # (partition, incarnation) that does not hold what the view says
        self.handed: dict[
            tuple[int, int], int
        ] = {}  # (partition, leader) → its records when it said that it hands over
        self.letters: list[tuple[int, int, Holder, Epoch]] = []  # that say so
        self.promotions = self.syncs = self.losses = self.handovers = 0
        self.announce()
        for partition, entry in enumerate(self.entries()):
            self.held[partition] = {
                holder.incarnation: 0 for holder in (entry.leader, entry.backup) if holder is not None
            }
            self.committed[partition] = (entry.lineage, 0)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(entry for entry, _ in self.table.partitions.saved())

    def announce(self) -> None:
        self.table.partitions.validate(self.table.servers)
        after = self.entries()
        if self.views:
            for old, new in zip(self.views[-1][1], after, strict=True):
                self.promotions += old.leader != new.leader and old.lineage == new.lineage
                self.losses += old.lineage != new.lineage
        self.views.append((self.table.epoch, after))

    def here(self) -> list[int]:
        """The ranks whose processes run and are not paused."""
        return [rank for rank, server in self.table.servers.items() if rank not in self.paused and self.alive(server)]

    def alive(self, server: Server) -> bool:
        return server.incarnation in self.seen

    def view_of(self, incarnation: int, partition: int) -> Entry | None:
        known = self.seen[incarnation]
        return next((entries[partition] for epoch, entries in self.views if epoch == known), None)

    # ── what may happen ──

    def learn(self) -> None:
        """A server takes the newest view, and does what it says; then the scheduler hears of that."""
        rank = self.random.choice(self.here() or [0])
        if rank not in self.here():
            return
        me = self.table.servers[rank].incarnation
        before = [self.view_of(me, partition) for partition in range(self.count)]
        self.seen[me], entries = self.views[-1]
        for partition, (old, new) in enumerate(zip(before, entries, strict=True)):
            self.obey(partition, me, old, new)
        if not self.table.servers[rank].is_living:
            self.table.servers[rank] = Server(me, True, True)
            self.table.change += 1
            self.table.partitions.heard(me, self.seen[me])
            self.table.follow()
            self.announce()
        elif self.table.partitions.heard(me, self.seen[me]):
            self.table.change += 1
            self.table.follow()
            self.announce()

    def obey(self, partition: int, me: int, old: Entry | None, new: Entry) -> None:
        """A server knows a new entry."""
        held = self.held[partition]
        roles = [holder.incarnation for holder in new[:3] if holder is not None]
        was_leader = old is not None and old.leader.incarnation == me
        if me not in roles:
            held.pop(me, None)
        elif was_leader and me != new.leader.incarnation and self.handed.pop((partition, me), -1) != held.get(me, 0):
            held.pop(me, None)
            self.fallen.append((partition, me))
        elif me == new.leader.incarnation:
            held.setdefault(me, 0)
            if old is not None and old.syncing != new.syncing:
                self.copied.pop((partition, me), None)

    def copy(self) -> None:
        """A leader gives everything to who is syncing, and from then on waits for it."""
        partition = self.random.randrange(self.count)
        for rank in self.here():
            me = self.table.servers[rank].incarnation
            entry = self.view_of(me, partition)
            if entry is None or entry.leader.incarnation != me or entry.syncing is None:
                continue
            if self.takes_from(entry.syncing, partition, me, as_syncing=True):
                self.held[partition][entry.syncing.incarnation] = self.held[partition][me]
                self.copied[partition, me] = entry.syncing

    def takes_from(self, holder: Holder, partition: int, leader: int, *, as_syncing: bool = False) -> bool:
        """Whether this server runs, and its view says that it takes records from that leader."""
        present = self.table.servers[holder.rank]
        if present.incarnation != holder.incarnation or holder.rank not in self.here():
            return False
        entry = self.view_of(holder.incarnation, partition)
        roles = (entry.syncing,) if entry is not None and as_syncing else entry[1:3] if entry is not None else ()
        return entry is not None and entry.leader.incarnation == leader and holder in roles

    def commit(self) -> None:
        """A leader makes a record, and commits it if all hold it that it has to wait for."""
        partition = self.random.randrange(self.count)
        for rank in self.here():
            me = self.table.servers[rank].incarnation
            entry = self.view_of(me, partition)
            if entry is None or entry.leader.incarnation != me:
                continue
            needed = [holder for holder in (entry.backup, self.copied.get((partition, me))) if holder is not None]
            held = self.held[partition]
            if all(self.takes_from(holder, partition, me) and holder.incarnation in held for holder in needed):
                held[me] += 1
                for holder in needed:
                    held[holder.incarnation] = held[me]
                lineage, most = self.committed[partition]
                newest = self.entries()[partition].lineage
                if entry.lineage == newest:
                    assert lineage == newest, "a lineage began without anyone to say so"
                    self.committed[partition] = (lineage, max(most, held[me]))
                    assert held[me] > most, f"partition {partition}: record {held[me]} is committed twice"

    def apply_alone(self) -> None:
        """A leader has closed a round that nobody holds: it is a record ahead, which is not committed."""
        for at in [at for at in self.handed if self.random.random() < 0.3]:
            del self.handed[at]

    def say_handed_over(self) -> None:
        """A leader that is to hand a partition over, and whose successor has all of it, says so."""
        for partition in range(self.count):
            for rank in self.here():
                me = self.table.servers[rank].incarnation
                entry = self.view_of(me, partition)
                if entry is None or entry.leader.incarnation != me or entry.successor is None:
                    continue
                held = self.held[partition]
                if held.get(entry.successor.incarnation) == held.get(me, 0):
                    self.handed[partition, me] = held.get(me, 0)
                    self.letters.append((partition, me, entry.successor, self.seen[me]))

    def deliver_letter(self) -> None:
        if not self.letters:
            return
        partition, leader, holder, known = self.letters.pop(self.random.randrange(len(self.letters)))
        self.letters = self.letters[-20:]
        self.table.change += 1
        if self.table.partitions.handed_over(partition, leader, holder.incarnation, known, self.table.epoch):
            self.handovers += 1
        self.table.follow()
        self.announce()

    def fall(self) -> None:
        """Who found that it is no backup says so."""
        for partition, me in self.fallen:
            self.table.change += 1
            self.table.partitions.out_of_sync(partition, me, me, self.table.epoch)
            self.table.follow()
            self.announce()
        self.fallen = []

    def say_synced(self) -> None:
        """A leader says that its copy is complete."""
        self.mail += [(at, me, holder, self.seen[me]) for (at, me), holder in self.copied.items() if me in self.seen]

    def deliver(self) -> None:
        """What leaders said reaches the scheduler, in any order, perhaps late or never."""
        if not self.mail:
            return
        partition, leader, holder, known = self.mail.pop(self.random.randrange(len(self.mail)))
        self.mail = self.mail[-20:]
        self.table.change += 1
        if self.table.partitions.synced(partition, leader, holder.incarnation, known, self.table.epoch):
            self.syncs += 1
        self.table.follow()
        self.announce()

    def fall_out(self) -> None:
        """A backup, or who is syncing, cannot hold a record: it drops everything, and says so."""
        partition = self.random.randrange(self.count)
        entry = self.entries()[partition]
        holder = entry.backup or entry.syncing
        if holder is None or holder.incarnation not in self.seen:
            return
        self.held[partition].pop(holder.incarnation, None)
        self.table.change += 1
        me = holder.incarnation
        assert self.table.partitions.out_of_sync(partition, me, me, self.table.epoch)
        self.table.follow()
        self.announce()

    def pause(self) -> None:
        rank = self.random.randrange(self.count)
        self.paused ^= {rank}

    def declare_dead(self) -> None:
        """A paused server is declared dead, or one that runs, by mistake."""
        rank = self.random.randrange(self.count)
        server = self.table.servers[rank]
        self.table.servers[rank] = Server(server.incarnation, False, False)
        self.table.change += 1
        self.table.follow()
        self.announce()

    def kill(self) -> None:
        """A process ends; what it held is gone. The scheduler finds out at once, or when it is replaced."""
        rank = self.random.randrange(self.count)
        server = self.table.servers[rank]
        self.seen.pop(server.incarnation, None)
        for held in self.held:
            held.pop(server.incarnation, None)
        self.copied = {at: holder for at, holder in self.copied.items() if at[1] != server.incarnation}
        self.paused.discard(rank)
        if self.random.random() < 0.7:
            self.declare_dead_rank(rank)

    def declare_dead_rank(self, rank: int) -> None:
        self.table.servers[rank] = Server(self.table.servers[rank].incarnation, False, False)
        self.table.change += 1
        self.table.follow()
        self.announce()

    def start(self) -> None:
        """A new process takes the rank of one that has ended."""
        ended = [rank for rank, server in self.table.servers.items() if not self.alive(server)]
        if not ended:
            return
        rank = self.random.choice(ended)
        self.lives[rank] += 1
        incarnation = server_id(rank, self.lives[rank])
        self.seen[incarnation] = NO_VIEW
        self.table.change += 1
        self.table.partitions.heard(incarnation, self.table.epoch)
        self.table.servers[rank] = Server(incarnation, True, True)
        self.table.follow()
        self.announce()

    # ── what must hold ──

    def check(self) -> None:
        for partition, entry in enumerate(self.entries()):
            lineage, most = self.committed[partition]
            if entry.lineage != lineage:
                self.committed[partition] = (entry.lineage, 0)
                continue
            for holder in (entry.leader, entry.backup):
                if holder is not None and (partition, holder.incarnation) in self.fallen:
                    continue
                if holder is not None and holder.incarnation in self.seen:
                    held = self.held[partition].get(holder.incarnation, 0)
                    assert held >= most, f"partition {partition}: {holder} holds {held} of {most} records: {entry}"

    def run(self, steps: int, *, calm: bool) -> None:
        """`calm`: faults are rare, so that the load becomes even between them."""
        acts = [self.learn] * 16 + [self.commit] * 8 + [self.copy] * 10 + [self.say_synced] * 3 + [self.deliver] * 6
        acts += [self.say_handed_over] * 4 + [self.deliver_letter] * 4 + [self.apply_alone, self.fall, self.fall]
        acts += [self.pause, self.fall_out, self.declare_dead, self.kill, self.start, self.start]
        acts += (acts[:-6] * 15) if calm else []
        for _ in range(steps):
            self.random.choice(acts)()
            self.check()


SEEDS = 40


def run_models(count: int, seeds: int) -> list[Model]:
    models = [Model(seed, count) for seed in range(seeds)]
    for model in models:
        model.run(800, calm=model.seed % 2 == 1)
    return models


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_leader_always_holds_what_is_committed(count: int) -> None:
    models = run_models(count, SEEDS)
    assert sum(model.promotions for model in models) > 50
    assert sum(model.syncs for model in models) > 50
    assert sum(model.handovers for model in models) > 5
    assert sum(most for model in models for _, most in model.committed) > 100


def promotes_who_is_syncing(entry: Entry, servers: Any) -> Entry:
    found = after_losses(entry, servers)
    syncing = entry.syncing
    if found.leader != entry.leader or syncing is None or servers[entry.leader.rank].is_living:
        return found
    return Entry(syncing, None, None, entry.lineage) if servers[syncing.rank].is_living else found


def keeps_a_backup_that_is_replaced(entry: Entry, servers: Any) -> Entry:
    found = after_losses(entry, servers)
    backup = entry.backup
    if found.leader != entry.leader or backup is None or not servers[backup.rank].is_living:
        return found
    return found._replace(backup=Holder(backup.rank, servers[backup.rank].incarnation))


def believes_what_is_out_of_date(
    self: Partitions, partition: int, leader: int, incarnation: int, known: Epoch, epoch: Epoch
) -> bool:
    return said_synced(self, partition, leader, incarnation, epoch, epoch)


MUTANTS: list[tuple[Any, str, Any]] = [
    (module, "_without_the_gone", promotes_who_is_syncing),
    (module, "_without_the_gone", keeps_a_backup_that_is_replaced),
    (Partitions, "synced", believes_what_is_out_of_date),
    (Partitions, "_both_know", lambda self, partition, chosen: True),
]


@pytest.mark.parametrize(("where", "name", "mutant"), MUTANTS)
def test_a_table_with_a_wrong_rule_is_found(where: Any, name: str, mutant: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(where, name, mutant)
    monkeypatch.setattr(Partitions, "validate", lambda self, servers: None)
    with pytest.raises(AssertionError, match=r"holds \d+ of \d+ records|committed twice"):
        run_models(3, 20 * SEEDS)
