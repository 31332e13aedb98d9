"""Random numbers in torch modules that are the same for each device and step, in whatever order the devices run."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import torch

#: One lock per generator of torch: all CPU devices of a process draw from the same one.
_locks: dict[torch.device, threading.Lock] = {}
_locks_lock = threading.Lock()


class StepSeed:
    """Seeds the generator of one executor's device for every step.

    The first forward for training finds out whether anything is drawn; if not, later ones take no lock. A module that
    draws in some steps but not in the first shares the generator unseeded.

    Arguments:
        where: the executor's device.
        seed: of the executor.
    """

    def __init__(self, where: torch.device, seed: tuple[int, ...]) -> None:
        self._where = where
        self._seed = seed
        self._draws: bool | None = None
        with _locks_lock:
            self._lock = _locks.setdefault(where, threading.Lock())

    @contextlib.contextmanager
    def during(self, step: int, is_train: bool) -> Iterator[None]:
        """What is drawn inside depends on the seed and ``step`` only; outside it is as if nothing had been drawn."""
        if not is_train or self._draws is False:
            yield
            return
        with self._lock:
            generator = self._generator()
            before = generator.get_state()
            digest = hashlib.blake2b(repr((*self._seed, step)).encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            seeded = generator.get_state()
            try:
                yield
                self._draws = not torch.equal(seeded, generator.get_state())
            finally:
                generator.set_state(before)

    def _generator(self) -> torch.Generator:
        if self._where.type == "cpu":
            return torch.default_generator
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generator: torch.Generator = torch.cuda.default_generators[self._where.index]
        return generator
