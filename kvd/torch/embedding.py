"""Embeddings whose rows are on the servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from kvd.client.facades.blocking import KVStore, backend_of
from kvd.errors import DtypeMismatch, NotAllowed
from kvd.initializer import Normal
from kvd.optimizer import Optimizer
from kvd.tables.description import RowSparse
from kvd.tables.row_values import RowSparseArray
from kvd.torch.servers import set_only_optimizer

_WHOLE = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


class Embedding(nn.Module):
    """``nn.Embedding`` over a table of a store: only the rows of a batch travel, and only they take memory here.

    ::

        users = kt.Embedding(10_000_000, 64, name="users", store=kv, optimizer=kvd.optimizer.Adagrad(0.1))
        for step in kv.steps(1000):
            loss = loss_of(users(ids(step)))  # pulls the rows of the distinct ids
            loss.backward()  # pushes their gradients: the servers update these rows

    A forward in training remembers its ids, and each backward ends with one push of all row gradients, of the forwards
    that it came through. So in a synchronous store each worker has as many backwards; one without ids calls the module
    with an empty tensor of them. Forwards in evaluation mode or under ``torch.no_grad()`` read rows and have no
    gradients.

    The optimizer is that of the store, for all its keys, and updates the pushed rows only: SGD, Adagrad and Adam take
    the steps of ``nn.Embedding(sparse=True)`` with ``torch.optim.SGD``, ``Adagrad`` and ``SparseAdam`` (whose ``eps``
    is that of Adam without bias correction). In a program whose other parameters have their optimizer in the workers,
    give the table a store of another job: ``kvd.create("dist_sync", job="tables")``.

    The module has no parameters: a state dict has no rows, and optimizers do not see them. ``store.snapshot`` and
    ``store.restore`` save them with the state of the optimizer, ``store.export_table(name, path)`` writes the rows to a
    file, and ``values=`` begins with given rows. Gradients are pushed as they are: scale no loss (``GradScaler``).

    Args:
        num_embeddings: the ids are 0 to `num_embeddings` - 1; None: any number from 0 to 2⁶³ - 1, such as a hash.
        embedding_dim: elements of a row.
        name: the key of the table.
        store: of this worker. All workers make the module.
        optimizer: is set on the store; None: the program sets one.
        op: how the row gradients of the workers become one. A worker that did not name a row counts as zeros.
        padding_idx: an id whose row is all zeros, and which has no gradient; a negative one counts from the end.
        table: further arguments of `kvd.RowSparse`, such as ``values=``, ``dtype=`` (float32 or float64), ``max_rows=``
            or ``initializer=``, which is ``Normal(1.0)`` as in torch.

    Raises:
        NotAllowed: an argument is out of its range.
        KeyExists, ShapeMismatch, DtypeMismatch: see `kvd.KVStore.init`.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        name: str,
        store: KVStore,
        optimizer: Optimizer | None = None,
        op: Literal["mean", "sum"] = "mean",
        padding_idx: int | None = None,
        **table: Any,
    ) -> None:
        super().__init__()
        if op not in ("mean", "sum"):
            raise NotAllowed(f'op is "mean" or "sum", not {op!r:.40}', key=name)
        shape = (
            {"row_shape": (embedding_dim,)} if num_embeddings is None else {"shape": (num_embeddings, embedding_dim)}
        )
        described = RowSparse(**{"initializer": Normal(1.0), **shape, **table})
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = self._checked_padding(padding_idx)
        self.name = name
        self.store = store
        store.init(name, described, merge=op)
        if optimizer is not None:
            set_only_optimizer(store, optimizer, f"Embedding(name={name!r}, optimizer=…)")
        self._has_optimizer = False
        self._is_accumulating = False
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids and rows of whole backwards
        self._coming: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # of the present one, with numbers of autograd
        self._task = -1  # the number whose end is noticed

    def _checked_padding(self, padding_idx: int | None) -> int | None:
        if padding_idx is None:
            return None
        rows = self.num_embeddings
        lowest, highest = (0, (1 << 63) - 1) if rows is None else (-rows, rows - 1)
        if isinstance(padding_idx, bool) or not isinstance(padding_idx, int) or not lowest <= padding_idx <= highest:
            raise NotAllowed(f"padding_idx is a whole number from {lowest} to {highest}, not {padding_idx!r:.40}")
        return padding_idx + (rows or 0) if padding_idx < 0 else padding_idx

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids.

        Args:
            ids: whole numbers of any shape, on any device.

        Returns:
            Shape (…ids.shape, embedding_dim), on the device of the ids.

        Raises:
            DtypeMismatch: the ids are no whole numbers.
            NotAllowed: the table has no such row, or the store has no optimizer for its gradients.
        """
        distinct, places = torch.unique(self._checked(ids), return_inverse=True)
        named = distinct if self.padding_idx is None else distinct[distinct != self.padding_idx]
        rows = torch.from_numpy(self.store.row_sparse_pull(self.name, named.numpy()))
        is_named = None
        if len(named) < len(distinct):
            is_named = distinct != self.padding_idx
            pulled, rows = rows, torch.zeros(len(distinct), self.embedding_dim, dtype=rows.dtype)
            rows[is_named] = pulled
        rows = rows.to(ids.device)
        if self.training and torch.is_grad_enabled():
            self._check_optimizer()
            rows.requires_grad_()
            hooked: Any = rows
            hooked.register_post_accumulate_grad_hook(partial(self._collect, named, is_named))
        return nn.functional.embedding(places.reshape(ids.shape).to(ids.device), rows)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards in this context push nothing: the first one after it pushes their sum."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def extra_repr(self) -> str:
        """The arguments, for ``print(module)``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, name={self.name!r}"

    # ── ids ──

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids on the host, of one dimension."""
        if ids.dtype not in _WHOLE:
            raise DtypeMismatch(f"the ids of table {self.name!r} are whole numbers, not {ids.dtype}", key=self.name)
        flat = ids.detach().cpu().to(torch.int64).reshape(-1)
        if not flat.numel():
            return flat
        rows = self.num_embeddings
        if int(flat.min()) < 0 or (rows is not None and int(flat.max()) >= rows):
            wrong = (flat < 0) if rows is None else (flat < 0) | (flat >= rows)
            index = int(wrong.nonzero()[0])
            place = ", ".join(str(int(position)) for position in np.unravel_index(index, ids.shape or (1,)))
            has = "the rows from 0 on" if rows is None else f"{rows} rows, 0 to {rows - 1}"
            raise NotAllowed(f"ids[{place}] is {int(flat[index])}: table {self.name!r} has {has}", key=self.name)
        return flat

    # ── gradients ──

    def _check_optimizer(self) -> None:
        if self._has_optimizer:
            return
        if not backend_of(self.store).steps.has_optimizer().result():
            raise NotAllowed(
                f"no optimizer is set on the store of table {self.name!r}, so gradients would replace its rows: pass "
                "optimizer=, or call store.set_optimizer. If the optimizer of the other parameters is in the workers, "
                'give the table a store of another job, such as kvd.create("dist_sync", job="tables")',
                key=self.name,
            )
        self._has_optimizer = True

    def _collect(self, named: torch.Tensor, is_named: torch.Tensor | None, rows: torch.Tensor) -> None:
        """Keep the row gradients of one forward until the end of this backward."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        gradient, rows.grad = rows.grad, None
        if gradient is not None:
            found = gradient.detach().cpu()
            self._coming.append((task, named, found if is_named is None else found[is_named]))

    def _end_backward(self) -> None:
        number, self._task = torch._C._current_graph_task_id(), -1
        coming, self._coming = self._coming, []
        if torch._C._current_autograd_node() is not None and any(task < number for task, _, _ in coming):
            raise NotAllowed(
                f"table {self.name!r} is used inside and outside of checkpoint(…, use_reentrant=True), whose gradients "
                f"cannot be told from those of a backward that has failed: use use_reentrant=False",
                key=self.name,
            )
        # An earlier backward that failed half-way has left its own.
        self._gradients += [(named, rows) for task, named, rows in coming if task >= number]
        if self._is_accumulating or not self._gradients:
            return
        gradients, self._gradients = self._gradients, []
        ids = torch.cat([named for named, _ in gradients])
        rows = torch.cat([gradient for _, gradient in gradients])
        # The next call on the table raises its error.
        self.store.push(self.name, RowSparseArray(ids.numpy(), rows.numpy()))
