"""What both façades tell about their store without a call."""

from __future__ import annotations

from kvd.client.calls.backend import StoreFacts

CAPABILITIES = {"optimizer": True, "compression": True, "row_sparse": True, "bind": True}


class StoreProperties:
    """The identity of a store, which never changes, and what every store is capable of."""

    def __init__(self, facts: StoreFacts) -> None:
        self._facts = facts

    @property
    def type(self) -> str:
        """The type that the store was created with, in lower case; a name of MXNet's stays, as there."""
        return self._facts.type

    @property
    def rank(self) -> int:
        """The number of this worker, from 0 on. The workers with which the job begins have 0 to their number - 1."""
        return self._facts.rank

    @property
    def local_rank(self) -> int:
        """The number of this worker on its host, from LOCAL_RANK; 0 without it."""
        return self._facts.local_rank

    @property
    def num_workers(self) -> int:
        """The number of workers of the job. With `on_worker_loss = "shrink"` or a `quorum` that of the newest round:
        the workers that were lost or late are not in it until they take part again. With `max_workers` those that take
        part: neither workers that have left nor those that have yet to come in."""
        return len(self.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that `num_workers` counts, in order. ``sum(rank < kv.rank for rank in kv.ranks)``
        of `num_workers` is this worker's share of the data. Workers notice a change one after the other, so in the
        step in which one comes or goes, two may see different ones."""
        taking_part = self._facts.taking_part
        return tuple(range(self._facts.num_workers)) if taking_part is None else taking_part()

    @property
    def num_servers(self) -> int:
        """The number of servers of the cluster; 0 without a cluster."""
        return self._facts.num_servers

    @property
    def job(self) -> str:
        """The name of the job that this worker belongs to; "" without a cluster."""
        return self._facts.job

    @property
    def merge(self) -> str:
        """How the contributions to a round become one: "sum", "mean" or "weighted"; "" where there are no rounds."""
        return self._facts.merge

    @property
    def restarted(self) -> bool:
        """Whether this worker took the place of one that died: its clocks continue those of its predecessor."""
        return self._facts.restarted

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store has a capability: "optimizer", "compression", "row_sparse" or "bind".

        Raises:
            ValueError: there is no such capability.
        """
        if capability not in CAPABILITIES:
            raise ValueError(f"no capability is called {capability!r}; there are: {', '.join(CAPABILITIES)}")
        return CAPABILITIES[capability]
