"""The links that others have opened to this process: one for each who asked, since each has buffers of its own."""

from __future__ import annotations

import threading
from itertools import count

from kvd.core.machine import LinkPeer, Peer
from kvd.transport.links.link import Link


class AcceptedLinks:
    """Any thread may call `forget`; the rest belongs to the loop's thread."""

    def __init__(self) -> None:
        self._names = count(1)
        self._by_asker: dict[Peer, Link] = {}
        self._lock = threading.Lock()

    def name(self) -> LinkPeer:
        """A name that no link has had."""
        return LinkPeer(f"link {next(self._names)}")

    def put(self, asker: Peer, link: Link) -> Link | None:
        """Returns the link that this one replaces, which is to be ended."""
        with self._lock:
            older, self._by_asker[asker] = self._by_asker.get(asker), link
        return older

    def forget(self, link: Link) -> None:
        """The link has ended."""
        with self._lock:
            for asker, known in self._by_asker.items():
                if known is link:
                    del self._by_asker[asker]
                    return
