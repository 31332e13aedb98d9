"""What a worker does when a peer cannot take a request yet: it puts right what is missing, and sends it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd.core.outbox import Entry, Outbox
from kvd.core.worker.asking import Asker
from kvd.core.worker.connections import Connections
from kvd.core.worker.keys import KeyTable
from kvd.core.worker.message_plans import MessagePlan
from kvd.core.worker.transfer import Transfer
from kvd.protocol.messages import Attach, NotYet, NotYetReason

MAX_ATTEMPTS = 400
ELSEWHERE_ATTEMPTS = 4  # that count: a server that fails is replaced soon, and nobody gives up before its call does


class NotYetReactions:
    """A table of what is done for each reason. A request that can never be taken is given up."""

    def __init__(
        self, keys: KeyTable, outbox: Outbox, asker: Asker, connections: Connections, transfer: Transfer
    ) -> None:
        self._keys = keys
        self._outbox = outbox
        self._asker = asker
        self._connections = connections
        self._transfer = transfer
        self._reactions: dict[NotYetReason, Callable[[Entry, NotYet], None]] = {
            NotYetReason.NOT_ATTACHED: self._attach,
            NotYetReason.UNKNOWN_BATCH: self._declare,
        }  # the other reasons pass with time

    def postponed(self, entry: Entry, not_yet: NotYet, now: float) -> None:
        """Sends the request again soon, unless that is hopeless."""
        react = self._reactions.get(not_yet.reason)
        if react is not None:
            react(entry, not_yet)
        if not_yet.reason is NotYetReason.ELSEWHERE:
            self._outbox.retry_soon(entry, now, ELSEWHERE_ATTEMPTS)
        elif entry.attempts >= MAX_ATTEMPTS or self._has_lost_its_turn(not_yet):
            self._asker.give_up(entry, not_yet.text, not_yet.key)
        else:
            self._outbox.retry_soon(entry, now)

    def _attach(self, entry: Entry, not_yet: NotYet) -> None:
        server: Any = entry.peer
        if not isinstance(entry.send.message, Attach):
            self._connections.attach(server)

    def _declare(self, entry: Entry, not_yet: NotYet) -> None:
        if isinstance(entry.topic, MessagePlan):
            self._transfer.declare(entry.topic, entry.priority)

    def _has_lost_its_turn(self, not_yet: NotYet) -> bool:
        """Whether the request is a push behind one that was taken in part: its clock never comes next."""
        key = self._keys.by_name.get(not_yet.key)
        is_out_of_turn = not_yet.reason is NotYetReason.OUT_OF_TURN
        return is_out_of_turn and key is not None and key.window.partial_failure is not None
