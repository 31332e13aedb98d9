"""Lists of thousands of keys: the number of messages, not the time, is what is asserted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvd
from kvd.client.calls.optimizer_state_file import OptimizerStateFile
from kvd.core.machine import Send
from kvd.errors import KeyExists, ShapeMismatch
from kvd.node.shell.sending import MessageSender
from kvd.protocol.messages import Epoch, Init, Lookup, Publish
from kvd.testing.cluster import LocalCluster

KEYS = 5000
NAMES = [f"layer.{number}.weight" for number in range(KEYS)]


def test_a_list_of_thousands_of_keys_takes_a_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: dict[type, set[tuple[MessageSender, int]]] = {Init: set(), Publish: set(), Lookup: set()}
    send = MessageSender.send

    def counting(sender: MessageSender, effect: Send, run: int, epoch: Epoch) -> None:
        message = effect.message
        if isinstance(message, Init | Publish | Lookup):
            requests[type(message)].add((sender, message.request))  # a retry has the number of its request
        send(sender, effect, run, epoch)

    monkeypatch.setattr(MessageSender, "send", counting)

    def program(store: kvd.KVStore) -> bool:
        values = [np.full(16, number + store.rank * 1e6, np.float32) for number in range(KEYS)]
        store.init(NAMES, values)
        got = store.pull(NAMES)
        assert all((got[number] == number).all() for number in range(KEYS))  # rank 0's
        outs = [np.empty(16, np.float32) for _ in NAMES]
        store.pushpull(NAMES, values, outs)
        return all((outs[number] == 2.0 * number + 1e6).all() for number in range(KEYS))

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == [True, True]
    counts = {kind.__name__: len(numbers) for kind, numbers in requests.items()}
    assert max(counts.values()) <= 20, counts
    assert min(counts.values()) > 0, counts


def test_an_error_of_a_list_names_its_key_and_the_other_keys_are_made() -> None:
    def program(store: kvd.KVStore) -> str:
        store.init("w", np.zeros(2, np.float32))
        store.barrier()
        names = ["a", "w", "b"]
        shapes = [1, 2, 3] if store.rank == 0 else [1, 3, 3]
        with pytest.raises(KeyExists if store.rank == 0 else (KeyExists, ShapeMismatch)) as caught:
            store.init(names, [np.full(shape, 7, np.float32) for shape in shapes])
        store.barrier()
        assert [store.pull(name).tolist() for name in ("a", "b")] == [[7], [7, 7, 7]]
        return str(caught.value.key)

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == ["w", "w"]


def test_all_keys_of_a_large_list_are_listed(tmp_path: Path) -> None:
    with LocalCluster(1, 1) as cluster:
        store = cluster.store()
        store.set_optimizer(kvd.optimizer.SGD(learning_rate=1.0))
        store.init(NAMES[:500], [np.ones(1, np.float32)] * 500)
        store.save_optimizer_states(tmp_path / "states")
    assert sorted(OptimizerStateFile.read(tmp_path / "states").steps) == sorted(NAMES[:500])
