"""Connections of commands: as an observer without a rank, or as a worker for the duration of the command."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvd_cli import interrupts
from kvd_cli.options import current, with_deadline
from kvd_cli.patience import Patience, told_when_slow

if TYPE_CHECKING:  # `kvd --help` needs no client
    from kvd.client.cluster.joining import Arrival
    from kvd.client.cluster.observer import Observer
    from kvd.client.facades.blocking import KVStore
    from kvd.config import Config, Loaded

NOBODY_THERE_S: Final = 1.5
"""How long a command without ``--timeout`` tries a name that is not known, or an address where nothing listens."""


@contextlib.contextmanager
def observer(doing: str, job: str = "", within_s: float | None = None) -> Iterator[Observer]:
    """Connect as an observer, which reads everything and joins nothing.

    Args:
        doing: description of the block, shown while it takes long.
        job: the job to look at, or one run of it as NAME@RUN; empty: that of the settings.
        within_s: seconds that the cluster has to answer without ``--timeout``; None: as long as the settings say.

    Raises:
        ConnectError: no scheduler answers, or its host is not known.
    """
    with interrupts.nothing_begun():
        from kvd.client.cluster.observer import Observer

    loaded = current().load_client()
    config = dataclasses.replace(loaded.config, job=job) if job else loaded.config
    if within_s is not None and current().timeout_s is None and within_s < config.request_timeout_s:
        config = with_deadline(config, within_s)
    with told_when_slow(_connecting(config), config) as patience:
        cluster = Observer(config, at_prompt(loaded, patience))
    with cluster, told_when_slow(doing, config):
        yield cluster


@contextlib.contextmanager
def as_worker(doing: str) -> Iterator[KVStore]:
    """Join as a worker in the cluster's mode. It leaves without waiting for the others.

    Args:
        doing: description of the block, shown while it takes long.
    """
    with interrupts.nothing_begun():
        from kvd.client.facades.blocking import leave_at_once, visit

    loaded = current().load_client()
    given = {name: getattr(loaded.config, name) for name, origin in loaded.origin.items() if origin != "default"}
    given.setdefault(
        "join_timeout_s", loaded.config.request_timeout_s
    )  # nobody waits at a prompt as long as a job does
    with told_when_slow(_connecting(loaded.config), loaded.config) as patience:
        store = visit("dist", at_prompt(loaded, patience, operator=True), **given)
    store.set_barrier_before_exit(False)
    try:
        with told_when_slow(doing, loaded.config):
            yield store
    except BaseException:
        leave_at_once(store)  # a refused command is not a dead worker
        raise
    with told_when_slow("leaving the cluster", loaded.config):
        store.close()


def at_prompt(loaded: Loaded, patience: Patience, *, operator: bool = False) -> Arrival:
    """Return the arrival of a command: it does not wait for workers, nor long where nothing listens.

    Args:
        loaded: the settings of the command.
        patience: reports on stderr what the command waits for.
        operator: as of `Arrival`.
    """
    from kvd.client.cluster.joining import Arrival

    timeout_s = current().timeout_s
    return Arrival(
        wait_for_workers=False,
        operator=operator,
        tell=patience.say,
        scheduler_given=loaded.is_given("scheduler"),
        patience_s=NOBODY_THERE_S if timeout_s is None else timeout_s,
    )


def _connecting(config: Config) -> str:
    return f"waiting for an answer from the cluster at {config.scheduler}"
