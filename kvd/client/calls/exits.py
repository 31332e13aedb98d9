"""Programs that end without `close()`.

The stores of a cluster are held here until they are closed, so that one which a program simply lets go of, as a script
does that creates it in a function, leaves the cluster in good order when the process ends. A store without a cluster
has nothing to leave, but what went wrong there unheard is told then as well.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import Protocol

from kvd.client.calls.backend import Backend
from kvd.client.calls.handle import Handle
from kvd.client.calls.unobserved_errors import Unheard
from kvd.errors import KvdError


class Leaving(Protocol):
    """What the two façades have in common."""

    _backend: Backend
    _open: bool
    _barrier_before_exit: bool


_stores: set[Leaving] = set()
_unheard: set[Unheard] = set()
os.register_at_fork(after_in_child=_stores.clear)  # they are the parent's
os.register_at_fork(after_in_child=_unheard.clear)


def remember(store: Leaving) -> None:
    """Leaves the cluster when the process ends, unless `forget` comes first."""
    _stores.add(store)


def forget(store: Leaving) -> None:
    _stores.discard(store)


def tell_at_exit(errors: Unheard) -> None:
    """Raises them when the process ends well, if they are still unheard then."""
    _unheard.add(errors)


def _leave() -> None:
    """A program that ends well leaves like one that called close(); one that failed leaves at once.

    All stores begin before the first is waited for: they may be workers that wait for each other.
    """
    failed = getattr(sys, "last_value", None) is not None
    begun: list[tuple[Backend, Handle | None]] = []
    for store in list(_stores):
        if store._open:
            store._open = False
            with suppress(KvdError):
                leaving = None if failed else store._backend.begin_close(store._barrier_before_exit)
                begun.append((store._backend, leaving))
    errors = []
    for backend, leaving in begun:
        try:
            if leaving is None:
                backend.abandon(failed=True)
            else:
                backend.end_close(leaving)
        except KvdError as error:
            errors.append(error)
    for unheard in [] if failed else list(_unheard):
        try:
            unheard.tell(None)
        except KvdError as error:
            errors.append(error)
    if errors:
        raise errors[0]


atexit.register(_leave)
