"""Notices at once when other processes of this host end, through pidfds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable

from kvd.node.daemon.process_limits import NO_DESCRIPTOR


class ProcessWatch:
    """Watches processes on an event loop, once for each token."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._descriptors: dict[Hashable, int] = {}
        self._seen: set[Hashable] = set()

    def watch(self, pid: int, ended: Callable[[], None], token: Hashable = None) -> None:
        """Call `ended` when the process with this id ends; at once if there is none.

        If no descriptor is left, it is not watched: the heartbeats will tell, and the next call tries again.
        """
        token = pid if token is None else token
        if token in self._seen:
            return
        self._seen.add(token)
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(ended)
            return
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                self._seen.discard(token)
            return  # also an old kernel
        self._descriptors[token] = descriptor
        self._loop.add_reader(descriptor, self._ended, token, ended)

    def forget(self, token: Hashable) -> None:
        """Watch the process no longer that has this token, and give its descriptor back."""
        self._seen.discard(token)
        self._drop(token)

    def _ended(self, token: Hashable, ended: Callable[[], None]) -> None:
        self._drop(token)
        ended()

    def _drop(self, token: Hashable) -> None:
        descriptor = self._descriptors.pop(token, None)
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """Watch no longer."""
        for token in list(self._descriptors):
            self._drop(token)
