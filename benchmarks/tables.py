"""How many rows of a table one core updates and reads in a second: ``python -m benchmarks.tables``.

The table alone, without a store: batches of random row ids, updated with Adagrad and read. ``live`` batches hit a table
whose rows have all been updated before; of ``new`` batches every row is new, in a table without a bound; with
``evict`` such a table keeps as many rows as five batches have. Rates count the rows of the batches by the processor
time of this process, medians over the batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.arguments import positive
from kvd.compute.compiled import kernels_in_use, warm_up
from kvd.optimizer import Adagrad
from kvd.tables.description import RowSparse
from kvd.tables.table import Table


class Rates(NamedTuple):
    """Millions of rows per second.

    Attributes:
        memory: bytes of the table over those of its rows and their state.
    """

    work: str
    update: float
    read: float
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--rows", type=positive(int), default=1_000_000, help="of the table (default: %(default)s)")
    parser.add_argument("--width", type=positive(int), default=64, help="elements of a row (default: %(default)s)")
    parser.add_argument("--batch", type=positive(int), default=100_000, help="row ids (default: %(default)s)")
    parser.add_argument("--batches", type=positive(int), default=10, help="of each work (default: %(default)s)")
    arguments = parser.parse_args()
    warm_up(Adagrad(), of_rows=True)
    for rates in (live(arguments), new(arguments), evict(arguments)):
        print(json.dumps(rates._asdict()))
    print(kernels_in_use())


def live(arguments: argparse.Namespace) -> Rates:
    """Rows that were updated before."""
    chance = np.random.default_rng(1)
    table = Table(RowSparse(shape=(arguments.rows, arguments.width)), "table")
    every = chance.permutation(arguments.rows).astype(np.int64)
    for first in range(0, arguments.rows, arguments.batch):
        ids = every[first : first + arguments.batch]
        table.update(Adagrad(), ids, np.ones((len(ids), arguments.width), np.float32))
    return rates_of("live", table, lambda: chance.integers(0, arguments.rows, arguments.batch), arguments.batches)


def new(arguments: argparse.Namespace) -> Rates:
    """Rows that nobody has updated."""
    chance = np.random.default_rng(2)
    table = Table(RowSparse(row_shape=(arguments.width,)), "table")
    return rates_of("new", table, lambda: chance.integers(0, 1 << 62, arguments.batch), arguments.batches)


def evict(arguments: argparse.Namespace) -> Rates:
    """Rows that nobody has updated, in place of which others go."""
    chance = np.random.default_rng(3)
    table = Table(RowSparse(row_shape=(arguments.width,), max_rows=5 * arguments.batch), "table")
    for _ in range(5):
        table.assign(
            chance.integers(0, 1 << 62, arguments.batch), np.ones((arguments.batch, arguments.width), np.float32)
        )
    return rates_of("evict", table, lambda: chance.integers(0, 1 << 62, arguments.batch), arguments.batches)


def rates_of(work: str, table: Table, batch: Callable[[], Any], batches: int) -> Rates:
    """What the table does with these batches."""
    updates, reads = [], []
    for _ in range(batches):
        ids = batch()
        rows = np.ones((len(ids), table.description.width), np.float32)
        begun = time.process_time()
        table.update(Adagrad(), ids, rows)
        updated = time.process_time()
        table.read(ids, rows)
        updates.append(len(ids) / (updated - begun) / 1e6)
        reads.append(len(ids) / (time.process_time() - updated) / 1e6)
    memory = table.nbytes / (len(table) * table.description.width * 4 * 2)
    found = [round(number, 3) for number in (statistics.median(updates), statistics.median(reads), memory)]
    return Rates(work, *found)


if __name__ == "__main__":
    main()
