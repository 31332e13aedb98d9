"""The scheduler's own restart: what it takes from its record, and from nodes if the record is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.core.machine import CallerPeer, PeerLost
from kvd.core.scheduler.barriers.barriers import Barriers, Entrant, Verdict
from kvd.core.scheduler.machine import SchedulerMachine
from kvd.core.scheduler.membership.roster import Seat
from kvd.core.scheduler.membership.views import MOST_TOLD
from kvd.core.scheduler.runs.record import MOST_GENERATION, Record
from kvd.protocol.messages import (
    BIGGEST,
    ErrorCode,
    Heartbeat,
    HeartbeatAck,
    Join,
    MemberState,
    NotYet,
    NotYetReason,
    Refused,
    RunPhase,
    View,
    Welcome,
)
from tests.core.fakes import OPEN, member, said, server_id, worker_id
from tests.core.scheduler_harness import BARE, Harness, answer


def test_a_restarted_scheduler_knows_its_nodes_from_its_record() -> None:
    harness = Harness()
    harness.join("server", server_id(0), "s", settings=OPEN)
    harness.join("worker", worker_id(0), "worker-0", settings=OPEN._replace(mode="async", merge="mean"))
    harness.worker(1)
    harness.kill(worker_id(1))
    SchedulerMachine.check_record(harness.disk)
    again = Harness(saved=harness.disk, generation=2)
    assert again.machine.epoch == (2, 1)
    assert again.states() == {"server 0": "active", "worker 0": "active", "worker 1": "dead"}
    assert again.machine.explain(0.0)["settings"]["merge"] == "mean"  # type: ignore[index]
    effects = again.say(worker_id(0), Heartbeat("worker", 0), view=harness.machine.epoch)
    assert [type(message) for message in said(effects)] == [HeartbeatAck], "the record may be too old"
    effects = again.say(server_id(0), Heartbeat("server", 0), view=harness.machine.epoch)
    assert [type(message) for message in said(effects)] == [HeartbeatAck, View]
    effects = again.say(worker_id(0), Heartbeat("worker", 0), view=harness.machine.epoch)
    assert [type(message) for message in said(effects)] == [HeartbeatAck, View]
    assert answer(again.worker(1, life=1), Welcome) == Welcome(1, 1, MemberState.DEAD)


def test_a_server_that_dies_while_the_record_is_checked_counts_as_dead_afterwards() -> None:
    """Another server may know a later view, in which the dead one has another part."""
    settings = OPEN._replace(num_servers=2)
    harness = Harness(BARE._replace(num_servers=2))
    for rank in (0, 1):
        harness.join("server", server_id(rank), f"s{rank}", settings=settings)
    again = Harness(BARE._replace(num_servers=2), saved=harness.disk, generation=2)
    again.say(server_id(0), Heartbeat("server", 0), view=harness.machine.epoch)
    again.step(PeerLost(server_id(0), "killed"))
    assert (again.states()["server 0"], again.machine.epoch) == ("active", (2, 1))
    for again.now in (2.0, 4.9, 5.1):
        again.say(server_id(1), Heartbeat("server", 1), view=harness.machine.epoch)
    assert again.states() == {"server 0": "dead", "server 1": "active"}


def test_seats_in_the_record_beyond_the_cluster_s_new_size_are_dropped() -> None:
    harness = Harness()
    harness.worker(0)
    harness.worker(1)
    again = Harness(BARE._replace(num_workers=1, mode="sync", merge="sum"), saved=harness.disk, generation=2)
    assert again.states() == {"worker 0": "active"}


def test_a_scheduler_without_a_record_continues_after_the_epochs_that_nodes_know() -> None:
    harness = Harness()
    effects = harness.say(51, Join(1, "worker", "a", "", "h", 1, 1, OPEN), view=(4, 7))
    assert answer(effects, Welcome).rank == 1
    assert harness.machine.epoch > (4, 7)


@pytest.mark.parametrize("generation", [BIGGEST, BIGGEST - 1, MOST_TOLD["server"] + 1])
def test_a_node_that_knows_a_view_that_cannot_be_is_not_let_in(generation: int) -> None:
    """A scheduler that counted on from there would come to an end of the numbers, and no restart would help."""
    harness = Harness()
    effects = harness.say(51, Join(1, "worker", "a", "", "h", 1, 1, OPEN), view=(generation, 0))
    assert answer(effects, NotYet).reason is NotYetReason.BUSY
    effects = harness.say(52, Join(1, "server", "s", "", "h", 1, 0, OPEN), view=(generation, 0))
    assert answer(effects, Refused).error is ErrorCode.PROTOCOL_ERROR
    assert harness.states() == {}
    assert harness.machine.epoch.generation == 1


def test_an_observer_is_believed_no_view() -> None:
    harness = Harness()
    for generation in (7, MOST_TOLD["worker"], BIGGEST - 1):
        effects = harness.say(51, Join(1, "observer", "", "", "h", 1, -1, OPEN), view=(generation, 0))
        assert answer(effects, Welcome).rank == -1
    assert harness.machine.epoch.generation == 1


def test_a_worker_that_is_not_seated_is_believed_no_view() -> None:
    harness = Harness()
    harness.worker(0)
    harness.worker(1)
    effects = harness.say(51, Join(1, "worker", "third", "", "h", 1, -1, OPEN), view=(9, 0))
    assert answer(effects, Refused).error is ErrorCode.NOT_ALLOWED
    assert harness.machine.epoch.generation == 1


def test_what_workers_are_believed_leaves_room_for_what_servers_tell_then() -> None:
    """A worker lies, the scheduler restarts, and loses its record: the servers know a later view than a worker may."""
    lied = Harness()
    lied.say(51, Join(1, "worker", "a", "", "h", 1, 1, OPEN), view=(MOST_TOLD["worker"], BIGGEST))
    known = lied.machine.epoch
    assert known == (MOST_TOLD["worker"] + 1, known.change)
    again = Harness()
    again.say(51, Join(1, "worker", "a", "", "h", 1, 1, OPEN), view=known)
    again.say(60, Join(1, "server", "s", "", "h", 2, 0, OPEN), view=known)
    assert again.machine.epoch > known
    assert answer(again.say(51, Join(1, "worker", "a", "", "h", 1, 1, OPEN), view=known), Welcome).rank == 1


def test_a_record_of_an_earlier_kvd_is_read() -> None:
    harness = Harness()
    harness.worker(0)
    record = json.loads(json.dumps(harness.disk))
    (seat,) = record["seats"]
    del seat[4:]  # the name of the host, and where it came in
    del seat[0][8]  # the key
    assert list(Harness(saved=record, generation=2).states()) == ["worker 0"]


@pytest.mark.parametrize(
    "damage",
    [
        {"generation": 0},
        {"generation": "x"},
        {"settings": [1]},
        {"seats": [[["worker"], "h", 1, ""]]},
        {"seats": [["worker"]]},
        {"seats": 5},
        {"generation": True},
        {"generation": 1.0},
        {"generation": MOST_GENERATION + 1},
        {"epoch": -1},
        {"settings": list(BARE._replace(num_workers=1 << 61))},
        {"settings": list(BARE._replace(merge="most"))},
        {"phase": "gone"},
        {"replaced": [[1, "worker 0"], [1, "worker 1"]]},
        {"replaced": [[worker_id(0), "worker 0"]]},
        {"barriers": [["b", 0, [[0, 1, 1, [1]], [0, 2, 1, [1]]]]]},
        {"barriers": [["b", 0, [[0, 1, 1, []]]]]},
    ],
)
def test_a_damaged_record_is_noticed(damage: dict[str, Any]) -> None:
    harness = Harness()
    harness.worker(0)
    with pytest.raises((ValueError, KeyError, TypeError)):
        SchedulerMachine.check_record({**harness.disk, **damage})
    with pytest.raises(KeyError):
        SchedulerMachine.check_record({})


def test_a_record_comes_back_from_json_as_it_was() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, Entrant(0, 100, CallerPeer(b"peer"), 1))
    barriers.settle([0, 1], [1])
    seats = [
        Seat(member("server", 0), "host", 7, CallerPeer(b"peer")),
        Seat(member("worker", 0, "done"), "host", 8, None, MemberState.DEAD),
    ]
    written = Record(3, 9, BARE, seats, [(41, "worker 0")], barriers, RunPhase.CLOSING).to_plain()
    read = Record.from_plain(json.loads(json.dumps(written)))
    assert (read.generation, read.epoch, read.settings, read.replaced) == (3, 9, BARE, [(41, "worker 0")])
    assert [(seat.member, seat.host, seat.pid, seat.peer, seat.predecessor) for seat in read.seats] == [
        (seats[0].member, "host", 7, None, None),
        (seats[1].member, "host", 8, None, MemberState.DEAD),
    ]
    assert all(isinstance(seat.member.state, MemberState) for seat in read.seats)
    assert read.phase is RunPhase.CLOSING
    assert read.barriers.enter("b", 0, Entrant(0, 100, CallerPeer(b"peer"), 1)) == Verdict((1,))
