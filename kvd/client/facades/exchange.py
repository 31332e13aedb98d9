"""Values that one worker has and all take: what `broadcast` does for rank 0, for any worker.

In a synchronous store every worker takes part in every round of every key. The one that has a key's value assigns it,
the others are absent: they send a header without bytes. So the value replaces the stored one bit for bit, whatever
optimizer, updater or merge the store has, and it crosses the wire once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from kvd.client.calls.handle import Handle
from kvd.client.calls.values import Array, source_of
from kvd.client.cluster.values import DistBackend
from kvd.client.facades.blocking import KVStore
from kvd.client.local.values import LocalBackend
from kvd.config import Config
from kvd.core import requests
from kvd.core.requests import Item
from kvd.errors import KeyExists, KvdError
from kvd.protocol.messages import ABSENT, ASSIGN, StatusQuery

STATUS_TIMEOUT_S = 2.0


class Exchange:
    """What one store offers to those who exchange values key by key, each key with one writer.

    Attributes:
        store: whose keys they are; everything else goes through it.
        versioned: whether a pull gives exactly the version of this worker's clock, so that all slices of a value are
            of one round (synchronous stores, and those in this process). If not, they may be of several.
        distributed: whether the writers are workers of a cluster.
        timeout_s: the store's deadline for a call.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        backend = store._backend
        self._backend = backend
        self.distributed = isinstance(backend, DistBackend)
        self.versioned = True
        self.timeout_s = Config().request_timeout_s
        self._rounds = False  # whether the absent must say so
        if isinstance(backend, DistBackend):
            settings = backend._engine.machine.view.settings
            self.versioned = backend._sync
            self.timeout_s = backend._config.request_timeout_s
            self._rounds = backend._sync or settings.staleness >= 0

    def make(self, sizes: Mapping[str, int]) -> None:
        """Makes uint8 keys of these sizes in bytes, all zeros; keys that are there keep their values. Collective.

        Raises:
            ShapeMismatch: rank 0 made one with another size.
            NodeLost: rank 0 is gone.
        """
        begun = [self.store.init_async(name, np.zeros(size, np.uint8)) for name, size in sizes.items()]
        for handle in begun:
            with suppress(KeyExists):  # an earlier user of the names in this process, or before this job
                handle.wait()

    def assign(self, mine: Mapping[str, Array], others: Sequence[str]) -> None:
        """Sends the values of the keys that are this worker's, and says for `others` that it has none.

        Returns at once; every worker calls it with the same keys, each in one of the two places. What goes wrong on
        the way is raised by the next call on these keys, by `flush` or by `close`.

        Args:
            mine: a uint8 array per key, which must not be changed afterwards.
        """
        backend = self.store._here()
        if isinstance(backend, LocalBackend):
            for name, value in mine.items():
                backend.broadcast(name, value, None, 0)
            return
        assert isinstance(backend, DistBackend)
        names, _ = backend._keys(list(mine))
        sources = [source_of(value, backend._slice_bytes, private=False) for value in mine.values()]
        for source in sources:
            backend._room.take([source])
        items = tuple(Item(name, spec, data) for name, (data, spec) in zip(names, sources, strict=True))
        self._send(backend, names, requests.Transfer(items, push=True, pull=False, how=ASSIGN))
        if others and self._rounds:
            absent = tuple(Item(name, None) for name in others)
            self._send(backend, list(others), requests.Transfer(absent, push=True, pull=False, how=ABSENT))

    @staticmethod
    def _send(backend: DistBackend, names: list[str], transfer: requests.Transfer) -> None:
        backend._watched(names, Handle(backend._engine.submit(transfer), lambda versions: None, "assign"))

    def late_workers(self) -> tuple[str, ...]:
        """The workers that the servers wait for, such as ``"worker 1"``; empty if no server can say."""
        backend = self._backend
        if not isinstance(backend, DistBackend):
            return ()
        try:
            query = requests.Control((StatusQuery(0),))
            answers = backend._engine.submit(query, STATUS_TIMEOUT_S).result()
        except KvdError:
            return ()
        names: set[str] = set()
        for _, payload, nbytes in answers:
            status: dict[str, Any] = json.loads(bytes(payload[:nbytes]))
            names.update(status.get("waiting_for", ()))
        return tuple(sorted(names))

    def gone_workers(self) -> dict[int, bool]:
        """The ranks that write nothing any more: whether they died, or left the rounds. Empty in this process."""
        backend = self._backend
        if not isinstance(backend, DistBackend):
            return {}
        view = backend._engine.machine.view
        dead = view.dead_workers()
        taking_part = set(view.required_ranks()) - set(dead)
        return {rank: rank in dead for rank in range(backend.num_workers) if rank not in taking_part}
