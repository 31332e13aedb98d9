"""How worker 0 makes keys: it sends their slices to the servers, and publishes the keys whose slices are all stored.

Both travel like a push of many keys: a message has as many slices as its header and the size of a slice allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from kvd.core.machine import Received, Span
from kvd.core.membership import ViewState
from kvd.core.requests import Item
from kvd.core.worker.asking import Asker
from kvd.core.worker.first_rows import FirstRows
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.key_directory import by_home, in_messages
from kvd.core.worker.keys import KeyState, WorkerKey
from kvd.core.worker.message_plans import MessagePlan, plan_messages
from kvd.core.worker.servers import Servers
from kvd.core.worker.transfer_plans import TransferPlans
from kvd.errors import KeyExists, KvdError
from kvd.protocol.messages import Init, NewKey, NewSlice, Outdated, Publish, Refused
from kvd.protocol.specs import KeySpec

Ended: TypeAlias = Callable[[WorkerKey, KvdError | None], None]


@dataclass(slots=True, eq=False)
class _Making:
    """Keys that are being made for a call, until they are published."""

    call: InFlight
    keys: list[WorkerKey]
    items: list[Item]  # of the keys
    ended: Ended  # told of each key when it is live, or cannot be made
    remaining: int  # messages that are not answered
    is_outdated: bool = False  # a server wants a larger creation
    errors: dict[int, KvdError] = field(default_factory=dict)  # by the place of the key


class KeyMaking:
    """Makes keys and publishes them."""

    def __init__(self, view: ViewState, servers: Servers, plans: TransferPlans, asker: Asker) -> None:
        self._view = view
        self._servers = servers
        self._plans = plans
        self._asker = asker
        self._first_rows = FirstRows(asker)
        self._creation = 0  # of the keys that are made next: larger than those of the keys known to be deleted

    def make(self, call: InFlight, wanted: Sequence[tuple[WorkerKey, Item]], ended: Ended) -> None:
        """Makes these keys with the values of the items. `ended` is told of each."""
        again = [(key, item) for key, item in wanted if key.is_publishing]
        fresh = [(key, item) for key, item in wanted if not key.is_publishing]
        if again:
            self._publish_again(call, again, ended)
        if fresh:
            self._store(call, fresh, ended)

    def deleted(self, key: WorkerKey) -> None:
        """The key is gone: keys that are made from now on must not be taken for it."""
        self._creation = max(self._creation, key.creation + 1)
        key.forget()
        key.creation += 1  # an answer about the deleted key may still come
        self._plans.clear()

    # ── the slices go to their servers ──

    def _store(self, call: InFlight, wanted: Sequence[tuple[WorkerKey, Item]], ended: Ended) -> None:
        slice_bytes = self._view.settings.slice_bytes
        for key, item in wanted:
            assert item.spec is not None
            spec = replace(item.spec, slice_bytes=slice_bytes)
            key.place(spec, self._creation, self._view)
        self._plans.clear()
        if self._view.partitions and self._servers.orphans:
            wanted = self._without_lost(wanted, ended)
        keys = [key for key, _ in wanted]
        if not keys:
            return
        plans = plan_messages(keys, slice_bytes, with_specs=True)
        making = _Making(call, keys, [item for _, item in wanted], ended, len(plans))
        make_again = partial(self._store, call, wanted, ended)
        for plan in plans:
            specs, places = _numbered([keys[item] for item in plan.items])
            slices = tuple(
                [NewSlice(key, index, place) for (key, index, _), place in zip(plan.slice_ids, places, strict=True)]
            )
            payload = tuple(
                [
                    Span(wanted[item][1].source, offset, nbytes)
                    for item, (offset, nbytes) in zip(plan.items, plan.ranges, strict=True)
                ]
            )
            answered, message = partial(self._stored, making, plan, make_again), Init(0, specs, slices, self._creation)
            self._asker.ask_leader(call, plan.partition, message, answered, payload)

    def _without_lost(self, wanted: Sequence[tuple[WorkerKey, Item]], ended: Ended) -> Sequence[tuple[WorkerKey, Item]]:
        """Those whose partitions all have leaders; the others end."""
        rest = []
        for key, item in wanted:
            error = next(filter(None, map(self._servers.orphan_error, key.lineages)), None)
            if error is None:
                rest.append((key, item))
            else:
                ended(key, error)
        return rest

    def _stored(self, making: _Making, plan: MessagePlan, make_again: Callable[[], None], event: Received) -> None:
        if isinstance(event.message, Outdated):
            self._creation = max(self._creation, event.message.creation)
            making.is_outdated = True
        error = self._asker.error_of(event)
        if error is not None:
            for place in _refused_places(event, len(plan.items)):
                making.errors.setdefault(plan.items[place], error)
        making.remaining -= 1
        if making.remaining == 0 and making.is_outdated:
            make_again()
        elif making.remaining == 0:
            self._fill(making)

    # ── tables get the rows that they begin with ──

    def _fill(self, making: _Making) -> None:
        filled = [place for place, item in enumerate(making.items) if item.pages and place not in making.errors]
        making.remaining = len(filled)
        for place in filled:
            done = partial(self._filled, making, place)
            self._first_rows.put(making.call, making.keys[place], making.items[place], done)
        if not filled:
            self._made(making)

    def _filled(self, making: _Making, place: int, error: KvdError | None) -> None:
        if error is not None:
            making.errors.setdefault(place, error)
        making.remaining -= 1
        if making.remaining == 0:
            self._made(making)

    def _made(self, making: _Making) -> None:
        self._publish(making.call, [key for n, key in enumerate(making.keys) if n not in making.errors], making)
        for number, failure in making.errors.items():
            making.ended(making.keys[number], failure)

    # ── and are published ──

    def _publish(self, call: InFlight, keys: Sequence[WorkerKey], making: _Making) -> None:
        def published(key: WorkerKey, error: KvdError | None) -> None:
            if error is None:
                key.move_to(KeyState.READY)
            else:
                key.is_publishing = False
            making.ended(key, error)

        for key in keys:
            key.is_publishing = True
        self._ask_to_publish(call, keys, published)

    def _ask_to_publish(self, call: InFlight, keys: Sequence[WorkerKey], published: Ended) -> None:
        """Asks the homes of the keys. `published` is told of each key."""

        def answered(some: Sequence[WorkerKey], event: Received) -> None:
            error = self._asker.error_of(event)
            refused = set() if error is None else set(_refused_places(event, len(some)))
            for place, key in enumerate(some):
                published(key, error if place in refused else None)

        creations = sorted({key.creation for key in keys})
        alike = [[key for key in keys if key.creation == creation] for creation in creations]
        for home, here in [group for some in alike for group in by_home(some, self._view)]:
            for some in in_messages(here, with_specs=True):
                specs, places = _numbered(some)
                named = tuple([NewKey(key.name, place) for key, place in zip(some, places, strict=True)])
                message = Publish(0, specs, named, some[0].creation)
                self._asker.ask_leader(call, home, message, partial(answered, some))

    def _publish_again(self, call: InFlight, wanted: Sequence[tuple[WorkerKey, Item]], ended: Ended) -> None:
        """An earlier init was given up when only the answer to its Publish was missing. Others may use its values
        already."""
        items = {key: item for key, item in wanted}  # noqa: C416  a dict of pairs
        refused: list[tuple[WorkerKey, Item]] = []
        answers = 0

        def published(key: WorkerKey, error: KvdError | None) -> None:
            nonlocal answers
            answers += 1
            if error is not None:  # it is not there, or not any more
                key.is_publishing = False
                refused.append((key, items[key]))
            else:
                key.move_to(KeyState.READY)
                key.is_initialised_here = True
                text = f"key {key.name!r} is live, with the values of an init whose outcome was unknown: pull it"
                ended(key, KeyExists(text, key=key.name))
            if answers == len(items) and refused:
                self._store(call, refused, ended)

        self._ask_to_publish(call, list(items), published)


def _numbered(keys: Sequence[WorkerKey]) -> tuple[tuple[KeySpec, ...], list[int]]:
    """The different specs of the keys, and for each key the place of its spec among them."""
    numbers: dict[KeySpec, int] = {}
    places = []
    for key in keys:
        assert key.spec is not None
        places.append(numbers.setdefault(key.spec, len(numbers)))
    return tuple(numbers), places


def _refused_places(event: Received, count: int) -> Sequence[int]:
    """The entries of a list of `count` that the answer refuses."""
    message = event.message
    places = message.places if isinstance(message, Refused) else ()
    return [place for place in places if place < count] or range(count)
