"""The express way of a server in a simulator: what `kvd.node.server_express` does, with messages in place of frames.
The update of a round is a job that takes a while."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from kvd.core.machine import (
    Effect,
    Event,
    InRun,
    JobDone,
    Machine,
    Received,
    Send,
    Span,
)
from kvd.core.principals import HOLDER
from kvd.core.server.express import Round
from kvd.core.server.machine import ServerMachine
from kvd.core.server.router import ServerRouter
from kvd.protocol.codec import encode
from kvd.protocol.fixed import PUSH_HEAD_NBYTES, PushNumbers, numbers_of, push_numbers
from kvd.protocol.messages import Done, PushBatch, Values


class ServerSteps:
    """The express way of one run in a server."""

    def __init__(self) -> None:
        self._rounds: dict[int, Round] = {}  # whose update is under way, by its job

    def step(self, machine: ServerMachine, event: Event, now: float) -> list[Effect] | None:
        """What the machine does with a push that is held, or with the end of a job that made a round. None: the event
        is for `machine.step`, as when a heartbeat is due: it goes with the event, as without the express way, where a
        real server waits for its timer."""
        if machine.session.is_due(now):
            return None
        if isinstance(event, JobDone):
            round_ = self._rounds.pop(event.job, None)
            if round_ is None or event.error is not None or not machine.fast.express.end(round_, event.result):
                return None
            return _answers(round_, event.result)
        if not isinstance(event, Received) or not isinstance(event.message, PushBatch) or event.principal is not HOLDER:
            return None
        numbers = push_numbers(event.message)
        if numbers is None or event.payload is None:
            return None
        _check_header(machine, event.message, numbers)
        round_ = machine.fast.lane.hold(event.peer, event.sender, numbers, event.payload, event.nbytes, None)
        if round_ is None or round_.update is None:
            return None if round_ is None else []
        self._rounds[round_.update.job] = round_
        return [round_.update]


class ExpressSteps:
    """Steps machines."""

    def __init__(self) -> None:
        self._servers: WeakKeyDictionary[ServerMachine, ServerSteps] = WeakKeyDictionary()

    def step(self, machine: Machine, event: Event, now: float) -> list[Effect]:
        """As `machine.step`."""
        effects = None
        if isinstance(machine, ServerRouter) and isinstance(event, Received | JobDone):
            of_run = machine.machine_of(event.run)
            if of_run is not None:
                own: Any = self._servers.setdefault(of_run, ServerSteps()).step(of_run, event, now)
                effects = own and [InRun(event.run, of_run.epoch, own)]
        return machine.step(event, now) if effects is None else effects


def _answers(round_: Round, value: Any) -> list[Effect]:
    """To those whose pushes the round has."""
    version, nbytes = round_.group.log.version, round_.group.nbytes
    return [
        Send(push.peer, Values(push.numbers.request, (version,)), (Span(value, 0, nbytes),))
        if push.numbers.pull
        else Send(push.peer, Done(push.numbers.request))
        for push in round_.held.values()
    ]


def _check_header(machine: ServerMachine, push: PushBatch, numbers: PushNumbers) -> None:
    """What the shell reads out of the header is what the message says."""
    header = encode(push, machine.incarnation, machine.epoch, machine.run)
    assert numbers_of(header[PUSH_HEAD_NBYTES:]) == numbers, f"other numbers in the header of {push}"
