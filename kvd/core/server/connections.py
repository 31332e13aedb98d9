"""The connections of a server to other servers, which all its runs share: one to each."""

from __future__ import annotations

from kvd.core.machine import Connect, Disconnect, Peer


class SharedConnections:
    """Knows which runs use the connection to whom. It is opened for the first, and closed after the last."""

    def __init__(self) -> None:
        self._users: dict[Peer, set[int]] = {}

    def connect(self, run: int, effect: Connect) -> Connect | None:
        """What is to be done when this run connects; None: nothing, the connection is there."""
        users = self._users.get(effect.peer)
        if users is None:
            self._users[effect.peer] = {run}
            return effect
        users.add(run)
        return None

    def disconnect(self, run: int, effect: Disconnect) -> Disconnect | None:
        """What is to be done when this run disconnects; None: nothing, others use the connection."""
        users = self._users.get(effect.peer)
        if users is None or run not in users:
            return None
        users.discard(run)
        if users:
            return None
        del self._users[effect.peer]
        return effect

    def leave(self, run: int) -> list[Disconnect]:
        """What is to be done when a run ends."""
        return [
            effect
            for peer, users in list(self._users.items())
            if run in users and (effect := self.disconnect(run, Disconnect(peer))) is not None
        ]
