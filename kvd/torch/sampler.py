"""Shares of a data set: which samples a worker reads in which step of a training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from kvd.client.calls import checks
from kvd.client.facades.blocking import KVStore
from kvd.errors import NotAllowed

MOST_DRAWN = 1 << 14
"""Batches that a loader may have drawn ahead of the step that is made."""


class ShardedSampler(Sampler[list[int]]):
    """A batch sampler for DataLoader: in each step, the workers of a store share a batch.

    ::

        sampler = kt.ShardedSampler(dataset, kv, batch_size=96, seed=1)  # 96 samples per step, of all workers together
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        for step, (x, y) in sampler.batches(loader, kv.steps(1000)):
            ...

    The samples of a step follow from the seed and the number of the step; which of them are this worker's, from its
    place in ``store.ranks``. So a restarted worker continues with the samples of its step, and after a worker has
    joined or left, the others share each batch anew. Over all workers every sample comes once per epoch, in an order of
    its own in each epoch.

    An epoch has ``len(sampler)`` steps, whose batches differ by one sample at most; those of two workers do, too. With
    ``drop_last=True`` every batch has `batch_size` samples, and the remaining ones, others in each epoch, are left out.

    `batches` is exact at restarts and joins. A plain ``for x, y in loader`` gives the steps from `at` or `set_epoch` on
    to the end of their epoch, then those of the next one. A DataLoader with workers draws batches some steps ahead, for
    those that take part then: without `batches`, samples are missed or come twice in these steps if that changes. The
    workers of a store do not notice a change at the same time, so in that one step it happens with `batches`, too.

    A step of ``kv.steps(total, shared=True)`` is made by one worker: this sampler is not for those.

    It is used by the process of the store alone. A DataLoader gives its workers numbers of samples, not the sampler.

    Args:
        dataset: of a known length, or that length.
        store: of this worker.
        batch_size: samples of a step, of all workers together.
        seed: of the order, the same in all workers; from 0 on.
        shuffle: False: the order of the data set, in every epoch.
        drop_last: leave out the samples at the end of an epoch that do not fill a batch.

    Raises:
        NotAllowed: an argument is out of its range.
    """

    def __init__(
        self,
        dataset: Sized | int,
        store: KVStore,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self._store = store
        self._size = checks.whole("the length of the data set", _length(dataset), 1)
        self._batch_size = checks.whole("batch_size", batch_size, 1)
        self._seed = checks.whole("seed", seed, 0)
        self._shuffle = shuffle
        self._drop_last = drop_last
        if drop_last and self._size < self._batch_size:
            raise NotAllowed(f"{self._size} samples fill no batch of {batch_size}: drop_last leaves nothing")
        self._steps = self._size // self._batch_size if drop_last else -(-self._size // self._batch_size)
        self._first = 0  # of the next iteration
        self._is_endless = False
        self._ranks: dict[int, tuple[int, ...]] = {}  # by step, of batches that are drawn and not made
        self._order: tuple[int, torch.Tensor] | None = None  # of the last epoch

    def __len__(self) -> int:
        """The steps of an epoch."""
        return self._steps

    def at(self, step: int) -> None:
        """Let the next iteration begin with this step, counted from 0 over all epochs.

        Raises:
            NotAllowed: it is no number from 0 on.
        """
        self._first = checks.whole("step", step, 0)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with the first step of an epoch, as that of torch's DistributedSampler.

        Raises:
            NotAllowed: it is no number from 0 on.
        """
        self._first = checks.whole("epoch", epoch, 0) * self._steps

    def samples(self, step: int) -> list[int]:
        """Return the samples of this worker in a step, for those workers that take part now.

        Raises:
            NotAllowed: there are more workers than samples in the batch.
        """
        return self._share(step, self._ranks_now())

    def __iter__(self) -> Iterator[list[int]]:
        """The samples of this worker, step by step to the end of the epoch."""
        first, is_endless = self._first, self._is_endless
        end = None if is_endless else (first // self._steps + 1) * self._steps
        return self._draw(first, end)

    def _draw(self, step: int, end: int | None) -> Iterator[list[int]]:
        while step != end:
            ranks = self._ranks_now()
            if end is None:
                if len(self._ranks) >= MOST_DRAWN:
                    raise NotAllowed(f"the loader has drawn {MOST_DRAWN} batches ahead: lower its prefetch_factor")
                self._ranks[step] = ranks
            elif step + 1 == end:
                self._first = end  # a loop that counts its batches asks for none after the last one
            yield self._share(step, ranks)
            step += 1

    def batches(self, loader: DataLoader[Any], steps: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Iterate over pairs of a step and its batch.

        If the steps do not follow each other, as after a restart, or other workers take part than when a batch was
        drawn, the loader begins again with the present step. That takes as long as ``iter(loader)``: with workers, set
        ``persistent_workers=True``.

        Args:
            loader: a DataLoader with ``batch_sampler=`` this sampler.
            steps: ``kv.steps(total)``, or any numbers from 0 on.

        Raises:
            NotAllowed: the loader has another sampler.
        """
        if getattr(loader, "batch_sampler", None) is not self:
            text = "the loader does not draw from this sampler: make it with DataLoader(dataset, batch_sampler=sampler)"
            raise NotAllowed(text)
        batches: Iterator[Any] | None = None
        expected = -1
        try:
            for step in steps:
                now = self._ranks_now()
                if batches is None or step != expected or self._ranks.get(step, now) != now:
                    batches = None  # before the next one: persistent workers have one at a time
                    batches = self._begin(loader, step)
                batch = next(batches)
                self._ranks.pop(step, None)
                expected = step + 1
                yield step, batch
        finally:
            self._ranks = {}

    def _begin(self, loader: DataLoader[Any], step: int) -> Iterator[Any]:
        self._ranks = {}
        self._first, self._is_endless = step, True
        try:
            return iter(loader)
        finally:
            self._is_endless = False

    def _ranks_now(self) -> tuple[int, ...]:
        """The ranks of those who share a batch. A worker that takes no part, since it was late, has a share as well."""
        ranks = self._store.ranks
        return ranks if self._store.rank in ranks else tuple(sorted((*ranks, self._store.rank)))

    def _share(self, step: int, ranks: tuple[int, ...]) -> list[int]:
        epoch, position = divmod(step, self._steps)
        if self._drop_last:
            begin, end = position * self._batch_size, (position + 1) * self._batch_size
        else:  # as evenly as it can be
            begin, end = (self._size * part // self._steps for part in (position, position + 1))
        if end - begin < len(ranks):
            raise NotAllowed(
                f"step {step} has {end - begin} samples for {len(ranks)} workers: let batch_size be at least twice the "
                "number of workers, or use fewer"
            )
        own = slice(begin + ranks.index(self._store.rank), end, len(ranks))
        if not self._shuffle:
            return list(range(own.start, own.stop, own.step))
        samples: list[int] = self._permutation(epoch)[own].tolist()
        return samples

    def _permutation(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            mixed = int(np.random.SeedSequence((self._seed, epoch)).generate_state(1, np.uint64)[0])
            generator = torch.Generator().manual_seed(mixed >> 1)
            self._order = epoch, torch.randperm(self._size, generator=generator)
        return self._order[1]


def _length(dataset: Sized | int) -> int:
    if isinstance(dataset, int):
        return dataset
    try:
        return len(dataset)
    except TypeError:
        raise NotAllowed(
            f"a {type(dataset).__name__} has no length, so its samples have no numbers to share: pass a data set with "
            "__len__ and __getitem__, or let each worker of an IterableDataset read files of its own"
        ) from None
