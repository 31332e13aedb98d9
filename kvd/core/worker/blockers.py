"""Which open requests a call waits for: its own, or those of the earlier calls that it queues behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvd.core import requests
from kvd.core.outbox import Entry, Outbox
from kvd.core.worker.in_flight import WAITING, InFlight
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.message_plans import MessagePlan
from kvd.core.worker.open_pushes import OpenPushes
from kvd.protocol.messages import Delete, Drop


class Blockers:
    """Finds them, as they are at the moment of its creation."""

    def __init__(self, outbox: Outbox, pushes: OpenPushes) -> None:
        self._outbox = outbox
        self._pushes = pushes
        self._about: dict[str, list[Entry]] | None = None  # by key; made when it is needed first

    def of(self, call: InFlight) -> list[Entry]:
        """The oldest first. A call with none waits for something else: to have joined, or for memory of its program."""
        found: dict[int, Entry] = {}
        for part in self._parts(call):
            entries = part.entries or self._of_keys(part)
            found.update((entry.request, entry) for entry in entries)
        return [found[request] for request in sorted(found)]

    def _parts(self, call: InFlight) -> Sequence[InFlight]:
        """The call, or the pushes that it waits for."""
        if isinstance(call.request, requests.Flush):
            return self._pushes.awaited_by(call)
        if isinstance(call.request, requests.Control) and call.request.staged_first and call.state is WAITING:
            return self._pushes.open()
        return [call]

    def _of_keys(self, call: InFlight) -> Iterable[Entry]:
        """A call that has not begun waits for what is open on its keys, and for the calls before it in their queues."""
        seen: set[str] = set()
        keys: list[WorkerKey] = list(call.keys)
        while keys:
            key = keys.pop()
            if key.name in seen:
                continue
            seen.add(key.name)
            yield from self._entries_about(key.name)
            for earlier in key.queue:
                if earlier is call:
                    break
                keys += earlier.keys

    def _entries_about(self, name: str) -> list[Entry]:
        if self._about is None:
            self._about = {}
            for entry in self._outbox.entries():
                message: Any = entry.send.message
                for key in _keys_of(entry.topic, message):
                    self._about.setdefault(key, []).append(entry)
        return self._about.get(name, [])


def _keys_of(topic: MessagePlan | int, message: Any) -> set[str]:
    """The keys that a message is about."""
    if isinstance(topic, MessagePlan):
        return {slice_id.key for slice_id in topic.slice_ids}
    if isinstance(message, Delete | Drop):
        return {key_id.key for key_id in message.keys}
    return {message.key} if hasattr(message, "key") else set(getattr(message, "keys", ()))
