"""How a pushed value changes the stored one: the merge, the optimizer and its state, or the program's own updater."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvd.client.calls import checks
from kvd.client.calls.backend import SentHyperparameters, Updater
from kvd.client.calls.handle import Handle
from kvd.client.calls.held_signals import signals
from kvd.client.calls.optimizer_state_file import OptimizerStateFile
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.promise import Promise
from kvd.client.calls.restored_optimizer import is_kept
from kvd.client.calls.row_states import check_fits
from kvd.client.calls.values import Array
from kvd.client.local.keys import Entry, LocalKeys, TableEntry
from kvd.compression import parse
from kvd.compute.by_key import optimizer_for
from kvd.compute.optimizers import SliceState, apply_update
from kvd.core.push_policy import is_updated, push_error
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer, with_hyperparameters
from kvd.protocol.messages import ADD
from kvd.tables.contributions import Contributed, merged_rows
from kvd.tables.row_values import Rows
from kvd.tables.stored_rows import all_of


class LocalUpdates:
    """The arithmetic is that of the servers.

    Args:
        merge: "sum", "mean" or "weighted": of the keys without a merge of their own.
    """

    def __init__(self, keys: LocalKeys, steps: ProgramSteps, merge: str) -> None:
        self._keys = keys
        self._steps = steps
        self.merge = merge
        self.last_sent: SentHyperparameters | None = None
        self._optimizer: Optimizer | None = None
        self._updater: Updater | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The one that is set."""
        return self._optimizer

    def has_optimizer(self) -> Promise:
        """Whether an optimizer or an updater changes the values."""
        known = Promise()
        known.set_result(self._optimizer is not None or self._updater is not None)
        return known

    # ── a push ──

    def check(self, name: str, entry: Entry) -> None:
        """Raises NotAllowed if the key takes no push."""
        has_optimizer = self._optimizer is not None
        spec = entry.spec
        text = push_error(name, spec.dtype, ADD, has_optimizer=has_optimizer, merge=self.merge, own_merge=spec.merge)
        if text is not None:
            raise NotAllowed(text, key=name)

    def apply(self, name: str, entry: Entry, received: Array, samples: int) -> None:
        """Updates the value of the key with a flat array of its dtype."""
        if self._updater is not None:
            shape = entry.spec.shape
            key = self._keys.written.of(name)
            signals.let_run(self._updater, key, received.reshape(shape), entry.value.reshape(shape))
        else:
            out = np.empty_like(entry.value)
            optimizer = self._optimizer if is_updated(entry.spec.dtype) else None
            merge: Any = entry.spec.merge or self.merge
            own = (name, 0)
            apply_update(optimizer, entry.state, entry.value, [received], out, merge, [samples], slice_id=own)
            entry.value = out
        entry.version += 1

    def check_rows(self, name: str, entry: TableEntry) -> None:
        """Raises NotAllowed if an updater is set, or the optimizer updates no single rows."""
        if self._updater is not None:
            text = f"key {name!r} is a table, and an updater takes whole values: set_updater(None), and an optimizer"
            raise NotAllowed(text, key=name)
        if self._optimizer is not None:
            entry.table.check(self._optimizer)

    def apply_rows(self, name: str, entry: TableEntry, pushed: Rows, samples: int) -> None:
        """Updates rows of a table, which was checked."""
        ids, rows = pushed
        if (entry.merge or self.merge) == "weighted":  # of a sum and of a mean, nothing is left to calculate
            description = entry.table.description
            given = Contributed(pushed, samples)
            merged = merged_rows([given], "weighted", description.width, description.numpy_dtype)
            ids, rows = merged.ids, merged.rows()
        if self._optimizer is None:
            entry.table.assign(ids, rows)
        else:
            entry.table.update(optimizer_for(self._optimizer, name), ids, rows)

    # ── the calls of a program ──

    @property
    def last_set(self) -> Optimizer | None:
        return self._optimizer

    def current(self) -> Handle:
        return self._keys.answered(lambda: self._optimizer)

    def set_optimizer(self, optimizer: Optimizer | None) -> Handle:
        self._keys.check_open()
        optimizer = checks.known_optimizer(optimizer)

        def work() -> None:
            if self._steps.is_before_restored and is_kept(self._optimizer, optimizer):
                return
            if optimizer != self._optimizer:
                self._optimizer = optimizer
                for entry in self._keys.entries.values():
                    entry.state = SliceState()
                for table in self._keys.tables.values():
                    table.table.forget_optimizer()

        return self._keys.answered(work)

    def set_gradient_compression(self, params: object) -> Handle:
        self._keys.check_open()
        if parse(params) is not None:
            text = (
                "compression is for pushes that cross a network, and this store is within one process: use a dist_ type"
            )
            raise NotAllowed(text)
        return Handle.of(None)

    def set_updater(self, updater: Updater | None) -> None:
        """`updater(key, received, stored)` changes `stored` in place; None: the optimizer or the merge does."""
        self._keys.check_open()
        if updater is not None and not callable(updater):
            text = f"an updater is a function of a key, what was received and what is stored, not {updater!r:.40}"
            raise NotAllowed(text)
        self._updater = updater

    def update_optimizer(self, changes: dict[str, Any]) -> Handle:
        self._keys.check_open()
        plain = checks.hyperparameters(changes)
        if self._steps.is_before_restored:
            return Handle.of(None)

        def work() -> None:
            if self._optimizer is None:
                raise NotAllowed("no optimizer is set whose hyperparameters could change: call set_optimizer first")
            self._optimizer = with_hyperparameters(self._optimizer, plain)

        return self._keys.answered(work)

    def save_optimizer_states(self, path: Any, dump_optimizer: bool) -> Handle:
        self._keys.check_open()
        file = checks.file_path(path)
        content = OptimizerStateFile()

        def work() -> None:
            if self._optimizer is None:
                raise NotAllowed("no optimizer is set, so there is no state to save: call set_optimizer first")
            content.optimizer = self._optimizer if dump_optimizer else None
            for name, entry in self._keys.entries.items():
                content.steps[name], content.arrays[name] = exported(entry)
            content.tables = {name: all_of(entry.table).without_rows() for name, entry in self._keys.tables.items()}
            content.write(file)

        return self._keys.answered(work)

    def load_optimizer_states(self, path: Any) -> Handle:
        self._keys.check_open()
        file = checks.file_path(path)
        return self._keys.answered(lambda: self._load(OptimizerStateFile.read(file), file))

    def _load(self, content: OptimizerStateFile, path: object) -> None:
        states = {}
        for name, step in content.steps.items():
            arrays = content.arrays.get(name, {})
            entry = self._keys.entry(name)
            states[name] = loaded(step, arrays)
            if any(array.size != entry.value.size for array in arrays.values()):
                raise NotAllowed(f"the state of {name!r} in {path} has another size than the key", key=name)
        for name, stored in content.tables.items():
            check_fits(self._keys.table(name).table.description, self._keys.written.of(name), stored)
        if content.optimizer is not None:
            self.adopt(content.optimizer)
        for name, state in states.items():
            self._keys.entries[name].state = state
        for name, stored in content.tables.items():
            table = self._keys.table(name).table
            table.store_state(stored.ids, stored.slots, is_first=True)
            table.step = stored.updates

    def adopt(self, optimizer: Optimizer | None) -> None:
        """Update with an optimizer that came from a file. The states stay: they come from there as well. Those of
        tables do not: they start over if it is of another kind, which may keep something else under the same name."""
        if type(optimizer) is not type(self._optimizer):
            for table in self._keys.tables.values():
                table.table.forget_optimizer()
        self._optimizer = optimizer


def exported(entry: Entry) -> tuple[int, dict[str, Array]]:
    """How many updates a key has had, and the arrays of its state by slot."""
    arrays = entry.state.export()
    return int(arrays.pop("step")), arrays


def loaded(updates: int, arrays: Mapping[str, Array]) -> SliceState:
    """The state that `exported` gave."""
    return SliceState.load({**arrays, "step": np.asarray(updates, np.int64)})
