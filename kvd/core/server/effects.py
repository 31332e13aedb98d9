"""What the parts of a server want done: the effects of one step, and the jobs whose ends come back."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import Effect, Job, JobDone, Peer, Send, Span
from kvd.protocol.messages import ErrorCode, Message, NotYet, NotYetReason, Refused


class ServerEffects:
    """Effects in their order, until the machine takes them.

    Attributes:
        emit: adds an effect.
        extend: adds several.
    """

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self.emit = self._effects.append
        self.extend = self._effects.extend
        self._jobs: dict[int, Callable[[JobDone], None]] = {}
        self._last_job = 0

    def take(self) -> list[Effect]:
        """The effects so far. The list is the caller's: it refers to memory that others wait for."""
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    # ── messages ──

    def send(self, peer: Peer, message: Message, payload: tuple[Span, ...] = ()) -> None:
        self.emit(Send(peer, message, payload))

    def refuse(self, peer: Peer, request: int, error: ErrorCode, text: str, key: str = "") -> None:
        self.send(peer, Refused(request, error, text, key))

    def not_yet(self, peer: Peer, request: int, reason: NotYetReason, text: str, key: str = "") -> None:
        self.send(peer, NotYet(request, reason, text, key))

    # ── jobs ──

    def start_job(self, make: Callable[[int], Job], done: Callable[[JobDone], None]) -> int:
        """Emits the job that `make` gives for its number, and returns that; `done` is called with its end."""
        job = self.new_job()
        self._jobs[job] = done
        self._effects.append(make(job))
        return job

    def new_job(self) -> int:
        """A number that no job has had."""
        self._last_job += 1
        return self._last_job

    def await_job(self, job: int, done: Callable[[JobDone], None]) -> None:
        """`done` is called with the end of this job."""
        self._jobs[job] = done

    def end_job(self, event: JobDone) -> None:
        """Calls the `done` of a job that has ended. An unknown job is ignored."""
        done = self._jobs.pop(event.job, None)
        if done is not None:
            done(event)
