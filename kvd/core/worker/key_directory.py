"""How a worker comes to know its keys: it initialises and publishes them, or looks them up.

Rank 0 makes the keys; the others wait until they are live. The server that leads slice 0 of a key is its home, which
answers look-ups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.core import requests
from kvd.core.machine import Peer, Received, Span
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import Call, CallBook
from kvd.core.worker.clocks import WorkerClocks
from kvd.core.worker.keys import KeyState, KeyTable, WorkerKey
from kvd.core.worker.message_plans import MessagePlans
from kvd.core.worker.participation import Participation
from kvd.core.worker.servers import Servers
from kvd.errors import KeyExists, KvdError, NotAllowed, RemoteError
from kvd.protocol.messages import ErrorCode, Init, KeyInfo, Lookup, MemberState, Publish, Refused
from kvd.protocol.specs import KeySpec


@dataclass(slots=True, eq=False)
class _InitCall:
    """An InitKeys under way: how many of its keys are still to come, and the first error."""

    call: Call
    remaining: int
    error: KvdError | None = None


class KeyDirectory:
    """Finds and makes keys.

    Args:
        wake: a key became ready, or is lost: the calls that queue for it go on.
        fail_waiting: a key cannot be had: the calls that queue for it fail. True if some wait until it is live.
    """

    def __init__(
        self,
        session: SchedulerSession,
        servers: Servers,
        keys: KeyTable,
        plans: MessagePlans,
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
        self._keys = keys
        self._plans = plans
        self._participation = participation
        self._asker = asker
        self._calls = calls
        self._clocks = clocks
        self._wake = wake
        self._fail_waiting = fail_waiting

    # ── init ──

    def init_keys(self, call: Call, request: requests.InitKeys) -> None:
        if not self._view.shards:
            self._calls.complete(call, error=_not_joined())
            return
        call.start()
        call.set_keys([self._keys.get_or_add(item.key) for item in request.items])
        if not request.items:
            self._calls.complete(call)
        init = _InitCall(call, len(request.items))
        for key, item in zip(call.keys, request.items, strict=True):
            if not self._participation.in_rounds:
                self._initialised(init, key, NotAllowed("only a worker that takes part in the rounds makes keys"))
            elif key.is_initialised_here:
                text = f"key {key.name!r} is live already: init makes a key once; push changes its value"
                self._initialised(init, key, KeyExists(text, key=key.name))
            elif self._session.rank == 0 and not self._session.predecessor:
                self._make(init, key, item)
            else:
                self._find_or_make(init, key, item)

    def _initialised(self, init: _InitCall, key: WorkerKey, error: KvdError | None) -> None:
        """One key of an InitKeys is live, or has failed."""
        if error is None:
            key.is_initialised_here = True
            self._wake(key)
        init.error = init.error or error
        init.remaining -= 1
        if init.remaining == 0:
            self._calls.complete(init.call, error=init.error)

    def _find_or_make(self, init: _InitCall, key: WorkerKey, item: requests.Item) -> None:
        """Rank 0 after a restart looks whether its predecessor made the key; the others wait until it is live."""
        is_maker = self._session.rank == 0

        def answered(event: Received) -> None:
            message = event.message
            if isinstance(message, KeyInfo):
                error = self._init_error(key, item, message.spec)
                if error is not None:
                    self._initialised(init, key, error)
                else:
                    self._found(key, message.spec, lambda error: self._initialised(init, key, error))
            elif is_maker and isinstance(message, Refused) and message.error is ErrorCode.KEY_NOT_FOUND:
                self._make(init, key, item)
            else:
                self._initialised(init, key, self._asker.error_of(event))

        home = self._home_of(key)
        gone = self._servers.gone_error(home)
        if gone is not None:
            self._initialised(init, key, gone)
        else:
            self._asker.ask(init.call, home, Lookup(0, key.name, not is_maker), answered)

    def _init_error(self, key: WorkerKey, item: requests.Item, spec: KeySpec) -> KvdError | None:
        """Why a key that is live already is not the one that the call wants to make."""
        assert item.spec is not None
        try:
            spec.check_same(item.spec, key.name)
        except RemoteError as error:
            return error
        if self._session.rank == 0 and self._session.predecessor == MemberState.LEFT:
            return KeyExists(f"key {key.name!r} is live already: pull it, or take another name", key=key.name)
        return None

    def _make(self, init: _InitCall, key: WorkerKey, item: requests.Item) -> None:
        """Rank 0: every slice goes to its server; when all are there, the key is published."""
        if key.is_publishing:
            self._publish_again(init, key, item)
            return
        assert item.spec is not None
        spec = KeySpec(item.spec.dtype, item.spec.shape, self._view.settings.slice_bytes)
        self._place(key, spec)

        def stored(answers: list[Received], error: KvdError | None) -> None:
            if error is not None:
                self._initialised(init, key, error)
                return
            key.is_publishing = True
            self._asker.ask(init.call, self._servers.peer_of(key.servers[0]), Publish(0, key.name, spec), published)

        def published(event: Received) -> None:
            error = self._asker.error_of(event)
            if error is None:
                key.move_to(KeyState.READY)
            else:
                key.is_publishing = False
            self._initialised(init, key, error)

        questions = [
            (self._servers.peer_of(rank), Init(0, key.name, spec, index), (Span(item.source, *spec.span(index)),))
            for index, rank in enumerate(key.servers)
        ]
        self._asker.ask_all(init.call, questions, stored)

    def _publish_again(self, init: _InitCall, key: WorkerKey, item: requests.Item) -> None:
        """An earlier init was given up when only the answer to its Publish was missing. Others may use its values
        already."""
        assert key.spec is not None

        def answered(event: Received) -> None:
            if self._asker.error_of(event) is not None:  # it is not there, or not any more
                key.is_publishing = False
                self._make(init, key, item)
                return
            key.move_to(KeyState.READY)
            key.is_initialised_here = True
            self._wake(key)
            text = f"key {key.name!r} is live, with the values of an init whose outcome was unknown: pull it"
            self._initialised(init, key, KeyExists(text, key=key.name))

        home = self._servers.peer_of(key.servers[0])
        self._asker.ask(init.call, home, Publish(0, key.name, key.spec), answered)

    # ── look-up ──

    def look_up(self, key: WorkerKey, *, wait: bool = False) -> None:
        """Asks for a key, for the calls that queue for it. With `wait`, the answer comes when it is live."""
        key.move_to(KeyState.ASKING)

        def answered(event: Received) -> None:
            if isinstance(event.message, KeyInfo):
                self._found(key, event.message.spec, lambda error: self._looked_up(key, error))
            else:
                self._looked_up(key, self._asker.error_of(event))

        if not self._view.shards:
            self._looked_up(key, _not_joined())
            return
        home = self._home_of(key)
        gone = self._servers.gone_error(home)
        if gone is not None:
            self._looked_up(key, gone)
        else:
            self._asker.ask(None, home, Lookup(0, key.name, wait), answered)

    def _looked_up(self, key: WorkerKey, error: KvdError | None) -> None:
        """The calls that queue for the key go on, or fail."""
        if error is None or key.state in (KeyState.READY, KeyState.LOST):  # found in another way meanwhile
            self._wake(key)
            return
        key.move_to(KeyState.UNKNOWN)
        if self._fail_waiting(key, error):
            self.look_up(key, wait=True)

    def _found(self, key: WorkerKey, spec: KeySpec, then: Callable[[KvdError | None], None]) -> None:
        """The key is live. A worker whose rank had an earlier holder takes over its clock first."""
        if key.state is KeyState.READY:
            then(None)
            return
        self._place(key, spec)

        def clock_known(error: KvdError | None) -> None:
            if error is None:
                key.move_to(KeyState.READY)
            then(error)

        if self._participation.is_observer or not self._session.predecessor:
            clock_known(None)
        else:
            self._clocks.take_over(key, clock_known)

    def describe(self, call: Call, request: requests.DescribeKey) -> None:
        """Completes the call with the spec of its key."""
        (key,) = call.keys
        self._calls.complete(call, key.spec)

    def _place(self, key: WorkerKey, spec: KeySpec) -> None:
        key.place(spec, self._view, self._servers)
        self._plans.clear()

    def _home_of(self, key: WorkerKey) -> Peer:
        return self._servers.peer_of(self._view.server_of(key.name, 0))


def _not_joined() -> NotAllowed:
    return NotAllowed("this node has not joined a cluster yet")
