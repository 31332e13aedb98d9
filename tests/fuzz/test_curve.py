"""The hand-made client of CurveZMQ: real daemons let it in and answer it, and nobody else who speaks like it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvd.node.keys.keyfiles import NodeKey, new_cluster_key, new_node_key, public_part, write_key
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import NO_VIEW, StatusQuery, StatusReport
from kvd.testing.cluster import LocalCluster
from tests.fuzz.curve import SEALED_COMMAND, SEALED_MORE, CurveDealer, CurveKeys, RefusedError, keys_of, strange_keys
from tests.fuzz.zmtp import frame, metadata

QUERY = encode(StatusQuery(7), 0x1234, NO_VIEW)


@pytest.fixture(scope="module")
def cluster_key() -> NodeKey:
    return new_cluster_key()


@pytest.fixture(scope="module")
def worker_key(cluster_key: NodeKey) -> NodeKey:
    return new_node_key("a-worker", cluster_key.keypair.public)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, cluster_key: NodeKey, worker_key: NodeKey) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("keys")
    write_key(folder / "cluster.key", cluster_key)
    (folder / "allowed.toml").write_text(public_part(worker_key, ["worker"]))
    settings: dict[str, Any] = {"keyfile": str(folder / "cluster.key"), "allowed_keys": str(folder / "allowed.toml")}
    with LocalCluster(1, 1, path="tcp", insecure=False, **settings) as cluster:
        yield cluster.address


def answered(address: str, keys: CurveKeys) -> StatusReport:
    with CurveDealer(address, keys) as peer:
        assert peer.send(peer.message(QUERY))
        flags, header = peer.hear()
        assert flags == SEALED_MORE
        report = decode(header).message
        assert isinstance(report, StatusReport)
        return report


def test_a_holder_of_either_key_is_answered(address: str, cluster_key: NodeKey, worker_key: NodeKey) -> None:
    for key in (cluster_key, worker_key):
        assert answered(address, keys_of(key)).request == 7


def test_a_key_that_is_not_allowed_is_refused(address: str, cluster_key: NodeKey) -> None:
    with pytest.raises(RefusedError):
        CurveDealer(address, strange_keys(keys_of(cluster_key).server))


def test_who_knows_another_key_of_the_daemon_gets_no_welcome(address: str, cluster_key: NodeKey) -> None:
    keys = keys_of(cluster_key)
    with pytest.raises(RefusedError):
        CurveDealer(address, keys._replace(server=strange_keys(keys.server).public))


def test_messages_of_several_frames_and_commands_arrive(address: str, cluster_key: NodeKey) -> None:
    with CurveDealer(address, keys_of(cluster_key)) as peer:
        assert peer.send(peer.command(b"PING", b"\0\0context"))
        assert peer.hear() == (SEALED_COMMAND, b"\4PONGcontext")
        assert peer.send(peer.message(QUERY, bytes(100_000), b"one too many"))
        flags, header = peer.hear()
        assert flags == 0
        assert "too many frames" in str(decode(header).message)


@pytest.mark.parametrize("nonce", ["the same", "an earlier one"])
def test_a_nonce_that_was_used_ends_the_connection(address: str, cluster_key: NodeKey, nonce: str) -> None:
    with CurveDealer(address, keys_of(cluster_key)) as peer:
        for _ in range(3):
            peer.send(peer.message(QUERY))
            peer.hear()
        again = peer.nonce if nonce == "the same" else peer.nonce - 1
        peer.send(frame(peer.sealed(b"\0" + QUERY, nonce=again)))
        assert peer.is_hung_up()


def test_a_scheduler_keeps_no_large_handshake(address: str, worker_key: NodeKey) -> None:
    """It takes no values, so nobody has to say so much; libzmq keeps all properties of a connection, in many pieces."""
    properties = metadata(Socket_Type=b"DEALER")
    CurveDealer(address, keys_of(worker_key), properties=properties + metadata(x=bytes(100_000))).close()
    with pytest.raises(RefusedError):
        CurveDealer(address, keys_of(worker_key), properties=properties + metadata(x=bytes(1 << 20)))
