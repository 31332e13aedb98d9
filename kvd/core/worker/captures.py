"""Captures of keys: the slices are kept by the servers that lead them; `kvd.core.server.captures` says for what."""

from __future__ import annotations

from kvd.core import requests
from kvd.core.machine import Received
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.keys import KeyState
from kvd.core.worker.message_plans import lists_of_slices
from kvd.errors import KeyNotFound, KvdError, ProtocolError
from kvd.protocol.messages import Capture, Captured, Surveyed


class Captures:
    """The captures of this node."""

    def __init__(self, asker: Asker, calls: CallBook) -> None:
        self._asker = asker
        self._calls = calls

    def start(self, call: InFlight, request: requests.Capture) -> KvdError | None:
        """Completes the call with the answers of all servers that lead a part of its keys."""
        lists = lists_of_slices(call.keys)

        def then(answers: list[Received], error: KvdError | None) -> None:
            parts = []
            for (partition, slice_ids), event in zip(lists, answers, strict=True):
                answer = event.message
                fits = isinstance(answer, Surveyed) or (
                    isinstance(answer, Captured) and len(answer.kept) == len(slice_ids)
                )
                if isinstance(answer, Captured | Surveyed) and fits:
                    parts.append(requests.CapturedPart(partition, slice_ids, answer))
                else:
                    error = error or ProtocolError("a server answered a capture with something that does not fit")
            if isinstance(error, KeyNotFound):
                self._look_again(call)
            self._calls.complete(call, parts, error)

        call.start()
        self._asker.ask_all(
            call,
            [
                self._asker.to_leader(partition, Capture(0, request.number, request.step, request.when, slice_ids))
                for partition, slice_ids in lists
            ],
            then,
        )
        return None

    def _look_again(self, call: InFlight) -> None:
        """Nobody asked this node before a key was deleted: its next call looks the keys up."""
        for key in call.keys:
            if key.state is KeyState.READY:
                key.forget()
