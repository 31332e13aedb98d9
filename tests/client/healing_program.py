"""A worker that trains with momentum of its own: `healing_program TOTAL FOLDER DEATHS`, each of "RANK:STEP:MOMENT".

Each death happens once. At its end the program prints its rank, and a digest of its weights and momentum.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvd
from kvd.client.facades.blocking import healing_of
from kvd.errors import NotAllowed

SIZES = {"a": 700_000, "b": 5, "c": 3000}
RATE, MOMENTUM = np.float32(0.1), np.float32(0.9)

Array = np.ndarray[Any, np.dtype[np.float32]]


def first_weights() -> dict[str, Array]:
    return {key: np.linspace(-1, 1, size, dtype=np.float32) for key, size in SIZES.items()}


def gradient(key: str, weights: Array, rank: int, step: int) -> Array:
    """Depends on the weights, so any mistake spreads."""
    noise = np.random.default_rng([ord(key), rank, step]).standard_normal(weights.size, np.float32)
    return np.float32(0.3) * weights + noise


def update(weights: Array, momentum: Array, merged: Array) -> None:
    """One step of SGD with momentum, in place."""
    momentum *= MOMENTUM
    momentum += merged
    weights -= RATE * momentum


def digest_of(weights: dict[str, Array], momentum: dict[str, Array]) -> str:
    arrays = [*weights.values(), *momentum.values()]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


class Arrays:
    """The state: weights and momentum, one after the other."""

    def __init__(self, weights: dict[str, Array], momentum: dict[str, Array], come_to: Any) -> None:
        self._arrays = [*weights.values(), *momentum.values()]
        self._come_to = come_to

    def layout(self) -> bytes:
        return json.dumps([array.size for array in self._arrays]).encode()

    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def read(self, offset: int, target: memoryview) -> None:
        if offset:
            self._come_to("serving")
        target[:] = b"".join(array.tobytes() for array in self._arrays)[offset : offset + len(target)]

    def title(self) -> str:
        return "the arrays"

    def weights(self) -> dict[str, Any]:
        return {}

    def weights_nbytes(self) -> int:
        return 0

    def write_weight(self, key: str, value: Any) -> None:
        raise NotImplementedError

    def begin_write(self, layout: bytes, donor: str) -> int:
        if layout != self.layout():
            raise NotAllowed(f"the state of {donor} has sizes {layout.decode()}, this worker {self.layout().decode()}")
        return self.nbytes()

    def write(self, offset: int, data: memoryview) -> None:
        if offset:
            self._come_to("receiving")
        for array in self._arrays:
            part = array.view(np.uint8)
            if 0 <= offset < part.size:
                taken = data[: part.size - offset]
                part[offset : offset + len(taken)] = np.frombuffer(taken, np.uint8)
                data, offset = data[len(taken) :], 0
                if not data:
                    return
            else:
                offset -= part.size

    def end_write(self) -> None:
        self._come_to("received")


def main() -> None:
    total, folder = int(sys.argv[1]), Path(sys.argv[2])
    deaths = [tuple(death.split(":")) for death in sys.argv[3:]]
    kv = kvd.create("dist_sync")
    place = "0"

    def come_to(moment: str) -> None:
        for number, (rank, step, at) in enumerate(deaths):
            mark = folder / f"died-{number}"
            if (rank, at) == (str(kv.rank), moment) and step in ("*", place) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    weights = first_weights()
    if kv.rank:
        weights = {key: np.zeros_like(array) for key, array in weights.items()}
    momentum = {key: np.zeros_like(array) for key, array in weights.items()}
    kv.init(list(SIZES), [np.zeros(size, np.float32) for size in SIZES.values()])
    healing = healing_of(kv)
    healing.hold(Arrays(weights, momentum, come_to))
    made = []
    for step in healing.steps(total, list(SIZES)):
        place = str(step)
        made.append(step)
        come_to("before")
        handles = []
        merged = {key: np.empty(size, np.float32) for key, size in SIZES.items()}
        for key in SIZES:
            value = gradient(key, weights[key], kv.rank, step)
            handles.append(kv.pushpull_async(key, value, out=merged[key]))
            if key == "a" and any(death[1:] == (place, "half") for death in deaths):
                time.sleep(0.3)  # time itself: it arrives, and nobody says so
                come_to("half")
        come_to("sent")
        for handle in handles:
            handle.wait()
        come_to("over")
        healing.updating()
        for key in SIZES:
            update(weights[key], momentum[key], merged[key])
        come_to("updated")
    place = str(total)
    come_to("end")
    result = {"rank": kv.rank, "digest": digest_of(weights, momentum), "made": made}
    kv.close()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
