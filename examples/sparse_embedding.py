"""A recommender of two tables, users and items: a step moves the rows of its batch, and no others.

Each user and each item has a vector; the user likes the item if their product is positive. The ratings are made up, by
vectors that the program does not see. With torch the tables are ``nn.Embedding(sparse=True)``, whose sparse gradients
are pushed as they are; without it the few lines of calculus are NumPy. The store has the tables and the optimizer: ::

    kvd launch -n 2 -s 2 -- python examples/sparse_embedding.py
    python examples/sparse_embedding.py --library numpy           # in one process

A torch module need not be written around the store: `kvd.parallel.TorchModel` does this for modules with
``sparse=True``, see docs/tables.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import kvd
from kvd.initializer import Normal

Array: TypeAlias = npt.NDArray[Any]
#: The gradients of both tables for (ids of users, their rows, ids of items, their rows, likes).
Gradients: TypeAlias = Callable[[Array, Array, Array, Array, Array], tuple[Any, Any]]

USERS, ITEMS, WIDTH = 20_000, 2_000, 8
RATE = 0.5
TASTES = 2  # what likes depend on


def ratings(seed: tuple[int, int], count: int) -> tuple[Array, Array, Array]:
    """Users, items, and 1.0 for those that the user likes, else 0.0. Few users and items come up in most ratings."""
    hidden = np.random.default_rng(0)
    of_users, of_items = hidden.normal(size=(USERS, TASTES)), hidden.normal(size=(ITEMS, TASTES))
    random = np.random.default_rng((1, *seed))
    users, items = (np.floor(size * random.random(count) ** 3).astype(np.int64) for size in (USERS, ITEMS))
    likes = np.einsum("ij,ij->i", of_users[users], of_items[items]) > 0
    return users, items, likes.astype(np.float32)


def numpy_gradients() -> Gradients:
    """Of the mean logistic loss: the score is the product of both rows."""

    def compute(users: Array, of_users: Array, items: Array, of_items: Array, likes: Array) -> tuple[Any, Any]:
        scores = np.einsum("ij,ij->i", of_users, of_items)
        off = ((1 / (1 + np.exp(-scores)) - likes) / len(likes))[:, None]
        return kvd.RowSparseArray(users, off * of_items), kvd.RowSparseArray(items, off * of_users)

    return compute


def torch_gradients() -> Gradients:
    """The same of a module with room for both tables, of which only the rows of the batch are up to date."""
    import torch

    user_table = torch.nn.Embedding(USERS, WIDTH, sparse=True)
    item_table = torch.nn.Embedding(ITEMS, WIDTH, sparse=True)
    loss_of = torch.nn.BCEWithLogitsLoss()

    def compute(users: Array, of_users: Array, items: Array, of_items: Array, likes: Array) -> tuple[Any, Any]:
        tables = [(user_table, torch.from_numpy(users), of_users), (item_table, torch.from_numpy(items), of_items)]
        for table, ids, rows in tables:
            table.weight.data[ids] = torch.from_numpy(rows)
            table.weight.grad = None
        scores = (user_table(tables[0][1]) * item_table(tables[1][1])).sum(1)
        loss: Any = loss_of(scores, torch.from_numpy(likes))
        loss.backward()
        return user_table.weight.grad, item_table.weight.grad

    return compute


def accuracy(kv: kvd.KVStore, count: int = 4000) -> float:
    """How many of new ratings are foretold."""
    users, items, likes = ratings((1 << 40, 0), count)
    of_users, of_items = kv.row_sparse_pull(["users", "items"], [users, items])
    return float(np.mean((np.einsum("ij,ij->i", of_users, of_items) > 0) == likes))


def train(kv: kvd.KVStore, steps: int, batch: int, gradients: Gradients) -> float:
    """Trains, and returns the accuracy on ratings that were not seen. `batch` is that of one worker."""
    for key, rows in (("users", USERS), ("items", ITEMS)):
        kv.init(key, kvd.RowSparse(shape=(rows, WIDTH), initializer=Normal(std=0.3, seed=2)), merge="mean")
    kv.set_optimizer(kvd.optimizer.Adagrad(RATE))
    moved = 0
    for step in kv.steps(steps):
        users, items, likes = ratings((step, kv.rank), batch)
        of_users, of_items = kv.row_sparse_pull(["users", "items"], [users, items])
        kv.push(["users", "items"], list(gradients(users, of_users, items, of_items, likes)))
        moved += len(np.unique(users)) + len(np.unique(items))
    if kv.rank == 0:
        share = moved / (steps * (USERS + ITEMS))
        print(f"a step has moved {moved / steps:.0f} of {USERS + ITEMS} rows: {share:.1%}", flush=True)
    return accuracy(kv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=1024, help="ratings per step and worker")
    parser.add_argument("--library", choices=["torch", "numpy"], help="default: torch, if it is installed")
    given = parser.parse_args()
    library = given.library or ("torch" if importlib.util.find_spec("torch") else "numpy")
    gradients = torch_gradients() if library == "torch" else numpy_gradients()
    with kvd.create("dist_sync" if "KVD_SCHEDULER" in os.environ else "local") as kv:
        result = train(kv, given.steps, given.batch, gradients)
        print(f"worker {kv.rank} of {kv.num_workers}: accuracy {result:.4f}", flush=True)


if __name__ == "__main__":
    main()
