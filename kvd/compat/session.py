"""The store behind the module-level calls of another framework."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import kvd
from kvd.client.facades.blocking import KVStore
from kvd.compat.collectives import Collectives
from kvd.config import load, local_world_size
from kvd.errors import NotAllowed, NotInitialized


class Session:
    """What ``init()`` of a façade makes and ``shutdown()`` ends: one store, and the collective calls over it.

    Args:
        framework: its name, for errors.
        name: under which programs import the façade, such as ``"hvd"``.

    Attributes:
        steps: how many steps the optimizers of this process have made.
    """

    def __init__(self, framework: str, name: str) -> None:
        self._framework = framework
        self._name = name
        self._collectives: Collectives | None = None
        self._lock = threading.Lock()
        self.steps = 0

    def init(self, comm: Any = None) -> None:
        """Join the cluster that the variables of ``kvd launch`` name; without one, be the only worker.

        A second call does nothing.

        Args:
            comm: None; subsets of the workers cannot be chosen.

        Raises:
            NotAllowed: `comm` is given.
            KvdError: the worker cannot join, see `kvd.create`.
        """
        if comm is not None:
            raise NotAllowed(f"{self._framework}'s init(comm) chooses a part of the workers; kvd has no process sets")
        with self._lock:
            if self._collectives is None:
                is_in_job = load().is_given("scheduler")
                self._collectives = Collectives(kvd.create("dist_sync" if is_in_job else "local"))

    def shutdown(self) -> None:
        """Leave the cluster, once all workers are here. A second call does nothing."""
        with self._lock:
            ended, self._collectives = self._collectives, None
        if ended is not None:
            ended.store.close()

    def is_initialized(self) -> bool:
        """Return True between `init` and `shutdown`."""
        return self._collectives is not None

    def count_step(self) -> None:
        """Count a step of an optimizer."""
        self.steps += 1

    @property
    def collectives(self) -> Collectives:
        """The collective calls. Raises NotInitialized before `init`."""
        collectives = self._collectives
        if collectives is None:
            raise NotInitialized(f"{self._framework} has not been initialized: call {self._name}.init() first")
        return collectives

    @property
    def store(self) -> KVStore:
        """The store. Raises NotInitialized before `init`."""
        return self.collectives.store

    def rank(self) -> int:
        """Return the number of this worker, from 0."""
        return self.store.rank

    def size(self) -> int:
        """Return the number of workers."""
        return self.store.num_workers

    def local_rank(self) -> int:
        """Return the number of this worker on its host, from 0."""
        return self.store.local_rank

    def local_size(self) -> int:
        """Return the number of workers on this host."""
        self.collectives  # noqa: B018  raises before init
        return local_world_size()


def left_out(module: str, names: Mapping[str, str], name: str) -> AttributeError:
    """Return the error of a module for a name that it does not have.

    Args:
        names: for each name of the framework that is left out, what to do instead.
    """
    if name in names:
        return AttributeError(f"{module} has no {name}: {names[name]} (docs/porting.md)")
    return AttributeError(f"module {module!r} has no attribute {name!r}")
