"""Barriers as a worker sees them: which generation of each name it enters next."""

from __future__ import annotations

from functools import partial

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Received
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import InFlight
from kvd.protocol.messages import Enter, Listen, Said, Say


class BarrierCalls:
    """A barrier that timed out is entered again at the same generation: the others may still wait there. So is one that
    broke: nobody has passed it, and all meet there once the dead are back."""

    def __init__(self, asker: Asker, calls: CallBook) -> None:
        self._asker = asker
        self._calls = calls
        self._generations: dict[str, int] = {}  # by name: the one to enter next

    def enter(self, call: InFlight, request: requests.Barrier) -> None:
        """Completes the call when all workers are at the barrier, or it is broken."""
        generation = self._generations.get(request.name, 0)
        if request.passed:
            self._generations[request.name] = generation + 1
            self._calls.complete(call)
        elif request.says is not None:
            say = Say(0, request.name, generation, request.says)
            self._asker.ask(call, SCHEDULER, say, partial(self._is_noted, call, request, generation))
        else:
            self._enter(call, request, generation)

    def said(self, call: InFlight, request: requests.SaidAt) -> None:
        """Completes the call with the note of the barrier that comes next, if it has been released."""
        self._listen(call, request.name, self._generations.get(request.name, 0))

    def tell(self, call: InFlight, request: requests.Tell) -> None:
        """Completes the call when the note is saved."""

        def answered(event: Received) -> None:
            self._calls.complete(call, error=self._asker.error_of(event))

        self._asker.ask(call, SCHEDULER, Say(0, request.name, 0, request.note), answered)

    def told(self, call: InFlight, request: requests.ToldAt) -> None:
        """Completes the call with the note of a barrier that is never released."""

        def answered(event: Received) -> None:
            said = event.message
            self._calls.complete(call, said.note if isinstance(said, Said) else "", self._asker.error_of(event))

        self._asker.ask(call, SCHEDULER, Listen(0, request.name, 0), answered)

    def _is_noted(self, call: InFlight, request: requests.Barrier, generation: int, event: Received) -> None:
        error = self._asker.error_of(event)
        if error is not None:
            self._calls.complete(call, error=error)
        else:
            self._enter(call, request, generation)

    def _enter(self, call: InFlight, request: requests.Barrier, generation: int) -> None:
        def answered(event: Received) -> None:
            error = self._asker.error_of(event)
            if error is None:  # otherwise this generation is still open
                self._generations[request.name] = generation + 1
            if error is None and request.listens:
                self._listen(call, request.name, generation)
            else:
                self._calls.complete(call, error=error)

        self._asker.ask(call, SCHEDULER, Enter(0, request.name, generation, request.place), answered)

    def _listen(self, call: InFlight, name: str, generation: int) -> None:
        def answered(event: Received) -> None:
            said = event.message
            error = self._asker.error_of(event)
            result = said.note if isinstance(said, Said) and said.released else None
            self._calls.complete(call, result, error)

        self._asker.ask(call, SCHEDULER, Listen(0, name, generation), answered)
