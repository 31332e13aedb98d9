"""How a call is cut into messages: a full slice has one for itself, small slices of one partition share one.

A call of much more than that takes larger messages: there are still enough of them for servers and workers to work at
the same time. A server makes the new version of what came in one message in one piece of memory. So a value whose
slices all travel together lies there as the program has it, and a worker within the host need not copy it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.core.machine import Row, Span
from kvd.core.requests import Item
from kvd.core.worker.keys import WorkerKey
from kvd.protocol.messages import MAX_PARTS, SliceId
from kvd.protocol.specs import DTYPES, ROW_ID_BYTES, KeySpec, padded

HEADER_BUDGET = 48 << 10  # of the 64 KiB of a header, for the parts
MOST_SLICES = 4  # full ones in a message
LEAST_MESSAGES = 8  # to a partition, before there are several full slices in one: servers merge while others travel


@dataclass(slots=True, eq=False)
class MessagePlan:
    """What goes in one message of a call. A later call on the same keys uses the same plan."""

    partition: int  # of all its slices
    slice_ids: tuple[SliceId, ...]
    items: tuple[int, ...]  # the call's item that each slice belongs to
    ranges: tuple[tuple[int, int], ...]  # offset and size in bytes of each slice in the value of its item
    rows: tuple[Row, ...]  # from the payload to the values of the items
    nbytes: int  # of the payload, in the dtypes of the keys
    is_alone: bool = False  # made for one call: its bytes are rows, in another dtype than the key, or encoded
    is_all: bool = False  # of its call
    uses: int = 0
    batch: int = 0  # its number as a batch; 0 until it is declared
    declared_to: int = 0  # the incarnation of the server that was told

    def payload_of(self, items: Sequence[Item], whole: Any = None) -> tuple[Span, ...]:
        """What a message brings of the sources of these items.

        Args:
            whole: the sources side by side, if they lie so.
        """
        if self.is_all and whole is not None:
            return (Span(whole, 0, self.nbytes),)
        spans = zip(self.items, self.ranges, strict=True)
        return tuple([Span(items[item].source, offset, nbytes) for item, (offset, nbytes) in spans])


@dataclass(slots=True)
class _OpenMessage:
    """A message that still takes slices."""

    partition: int
    slice_ids: list[SliceId] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    payload_nbytes: int = 0
    header_nbytes: int = 0

    def has_room(self, header_nbytes: int, nbytes: int, limit: int) -> bool:
        """Whether one more slice goes in, or several that have so many bytes together."""
        return (
            len(self.slice_ids) < MAX_PARTS
            and self.payload_nbytes + nbytes <= limit
            and self.header_nbytes + header_nbytes <= HEADER_BUDGET
        )

    def add(self, slice_id: SliceId, item: int, span: tuple[int, int], header_nbytes: int) -> None:
        self.slice_ids.append(slice_id)
        self.items.append(item)
        self.ranges.append(span)
        self.offsets.append(self.payload_nbytes)
        self.payload_nbytes += padded(span[1])
        self.header_nbytes += header_nbytes

    def plan(self) -> MessagePlan:
        nbytes = self.offsets[-1] + self.ranges[-1][1]
        rows = tuple(
            [Row(start, offset, size) for (start, size), offset in zip(self.ranges, self.offsets, strict=True)]
        )
        return MessagePlan(self.partition, tuple(self.slice_ids), tuple(self.items), tuple(self.ranges), rows, nbytes)


def plan_slices(keys: Sequence[WorkerKey], items: Sequence[Item], coded: Sequence[int]) -> list[MessagePlan]:
    """A message per slice of the items in the places `coded`, whose bytes are not what the key has."""
    plans = []
    for item in coded:
        key = keys[item]
        assert key.spec is not None
        ranges = _ranges(key.spec, items[item])
        for index, partition in enumerate(key.partitions):
            offset, nbytes = key.spec.span(index)
            plan = MessagePlan(
                partition,
                (SliceId(key.name, index, key.creation),),
                (item,),
                (ranges[index],),
                (Row(offset, 0, nbytes),),
                nbytes,
                is_alone=True,
            )
            plans.append(plan)
    return plans


def _ranges(spec: KeySpec, item: Item) -> Sequence[tuple[int, int]]:
    """Where the slices of a key of this spec are in the source of the item."""
    if item.encoded is not None:
        return item.encoded.ranges
    itemsize = DTYPES[spec.dtype].itemsize
    given = itemsize if item.spec is None else DTYPES[item.spec.dtype].itemsize
    spans = [spec.span(index) for index in range(spec.num_slices)]
    return [(offset // itemsize * given, nbytes // itemsize * given) for offset, nbytes in spans]


def plan_rows(
    keys: Sequence[WorkerKey], items: Sequence[Item], tables: Sequence[int], *, is_push: bool
) -> list[MessagePlan]:
    """A message per part of the tables in the places `tables`. A push closes a round of every part; a pull asks only
    those that it wants rows of."""
    plans = []
    for item in tables:
        key, ranges = keys[item], items[item].ranges
        assert key.spec is not None
        assert ranges is not None
        first = 0  # byte of the rows of this part in the target
        for index, (partition, span) in enumerate(zip(key.partitions, ranges, strict=True)):
            nbytes = span[1] if is_push else span[1] // ROW_ID_BYTES * key.spec.row_nbytes
            if nbytes or is_push:
                slice_id = SliceId(key.name, index, key.creation)
                row = Row(first, 0, nbytes)
                plans.append(MessagePlan(partition, (slice_id,), (item,), (span,), (row,), nbytes, is_alone=True))
            first += nbytes
    return plans


def header_nbytes(key: WorkerKey, *, with_spec: bool = False) -> int:
    """The most that a slice of this key takes in a header: a character is at most 4 bytes in UTF-8."""
    nbytes = 4 * len(key.name) + (29 if key.creation else 21)
    if with_spec and key.spec is not None:
        nbytes += 9 * len(key.spec.shape) + 32
        if key.spec.table is not None:
            nbytes += 9 * len(key.spec.table.initial.numbers) + 96
    return nbytes


def plan_messages(
    keys: Sequence[WorkerKey],
    limit: int,
    *,
    most: int = 0,
    least: int = LEAST_MESSAGES,
    with_specs: bool = False,
    without: Collection[int] = (),
) -> list[MessagePlan]:
    """Cuts the keys into slices and packs those of each partition, in order, into messages of at most `limit` bytes.

    Args:
        most: bytes of a message to a partition that gets many of them. What such a partition has of one key goes in one
            message, if it fits.
        least: how many messages of at most `limit` bytes are many, and how many larger ones are left.
        with_specs: the header has the specs of the keys too.
        without: the places of keys that are left out.
    """
    messages: list[_OpenMessage] = []
    open_: dict[int, _OpenMessage] = {}
    taken = [(item, key) for item, key in enumerate(keys) if item not in without]
    limits = _limits([key for _, key in taken], limit, most, least) if most > limit else {}
    for item, key in taken:
        assert key.spec is not None
        header = header_nbytes(key, with_spec=with_specs)
        together = _sizes(key) if limits and len(key.partitions) > 1 else {}
        for index, partition in enumerate(key.partitions):
            span = key.spec.span(index)
            own = limits.get(partition, limit)
            nbytes = together.pop(partition, 0)  # of all its slices here, at the first of them
            if not span[1] <= nbytes <= own:
                nbytes = span[1]
            message = open_.get(partition)
            if message is None or not message.has_room(header, nbytes, own):
                message = open_[partition] = _OpenMessage(partition)
                messages.append(message)
            message.add(SliceId(key.name, index, key.creation), item, span, header)
    plans = [message.plan() for message in messages]
    if len(plans) == 1 and not without:
        plans[0].is_all = True
    return plans


def _limits(keys: Sequence[WorkerKey], limit: int, most: int, least: int) -> dict[int, int]:
    """The most bytes of a message to each partition that gets more than `least` of them."""
    totals: Counter[int] = Counter()
    for key in keys:
        totals.update(_sizes(key))
    shares = {partition: min(most, nbytes // least) for partition, nbytes in totals.items()}
    return {partition: share for partition, share in shares.items() if share > limit}


def _sizes(key: WorkerKey) -> Counter[int]:
    """How many bytes each partition has of a key."""
    sizes: Counter[int] = Counter()
    assert key.spec is not None
    for index, partition in enumerate(key.partitions):
        sizes[partition] += key.spec.slice_nbytes(index)
    return sizes


def lists_of_slices(keys: Sequence[WorkerKey]) -> list[tuple[int, tuple[SliceId, ...]]]:
    """The slices of the keys by their partition, in lists that fit in a header each."""
    lists: list[_OpenMessage] = []
    open_: dict[int, _OpenMessage] = {}
    for key in keys:
        header = header_nbytes(key)
        for index, partition in enumerate(key.partitions):
            message = open_.get(partition)
            if message is None or not message.has_room(header, 0, 0):
                message = open_[partition] = _OpenMessage(partition)
                lists.append(message)
            message.add(SliceId(key.name, index, key.creation), 0, (0, 0), header)
    return [(message.partition, tuple(message.slice_ids)) for message in lists]
