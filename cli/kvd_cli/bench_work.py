"""Works of `kvd bench` and their timing, shared by all systems that kvd is compared with."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Row: TypeAlias = dict[str, Any]

KIB: Final = 1024
VALUE_NBYTES: Final = 4  # every value is a float32
WARM_UP_STEPS: Final = 3
TRIAL_STEPS: Final = 3
MIN_ITERATIONS: Final = 3
MAX_ITERATIONS: Final = 20_000

MODES: Final = ("none", "sgd", "adam")
"""The optimizers on the servers."""

ROWS_FILE: Final = "rows.jsonl"
ROLES_FILE: Final = "roles.jsonl"
COUNTS_FILE: Final = "counts.jsonl"
SERVERS_FILE: Final = "servers.json"
"""Where the workers find the process ids of the servers, which run on the same machine."""

IN_FLIGHT: Final = 64
IN_FLIGHT_NAME: Final = f"1KiBx{IN_FLIGHT}inflight"
"""The rate of small keys: this many calls of 1 KiB are always in flight; one iteration is one call."""


def resnet50_sizes() -> list[int]:
    """Return the sizes of the 161 trainable tensors of ResNet-50, in the order of the layers.

    A stem, then four stages of bottleneck blocks (1×1, 3×3 and 1×1 convolutions, each with a batch norm of two
    vectors; the first block of a stage has a 1×1 shortcut besides), then a linear layer to 1000 classes.
    """
    stem_channels, expansion, classes = 64, 4, 1000
    sizes = _convolution(3, stem_channels, 7)
    channels = stem_channels
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        wide = expansion * width
        for block in range(blocks):
            sizes += _convolution(channels, width, 1) + _convolution(width, width, 3) + _convolution(width, wide, 1)
            if block == 0:
                sizes += _convolution(channels, wide, 1)
            channels = wide
    return [*sizes, channels * classes, classes]


def _convolution(inputs: int, outputs: int, side: int) -> list[int]:
    """Return the sizes of a convolution without bias and of the batch norm after it."""
    return [inputs * outputs * side * side, outputs, outputs]


WORK: Final[dict[str, list[int]]] = {
    "1KiB": [KIB // VALUE_NBYTES],
    "4KiB": [4 * KIB // VALUE_NBYTES],
    "64KiB": [64 * KIB // VALUE_NBYTES],
    "1MiB": [KIB * KIB // VALUE_NBYTES],
    "4MiB": [4 * KIB * KIB // VALUE_NBYTES],
    "64MiB": [64 * KIB * KIB // VALUE_NBYTES],
    "resnet50": resnet50_sizes(),
    "1KiBx1000": [KIB // VALUE_NBYTES] * 1000,
    IN_FLIGHT_NAME: [KIB // VALUE_NBYTES] * IN_FLIGHT,
}
"""The works with names of their own, and the sizes of their float32 keys. `sizes_of` knows more works."""

_SIZED: Final = re.compile(r"([1-9][0-9]{0,5})(B|KiB|MiB)(?:x([1-9][0-9]{0,5}))?")
_UNITS: Final = {"B": 1, "KiB": KIB, "MiB": KIB * KIB}
MOST_BYTES: Final = 64 << 30
"""The most bytes of one work: more is a typing mistake."""


def sizes_of(name: str) -> list[int]:
    """Return the sizes of the float32 keys of a work: one of `WORK`, ``SIZE`` or ``SIZExCOUNT``, such as ``4MiBx64``.

    Raises:
        ValueError: there is no such work; the text lists the known ones.
    """
    if name in WORK:
        return WORK[name]
    match = _SIZED.fullmatch(name)
    nbytes = int(match[1]) * _UNITS[match[2]] if match else 0
    count = int(match[3] or 1) if match else 0
    if not 0 < nbytes * count <= MOST_BYTES or nbytes % VALUE_NBYTES:
        raise ValueError(f"no such work: {name}; there are {', '.join(WORK)}, and sizes such as 16KiB or 4MiBx64")
    return [nbytes // VALUE_NBYTES] * count


def row_sizes(name: str) -> list[int]:
    """Return the sizes of the keys of one iteration, which is one call where calls overlap."""
    return [KIB // VALUE_NBYTES] if name == IN_FLIGHT_NAME else sizes_of(name)


@dataclass(frozen=True, slots=True)
class Task:
    """Task of all workers of a run.

    Attributes:
        works: names of works, in order.
        mode: the optimizer on the servers, one of `MODES`.
        seconds: how long a repetition should take.
        repetitions: how many there are of each work.
        folder: the directory in which the workers, on one machine, write rows and agree on counts.
        bound: use the arrays of `kvd.KVStore.bind` instead of the workers' own.
        copy_free: pull with `copy=False` instead of into the worker's arrays.
        counts: count calls and context switches, too.
    """

    works: tuple[str, ...]
    mode: str
    seconds: float
    repetitions: int
    folder: str
    bound: bool = False
    copy_free: bool = False
    counts: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Task:
        fields = json.loads(text)
        return Task(**{**fields, "works": tuple(fields["works"])})


def names_of(only: str) -> list[str]:
    """Return the works that a comma-separated list names.

    Raises:
        ValueError: it names no work, or an unknown one; the text lists the known ones.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    if not names:
        raise ValueError(f"no work is named; there are {', '.join(WORK)}, and sizes such as 16KiB or 4MiBx64")
    for name in names:
        sizes_of(name)
    return list(dict.fromkeys(names))


def iterations_for(trial_s: Sequence[float], seconds: float, calls_per_step: int = 1) -> int:
    """Return the number of iterations that take `seconds`, judged by a few trial steps."""
    wanted = int(seconds * calls_per_step / max(statistics.median(trial_s), 1e-9))
    return max(MIN_ITERATIONS, min(MAX_ITERATIONS, wanted))


def time_steps(step: Callable[[], object], count: int) -> tuple[list[float], float]:
    """Do a step `count` times. Return the seconds of each, and the seconds of all together."""
    each = []
    begin = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        step()
        each.append(time.perf_counter() - start)
    return each, time.perf_counter() - begin


def make_row(name: str, rank: int, repetition: int, each: list[float], total_s: float) -> Row:
    """Return the row of one repetition of a work on one rank, from the times of its iterations."""
    in_order = sorted(each)
    count = len(in_order)
    sizes = row_sizes(name)
    return {
        "name": name,
        "rank": rank,
        "keys": len(sizes),
        "bytes": VALUE_NBYTES * sum(sizes),
        "repetition": repetition,
        "iterations": count,
        "seconds": total_s,
        "p50_us": in_order[count // 2] * 1e6,
        "p99_us": in_order[int(count * 0.99)] * 1e6,
    }
