"""Calls on keys wait for their turn: behind earlier calls on the same keys, and until all their keys let them start.

A key lets a call start when it is known, and a push only within its push window. A key that this worker is about to
make is not looked up: the end of its init lets the calls start, or fails them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from kvd.core import requests
from kvd.core.membership import name_of
from kvd.core.session import SchedulerSession
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import WAITING, InFlight
from kvd.core.worker.key_directory import LookUp
from kvd.core.worker.keys import KeyState, KeyTable, WorkerKey
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.servers import Servers
from kvd.core.worker.steps import StepCounter
from kvd.core.worker.transfer_plans import TransferPlan, TransferPlans
from kvd.errors import KeyNotFound, KvdError, NodeLost, NotAllowed

UNKNOWN, ASKING, READY, DELETING, LOST = KeyState  # the hot path compares: one look-up instead of two

Start: TypeAlias = Callable[[InFlight, Any], KvdError | None]


class KeyQueue:
    """The queues of all keys. A call is in the queue of each of its keys, and starts when it is the first in all.

    Args:
        starters: by the type of a request, what starts it. It gets the call and its request, and returns the error
            that the call ends with if it cannot start.
        look_up: asks for keys.
    """

    def __init__(
        self,
        session: SchedulerSession,
        servers: Servers,
        keys: KeyTable,
        calls: CallBook,
        pushes: OpenPushes,
        steps: StepCounter,
        plans: TransferPlans,
        participation: Participation,
        starters: Mapping[type[Any], Start],
        look_up: LookUp,
    ) -> None:
        self._session = session
        self._view = session.view
        self._servers = servers
        self._keys = keys
        self._calls = calls
        self._pushes = pushes
        self._steps = steps
        self._plans = plans
        self._participation = participation
        self._transfer = starters[requests.Transfer]
        self._starters = starters
        self._look_up = look_up

    # ── calls in ──

    def enter_transfer(self, call: InFlight, request: requests.Transfer | requests.ListTransfer) -> None:
        """Starts a call that moves values by the plan of an earlier call on the same keys, if there is one and nothing
        holds the call back; else as `enter_items`."""
        listed: requests.Listed | None = None
        if isinstance(request, requests.ListTransfer):
            listed, transfer = request
            plan = self._plans.of_list(listed.keys)
        else:
            transfer = request
            plan = self._plans.of_items(transfer)
        if plan is not None and self.lets_start(plan, call.place if call.is_push else None):
            call.asked = transfer
            call.listed = listed
            call.plan = plan
            self._transfer(call, transfer)
        else:
            if isinstance(request, requests.ListTransfer):
                call.asked = transfer = request.in_full()
            self.enter_items(call, transfer)

    def lets_start(self, plan: TransferPlan, place: int | None) -> bool:
        """Whether a call by this plan starts at once, as far as its keys have not said so already.

        Args:
            place: of a push: where the program is, see `kvd.core.places`; None: it is a pull.
        """
        if self._participation.is_apart or self._servers.orphans:
            return False
        if place is None:
            return True
        window = plan.windows[0]
        if not self._participation.in_rounds or window.partial_failure is not None:
            return False
        oldest = self._pushes.oldest
        if oldest is not None and oldest.place != place:
            return False
        is_in_use = window.open_pushes or window.pulling
        return not (is_in_use and window.holds_back(self._view.settings.rounds_ahead))

    def enter_items(
        self, call: InFlight, transfer: requests.Transfer | requests.Read | requests.Survey | requests.Capture
    ) -> None:
        """Starts a call that moves values, or asks for their versions; or queues it, if a key has earlier calls or does
        not let it start."""
        known = self._keys.by_name
        call.set_keys([known.get(item.key) or self._keys.get_or_add(item.key) for item in transfer.items])
        if call.is_push:
            self._pushes.accept(call)
        if self._can_start_at_once(call):  # most calls do not need the queues
            self._start(call)
        else:
            self._enqueue(call)

    def enter(self, call: InFlight, request: requests.DescribeKey | requests.ClockOf | requests.SliceControl) -> None:
        """The same for a call on one key that moves no values."""
        call.set_keys([self._keys.get_or_add(request.key)])
        self._enqueue(call, wait=isinstance(request, requests.DescribeKey) and request.wait)

    def enter_deletion(self, call: InFlight, keys: Sequence[WorkerKey]) -> None:
        """The same for the deletion of keys, which waits until no earlier call on them is under way."""
        call.set_keys(keys)
        self._enqueue(call)

    def _can_start_at_once(self, call: InFlight) -> bool:
        limit, is_push = self._view.settings.rounds_ahead, call.is_push
        if is_push and self._pushes.holds_back(call):
            return False
        for key in call.keys:
            if key.state is not READY or key.queue:
                return False
            if is_push and (key.window.partial_failure is not None or key.window.holds_back(limit)):
                return False
        return len(call.keys) < 2 or len(set(call.keys)) == len(call.keys)

    def _enqueue(self, call: InFlight, *, wait: bool = False) -> None:
        for key in call.keys:
            key.leave_group()  # it is not at rest
            key.queue.append(call)
        if call.is_push:
            self._steps.queued(call)
        call.hold(self._withdraw)
        unknown = [key for key in dict.fromkeys(call.keys) if key.state is UNKNOWN and not key.inits]
        if unknown:
            self._look_up(unknown, wait=wait)
        self._try_start(call)

    # ── calls out ──

    def wake(self, key: WorkerKey) -> None:
        """Something about the key has changed: starts the calls that it lets start now."""
        while key.queue and self._try_start(key.queue[0]):
            pass

    def _try_start(self, call: InFlight) -> bool:
        """Starts the call if it is the first in the queues of all its keys, and they let it."""
        if call.state is not WAITING or self._must_wait(call):
            return False
        for key in call.keys:
            key.queue.popleft()
        call.let_go()
        self._start(call)
        for key in call.keys:
            if key.queue:
                self.wake(key)
        return True

    def _must_wait(self, call: InFlight) -> bool:
        """Looks first at the key that the call waited for last: as its keys become ready one after the other, this
        looks at each of them once, and not at all of them each time."""
        keys, first = call.keys, call.blocker
        is_held = call.is_push and self._pushes.holds_back(call)
        for place in chain(range(first, len(keys)), range(first)):
            if self._key_must_wait(call, keys[place], is_held=is_held):
                call.blocker = place
                return True
        return False

    def _key_must_wait(self, call: InFlight, key: WorkerKey, *, is_held: bool) -> bool:
        if key.state is UNKNOWN or key.state is ASKING or key.queue[0] is not call:
            return True
        if key.state is LOST and key.inits:
            return True
        if isinstance(call.request, requests.DeleteKeys):  # another deletion of the key is joined
            return key.window.is_in_use and not self._is_hopeless(key)
        if key.state is DELETING:
            return self._gone_error(key) is None
        limit = self._view.settings.rounds_ahead
        return call.is_push and (is_held or key.window.holds_back(limit)) and not self._is_hopeless(key)

    def _is_hopeless(self, key: WorkerKey) -> bool:
        """Whether a push of the key starts only to be told what is wrong: it does not wait for its window then."""
        return key.state is LOST or key.window.partial_failure is not None or self._gone_error(key) is not None

    def _gone_error(self, key: WorkerKey) -> KvdError | None:
        """The loss of a server that leads a part of the key, and was not replaced."""
        if self._servers.orphans:
            for partition in key.lineages:
                error = self._servers.orphan_error(partition)
                if error is not None:
                    return error
        return None

    def servers_changed(self) -> None:
        """Some partitions have lost their leaders: calls that queue behind pushes to these are told."""
        if self._servers.orphans:
            for key in list(self._keys.by_name.values()):
                self.wake(key)

    def _start(self, call: InFlight) -> None:
        """Starts the call, or completes it with the reason why it cannot."""
        error = self._key_error(call)
        if error is None:
            error = self._starters[type(call.request)](call, call.request)
        if error is not None:
            self._calls.complete(call, error=error)
            if call.is_push:
                self._pushes.settle(call)

    def _key_error(self, call: InFlight) -> KvdError | None:
        """Why the call cannot start, as far as its keys say."""
        for key in call.keys:
            if key.state is LOST:
                rank = self._view.leader_of((key.lost_partitions(self._view) or [0])[0])
                return NodeLost(self._servers.loss_text(rank), node=name_of("server", rank))
            error = self._gone_error(key)
            if error is not None:
                return error
            failure = key.window.partial_failure
            if call.is_push and failure is not None:
                text = f"an earlier push of {key.name!r} was taken in part only ({failure}): call rewind to go on"
                return NotAllowed(text, key=key.name)
        return None

    # ── calls that end before they start ──

    def _withdraw(self, call: InFlight) -> None:
        """The caller waits no more: the call leaves its queues."""
        for key in call.keys:
            if call in key.queue:
                key.queue.remove(call)
                self.wake(key)
        if call.is_push:
            self._pushes.settle(call)

    def fail_waiting(self, key: WorkerKey, error: KvdError) -> bool:
        """Fails the calls that queue for a key that cannot be had. True if some would wait until it is live: then those
        behind them wait, too."""
        some_wait = False
        for call in list(key.queue):
            if isinstance(error, KeyNotFound) and (some_wait or getattr(call.request, "wait", False)):
                some_wait = True
            elif isinstance(error, KeyNotFound) and self._was_deleted_before(call, key):
                self._leave_out(call, key)
            else:
                self._calls.abandon(call, error)
        return some_wait

    def _was_deleted_before(self, call: InFlight, key: WorkerKey) -> bool:
        """Whether the call deletes a key that this worker has deleted, or its predecessor may have."""
        is_deletion = isinstance(call.request, requests.DeleteKeys)
        return is_deletion and (key.creation > 0 or self._session.predecessor is not None)

    def _leave_out(self, call: InFlight, key: WorkerKey) -> None:
        """The call goes on without the key."""
        key.queue.remove(call)
        call.set_keys([other for other in call.keys if other is not key])
        call.blocker = 0
        self._try_start(call)

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError if the queue of a known key has a call that is over, or one that could start, or if a
        push window counts other pushes than those that are open."""
        self._pushes.validate(self._keys.by_name.values())
        for key in self._keys.by_name.values():
            waits = key.state is not UNKNOWN or key.inits > 0
            assert waits or not key.queue, f"nothing ends the wait of call {key.queue[0].number} at {key.name!r}"
            for call in key.queue:
                assert call.state is WAITING, f"call {call.number} is {call.state.name} in the queue of {key.name!r}"
            if key.queue and key.state is READY:
                assert self._must_wait(key.queue[0]), f"call {key.queue[0].number} waits for nothing at {key.name!r}"
