"""Values that one worker has and all take: what `broadcast` does for rank 0, for any worker.

In a synchronous store every worker takes part in every round of every key. The worker that has a key's value assigns
it, the others are absent: they send a header without bytes. So the value replaces the stored one bit for bit, whatever
optimizer, updater or merge the store has, and it crosses the wire once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from kvd.client.calls.held_signals import with_uninterrupted_methods
from kvd.client.calls.values import Array
from kvd.client.facades.blocking import KVStore, backend_of
from kvd.errors import KeyExists, KvdError


@with_uninterrupted_methods
class Exchange:
    """A store as it serves workers that exchange values key by key, where each key has one writer.

    Attributes:
        store: the store of the keys; everything that is not here goes through it.
        versioned: whether a pull gives exactly the version of this worker's clock, see `StoreFacts.versioned`.
        distributed: whether the writers are workers of a cluster.
        timeout_s: how long a call waits for other workers, in seconds.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        backend = backend_of(store, may_block=False)
        self._nodes = backend.nodes
        self.versioned = backend.facts.versioned
        self.distributed = backend.facts.distributed
        self.timeout_s = backend.facts.round_timeout_s

    def make(self, sizes: Mapping[str, int]) -> None:
        """Makes uint8 keys of these sizes in bytes, all zeros; existing keys keep their values. Collective.

        Raises:
            ShapeMismatch: rank 0 made a key with another size.
            NodeLost: rank 0 is gone.
        """
        begun = [self.store.init_async(name, np.zeros(size, np.uint8)) for name, size in sizes.items()]
        for handle in begun:
            with suppress(KeyExists):  # an earlier user of the names in this process, or before this job
                handle.wait()

    def assign(self, mine: Mapping[str, Array], others: Sequence[str]) -> None:
        """Sends the values of this worker's keys, and says that it has none for `others`.

        Returns at once. Every worker calls it with the same keys, each key in one of the two places. Errors are raised
        by the next call on these keys, by `flush` or by `close`.

        Args:
            mine: a uint8 array per key, which must not be changed afterwards.
        """
        backend_of(self.store).assignments.assign(mine, others)

    def keep_error(self, keys: Sequence[str], error: KvdError) -> None:
        """Has the next call on these keys, `flush` or `close` raise an error that did not reach the program."""
        backend_of(self.store, may_block=False).assignments.keep_error(keys, error)

    def is_inherited(self, key: str) -> bool:
        """Whether a predecessor of this process, which died, has written the key, and this process has not yet."""
        store = self.store
        return store.restarted and store.clock(key) > 0 and not backend_of(store).assignments.has_assigned(key)

    def late_workers(self) -> tuple[str, ...]:
        """The workers that the servers wait for, such as ``"worker 1"``; empty if no server can say."""
        return self._nodes.late_workers()

    def gone_workers(self) -> dict[int, bool]:
        """The ranks that write nothing any more: True for one that died, False for one that left the rounds. Empty in
        this process."""
        return self._nodes.gone_workers()
