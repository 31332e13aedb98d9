"""What nodes know that are told of changes: put together by hand, so that tests may look at whole views."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvd.core.machine import Effect, Send
from kvd.protocol.messages import View, ViewChange


class KnownViews:
    """Of each node, by its peer, the whole view that it knows after all that it was sent."""

    def __init__(self) -> None:
        self._known: dict[Any, View] = {}

    def whole(self, effects: Iterable[Effect], run: int = 0) -> list[Effect]:
        """The effects, with whole views in place of changes."""
        return [self._told(effect, run) if isinstance(effect, Send) else effect for effect in effects]

    def _told(self, send: Send, run: int) -> Send:
        place = (send.peer, run)
        if isinstance(send.message, View):
            assert send.message.pages == 1
            self._known[place] = send.message
        if not isinstance(send.message, ViewChange):
            return send
        self._known[place] = applied(self._known[place], send.message)
        return send._replace(message=self._known[place])


def applied(view: View, change: ViewChange) -> View:
    """What a change makes of a view."""
    members = {(member.role, member.rank): member for member in view.members}
    for place in change.left:
        del members[place.role, place.rank]
    members.update({(member.role, member.rank): member for member in change.members})
    partitions = list(view.partitions)
    for number, entry in change.partitions:
        partitions[number] = entry
    runs = change.runs if change.has_runs else view.runs
    return replace(view, members=tuple(members.values()), partitions=tuple(partitions), runs=runs)
