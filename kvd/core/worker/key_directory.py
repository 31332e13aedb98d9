"""How a worker finds keys that were made. The partition of slice 0 of a key is its home, whose leader answers look-ups.

Keys are asked for in lists: one message has as many as its header holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from kvd.core import requests
from kvd.core.machine import Received
from kvd.core.membership import ViewState
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.clocks import WorkerClocks
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.keys import KeyState, WorkerKey
from kvd.core.worker.message_plans import HEADER_BUDGET, header_nbytes
from kvd.core.worker.participation import Participation
from kvd.core.worker.servers import Servers
from kvd.core.worker.transfer_plans import TransferPlans
from kvd.errors import KeyNotFound, KvdError, NotAllowed, ProtocolError
from kvd.protocol.messages import MAX_PARTS, NO_KEY, KeyInfo, Lookup, Made


class Search(NamedTuple):
    """What is done with the answers to a question for keys."""

    found: Callable[[WorkerKey, Made], None]
    missing: Callable[[Sequence[WorkerKey]], None]  # these are not live
    failed: Callable[[Sequence[WorkerKey], KvdError], None]  # there is no answer for these


class LookUp(Protocol):
    """Asks for keys that are not known yet, for the calls that queue for them."""

    def __call__(self, keys: Sequence[WorkerKey], *, wait: bool = False) -> None: ...


class KeyDirectory:
    """Finds keys.

    Args:
        wake: a key became ready, or is lost: the calls that queue for it go on.
        fail_waiting: a key cannot be had: the calls that queue for it fail. True if some wait until it is live.
    """

    def __init__(
        self,
        session: SchedulerSession,
        servers: Servers,
        plans: TransferPlans,
        participation: Participation,
        asker: Asker,
        calls: CallBook,
        clocks: WorkerClocks,
        wake: Callable[[WorkerKey], None],
        fail_waiting: Callable[[WorkerKey, KvdError], bool],
    ) -> None:
        self._session = session
        self._view = session.view
        self._servers = servers
        self._plans = plans
        self._participation = participation
        self._asker = asker
        self._calls = calls
        self._clocks = clocks
        self._wake = wake
        self._fail_waiting = fail_waiting

    # ── questions ──

    def ask(self, call: InFlight | None, keys: Sequence[WorkerKey], search: Search, *, wait: bool) -> None:
        """Asks the homes of these keys. With `wait`, they answer when the keys are live.

        Args:
            call: the call that asks; None if the questions stand alone.
        """
        for home, here in by_home(keys, self._view):
            gone = self._servers.orphan_error(home)
            if gone is not None:
                search.failed(here, gone)
            else:
                for some in in_messages(here):
                    question = Lookup(0, tuple([key.name for key in some]), wait)
                    self._asker.ask_leader(call, home, question, partial(self._answered, call, some, search, wait))

    def _answered(
        self, call: InFlight | None, keys: Sequence[WorkerKey], search: Search, wait: bool, event: Received
    ) -> None:
        message = event.message
        if not isinstance(message, KeyInfo) or len(message.keys) > len(keys):
            text = f"the server answered with a {type(message).__name__} that does not fit"
            search.failed(keys, self._asker.error_of(event) or ProtocolError(text))
            return
        missing = []
        for key, place in zip(keys, message.keys, strict=False):
            if NO_KEY < place < len(message.made) and message.made[place].creation >= key.creation:
                search.found(key, message.made[place])
            else:
                missing.append(key)
        if missing:
            search.missing(missing)
        rest = keys[len(message.keys) :]
        if rest:
            self.ask(call, rest, search, wait=wait)

    # ── for the calls that queue ──

    def look_up(self, keys: Sequence[WorkerKey], *, wait: bool = False) -> None:
        """Asks for keys, for the calls that queue for them. With `wait`, the answer comes when they are live."""
        for key in keys:
            key.move_to(KeyState.ASKING)
        if not self._view.shards:
            self._cannot_be_had(keys, not_joined())
        else:
            self.ask(None, keys, Search(self._found_by_queue, self._not_there, self._cannot_be_had), wait=wait)

    def _found_by_queue(self, key: WorkerKey, made: Made) -> None:
        self.found(key, made, partial(self._looked_up, key))

    def _not_there(self, keys: Sequence[WorkerKey]) -> None:
        for key in keys:
            self._looked_up(key, not_found(key.name))

    def _cannot_be_had(self, keys: Sequence[WorkerKey], error: KvdError) -> None:
        for key in keys:
            self._looked_up(key, error)

    def _looked_up(self, key: WorkerKey, error: KvdError | None) -> None:
        """The calls that queue for the key go on, or fail. While an init of it is under way, they wait for its end."""
        if error is None or key.state in (KeyState.READY, KeyState.DELETING, KeyState.LOST):  # found in another way
            self._wake(key)
            return
        key.move_to(KeyState.UNKNOWN)
        if not key.inits and self._fail_waiting(key, error):
            self.look_up([key], wait=True)

    def describe(self, call: InFlight, request: requests.DescribeKey) -> None:
        """Completes the call with the spec of its key."""
        (key,) = call.keys
        self._calls.complete(call, key.spec)

    # ── a key that is live ──

    def found(self, key: WorkerKey, made: Made, then: Callable[[KvdError | None], None]) -> None:
        """The key is live. A worker whose rank had an earlier holder takes over its clock first."""
        if key.state in (KeyState.READY, KeyState.DELETING):
            then(None)
            return
        key.place(made.spec, made.creation, self._view)
        self._plans.clear()

        def clock_known(error: KvdError | None) -> None:
            if error is None and key.state is not KeyState.DELETING:
                key.move_to(KeyState.READY)
            then(error)

        has_clock = self._session.predecessor or self._participation.has_missed_rounds
        if self._participation.is_observer or not has_clock:
            clock_known(None)
        else:
            self._clocks.take_over(key, clock_known)


def by_home(keys: Sequence[WorkerKey], view: ViewState) -> list[tuple[int, list[WorkerKey]]]:
    """The keys by their home, each in the given order."""
    homes: dict[int, list[WorkerKey]] = {}
    for key in keys:
        homes.setdefault(view.partition_of(key.name, 0), []).append(key)
    return list(homes.items())


def in_messages(keys: Sequence[WorkerKey], *, with_specs: bool = False) -> Iterator[list[WorkerKey]]:
    """The keys in lists that fit into a header each, with their specs if these go along."""
    some: list[WorkerKey] = []
    room = HEADER_BUDGET
    for key in keys:
        needed = header_nbytes(key, with_spec=with_specs)
        if some and (len(some) == MAX_PARTS or room < needed):
            yield some
            some, room = [], HEADER_BUDGET
        some.append(key)
        room -= needed
    if some:
        yield some


def not_found(name: str) -> KeyNotFound:
    text = f"no key is called {name!r}: worker 0 must init it first (kvd keys lists those there are)"
    return KeyNotFound(text, key=name)


def not_joined() -> NotAllowed:
    return NotAllowed("this node has not joined a cluster yet")
