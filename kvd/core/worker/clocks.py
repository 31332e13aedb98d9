"""Where the clocks of this worker stand when they do not just count up: after a predecessor, and after `rewind`."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core import requests
from kvd.core.machine import Received
from kvd.core.places import START, Inheritance, Stopped
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker, Question
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.keys import KeyState, KeyTable, WorkerKey
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.predecessor import Predecessor
from kvd.core.worker.servers import Servers
from kvd.core.worker.steps import StepCounter
from kvd.errors import KeyNotFound, KvdError, NotAllowed
from kvd.protocol.messages import Activate, ClockQuery, Clocks, ComeTo, MemberState

# Predecessors after which a worker does not go on: it begins where the rounds are.
STARTS_ANEW = (MemberState.LEFT, MemberState.DONE, MemberState.LOST, MemberState.BACK)


class WorkerClocks:
    """Takes over the clocks of a predecessor with the same rank, and goes back to earlier ones."""

    def __init__(
        self,
        session: SchedulerSession,
        servers: Servers,
        keys: KeyTable,
        asker: Asker,
        calls: CallBook,
        pushes: OpenPushes,
        steps: StepCounter,
        predecessor: Predecessor,
        participation: Participation,
    ) -> None:
        self._session = session
        self._servers = servers
        self._keys = keys
        self._asker = asker
        self._calls = calls
        self._pushes = pushes
        self._steps = steps
        self._predecessor = predecessor
        self._participation = participation
        self._rewound: int | None = None  # the clock that `rewind` named, for keys that are found later

    @property
    def in_rounds(self) -> bool:
        """See `Participation.in_rounds`."""
        return self._participation.in_rounds

    @property
    def is_apart(self) -> bool:
        """See `Participation.is_apart`."""
        return self._participation.is_apart

    def take_over(self, key: WorkerKey, then: Callable[[KvdError | None], None]) -> None:
        """Asks the servers of the key where the predecessor stood. `then` gets the error if one refuses."""

        window = key.window

        def answered(answers: list[Received], error: KvdError | None) -> None:
            if error is None and key.window is not window:
                error = KeyNotFound(f"key {key.name!r} was deleted", key=key.name)
            if error is not None:
                then(error)
                return
            clocks = [event.message for event in answers if isinstance(event.message, Clocks)]
            self._go_on_from(key, clocks, then)

        query = ClockQuery(0, key.name, self._predecessor.place)
        questions = [self._asker.to_leader(partition, query) for partition in key.lineages]
        self._asker.ask_all(None, questions, answered)

    def _go_on_from(self, key: WorkerKey, clocks: list[Clocks], then: Callable[[KvdError | None], None]) -> None:
        """After a death: from the clock that all slices have counted, or from the beginning of the step in which the
        predecessor stopped, since that is redone. After a departure or a loss: from the newest clock of all, and the
        servers are told that this rank counts again from there on."""
        if key.state in (KeyState.READY, KeyState.DELETING):  # it was asked for twice at once, and has its clock
            then(None)
            return
        if self._participation.is_apart:  # it takes the clock again when it takes part again
            self._start_at(key, max(entry.highest for entry in clocks))
            then(None)
            return
        goes_on = self._session.predecessor not in STARTS_ANEW
        passed_by = any(entry.passed_by for entry in clocks) or self._participation.has_missed_rounds
        if goes_on and not passed_by:
            place = max(entry.place for entry in clocks)
            left = Inheritance(place, min(entry.lowest for entry in clocks), min(entry.begun for entry in clocks))
            first = min(left.begun, left.counted) if self._predecessor.is_redone else left.counted
            key.window.inherit(left, first if self._rewound is None else min(first, self._rewound))
            self._steps.reached(key.window.clock)
            then(None)
            return
        self._start_at(key, max(entry.highest for entry in clocks))
        self._activate(key, then)

    def take_again(self, key: WorkerKey, then: Callable[[KvdError | None], None]) -> None:
        """Asks where the rounds of a known key are that wait for this worker again. Where its slices are at different
        ones, all are taken to the latest."""
        partitions = list(key.lineages)

        def answered(answers: list[Received], error: KvdError | None) -> None:
            if error is not None:
                then(error)
                return
            clocks = [event.message for event in answers if isinstance(event.message, Clocks)]
            self._start_at(key, max(entry.highest for entry in clocks))
            if min(entry.lowest for entry in clocks) == key.window.clock:
                key.window.resume()
                then(None)
            else:
                self._activate(key, then)

        questions = [self._asker.to_leader(partition, ClockQuery(0, key.name)) for partition in partitions]
        self._asker.ask_all(None, questions, answered)

    def _start_at(self, key: WorkerKey, clock: int) -> None:
        key.window.start_at(clock)
        self._steps.reached(clock)

    def _activate(self, key: WorkerKey, then: Callable[[KvdError | None], None]) -> None:
        """The rounds of the key after the present clock wait for this worker."""
        window = key.window

        def activated(answers: list[Received], error: KvdError | None) -> None:
            if error is None:
                window.resume()
            then(error)

        message = Activate(0, key.name, key.window.clock, key.creation)
        questions = [self._asker.to_leader(partition, message) for partition in key.lineages]
        self._asker.ask_all(None, questions, activated)

    def rewind(self, call: InFlight, request: requests.Rewind) -> None:
        """Sets back the clocks of the keys that are known, and of those that are found later."""
        if self._pushes:
            self._calls.complete(call, error=NotAllowed("rewind while pushes are under way: call flush first"))
            return
        self._rewound = request.clock
        for key in self._keys.by_name.values():
            key.window.rewind(request.clock)
        self._steps.go_back(max([key.clock for key in self._keys.by_name.values()], default=0))
        self._begin_again(call)

    def resume(self, call: InFlight, request: requests.Resume) -> None:
        """Goes on after all that counted of the predecessor: the program knows where it is."""
        if self._pushes:
            self._calls.complete(call, error=NotAllowed("resume while pushes are under way: call it before the first"))
            return
        for key in self._keys.by_name.values():
            key.window.catch_up()
        self._begin_again(call)

    def pass_over(self, call: InFlight, request: requests.PassOver) -> None:
        """Goes on after the step in which the predecessor stopped."""
        if self._pushes:
            self._calls.complete(call, error=NotAllowed("a step is passed over before any of its pushes"))
            return
        for key in self._keys.by_name.values():
            key.window.catch_up()
            self._steps.reached(key.clock)
        self._predecessor.pass_over()
        self._calls.complete(call)

    def _begin_again(self, call: InFlight) -> None:
        """The places of the predecessor's program mean nothing any more, here and on the servers."""
        has_place = self._predecessor.place != START
        self._predecessor.forget()
        if has_place:
            self.come_to(call, requests.ComeTo(START))
        else:
            self._calls.complete(call)

    def come_to(self, call: InFlight, request: requests.ComeTo) -> None:
        """Tells all servers where the program is."""
        message = ComeTo(0, request.place)
        told = self._servers.whoever_leads(only_there=True)
        self._asker.gather(call, [Question(peer, message, (), partition) for peer, partition in told])

    def stopped(self) -> Stopped | None:
        """Where the program of a predecessor stopped that did not leave in good order; None without one."""
        if self._session.predecessor in (None, MemberState.LEFT):
            return None
        is_new = self._session.predecessor is MemberState.BACK
        return Stopped(self._predecessor.place, self._predecessor.trained, self.inherited, is_new)

    def inherited(self, name: str) -> Inheritance | None:
        """What a predecessor has left in the key; None without one, or while the key is not known."""
        key = self._keys.by_name.get(name)
        return None if key is None else key.own_window.inherited

    def clock_of(self, call: InFlight, request: requests.ClockOf) -> None:
        """Completes the call with the clock of its key."""
        (key,) = call.keys
        self._calls.complete(call, key.clock)

    def has_pushed(self, name: str) -> bool:
        """Whether this incarnation has pushed to the key since it took the clock over, or went back."""
        key = self._keys.by_name.get(name)
        return key is not None and key.has_pushed

    def explain(self) -> dict[str, int]:
        """The clocks of the keys that are ready."""
        return {key.name: key.clock for key in self._keys.by_name.values() if key.state is KeyState.READY}
