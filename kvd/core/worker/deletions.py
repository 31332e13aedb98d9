"""How a worker deletes keys. A key is gone for all once every worker has deleted it.

The home of a key is told first, and answers when the key is gone there; then the leaders of its other slices drop them.
A deletion that was begun goes on when its call has timed out, like a push. Later calls on its keys wait for its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvd.core import requests
from kvd.core.machine import Received
from kvd.core.membership import ViewState
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import WAITING, InFlight
from kvd.core.worker.key_directory import LookUp, by_home, in_messages, not_joined
from kvd.core.worker.key_making import KeyMaking
from kvd.core.worker.keys import KeyState, KeyTable, WorkerKey
from kvd.core.worker.participation import Participation
from kvd.core.worker.servers import Servers
from kvd.errors import KvdError, NotAllowed
from kvd.protocol.messages import Delete, Drop, KeyId


@dataclass(slots=True, eq=False)
class _DeleteCall:
    """A DeleteKeys under way: how many of its keys are still there, and the first error."""

    call: InFlight
    remaining: int
    error: KvdError | None = None


class Deletions:
    """The keys that are being deleted, and who waits for that.

    Args:
        look_up: asks for keys, for the calls that queue for them.
        enqueue: lets a call wait for its turn at keys; it goes on in `start`.
        wake: calls that queue for a key may go on.
    """

    def __init__(
        self,
        view: ViewState,
        servers: Servers,
        keys: KeyTable,
        participation: Participation,
        asker: Asker,
        calls: CallBook,
        making: KeyMaking,
        look_up: LookUp,
        enqueue: Callable[[InFlight, Sequence[WorkerKey]], None],
        wake: Callable[[WorkerKey], None],
    ) -> None:
        self._view = view
        self._servers = servers
        self._keys = keys
        self._participation = participation
        self._asker = asker
        self._calls = calls
        self._making = making
        self._look_up = look_up
        self._enqueue = enqueue
        self._wake = wake
        self._ending: dict[WorkerKey, list[_DeleteCall]] = {}  # of each key that is being deleted: the calls
        self._after: dict[WorkerKey, list[tuple[InFlight, Callable[[], None]]]] = {}  # what waits for the end

    # ── calls in ──

    def enter(self, call: InFlight, request: requests.DeleteKeys) -> None:
        """Deletes the keys once the earlier calls on them have ended."""
        if not self._view.shards:
            self._calls.complete(call, error=not_joined())
        elif not self._participation.in_rounds:
            text = "only a worker that takes part in the rounds deletes keys"
            self._calls.complete(call, error=NotAllowed(text))
        else:
            self._enqueue(call, [self._keys.get_or_add(name) for name in dict.fromkeys(request.keys)])

    def start(self, call: InFlight, request: requests.DeleteKeys) -> KvdError | None:
        """The calls before this one have ended. Keys that are being deleted already are waited for."""
        call.start()
        waits = _DeleteCall(call, len(call.keys))
        fresh = [key for key in call.keys if key.state is not KeyState.DELETING]
        for key in call.keys:
            self._ending.setdefault(key, []).append(waits)
        for key in fresh:
            key.move_to(KeyState.DELETING)
        for home, here in by_home(fresh, self._view):
            gone = self._servers.orphan_error(home)
            for some in in_messages(here):
                if gone is not None:
                    self._failed(some, gone)
                else:
                    self._asker.ask_leader(None, home, Delete(0, _ids_of(some)), partial(self._answered, some, home))
        if not call.keys:
            self._calls.complete(call)
        return None

    def afterwards(self, key: WorkerKey, call: InFlight, act: Callable[[], None]) -> Callable[[], None]:
        """Act when the deletion of the key has ended, if the call still waits for it. Return a function that cancels
        that."""
        entry = (call, act)
        self._after.setdefault(key, []).append(entry)
        return lambda: self._after[key].remove(entry)

    def servers_changed(self) -> None:
        """Some partitions have lost their leaders: who waits for them is told. The deletions go on, should these come
        back."""
        if not self._servers.orphans:
            return
        for key, waiting in list(self._ending.items()):
            for partition in key.lineages:
                gone = self._servers.orphan_error(partition)
                if gone is not None:
                    for waits in waiting:
                        self._calls.complete(waits.call, error=gone)
                    self._wake(key)

    # ── answers in ──

    def _answered(self, keys: Sequence[WorkerKey], home: int, event: Received) -> None:
        """The home of the keys has taken them away, or refuses to."""
        error = self._asker.error_of(event)
        if error is not None:
            self._failed(keys, error)
            return
        slices_left = Counter[WorkerKey]()  # partitions that still have slices
        by_partition: dict[int, list[WorkerKey]] = {}
        for key in keys:
            for partition in sorted(set(key.partitions) - {home}):
                if partition not in self._servers.orphans:
                    by_partition.setdefault(partition, []).append(key)
                    slices_left[key] += 1

        def dropped(some: Sequence[WorkerKey], event: Received) -> None:
            """A server that refuses was restarted: it has no slices to drop."""
            slices_left.subtract(some)
            self._gone([key for key in some if not slices_left[key]])

        for partition, here in by_partition.items():
            for some in in_messages(here):
                self._asker.ask_leader(None, partition, Drop(0, _ids_of(some)), partial(dropped, some))
        self._gone([key for key in keys if not slices_left[key]])

    def _gone(self, keys: Sequence[WorkerKey]) -> None:
        for key in keys:
            self._making.deleted(key)
        for key in keys:
            self._end(key, None)

    def _failed(self, keys: Sequence[WorkerKey], error: KvdError) -> None:
        """The keys stay."""
        for key in keys:
            key.move_to(KeyState.READY)
            if key.lost_partitions(self._view):
                key.move_to(KeyState.LOST)
        for key in keys:
            self._end(key, error)

    def _end(self, key: WorkerKey, error: KvdError | None) -> None:
        """The key is gone, or stays: those who waited for that go on."""
        for waits in self._ending.pop(key):
            waits.error = waits.error or error
            waits.remaining -= 1
            if waits.remaining == 0:
                self._calls.complete(waits.call, error=waits.error)
        for call, act in self._after.pop(key, []):
            if call.state is WAITING:
                call.let_go()
                act()
        if key.state is KeyState.UNKNOWN and key.queue and not key.inits:
            self._look_up([key])
        self._wake(key)

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError unless exactly the keys that are DELETING have a deletion under way."""
        deleting = {key for key in self._keys.by_name.values() if key.state is KeyState.DELETING}
        assert deleting == self._ending.keys(), f"{deleting} are being deleted, {self._ending.keys()} are noted"
        assert self._after.keys() <= deleting, "something waits for the end of no deletion"


def _ids_of(keys: Sequence[WorkerKey]) -> tuple[KeyId, ...]:
    return tuple([KeyId(key.name, key.creation) for key in keys])
