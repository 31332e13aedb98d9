"""The keys of collective calls: one for each name, and a bounded ring for calls without one.

Frameworks with collective calls name a tensor at each call, or not at all; a store has keys, which keep their shape.
Calls with a name get a key of the name. Calls without one are counted in each process, as in Horovod, and share keys of
a power of two elements: call ``n`` of a size takes key ``n mod RING``. So the servers keep a bounded number of bytes,
whatever a program does.
"""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from kvd.client.facades.blocking import KVStore
from kvd.compute.tensors import named_dtype
from kvd.errors import NotAllowed

RING = 8
"""Calls without a name, of one size, that may be under way at the same time; a further one waits for the first."""

PIECE_BYTES = 4 << 20
"""Bytes of the largest key without a name. Longer values travel in several."""

LEAST_ELEMENTS = 64
MOST_NAMES = 4096


class CollectiveKeys:
    """The keys of one program's collective calls. A key is made by its first call. Thread-safe.

    Args:
        store: where the keys are.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._made: set[str] = set()
        self._shapes: dict[tuple[str, str, str], list[tuple[int, ...]]] = {}
        self._calls: Counter[tuple[str, str, int]] = Counter()
        self._names = 0
        self._lock = threading.Lock()

    def named(self, use: str, name: str, dtype: str, shape: tuple[int, ...], merge: str) -> str:
        """Return the key of a call with a name. A name that comes with another shape later has a key for each.

        Args:
            use: kind of the call; each kind has its own keys.
            merge: as in `kvd.KVStore.init`.

        Raises:
            NotAllowed: the program has used `MOST_NAMES` names.
        """
        with self._lock:
            shapes = self._shapes.setdefault((use, name, dtype), [])
            if shape not in shapes:
                if self._names == MOST_NAMES:
                    raise NotAllowed(
                        f"{name!r} is name {MOST_NAMES + 1} of this program's collective calls, and each takes memory "
                        f"on the servers: use a name again in each step, or leave it out"
                    )
                self._names += 1
                shapes.append(shape)
            # The first shape is not part of the key, so that a worker with another shape is told.
            more = "" if shape == shapes[0] else "/" + "x".join(map(str, shape))
            return self._key(f"collective/{use}/{dtype}/{name}{more}", shape, dtype, merge)

    def unnamed(self, use: str, elements: int, dtype: str, merge: str) -> tuple[str, int]:
        """Return the key of the next call without a name, and its number of elements.

        Args:
            elements: the least that it has to hold, in at most `PIECE_BYTES`.
            use, merge: as in `named`.
        """
        size = max(LEAST_ELEMENTS, 1 << max(elements - 1, 0).bit_length())
        with self._lock:
            number = self._calls[use, dtype, size]
            self._calls[use, dtype, size] += 1
            return self._key(f"collective/{use}/{dtype}/{size}/{number % RING}", (size,), dtype, merge), size

    def _key(self, key: str, shape: tuple[int, ...], dtype: str, merge: str) -> str:
        if key not in self._made:
            # Later calls on the key wait until worker 0 has made it.
            self._store.init_async(key, np.zeros(shape, named_dtype(dtype)), merge=merge)
            self._made.add(key)
        return key
