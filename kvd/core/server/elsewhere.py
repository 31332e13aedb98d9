"""Requests about slices that another server leads, or that this one is about to lead: they are sent again soon, where
the newest view says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvd.core.machine import Received
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import Slice
from kvd.core.session import SchedulerSession
from kvd.protocol.messages import NO_VIEW, NotYetReason


class Elsewhere:
    """Tells senders that what they ask for is not here.

    Args:
        is_handing_over: whether slices that this server is to lead are not in its table yet.

    Attributes:
        leaving: the partitions that it leads, and hands to another one: it neither serves nor changes them any more.
    """

    def __init__(self, session: SchedulerSession, effects: ServerEffects, is_handing_over: Callable[[], bool]) -> None:
        self._session = session
        self._view = session.view
        self._effects = effects
        self._is_handing_over = is_handing_over
        self._gave_up_at = NO_VIEW
        self.leaving: set[int] = set()

    def gave_up(self) -> None:
        """By the newest view, another server leads what this one has led."""
        self._gave_up_at = self._view.epoch

    def leaves(self, slices: Iterable[Slice]) -> bool:
        """Whether one of these slices is handed over to another server."""
        return bool(self.leaving) and any(slice_.partition in self.leaving for slice_ in slices)

    def has(self, event: Received, request: int, key: str, slice_index: int) -> bool:
        """Whether a slice that is not in the table is led elsewhere, or will be in the table soon. The sender is
        told."""
        if not self._view.partitions:
            return False
        partition = self._view.partition_of(key, slice_index)
        is_here = self._view.leader_of(partition) == self._session.rank and partition not in self.leaving
        if is_here and not self._is_unsettled(event):
            return False
        self._effects.not_yet(event.peer, request, NotYetReason.ELSEWHERE, "another server leads this slice", key)
        return True

    def postpones(self, event: Received) -> bool:
        """Whether a request about all slices that this server leads must wait. The sender is told."""
        is_late = event.epoch < self._gave_up_at  # the sender may count on an answer for slices that are led elsewhere
        if not self._view.partitions or not (is_late or self.leaving or self._is_unsettled(event)):
            return False
        message: Any = event.message
        text = "other slices are led here than the sender, or this server, knows of"
        self._effects.not_yet(event.peer, message.request, NotYetReason.ELSEWHERE, text)
        return True

    def is_news(self, event: Received, request: int, key: str) -> bool:
        """Whether the sender asks for a key, of which nothing is here, by an older view than this server has: it does
        not know yet where the slices are. The sender is told."""
        if not self._view.partitions or event.epoch >= self._view.epoch:
            return False
        text = "the sender asks by an earlier view, and no slice of the key is led here now"
        self._effects.not_yet(event.peer, request, NotYetReason.ELSEWHERE, text, key)
        return True

    def _is_unsettled(self, event: Received) -> bool:
        """Whether the sender knows of a later view, or more slices are about to be led here."""
        return event.epoch > self._view.epoch or self._is_handing_over()
