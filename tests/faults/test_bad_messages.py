"""Messages that make no sense where they arrive: they are refused, and the workers go on with the right sums."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.node.daemon.identity import token_of
from kvd.protocol.codec import decode
from kvd.protocol.messages import (
    NO_KEY,
    Attach,
    Departure,
    Done,
    ErrorCode,
    Join,
    Leave,
    NotYet,
    NotYetReason,
    Part,
    Pull,
    Push,
    PushBatch,
    Refused,
    Settings,
    Staged,
    Values,
    View,
)
from kvd.protocol.specs import KeySpec
from kvd.testing.cluster import LocalCluster, engine_of
from kvd.transport.base import joined, pieces_of
from kvd.transport.links.link import Link
from tests.core.fakes import init_of, lookup_of, publish_of
from tests.faults.bad_input_harness import RawPeer, addresses, busy, is_alive


def test_strangers_do_not_push(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    value = np.full(3000, 100, np.float32).tobytes()
    with busy(stores):
        for server in cluster.servers:
            with RawPeer(server.address) as raw:
                for clock in (1, 2, 10**6):
                    refused = raw.answers(Push(clock, (Part("w", 0, clock),), 0, 1, False), value)
                    assert refused.reason is NotYetReason.NOT_ATTACHED
                    assert refused.request == clock
                spec = KeySpec("float32", (1,), 1 << 20)
                assert raw.answers(publish_of(5, "w", spec)).reason is NotYetReason.NOT_ATTACHED
                assert raw.answers(init_of(6, "mine", spec, 0), bytes(4)).reason is NotYetReason.NOT_ATTACHED
                pull = raw.answers(Pull(7, (Part("w", 0, 3),)))
                assert isinstance(pull, NotYet) or pull.error is ErrorCode.KEY_NOT_FOUND
                assert raw.answers(Pull(8, (Part("no such key", 0, -1),))).error is ErrorCode.KEY_NOT_FOUND
                assert raw.answers(lookup_of(9, "no such key", False)).keys == (NO_KEY,)


def test_frames_that_are_recorded_and_sent_again_count_once(
    cluster: LocalCluster, stores: list[kvd.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes of a worker are sent again from another socket, some before the worker has its answer."""
    engine: Any = engine_of(stores[0])
    transport = engine.transport
    recorded: queue.Queue[tuple[int, bytes, bytes]] = queue.Queue()
    replayed: list[tuple[int, bytes, bytes]] = []
    send = transport.send
    by_incarnation = {member.incarnation: member.address for member in engine.machine.view.servers()}

    def record(peer: Any, header: bytes, payload: Any) -> bool:
        if peer in by_incarnation and isinstance(decode(header).message, Push | PushBatch):
            recorded.put((peer, header, bytes(joined(pieces_of(payload)))))
        return bool(send(peer, header, payload))

    monkeypatch.setattr(transport, "send", record)
    monkeypatch.setattr(Link, "send_prepared", lambda link, frame: False)  # they are sent as messages
    replayers = {incarnation: RawPeer(address) for incarnation, address in by_incarnation.items()}
    try:
        with busy(stores):
            for _ in range(40):  # the repetition holds nobody up
                peer, header, payload = recorded.get(timeout=5)
                replayed.append((peer, header, payload))
                replayers[peer].send(header, payload)
        for peer, header, payload in replayed:
            replayers[peer].send(header, payload)
        first = replayed[0][0]
        kinds = {type(replayers[first].answer()) for _ in range(5)}
        assert kinds & {Done, Staged, Values, Refused}
    finally:
        monkeypatch.undo()
        for raw in replayers.values():
            raw.close()
    with busy(stores):
        pass


def test_a_worker_that_sends_the_wrong_bytes_is_refused(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    engine: Any = engine_of(stores[0])
    me = engine.machine.incarnation
    home = engine.machine.view.partition_of("w", 0)
    clock = stores[0].clock("w")
    with RawPeer(engine.machine.view.servers()[home].address, engine.machine.run) as raw:
        for nbytes in (0, 1, 11_999, 12_001, 100_000):
            push = Push(1 << 40, (Part("w", 0, clock + 1),), 0, 1, False)
            refused = raw.answers(push, bytes(nbytes), sender=me)
            assert refused.error is ErrorCode.PROTOCOL_ERROR
            assert f"has 12000 bytes, this one has {nbytes}" in refused.text
        for wrong in (clock + 2, clock + 1000):
            refused = raw.answers(Push(1 << 41, (Part("w", 0, wrong),), 0, 1, False), bytes(12_000), sender=me)
            assert (refused.reason, refused.next_clock) == (NotYetReason.OUT_OF_TURN, clock + 1)
        refused = raw.answers(Push(1 << 42, (Part("w", 7, clock + 1),), 0, 1, False), bytes(12_000), sender=me)
        assert refused.error is ErrorCode.KEY_NOT_FOUND
    with busy(stores):
        pass


def test_a_pull_that_names_a_slice_often_is_refused(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    engine: Any = engine_of(stores[0])
    home = engine.machine.view.partition_of("w", 0)
    with busy(stores), RawPeer(engine.machine.view.servers()[home].address, engine.machine.run) as raw:
        refused = raw.answers(Pull(5, (Part("w", 0, -1),) * 1024))
        assert isinstance(refused, Refused)
        assert refused.request == 5
        assert "names the same slice twice" in refused.text


def test_a_message_to_the_wrong_role(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    scheduler, server = addresses(cluster)[:2]
    with busy(stores):
        with RawPeer(scheduler) as raw:
            refused = raw.answers(Push(3, (Part("w", 0, 1),), 0, 1, False), bytes(12_000))
            assert (refused.error, refused.request) == (ErrorCode.PROTOCOL_ERROR, 3)
            assert "the scheduler takes no Push" in refused.text
            assert raw.answers(Attach(4, 0)).error is ErrorCode.PROTOCOL_ERROR
        with RawPeer(server) as raw:
            settings = Settings("", "", -1, 0, 0, 0, 0, 0, 0)
            join = Join(3, "worker", "me", "", "host", 1, -1, settings)
            refused = raw.answers(join)
            assert (refused.error, refused.request) == (ErrorCode.PROTOCOL_ERROR, 3)
            assert "a server takes no Join" in refused.text
            assert raw.answers(Leave(4, Departure.LEFT)).error is ErrorCode.PROTOCOL_ERROR
            raw.say(View(settings, (), ()))  # only the scheduler may announce a view
            raw.say(Refused(0, ErrorCode.REPLACED, "go away"))
        assert is_alive(server)


def test_an_invalid_join_is_refused(cluster: LocalCluster, stores: list[kvd.KVStore]) -> None:
    settings = Settings("", "", -1, 0, 0, 0, 0, 0, 0)
    join = Join(1, "worker", "me", "", "host", 1, -1, settings, job="default")
    with busy(stores), RawPeer(cluster.scheduler.address) as raw:
        for bad, error in (
            (replace(join, role="pirate"), ErrorCode.CONFIG_ERROR),
            (replace(join, node_id=""), ErrorCode.CONFIG_ERROR),
            (replace(join, settings=settings._replace(mode="chaos"), job="new"), ErrorCode.CONFIG_ERROR),
            (replace(join, settings=settings._replace(num_workers=99)), ErrorCode.JOB_BUSY),
            (join, ErrorCode.JOB_BUSY),
        ):
            assert raw.answers(bad).error is error
        own = replace(join, token=token_of(str(cluster.settings["run"])), settings=settings._replace(num_workers=99))
        assert raw.answers(own).error is ErrorCode.CONFIG_ERROR
        assert isinstance(raw.answers(Leave(2, Departure.LEFT)), Done)  # it was never there
