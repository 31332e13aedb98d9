"""A peer that sends arbitrary bytes, while two workers check that their sums stay right."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq

import kvd
from kvd.config import load
from kvd.node.keys.keyring import Keyring
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import (
    NO_RUN,
    Epoch,
    StatusQuery,
    StatusReport,
)
from kvd.testing.cluster import LocalCluster

STRANGER = 0x1234
NO_VIEW = Epoch(0, 0)
STEP_TIMEOUT_S = 20.0


def addresses(cluster: LocalCluster) -> list[str]:
    return [cluster.scheduler.address, *[server.address for server in cluster.servers]]


@contextmanager
def busy(stores: list[kvd.KVStore]) -> Iterator[None]:
    """Both workers push and check every sum until the block ends; then a last push must still succeed."""
    stop, stepped = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def work(store: kvd.KVStore) -> None:
        try:
            value = np.empty(3000, np.float32)
            while True:
                going = not stop.is_set()
                value[:] = 1 if going else 0
                total = store.pushpull("w", value.copy())
                assert (total == total[0]).all()
                assert total[0] in (0, 1, 2)
                if total[0] < 2:
                    return
                stepped.set()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    try:
        yield
        stepped.clear()
        gets_through = stepped.wait(STEP_TIMEOUT_S) or errors
    finally:
        stop.set()
        for thread in threads:
            thread.join(STEP_TIMEOUT_S)
    assert errors == []
    assert gets_through, f"no step within {STEP_TIMEOUT_S} s"


class RawPeer:
    """A plain DEALER socket that can send any frames. It holds the key of the cluster, unless that is `insecure`.

    Args:
        settings: that name another key file.
        key: the public key that the other end has to hold; "": that of the cluster, or of the scheduler.
    """

    def __init__(
        self,
        address: str,
        run: int = NO_RUN,
        *,
        insecure: bool = False,
        settings: Mapping[str, Any] | None = None,
        key: str = "",
    ) -> None:
        self.run = run
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 5000
        given = settings or ({"insecure": True} if insecure else {})
        curve = Keyring(load(given).config, "observer").curve
        if curve is not None:
            curve.secure_connection(self.socket, key)
        self.socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def say(self, message: Any, *payload: bytes, sender: int = STRANGER) -> None:
        self.send(encode(message, sender, NO_VIEW, self.run), *payload)

    def answer(self) -> Any:
        return decode(self.socket.recv_multipart()[0]).message

    def answers(self, message: Any, *payload: bytes, sender: int = STRANGER) -> Any:
        self.say(message, *payload, sender=sender)
        return self.answer()

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_alive(address: str, *, insecure: bool = False) -> bool:
    with RawPeer(address, insecure=insecure) as raw:
        return isinstance(raw.answers(StatusQuery(1)), StatusReport)
