"""Which samples the workers read: all of them once, the same after restarts, and shared anew when workers change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import kvd
import kvd.torch as kt
from kvd.errors import NotAllowed
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster

SIZE, BATCH = 50, 12


class Worker:
    """What a sampler asks its store."""

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.rank = rank
        self.ranks = ranks


def sampler_of(worker: Any, size: Any = SIZE, batch_size: int = BATCH, **more: Any) -> kt.ShardedSampler:
    return kt.ShardedSampler(size, worker, batch_size=batch_size, **more)


def numbers(batch: Any) -> list[int]:
    """The samples of a batch of `dataset`."""
    found: list[int] = batch[0].tolist()
    return found


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(SIZE))


@given(
    size=st.integers(1, 200),
    workers=st.integers(1, 5),
    per_worker=st.integers(2, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_the_workers_share_an_epoch(
    size: int, workers: int, per_worker: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    batch_size = workers * per_worker
    size += batch_size
    ranks = tuple(3 * number for number in range(workers))
    options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "seed": 5}
    samplers = [sampler_of(Worker(rank, ranks), size, batch_size, **options) for rank in ranks]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert {len(steps) for steps in shares} == {len(samplers[0])}
    assert len(samplers[0]) == (size // batch_size if drop_last else int(np.ceil(size / batch_size)))
    drawn = [sample for steps in shares for step in steps for sample in step]
    assert len(set(drawn)) == len(drawn)  # none comes twice
    if drop_last:
        assert len(drawn) == len(samplers[0]) * batch_size
    else:
        assert sorted(drawn) == list(range(size))
    for step in zip(*shares, strict=True):
        sizes = [len(share) for share in step]
        assert max(sizes) - min(sizes) <= 1
        assert batch_size / 2 <= sum(sizes) <= batch_size
        if not shuffle:
            together = sorted(sample for share in step for sample in share)
            assert together == list(range(together[0], together[-1] + 1))


def test_orders_differ_by_epoch_and_seed_and_are_the_same_elsewhere() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        sampler = sampler_of(Worker(0, (0,)), seed=seed)
        sampler.set_epoch(number)
        return [sample for batch in sampler for sample in batch]

    found = [epoch(number, seed) for number in range(3) for seed in range(3)]
    assert len({tuple(order) for order in found}) == 9
    assert found == [epoch(number, seed) for number in range(3) for seed in range(3)]
    assert found[0] != sorted(found[0])


def test_a_loop_that_counts_its_batches_goes_on_with_the_next_epoch() -> None:
    """As those of Lightning and Trainer, which ask for no batch after the last one."""
    sampler = sampler_of(Worker(0, (0,)))
    loader = DataLoader(dataset(), batch_sampler=sampler)
    drawn = [numbers(batch) for _ in range(3) for batch in islice(loader, len(loader))]
    assert drawn == [sampler.samples(step) for step in range(3 * len(sampler))]


def test_an_iteration_goes_on_with_the_next_epoch() -> None:
    sampler = sampler_of(Worker(0, (0,)))
    assert len(sampler) == 5
    first, second = list(sampler), list(sampler)
    assert [*first, *second] == [sampler.samples(step) for step in range(10)]
    sampler.at(7)
    assert list(sampler) == second[2:]
    sampler.set_epoch(0)
    assert list(sampler) == first


# ── loaders ──


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
    ],
    ids=["here", "fork", "spawn"],
)
def test_a_loader_beside_a_store_of_a_cluster(options: dict[str, Any]) -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        sampler = sampler_of(kv)
        loader = DataLoader(dataset(), batch_sampler=sampler, **options)
        assert len(loader) == 5
        wanted = [sampler.samples(step) for step in range(17)]
        found = [(step, numbers(batch)) for step, batch in sampler.batches(loader, range(3, 17))]
        assert found == list(enumerate(wanted))[3:]
        sampler.set_epoch(1)
        assert [numbers(batch) for batch in loader] == wanted[5:10]
        kv.barrier()  # the store still works


def test_steps_that_do_not_follow_each_other() -> None:
    sampler = sampler_of(Worker(0, (0,)))
    loader = DataLoader(dataset(), batch_sampler=sampler)
    steps = [4, 5, 9, 0, 1]
    found = [(step, numbers(batch)) for step, batch in sampler.batches(loader, steps)]
    assert found == [(step, sampler.samples(step)) for step in steps]
    assert list(sampler.batches(loader, [])) == []


def test_batches_drawn_ahead_are_drawn_again_for_other_workers() -> None:
    """Each step is shared by those who take part in it, though the loaders are some batches ahead."""
    parts = [(0, 1), (0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (1, 2), (1, 2), (1, 2), (0, 1, 2)]
    workers = [Worker(rank, parts[0]) for rank in range(3)]

    def steps_of(worker: Worker) -> Iterable[int]:
        for step, ranks in enumerate(parts):
            worker.ranks = ranks
            if worker.rank in ranks:
                yield step

    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    found: dict[int, list[int]] = {}
    for worker in workers:
        sampler = sampler_of(worker, seed=2)
        loader = DataLoader(dataset(), batch_sampler=sampler, **options)
        for step, batch in sampler.batches(loader, steps_of(worker)):
            found.setdefault(step, []).extend(numbers(batch))
    whole = sampler_of(Worker(0, (0,)), seed=2)
    assert {step: sorted(samples) for step, samples in found.items()} == {
        step: sorted(whole.samples(step)) for step in range(len(parts))
    }


def test_a_worker_that_takes_no_part_has_a_share() -> None:
    sampler = sampler_of(Worker(1, (0, 2)), shuffle=False)
    assert sampler.samples(0) == [1, 4, 7]


def test_a_restarted_worker_reads_the_samples_of_its_step() -> None:
    total, stopped = 12, 7
    read: dict[int, set[int]] = {}

    is_back = Event()

    def train(kv: kvd.KVStore, last: int) -> None:
        kv.init("w", np.zeros(3, np.float32))
        kv.set_optimizer(SGD(0.1))
        sampler = sampler_of(kv, seed=1)
        loader = DataLoader(dataset(), batch_sampler=sampler)
        for step, batch in sampler.batches(loader, kv.steps(total)):
            if step == last:
                kv.__exit__(RuntimeError, None, None)
                return
            if step == stopped:
                assert is_back.wait(60)  # a push would wait for a dead worker
            read.setdefault(step, set()).update(numbers(batch))
            kv.push("w", np.ones(3, np.float32))
            kv.flush()

    with LocalCluster(2, 1, request_timeout_s=30.0) as cluster:
        stores = cluster.open_stores("dist_sync", [{"node_id": f"worker-{number}"} for number in range(2)])
        one = next(store for store in stores if store.rank == 1)
        zero = next(store for store in stores if store.rank == 0)
        node_id = f"worker-{stores.index(one)}"
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(train, zero, total)
            pool.submit(train, one, stopped).result()
            successor = cluster.store(node_id=node_id)
            is_back.set()
            pool.submit(train, successor, total).result()
            other.result()
    whole = sampler_of(Worker(0, (0,)), seed=1)
    assert read == {step: set(whole.samples(step)) for step in range(total)}


def test_a_worker_that_joins_has_a_share_of_later_steps() -> None:
    read: dict[int, list[list[int]]] = {}
    is_under_way = Event()
    last: list[int] = []

    def train(kv: kvd.KVStore, is_late: bool) -> list[int]:
        kv.init("w", np.zeros(3, np.float32))
        kv.set_optimizer(SGD(0.1))
        sampler = sampler_of(kv, seed=1)
        loader = DataLoader(dataset(), batch_sampler=sampler)
        made = []
        for step, batch in sampler.batches(loader, kv.steps(1_000_000)):
            if last and step > last[0]:
                break
            read.setdefault(step, []).append(numbers(batch))
            kv.pushpull("w", np.ones(3, np.float32))  # nobody is more than a step ahead
            made.append(step)
            if step == 5:
                is_under_way.set()
            if is_late and len(made) == 3:
                last.append(step + 5)
        kv.close()
        return made

    with ThreadPoolExecutor(3) as pool, LocalCluster(2, 1, max_workers=3) as cluster:
        stores = cluster.open_stores("dist_sync")
        others = [pool.submit(train, store, False) for store in stores]
        assert is_under_way.wait(60)
        first = pool.submit(train, cluster.store(), True).result()[0]
        assert [other.result()[-1] for other in others] == last * 2
    whole = sampler_of(Worker(0, (0,)), seed=1)
    for step, shares in read.items():
        if abs(step - first) > 1:  # workers notice a change one after the other
            assert len(shares) == (2 if step < first else 3)
            assert sorted(sample for share in shares for sample in share) == sorted(whole.samples(step))


# ── bad input ──


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sampler_of(Worker(0, (0,)), 0), "the length of the data set is a whole number from 1"),
        (lambda: sampler_of(Worker(0, (0,)), Endless()), "a Endless has no length"),
        (lambda: sampler_of(Worker(0, (0,)), batch_size=0), "batch_size is a whole number from 1"),
        (lambda: sampler_of(Worker(0, (0,)), seed=-1), "seed is a whole number from 0"),
        (lambda: sampler_of(Worker(0, (0,)), 3, 4, drop_last=True), "3 samples fill no batch of 4"),
        (lambda: sampler_of(Worker(0, (0, 1, 2)), 50, 2).samples(0), "step 0 has 2 samples for 3 workers"),
        (lambda: sampler_of(Worker(0, (0,))).at(-1), "step is a whole number"),
        (lambda: list(sampler_of(Worker(0, (0,))).batches(DataLoader(dataset()), [0])), "batch_sampler=sampler"),
    ],
)
def test_bad_input(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(NotAllowed, match=text):
        make()
