"""What the pushes and pulls on the same keys do, worked out once and kept for the next one.

A plan says which messages go to which partitions, and how the values lie in them. A message that is used again is
declared to its server as a batch; from then on it names the batch's number in place of its slices. The keys of a list
become a group (`kvd.core.worker.keys.KeyGroup`), whose one window is all that a call on them looks at.

A plan holds until a key is placed anew. Whatever else may have changed is asked for at each call: the state and the
queue of a single key, whether the group still holds, which server leads a partition and what it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from kvd.core.machine import Gathered, Scatter
from kvd.core.membership import ViewState
from kvd.core.requests import ListedKeys, Transfer
from kvd.core.worker.keys import KeyGroup, KeyState, KeyTable, WorkerKey, windows_at_rest
from kvd.core.worker.message_plans import LEAST_MESSAGES, MOST_SLICES, MessagePlan, plan_messages
from kvd.core.worker.push_window import PushWindow
from kvd.protocol.specs import KeySpec, padded

MAX_PLANS = 256
MAX_LISTS = 64  # one more, and all are forgotten
SMALL_VALUE_BYTES = 16 << 10  # on average: larger values are copied one by one, which saves a copy of them all

_READY = KeyState.READY
_spec = attrgetter("spec")


class Whole:
    """A message that brings small values of a list, each of them whole: they are gathered and scattered in one go.

    Attributes:
        nbytes: of each value.
        gaps: what lies between them, see `Gathered`.
    """

    __slots__ = ("_pick", "gaps", "nbytes")

    def __init__(self, plan: MessagePlan) -> None:
        self._pick: Callable[[Sequence[Any]], Any] = itemgetter(*plan.items)
        if len(plan.items) == 1:
            self._pick = itemgetter(slice(plan.items[0], plan.items[0] + 1))
        self.nbytes = [nbytes for _, nbytes in plan.ranges]
        gaps = [bytes(padded(nbytes) - nbytes) for nbytes in self.nbytes]
        gaps[-1] = b""
        self.gaps = gaps if any(gaps) else None

    def gathered(self, sources: Sequence[Any]) -> Gathered:
        return Gathered(self._pick(sources), self.gaps)

    def scatter(self, payload: Any, targets: Sequence[Any]) -> Scatter:
        return Scatter(payload, self._pick(targets), self.nbytes, self.gaps)


class TransferPlan:
    """What a push or pull of these keys does.

    Attributes:
        keys: in the order of the call.
        messages: all that it sends.
        windows: of the keys, or the one of their group.
        group: of several keys that calls move together; None: they have not been at rest yet.
        wholes: the messages of a list whose values are gathered and scattered.
        is_forgotten: a key was placed anew since.
    """

    __slots__ = ("group", "is_forgotten", "keys", "messages", "wholes", "windows")

    def __init__(self, keys: tuple[WorkerKey, ...], messages: list[MessagePlan]) -> None:
        self.keys = keys
        self.messages = messages
        self.windows: Sequence[PushWindow] = (keys[0].own_window,) if len(keys) == 1 else ()
        self.group: KeyGroup | None = None
        self.wholes: dict[MessagePlan, Whole] = {}
        self.is_forgotten = False

    def gather_keys(self, specs: Sequence[KeySpec | None]) -> bool:
        """Make a group of the keys, if they are at rest under one clock. False: they are not.

        Args:
            specs: of the values, one per key, as in `windows_at_rest`.
        """
        if windows_at_rest(self.keys, specs) is None:
            return False
        self.group = KeyGroup(self.keys)
        self.windows = self.group.windows
        return True


class TransferPlans:
    """The plans of the calls that a program repeats.

    Args:
        credit_bytes: bounds the payload in flight to one server. Two messages at least may be in flight.
        batches: whether messages may be declared as batches.

    Attributes:
        batches: as it was given.
    """

    def __init__(self, view: ViewState, keys: KeyTable, credit_bytes: int, *, batches: bool) -> None:
        self._view = view
        self._keys = keys
        self._most_nbytes = credit_bytes // 2
        self.batches = batches
        self._plans: dict[tuple[tuple[WorkerKey | None, ...], tuple[int, ...]], TransferPlan] = {}
        self._lists: dict[ListedKeys, TransferPlan] = {}
        self._last_batch = 0

    def of(self, keys: Sequence[WorkerKey], without: tuple[int, ...] = (), *, in_few: bool = False) -> TransferPlan:
        """The plan of a call on these keys: worked out once, and kept for the next call on the same keys.

        Args:
            without: the places of keys that have messages of their own, see `plan_slices`.
            in_few: in as few messages as there can be, if nothing was worked out yet.
        """
        call = tuple(keys), without
        plan = self._plans.get(call)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self.clear()
            slice_bytes = self._view.settings.slice_bytes
            most = max(slice_bytes, min(MOST_SLICES * slice_bytes, self._most_nbytes))
            messages = plan_messages(
                keys, slice_bytes, most=most, least=1 if in_few else LEAST_MESSAGES, without=without
            )
            plan = self._plans[call] = TransferPlan(call[0], messages)
        return plan

    def clear(self) -> None:
        """A key was placed: plans from before may name the wrong partitions."""
        for plan in self._plans.values():
            plan.is_forgotten = True
        self._plans.clear()
        self._lists.clear()

    # ── calls that start at once ──

    def of_items(self, transfer: Transfer) -> TransferPlan | None:
        """The plan of an earlier call on the same keys, if they let calls start, and no value need be checked; else
        None."""
        if transfer.cast or transfer.some_encoded or transfer.some_rows or transfer.takes or transfer.sets_out:
            return None
        known, items = self._keys.by_name, transfer.items
        if len(items) == 1:
            return self.of_key(items[0].key, items[0].spec)
        keys: Any = tuple([known.get(item.key) for item in items])
        plan = self._plans.get((keys, ()))
        if plan is None or not items:
            return None
        group = plan.group
        if group is None or group.is_parted:
            return plan if plan.gather_keys(list(map(_spec, items))) else None
        for key, item in zip(plan.keys, items, strict=True):
            if item.spec is not key.checked_spec and (item.spec is not None or key.is_table):
                return None
        return plan

    def of_key(self, name: str, spec: KeySpec | None) -> TransferPlan | None:
        """The same of a call on one key.

        Args:
            spec: of the value; None: it is like the key's, whatever that is.
        """
        key = self._keys.by_name.get(name)
        if key is None or key.state is not _READY or key.queue:
            return None
        plan = self._plans.get(((key,), ()))
        if plan is None or (spec is not key.checked_spec and (spec is not None or key.is_table)):
            return None
        if key.group is not None:
            key.group.part()
        return plan

    def of_list(self, listed: ListedKeys) -> TransferPlan | None:
        """The same of a call on a list."""
        plan = self._lists.get(listed)
        if plan is not None:
            group = plan.group
            if group is not None and not group.is_parted:
                return plan
            return plan if plan.gather_keys([key.checked_spec for key in plan.keys]) else None
        known = self._keys.by_name
        plan = self._plans.get((tuple([known.get(name) for name in listed.names]), ()))
        if plan is None or not plan.gather_keys(listed.specs):
            return None
        if len(self._lists) >= MAX_LISTS:
            self._lists.clear()
        plan.wholes = {message: Whole(message) for message in plan.messages if _is_whole(message, plan.keys)}
        self._lists[listed] = plan
        return plan

    # ── batches ──

    def declare(self, plan: MessagePlan, server: int) -> int:
        """Notes that the server of this incarnation is being told of the batch. Returns the batch's number."""
        if plan.batch == 0:
            self._last_batch += 1
            plan.batch = self._last_batch
        plan.declared_to = server
        return plan.batch


def _is_whole(plan: MessagePlan, keys: Sequence[WorkerKey]) -> bool:
    """Whether the message brings whole values, which are small."""
    if plan.nbytes > SMALL_VALUE_BYTES * len(plan.items):
        return False
    return all(len(keys[item].partitions) == 1 for item in plan.items)
