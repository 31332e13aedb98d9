"""Programs that end without `close()`.

The stores of a cluster are kept here until they are closed. So a store that a program lets go of, as a script does that
creates it in a function, leaves the cluster in good order when the process ends. A store without a cluster has nothing
to leave, but its unobserved errors are raised then as well.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import Protocol

from kvd.client.calls.handle import Handle
from kvd.client.calls.held_signals import uninterrupted
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.errors import KvdError


class Leaver(Protocol):
    """An open store, see `kvd.client.facades.life`."""

    def claim_end(self) -> bool: ...
    def begin_close(self) -> Handle: ...
    def end_close(self, leaving: Handle) -> None: ...
    def abandon(self, *, failed: bool) -> None: ...


_stores: set[Leaver] = set()
_errors: set[UnobservedErrors] = set()
os.register_at_fork(after_in_child=_stores.clear)  # they belong to the parent
os.register_at_fork(after_in_child=_errors.clear)


def leave_at_exit(store: Leaver) -> None:
    """Has the store leave its cluster when the process ends, unless `forget` comes first."""
    _stores.add(store)


def forget(store: Leaver) -> None:
    _stores.discard(store)


def raise_at_exit(errors: UnobservedErrors) -> None:
    """Raises the errors that are still unobserved when the process ends well."""
    _errors.add(errors)


@uninterrupted
def _leave() -> None:
    """A program that ends well leaves like one that called close(); one that failed leaves at once.

    All stores begin before the first is waited for: they may be workers that wait for each other.
    """
    failed = getattr(sys, "last_value", None) is not None
    begun: list[tuple[Leaver, Handle | None]] = []
    for store in list(_stores):
        if store.claim_end():
            with suppress(KvdError):
                begun.append((store, None if failed else store.begin_close()))
    raised = []
    for store, leaving in begun:
        try:
            if leaving is None:
                store.abandon(failed=True)
            else:
                store.end_close(leaving)
        except KvdError as error:
            raised.append(error)
    for errors in [] if failed else list(_errors):
        try:
            errors.raise_for(None)
        except KvdError as error:
            raised.append(error)
    if raised:
        raise raised[0]


atexit.register(_leave)
