"""Named moments at which a daemon kills itself with SIGKILL: between what it was told, did, saved and said.

A test writes the name of a point to a file. The first daemon that comes to this point takes the file away and dies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, Final

from kvd.core.machine import Received
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.server.router import ServerRouter
from kvd.node.shell.sending import MessageSender
from kvd.node.storage.state_file import SchedulerStateFile

ARMED: Final = "failpoint"
REACHED: Final = "failpoint-reached"


class Moment(Enum):
    """What a daemon is about to do, or has just done, with a message or with its record."""

    TOLD = "told"  # it has not looked at the message yet
    DECIDED = "decided"  # it has, and none of what follows has been carried out
    SENDS = "sends"
    SENT = "sent"
    SAVES = "saves"
    SAVED = "saved"


def point(moment: Moment, what: str) -> str:
    """The name of a point: the moment, and the kind of the message (or "record")."""
    return f"{moment.value} {what}"


class Failpoints:
    """Looks, at each point that this process comes to, whether it is to die there.

    Args:
        folder: where tests write what is armed.
    """

    def __init__(self, folder: Path) -> None:
        self._armed = folder / ARMED
        self._reached = folder / REACHED

    def arm(self, name: str, skip: int = 0) -> None:
        """The next process that comes to this point dies there; before it, so many come through, in each process."""
        self._reached.unlink(missing_ok=True)
        part = self._armed.with_suffix(".part")
        part.write_text(f"{skip} {name}")
        part.rename(self._armed)
        self._passed = 0

    def was_reached(self) -> bool:
        return self._reached.exists()

    def disarm(self) -> None:
        self._armed.unlink(missing_ok=True)

    def install(self) -> None:
        """Makes this process stop at points. It must run before the daemon is made."""
        self._came: dict[str, int] = {}
        for router in (ServerRouter, SchedulerRouter):
            self._wrap(router, "step", self._around_step)
        self._wrap(MessageSender, "send", self._around_send)
        self._wrap(SchedulerStateFile, "save", self._around_save)

    def _wrap(self, owner: type[Any], name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)

        @wraps(inner)
        def outer(*arguments: Any) -> Any:
            return around(inner, *arguments)

        setattr(owner, name, outer)

    def _around_step(self, inner: Callable[..., Any], router: Any, event: Any, now: float) -> Any:
        kind = type(event.message).__name__ if isinstance(event, Received) else ""
        self._come_to(Moment.TOLD, kind)
        effects = inner(router, event, now)
        self._come_to(Moment.DECIDED, kind)
        return effects

    def _around_send(self, inner: Callable[..., Any], sender: Any, effect: Any, run: int, epoch: Any) -> None:
        kind = type(effect.message).__name__
        self._come_to(Moment.SENDS, kind)
        inner(sender, effect, run, epoch)
        self._come_to(Moment.SENT, kind)

    def _around_save(self, inner: Callable[..., Any], file: Any, record: Any) -> None:
        self._come_to(Moment.SAVES, "record")
        inner(file, record)
        self._come_to(Moment.SAVED, "record")

    def _come_to(self, moment: Moment, what: str) -> None:
        try:
            skip, _, name = self._armed.read_text().partition(" ")
        except FileNotFoundError:
            self._came.clear()
            return
        if name != point(moment, what):
            return
        self._came[name] = self._came.get(name, 0) + 1
        if self._came[name] > int(skip):
            try:
                self._armed.rename(self._reached)
            except FileNotFoundError:
                return  # another process was faster, and is the one that dies
            os.kill(os.getpid(), signal.SIGKILL)
