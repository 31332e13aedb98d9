"""How a worker cuts a call into messages."""

from __future__ import annotations

import pytest

from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.message_plans import plan_messages
from kvd.protocol.codec import MAX_HEADER_BYTES, encode
from kvd.protocol.messages import MAX_PARTS, DeclareBatch, Epoch, Part, Push
from kvd.protocol.specs import MAX_KEY_CHARS, KeySpec
from tests.core.fakes import SLICE, uint8

MOST = 4 * SLICE


def keys_of(names: list[str], spec: KeySpec, servers: int = 1) -> list[WorkerKey]:
    return [
        WorkerKey(name, spec, partitions=tuple(index % servers for index in range(spec.num_slices))) for name in names
    ]


def test_no_batch_exceeds_the_header_limit() -> None:
    """Not with the longest names of the longest characters, and not with many short ones."""
    for names in ([f"{number:04}" + "𝄞" * (MAX_KEY_CHARS - 4) for number in range(300)], [str(n) for n in range(3000)]):
        plans = plan_messages(keys_of(names, uint8(1)), 1 << 20)
        assert sum(len(plan.slice_ids) for plan in plans) == len(names)
        for plan in plans:
            assert len(plan.slice_ids) <= MAX_PARTS
            header = encode(DeclareBatch(1 << 61, 1 << 61, plan.slice_ids), 1 << 61, Epoch(1 << 61, 1 << 61))
            assert len(header) <= MAX_HEADER_BYTES
            parts = tuple(Part(key, index, 1 << 61, creation) for key, index, creation in plan.slice_ids)
            header = encode(Push(1 << 61, parts, 0, 1 << 61, True), 1 << 61, Epoch(1 << 61, 1 << 61))
            assert len(header) <= MAX_HEADER_BYTES


@pytest.mark.parametrize("repeated", [1, 20])
def test_plans_cover_every_byte_once_and_start_at_multiples_of_eight(repeated: int) -> None:
    sizes = [0, 1, 7, 8, SLICE, SLICE + 1, 3 * SLICE, 2, 0] * repeated
    keys = [
        WorkerKey(str(number), uint8(size), partitions=tuple(number % 2 for _ in range(uint8(size).num_slices)))
        for number, size in enumerate(sizes)
    ]
    plans = plan_messages(keys, SLICE, most=MOST)
    covered: dict[int, int] = {}
    for plan in plans:
        assert plan.nbytes <= (SLICE if repeated == 1 else MOST)
        assert len({keys[item].partitions[0] for item in plan.items}) == 1
        ends = 0
        for row, (start, nbytes), item in zip(plan.rows, plan.ranges, plan.items, strict=True):
            assert (row.start, row.nbytes) == (start, nbytes)
            assert row.offset % 8 == 0
            assert row.offset >= ends
            ends = row.offset + nbytes
            covered[item] = covered.get(item, 0) + nbytes
        assert ends == plan.nbytes
    assert [covered[item] for item in range(len(sizes))] == sizes


def test_a_call_of_much_takes_larger_messages_but_still_several() -> None:
    full = [uint8(SLICE)] * 64
    for count, wanted in ((1, 1), (8, 8), (15, 15), (16, 8), (24, 8), (32, 8), (64, 16)):
        keys = [keys_of([str(number)], spec)[0] for number, spec in enumerate(full[:count])]
        assert len(plan_messages(keys, SLICE, most=MOST)) == wanted
        assert len(plan_messages(keys, SLICE, most=SLICE)) == count
        assert len(plan_messages(keys, SLICE)) == count
    one = keys_of(["one"], uint8(64 * SLICE))
    assert len(plan_messages(one, SLICE, most=MOST)) == 16


def test_a_call_beside_others_takes_few_messages() -> None:
    for count, wanted in ((1, 1), (2, 1), (4, 1), (5, 2), (9, 3)):
        keys = [keys_of([str(number)], uint8(SLICE))[0] for number in range(count)]
        assert len(plan_messages(keys, SLICE, most=MOST, least=1)) == wanted


@pytest.mark.parametrize("servers", [1, 2])
def test_what_a_server_has_of_a_key_is_not_divided_if_it_fits(servers: int) -> None:
    sizes = [SLICE // 2, 3 * SLICE + 8, 2 * SLICE, 100, 4 * SLICE, 5 * SLICE, 3 * SLICE] * 8
    keys = [keys_of([str(number)], uint8(size), servers)[0] for number, size in enumerate(sizes)]
    plans = plan_messages(keys, SLICE, most=MOST)
    messages: dict[tuple[int, int], int] = {}
    for plan in plans:
        for item in set(plan.items):
            messages[item, plan.partition] = messages.get((item, plan.partition), 0) + 1
    for (item, partition), count in messages.items():
        key, spec = keys[item], uint8(sizes[item])
        nbytes = sum([spec.slice_nbytes(index) for index, other in enumerate(key.partitions) if other == partition])
        assert count == (1 if nbytes <= MOST else 2)
