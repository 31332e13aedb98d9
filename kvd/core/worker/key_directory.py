"""Making keys and finding them: init, publish, look up, and where a predecessor stood."""

from __future__ import annotations

from collections.abc import Callable

from kvd import errors
from kvd.core import requests
from kvd.core.machine import Received, Span
from kvd.core.membership import DONE, LEFT
from kvd.core.session import SchedulerSession
from kvd.core.worker.calls import Call, WorkerSettings
from kvd.core.worker.key_queue import KeyQueue
from kvd.core.worker.keys import ASKING, LOST, READY, UNKNOWN, WorkerKey
from kvd.core.worker.outbox import Entry
from kvd.errors import KvdError, NotAllowed
from kvd.protocol.messages import Activate, ClockQuery, Clocks, ErrorCode, Init, KeyInfo, Lookup, Publish, Refused
from kvd.protocol.specs import KeySpec


class KeyDirectory(KeyQueue):
    """How a worker comes to know its keys."""

    def __init__(self, settings: WorkerSettings, session: SchedulerSession) -> None:
        super().__init__(settings, session)
        self._rewound: int | None = None  # the clock that `rewind` named, for keys that are found later

    def _init_keys(self, call: Call, request: requests.InitKeys) -> None:
        if not self.view.shards:
            self._complete(call, error=NotAllowed("this node has not joined a cluster yet"))
            return
        call.started = True
        call.remaining = len(request.items)
        call.keys = [self._key(item.key) for item in request.items]
        if not request.items:
            self._complete(call)
        for key, item in zip(call.keys, request.items, strict=True):
            assert item.spec is not None
            if self._observer or self._left_rounds:
                self._initialised(call, key, NotAllowed("only a worker that takes part in the rounds makes keys"))
            elif key.mine:
                text = f"key {key.name!r} is live already: init makes a key once; push changes its value"
                self._initialised(call, key, errors.KeyExists(text, key=key.name))
            elif self.session.rank == 0 and not self.session.predecessor:
                self._make(call, key, item)
            else:
                self._find_or_make(call, key, item)

    def _find_or_make(self, call: Call, key: WorkerKey, item: requests.Item) -> None:
        """Rank 0 after a restart looks whether its predecessor made the key; the others wait until it is live."""
        spec = item.spec
        assert spec is not None

        def answered(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            message = event.message
            if isinstance(message, KeyInfo):
                try:
                    message.spec.check_same(spec, key.name)
                    if self.session.rank == 0 and self.session.predecessor == LEFT:
                        text = f"key {key.name!r} is live already: pull it, or take another name"
                        raise errors.KeyExists(text, key=key.name)
                except errors.RemoteError as error:
                    self._initialised(call, key, error)
                    return
                self._found(key, message.spec, lambda error: self._initialised(call, key, error))
            elif self.session.rank == 0 and isinstance(message, Refused) and message.error is ErrorCode.KEY_NOT_FOUND:
                self._make(call, key, item)
            else:
                self._initialised(call, key, self._error_of(event))

        home = self._servers.get(self.view.server_of(key.name, 0))
        gone = self._gone_error(home)
        if gone is not None:
            self._initialised(call, key, gone)
            return
        self._ask(call, home, Lookup(0, key.name, self.session.rank != 0), answered)

    def _make(self, call: Call, key: WorkerKey, item: requests.Item) -> None:
        """Rank 0: every slice to its server, then publish."""
        if key.is_publishing:
            self._publish_again(call, key, item)
            return
        spec = item.spec
        assert spec is not None
        spec = KeySpec(spec.dtype, spec.shape, self.view.settings.slice_bytes)
        self._place(key, spec)
        left = spec.num_slices
        error: KvdError | None = None

        def stored(entry: Entry, event: Received) -> None:
            nonlocal left, error
            self._settled(call, entry)
            error = error or self._error_of(event)
            left -= 1
            if left == 0:
                if error is not None:
                    self._initialised(call, key, error)
                else:
                    home = self._servers.get(key.servers[0])
                    key.is_publishing = True
                    self._ask(call, home, Publish(0, key.name, spec), published)

        def published(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            failed = self._error_of(event)
            if failed is None:
                key.state = READY
            else:
                key.is_publishing = False
            self._initialised(call, key, failed)

        for index, rank in enumerate(key.servers):
            span = Span(item.source, *spec.span(index))
            message = Init(0, key.name, spec, index)
            self._ask(call, self._servers.get(rank), message, stored, (span,))

    def _publish_again(self, call: Call, key: WorkerKey, item: requests.Item) -> None:
        """An earlier init was given up when only the answer to its Publish was missing. Others may use its
        values already."""
        assert key.spec is not None

        def answered(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            if self._error_of(event) is not None:  # it is not there (any more)
                key.is_publishing = False
                self._make(call, key, item)
                return
            key.state, key.mine = READY, True
            self._out_of_queue(key)
            text = f"key {key.name!r} is live, with the values of an init whose outcome was unknown: pull it"
            self._initialised(call, key, errors.KeyExists(text, key=key.name))

        self._ask(call, self._servers.get(key.servers[0]), Publish(0, key.name, key.spec), answered)

    def _initialised(self, call: Call, key: WorkerKey, error: KvdError | None) -> None:
        if error is None:
            key.mine = True
            self._out_of_queue(key)
        call.error = call.error or error
        call.remaining -= 1
        if call.remaining == 0:
            self._complete(call, error=call.error)

    def _look_up(self, key: WorkerKey, wait: bool = False) -> None:
        """Asks the server of slice 0 what the key is, for the calls that queue for it."""
        key.state = ASKING

        def answered(entry: Entry, event: Received) -> None:
            self._settled(None, entry)
            if isinstance(event.message, KeyInfo):
                self._found(key, event.message.spec, lambda error: self._known(key, error))
            else:
                self._known(key, self._error_of(event))

        if not self.view.shards:
            self._known(key, NotAllowed("this node has not joined a cluster yet"))
            return
        home = self._servers.get(self.view.server_of(key.name, 0))
        gone = self._gone_error(home)
        if gone is not None:
            self._known(key, gone)
            return
        self._ask(None, home, Lookup(0, key.name, wait), answered)

    def _found(self, key: WorkerKey, spec: KeySpec, then: Callable[[KvdError | None], None]) -> None:
        """The key is live. A worker whose rank had an earlier holder asks where that one stood."""
        if key.state == READY:
            then(None)
            return
        self._place(key, spec)
        if self._observer or not self.session.predecessor:
            key.state = READY
            then(None)
            return
        ranks = sorted(key.incarnations)
        left = len(ranks)
        clocks: list[Clocks] = []
        error: KvdError | None = None

        def answered(entry: Entry, event: Received) -> None:
            nonlocal left, error
            self._settled(None, entry)
            error = error or self._error_of(event)
            if isinstance(event.message, Clocks):
                clocks.append(event.message)
            left -= 1
            if left == 0:
                if error is not None:
                    then(error)
                else:
                    self._take_up(key, clocks, then)

        for rank in ranks:
            self._ask(None, self._servers.get(rank), ClockQuery(0, key.name), answered)

    def _take_up(self, key: WorkerKey, clocks: list[Clocks], then: Callable[[KvdError | None], None]) -> None:
        """After a death: the clock that all slices have counted, the step is redone from there. After a good-bye: the
        newest clock of all, and the servers are told that this rank counts again from there on."""
        if key.state == READY:  # it was asked twice at once, and has its clock
            then(None)
            return
        if self.session.predecessor not in (LEFT, DONE):
            key.clock = min(entry.lowest for entry in clocks)
            if self._rewound is not None:
                key.clock = min(key.clock, self._rewound)
            key.taken_up = key.clock
            key.state = READY
            then(None)
            return
        key.clock = key.taken_up = max(entry.highest for entry in clocks)
        left = len(key.incarnations)
        error: KvdError | None = None

        def answered(entry: Entry, event: Received) -> None:
            nonlocal left, error
            self._settled(None, entry)
            error = error or self._error_of(event)
            left -= 1
            if left == 0:
                if error is None:
                    key.floor = key.clock
                    key.state = READY
                then(error)

        for rank in sorted(key.incarnations):
            self._ask(None, self._servers.get(rank), Activate(0, key.name, key.clock), answered)

    def _known(self, key: WorkerKey, error: KvdError | None) -> None:
        """The calls that queue for the key go on, or fail."""
        if error is None or key.state in (READY, LOST):  # found in another way in the meantime
            self._out_of_queue(key)
            return
        key.state = UNKNOWN
        waiting = []
        for call in list(key.queue):
            if isinstance(error, errors.KeyNotFound) and getattr(call.request, "wait", False):
                waiting.append(call)
            else:
                self._abandon(call, error)
        if waiting:
            self._look_up(key, wait=True)
