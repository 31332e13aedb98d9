"""A state file with anything in it: the scheduler goes on from it and is understood, or refuses it by its name."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.core.machine import (
    CallerPeer,
    Effect,
    InRun,
    PeerLost,
    Persist,
    Persisted,
    PersistFailed,
    Received,
    Send,
    Tick,
)
from kvd.core.scheduler.machine import SchedulerSettings
from kvd.core.scheduler.router import SchedulerRouter
from kvd.errors import ConfigError
from kvd.node.daemon.scheduler_role import continued_machine
from kvd.node.storage.state_file import STATE_FILE, SchedulerStateFile
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import BIGGEST, NO_VIEW, Departure, Enter, Heartbeat, Join, Leave
from tests.core.fakes import OPEN, cluster, server_id, worker_id

SETTINGS = SchedulerSettings(cluster(2, 1, mode="", merge=""), 1.0, 10.0, 10.0, break_on_loss=True)


class Scheduler:
    """A router whose records are saved at once; each message that it sends is encoded and decoded."""

    def __init__(self, router: SchedulerRouter) -> None:
        self.router = router
        self.now = 0.0
        self.disk: Any = None
        self.sent = 0

    def step(self, event: Any) -> None:
        for effect in self.router.step(event, self.now):
            self._carry_out(effect)
        self.router.validate()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Persist):
            self.disk = json.loads(json.dumps(effect.record))
            self.step(Persisted(effect.token))
        elif isinstance(effect, InRun):
            for own in effect.effects:
                if isinstance(own, Send):
                    header = encode(own.message, 1, effect.epoch, effect.run)
                    assert decode(header) == (1, effect.epoch, own.message, effect.run)
                    self.sent += 1

    def say(self, who: int, message: Any, run: int = 0) -> None:
        self.step(Received(CallerPeer(b"%d" % who), who, NO_VIEW, message, run=run))

    def join(self, role: str, who: int, rank: int) -> None:
        self.say(who, Join(1, role, f"{role}-{rank}", "tcp://h:1", "host", who, rank, OPEN, job="job", token="t"))


def used() -> Any:
    """A record in which everything occurs."""
    scheduler = Scheduler(SchedulerRouter(SETTINGS, 1, 3, 0.0))
    scheduler.join("server", server_id(0), 0)
    for rank in range(2):
        scheduler.join("worker", worker_id(rank), rank)
    (run,) = [slot.run for slot in scheduler.router.runs]
    scheduler.join("worker", worker_id(1, 1), 1)
    scheduler.say(worker_id(1, 1), Enter(4, "b", 0), run)
    scheduler.say(worker_id(0), Leave(5, Departure.DONE), run)
    scheduler.now = 9.0
    scheduler.say(server_id(0), Heartbeat("server", 0))
    scheduler.say(worker_id(1, 1), Heartbeat("worker", 1), run)
    scheduler.now = 10.5
    scheduler.step(Tick())
    scheduler.step(PeerLost(server_id(0), "killed"))
    scheduler.join("server", server_id(0, 1), 0)
    record = scheduler.disk
    assert {seat[0][5] for seat in record["runs"][0]["record"]["seats"]} == {"active", "dead", "gone"}
    assert record["runs"][0]["record"]["replaced"]
    assert record["runs"][0]["record"]["barriers"]
    return record


RECORD = used()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


PLACES = list(places(RECORD))


def at(record: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        record = record[key]
    return record


numbers = st.sampled_from([-1, 0, 1, 2, 3, 199, 200, 201, 1 << 31, 1 << 61, BIGGEST - 1, BIGGEST, BIGGEST + 1, 1 << 64])
scalars = st.one_of(
    numbers,
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(),
    st.sampled_from([1.0, 1e308, "", "worker", "server", "active", "gone", "running", "failed", "sync"]),
    st.text(st.characters(), max_size=12),  # half characters included
    st.just("x" * 5000),
)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """The record, changed in one to three places."""
    record = json.loads(json.dumps(RECORD))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(PLACES[1:]))
        with suppress(LookupError, TypeError):  # an earlier change took the place away
            within, key = at(record, path[:-1]), path[-1]
            how = draw(st.sampled_from(["replace", "remove", "double", "other"]))
            if how == "replace":
                within[key] = draw(junk)
            elif how == "remove":
                del within[key]
            elif how == "double":
                within[key] = within[key] + within[key]
            else:
                within[key] = json.loads(json.dumps(at(record, draw(st.sampled_from(PLACES)))))
    return record


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as name:
        yield Path(name)


def start(folder: Path, content: bytes) -> Scheduler | None:
    """A scheduler that finds this content; None: it refuses to start."""
    path = folder / STATE_FILE
    path.write_bytes(content)

    async def begin() -> SchedulerRouter:
        return continued_machine(SETTINGS, SchedulerStateFile(folder))

    try:
        return Scheduler(asyncio.run(begin()))
    except ConfigError as error:
        refusal = error
    assert refusal.setting == "state_dir"
    assert str(path) in str(refusal)
    assert "move it away" in str(refusal)
    assert len(str(refusal)) < 1000
    return None


def use(scheduler: Scheduler) -> None:
    """All that follows is valid, too: messages, records, and a scheduler after this one."""
    scheduler.now = scheduler.router.next_deadline() or 0.0
    scheduler.step(Tick())
    scheduler.join("observer", 900, -1)
    scheduler.join("server", server_id(0, 2), 0)
    for rank in range(2):
        scheduler.join("worker", worker_id(rank, 3), rank)
    for slot in scheduler.router.runs:
        for rank in range(2):
            scheduler.say(worker_id(rank, 3), Enter(4, "b", 0), slot.run)
            scheduler.say(worker_id(rank, 3), Heartbeat("worker", rank), slot.run)
            scheduler.say(worker_id(rank, 1), Leave(6, Departure.WITHDRAWN), slot.run)
    for _ in range(4):
        scheduler.now = scheduler.router.next_deadline() or scheduler.now
        scheduler.step(Tick())
    scheduler.step(PersistFailed("no room"))
    assert scheduler.sent
    assert scheduler.router.explain(scheduler.now)


def test_the_record_is_one(folder: Path) -> None:
    scheduler = start(folder, json.dumps(RECORD).encode())
    assert scheduler is not None
    use(scheduler)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged())
def test_a_damaged_record_is_refused_or_does_no_harm(folder: Path, record: Any) -> None:
    scheduler = start(folder, json.dumps(record).encode())
    if scheduler is not None:
        use(scheduler)
        assert start(folder, json.dumps(scheduler.disk).encode()) is not None, "its successor refuses its record"


@pytest.mark.parametrize("path", PLACES[1:], ids=lambda path: ".".join(map(str, path)))
def test_a_giant_number_anywhere_is_refused_or_does_no_harm(folder: Path, path: tuple[Any, ...]) -> None:
    for number in (-1, 1 << 61, BIGGEST, 1 << 62, 1.5, True):
        record = json.loads(json.dumps(RECORD))
        at(record, path[:-1])[path[-1]] = number
        scheduler = start(folder, json.dumps(record).encode())
        if scheduler is not None:
            use(scheduler)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"7",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"generation": 1',
        b'{"generation": ' + b"9" * 9999 + b"}",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_that_is_no_record_is_refused(folder: Path, content: bytes) -> None:
    assert start(folder, content) is None


def test_a_pipe_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / STATE_FILE)
    with pytest.raises(ConfigError, match="is no file"):
        SchedulerStateFile(tmp_path).prepare()
