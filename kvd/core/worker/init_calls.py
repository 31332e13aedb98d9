"""The InitKeys calls of a program: worker 0 makes the keys, the others wait until they are live.

Calls on a key that come while an init of it is under way queue behind it: they start when it has ended, or fail with
its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvd.core import requests
from kvd.core.session import SchedulerSession
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.key_directory import KeyDirectory, Search, not_joined
from kvd.core.worker.key_making import KeyMaking
from kvd.core.worker.keys import KeyState, KeyTable, WorkerKey
from kvd.core.worker.participation import Participation
from kvd.errors import KeyExists, KvdError, NotAllowed, RemoteError
from kvd.protocol.messages import Made, MemberState
from kvd.protocol.specs import KeySpec


@dataclass(slots=True, eq=False)
class _InitCall:
    """An InitKeys under way: what it wants, which of its keys are still to come, and the first error."""

    call: InFlight
    items: dict[WorkerKey, requests.Item]
    open: dict[WorkerKey, None]  # in their order
    error: KvdError | None = None


class InitCalls:
    """Completes each InitKeys when all of its keys are live, with the first error if some cannot be.

    Args:
        wake: a key became ready: the calls that queue for it go on.
        fail_waiting: a key cannot be had: the calls that queue for it fail.
        afterwards: acts when the deletion of a key has ended, if the call still waits for that. Returns what ends that.
    """

    def __init__(
        self,
        session: SchedulerSession,
        keys: KeyTable,
        participation: Participation,
        calls: CallBook,
        directory: KeyDirectory,
        making: KeyMaking,
        wake: Callable[[WorkerKey], None],
        fail_waiting: Callable[[WorkerKey, KvdError], bool],
        afterwards: Callable[[WorkerKey, InFlight, Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._session = session
        self._view = session.view
        self._keys = keys
        self._participation = participation
        self._calls = calls
        self._directory = directory
        self._making = making
        self._wake = wake
        self._fail_waiting = fail_waiting
        self._afterwards = afterwards

    def init_keys(self, call: InFlight, request: requests.InitKeys) -> None:
        error = self._error(request)
        if error is not None or not request.items:
            self._calls.complete(call, error=error)
            return
        call.set_keys([self._keys.get_or_add(item.key) for item in request.items])
        items = dict(zip(call.keys, request.items, strict=True))
        for key in items:
            key.inits += 1
        self._begin(_InitCall(call, items, dict.fromkeys(items)))

    def _begin(self, init: _InitCall) -> None:
        """Make or find the keys, once the deletion of each has ended."""
        call, items = init.call, init.items
        last = next((key for key in items if key.state is KeyState.DELETING), None)
        if last is not None:
            forget = self._afterwards(last, call, partial(self._begin, init))
            call.hold(partial(self._given_up, init, forget))
            return
        call.start()
        call.hold(partial(self._given_up, init, None))
        wanted = []
        for key in items:
            if key.is_initialised_here:
                self._ended(init, key, self._exists_error(key, items[key]))
            else:
                wanted.append(key)
        if self._session.rank == 0 and not self._session.predecessor:
            self._make(init, wanted)
        else:
            self._find_or_make(init, wanted)

    def _error(self, request: requests.InitKeys) -> KvdError | None:
        """Why no key of the call can be made."""
        if not self._view.shards:
            return not_joined()
        if not (self._participation.in_rounds or self._participation.is_apart) and request.items:
            return NotAllowed("only a worker that takes part in the rounds makes keys")
        names = [item.key for item in request.items]
        if len(set(names)) < len(names):
            seen: set[str] = set()
            twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            return NotAllowed(f"key {twice!r} is named twice in one init: give it one value", key=twice)
        return None

    def _ended(self, init: _InitCall, key: WorkerKey, error: KvdError | None) -> None:
        """One key of an InitKeys is live, or has failed."""
        if error is None:
            key.is_initialised_here = True
        self._let_go_on(init, key, error)
        init.error = init.error or error
        if not init.open:
            init.call.let_go()
            self._calls.complete(init.call, error=init.error)

    def _given_up(self, init: _InitCall, forget: Callable[[], None] | None, call: InFlight) -> None:
        """The caller waits no more. The calls behind find out themselves what became of the keys."""
        if forget is not None:
            forget()
        for key in list(init.open):
            self._let_go_on(init, key, None)

    def _let_go_on(self, init: _InitCall, key: WorkerKey, error: KvdError | None) -> None:
        """An init of the key has ended: the calls behind the last one start, or fail."""
        if key in init.open:
            del init.open[key]
            key.inits -= 1
        if key.state is not KeyState.UNKNOWN:
            self._wake(key)
        elif key.queue and not key.inits:
            if error is None or isinstance(error, KeyExists):
                self._directory.look_up([key])
            else:
                self._fail_waiting(key, error)

    def _make(self, init: _InitCall, keys: Sequence[WorkerKey]) -> None:
        self._making.make(init.call, [(key, init.items[key]) for key in keys], partial(self._ended, init))

    def _find_or_make(self, init: _InitCall, keys: Sequence[WorkerKey]) -> None:
        """Rank 0 after a restart looks whether its predecessor made the keys; the others wait until they are live."""

        def found(key: WorkerKey, made: Made) -> None:
            error = self._spec_error(key, init.items[key], made.spec)
            if error is not None:
                self._ended(init, key, error)
            else:
                self._directory.found(key, made, partial(self._ended, init, key))

        def failed(some: Sequence[WorkerKey], error: KvdError) -> None:
            for key in some:
                self._ended(init, key, error)

        def missing(some: Sequence[WorkerKey]) -> None:
            if is_maker:
                self._make(init, some)
            else:  # they were live, and deleted since
                self._directory.ask(init.call, some, search, wait=True)

        is_maker = self._session.rank == 0
        search = Search(found, missing, failed)
        self._directory.ask(init.call, keys, search, wait=not is_maker)

    def _exists_error(self, key: WorkerKey, item: requests.Item) -> KvdError:
        """What is wrong with making a key again that this process has made, or found."""
        assert key.spec is not None
        assert item.spec is not None
        try:
            key.spec.check_same(item.spec, key.name)
            key.spec.check_merge(item.spec, key.name, self._view.settings.merge)
        except RemoteError as error:
            return error
        text = f"key {key.name!r} is live already: init makes a key once; push changes its value"
        return KeyExists(text, key=key.name)

    def _spec_error(self, key: WorkerKey, item: requests.Item, spec: KeySpec) -> KvdError | None:
        """Why a key that is live already is not the one that the call wants to make."""
        assert item.spec is not None
        try:
            spec.check_same(item.spec, key.name)
            spec.check_merge(item.spec, key.name, self._view.settings.merge)
        except RemoteError as error:
            return error
        if self._session.rank == 0 and self._session.predecessor == MemberState.LEFT:
            return KeyExists(f"key {key.name!r} is live already: pull it, or take another name", key=key.name)
        return None
