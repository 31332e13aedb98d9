"""Which costs explain measured times: least squares, without negative ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

SWEEPS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Sample:
    """What one step took.

    Attributes:
        counts: how often there was what, by name.
        seconds: of a processor.
    """

    counts: Mapping[str, float]
    seconds: float


def fit(samples: Sequence[Sample], names: Sequence[str], known: Mapping[str, float] | None = None) -> dict[str, float]:
    """The cost of each name, in seconds, with which the samples come out best: the squares of relative errors are
    smallest, and no cost is negative.

    Args:
        known: costs of other names, which are taken as they are.
    """
    known = known or {}
    rows = np.array([[sample.counts.get(name, 0.0) / sample.seconds for name in names] for sample in samples])
    given = [sum(cost * sample.counts.get(name, 0.0) for name, cost in known.items()) for sample in samples]
    wanted = np.array([1.0 - told / sample.seconds for told, sample in zip(given, samples, strict=True)])
    scale = np.sqrt((rows**2).sum(axis=0))
    scale[scale == 0] = 1.0
    products, target = (rows / scale).T @ (rows / scale), (rows / scale).T @ wanted
    found = np.zeros(len(names))
    for _ in range(SWEEPS):  # one coordinate after the other: a convex function has one minimum
        for place in range(len(names)):
            if products[place, place] > 0:
                step = (target[place] - products[place] @ found) / products[place, place]
                found[place] = max(0.0, found[place] + step)
    return {name: float(cost) for name, cost in zip(names, found / scale, strict=True)}
