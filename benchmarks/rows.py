"""The rows that every system prints: one JSON object per work, rank and repetition."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

COPIES = "+copies"
"""The end of the name of a work that a peer did with copies in and out, which counts as a separate system."""

_COUNTS = ("rank", "keys", "bytes", "repetition", "iterations")
_TIMES = ("seconds", "p50_us", "p99_us")


@dataclass(frozen=True, slots=True)
class Row:
    """One repetition of one work on one rank.

    Attributes:
        mode: the optimizer on the servers; ``none`` for a system that has no such thing.
        round: of the comparison, counted from 0: every system is started once per round and mode.
        bytes: pushed per iteration; as much comes back.
        cpu_s: processor time of this rank in the repetition; None where the system does not say.
        servers_cpu_s: of all servers together, known to one rank at most.
    """

    system: str
    mode: str
    round: int
    name: str
    rank: int
    keys: int
    bytes: int
    repetition: int
    iterations: int
    seconds: float
    p50_us: float
    p99_us: float
    cpu_s: float | None = None
    servers_cpu_s: float | None = None

    @property
    def step_us(self) -> float:
        """The mean time of an iteration."""
        return self.seconds / self.iterations * 1e6


def parse(text: str, system: str, mode: str, round_number: int) -> tuple[list[Row], list[str]]:
    """The rows in the output of a system, and its other lines (the libraries of a peer print warnings)."""
    rows, others = [], []
    for line in text.splitlines():
        row = _row(line, system, mode, round_number)
        if row is not None:
            rows.append(row)
        elif line.strip():
            others.append(line)
    return rows, others


def from_objects(objects: list[object], system: str, mode: str, round_number: int) -> list[Row]:
    """The rows among decoded JSON values, without all others."""
    found = (_checked(value, system, mode, round_number) for value in objects)
    return [row for row in found if row is not None]


def _row(line: str, system: str, mode: str, round_number: int) -> Row | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return _checked(value, system, mode, round_number)


def _checked(value: object, system: str, mode: str, round_number: int) -> Row | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    numbers = [value.get(field) for field in (*_COUNTS, *_TIMES)]
    if not all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers):
        return None
    if value["iterations"] < 1 or not all(value[field] > 0 for field in _TIMES):
        return None
    name: str = value["name"]
    if name.endswith(COPIES):
        system, name = system + COPIES, name.removesuffix(COPIES)
    return Row(
        system=system,
        mode=mode,
        round=round_number,
        name=name,
        rank=int(value["rank"]),
        keys=int(value["keys"]),
        bytes=int(value["bytes"]),
        repetition=int(value["repetition"]),
        iterations=int(value["iterations"]),
        seconds=float(value["seconds"]),
        p50_us=float(value["p50_us"]),
        p99_us=float(value["p99_us"]),
        cpu_s=_seconds(value.get("cpu_s")),
        servers_cpu_s=_seconds(value.get("servers_cpu_s")),
    )


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value >= 0 else None
