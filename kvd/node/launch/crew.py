"""The processes of a running job."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.node.launch.child import Child
from kvd.node.launch.output import OutputRelay


class Crew:
    """The processes of a job: those that run or whose end has yet to be dealt with, and those that have ended.

    Attributes:
        scheduler: None before it is started, and while it waits for a restart.
        servers: by their index.
        workers: by their rank.
        ended: those whose end was dealt with.
        given_up_servers: indices of those that are not started again, and without which the job goes on.
        given_up_workers: ranks of the same.
    """

    def __init__(self) -> None:
        self.scheduler: Child | None = None
        self.servers: dict[int, Child] = {}
        self.workers: dict[int, Child] = {}
        self.ended: list[Child] = []
        self.given_up_servers: set[int] = set()
        self.given_up_workers: set[int] = set()

    def __iter__(self) -> Iterator[Child]:
        """All but those that have ended: daemons first."""
        if self.scheduler is not None:
            yield self.scheduler
        yield from self.servers.values()
        yield from self.workers.values()

    def in_order_of_end(self) -> Iterator[list[Child]]:
        """Those who end first come first."""
        yield list(self.workers.values())
        yield list(self.servers.values())
        yield [] if self.scheduler is None else [self.scheduler]

    def end(self) -> None:
        """All of them have ended, and that was dealt with."""
        self.ended += list(self)
        self.scheduler = None
        self.servers.clear()
        self.workers.clear()
        self.given_up_servers.clear()
        self.given_up_workers.clear()

    def pid_of(self, name: str) -> int | None:
        """The pid of the process with this node id, if it runs."""
        return next((child.pid for child in self if child.name == name and not child.exited.done()), None)

    def connecting_to(self, host: str) -> list[Child]:
        """Those whose connection to a host is being made."""
        return [c for c in self if c.host == host and not (c.connected.done() or c.exited.done())]

    def outputs(self) -> list[OutputRelay]:
        """The output of every process that there was."""
        return [child.output for child in (*self.ended, *self)]
