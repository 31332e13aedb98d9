"""What happened in a simulated run: its digest, its log, and the error that names its seed."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import NoReturn

from tests.simulator.clock import VirtualClock

NOTED = 40  # lines of the log, and events, that a violation shows


class Violation(AssertionError):
    """A promise was broken. The text names the seed."""


class Trace:
    """Records one run. Equal digests mean equal runs."""

    def __init__(self, seed: int, clock: VirtualClock) -> None:
        self.log: list[str] = []  # what the machines logged
        self._newest = deque[str](maxlen=NOTED)
        self._seed = seed
        self._clock = clock
        self._hash = blake2b(digest_size=16)

    def record(self, text: str) -> None:
        """Adds an event to the digest."""
        line = f"{self._clock.now:.9f} {text}"
        self._newest.append(line)
        self._hash.update(f"{line}\n".encode())

    def record_header(self, header: bytes) -> None:
        """Adds the header of a message that arrived to the digest."""
        self._hash.update(header)

    def note(self, text: str) -> None:
        """Adds a line to the log, which is not part of the digest."""
        self.log.append(f"{self._clock.now:.3f} {text}")

    def digest(self) -> str:
        """A hash over every event so far."""
        return self._hash.hexdigest()

    def fail(self, text: str) -> NoReturn:
        """Raises Violation with the seed and the time, and as a note the newest lines of the log and events."""
        violation = Violation(f"seed {self._seed}, {self._clock.now:.3f} s: {text}")
        violation.add_note("\n".join(["the log of the run:", *self.log[-NOTED:], "its last events:", *self._newest]))
        raise violation
