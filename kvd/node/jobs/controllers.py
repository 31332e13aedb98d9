"""The commands of a server: functions from bytes to bytes, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvd.errors import NotAllowed

Controller: TypeAlias = Callable[[bytes], bytes]


def ping(body: bytes) -> bytes:
    """The controller that every server has: it answers with what it was sent."""
    return body


def installed_controllers() -> dict[str, Controller]:
    """The controllers by head: `ping`, and the entry points of the group `kvd.commands` installed on this machine.

    One that cannot be loaded says so when a command asks for it: it must not keep the others from working.
    """
    from importlib.metadata import entry_points  # takes a while, and most processes run no commands

    controllers: dict[str, Controller] = {"ping": ping}
    for entry in entry_points(group="kvd.commands"):
        try:
            controllers[entry.name] = entry.load()
        except Exception as error:  # noqa: BLE001  importing foreign code may raise anything
            controllers[entry.name] = _broken(entry.name, error)
    return controllers


def _broken(name: str, error: Exception) -> Controller:
    text = f"the controller for {name!r} cannot be loaded on this server: {type(error).__name__}({error})"

    def refuse(_: bytes) -> bytes:
        raise NotAllowed(text)

    return refuse
