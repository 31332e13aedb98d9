"""The blocking façade: `kvd.KVStore`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from kvd.client.calls.backend import Backend, Node, Updater
from kvd.client.calls.checks import wants_copy
from kvd.client.calls.exits import ends_well
from kvd.client.calls.handle import Handle
from kvd.client.calls.healing import Healing
from kvd.client.calls.held_signals import uninterrupted, with_uninterrupted_methods
from kvd.client.calls.merging import MergeChoice
from kvd.client.calls.program_steps import StepIteration, Steps
from kvd.client.calls.staleness import Staleness
from kvd.client.cluster.joining import Arrival
from kvd.client.facades.dead_nodes import count_dead
from kvd.client.facades.event_loops import check_may_block
from kvd.client.facades.life import StoreLife
from kvd.client.facades.open import check_backend, open_backend
from kvd.client.facades.properties import StoreProperties
from kvd.client.registry import KVStoreBase, find_factory, make_store
from kvd.optimizer import Optimizer

Key = Any
Value = Any
_ErrorType = type[BaseException]  # in the class, `type` is the store's


@with_uninterrupted_methods
class KVStore(StoreProperties, KVStoreBase):
    """A store of keys and their values, shared by the workers of a job. `kvd.create` makes one.

    Keys are `str` or `int` (an int is the key of its decimal text). Values are anything that speaks DLPack or the
    buffer protocol: NumPy, CuPy, torch, JAX. A call takes one key and its value, or a list of keys and a list of their
    values. A value may also be a list of arrays, one per device, which are summed first. So are the values of a key
    that is in one list twice; in a pull each of its `out` is filled. Updaters and errors get a key as the program wrote
    it. Every call returns or raises before its deadline: its `timeout` in seconds, otherwise the setting
    `round_timeout_s` for what other workers owe it, and `request_timeout_s` for the answer of a node. If all workers
    wait for each other, their calls raise `Deadlock`. Thread-safe: the order of the clocks is the order of the calls.

    Calls block, so in coroutines they raise NotAllowed: use `kvd.aio` there. In a notebook they block the cell.
    """

    def __init__(self, backend: Backend) -> None:
        check_backend(backend, "kvd.create")
        super().__init__(backend.facts)
        self._backend = backend
        self._life = StoreLife(backend)

    # ── values ──

    def init(self, key: Key, value: Value, *, merge: MergeChoice = None) -> None:
        """Makes the key with rank 0's value; returns when every worker may pull it.

        In place of an array the value may be a `kvd.RowSparse`, which makes a table: pushes of `kvd.RowSparseArray` and
        `row_sparse_pull` name its rows. A cluster keeps a part of its rows on every server; it has tables only with
        ``replicas=1``.

        Args:
            merge: how the pushes of a round become one: ``"sum"``, ``"mean"``, or ``"weighted"`` by their samples;
                None: as the cluster's setting says. Of a list of keys, one for all, or a list with one for each. A key
                of integers that has a merge of its own is not updated by an optimizer: its merged value replaces the
                stored one.

        Raises:
            KeyExists: it is live already (not after a restart of this worker with the same shape and dtype).
            ShapeMismatch, DtypeMismatch, MergeMismatch: rank 0 made it with another shape, dtype or merge.
            NotAllowed: there is no such merge; or it is weighted, and the key holds integers; or two keys are two names
                of one torch tensor (tied weights), which should be one key.
            NodeLost: rank 0 is gone.
        """
        self._blocking().values.init(key, value, merge).wait()

    def init_async(self, key: Key, value: Value, *, merge: MergeChoice = None) -> Handle:
        """As `init`, without waiting."""
        return self._blocking().values.init(key, value, merge)

    def push(self, key: Key, value: Value, priority: int = 0, *, samples: int = 1, cast: bool = False) -> Handle:
        """Sends a value to be merged. Returns at once, and comes before later calls on the same key.

        To a table it sends rows: a `kvd.RowSparseArray`, a pair of ids and rows, a sparse tensor of torch, such as
        the gradient of ``nn.Embedding(sparse=True)``, or a sparse matrix of SciPy or CuPy; a list has one per device.
        Rows of the same id are added up in their order. Only these rows change: an optimizer updates, and decays, no
        others. A NaN gets no further than its row. Without an optimizer the rows replace those of the table.

        For another key these values, except for pairs, count as dense arrays that are zero in all other rows: decay
        and momentum change every row. The worker makes the dense array and sends it whole, so use a table for a large
        embedding.

        Args:
            priority: higher ones leave this worker first.
            samples: how many samples the value is the mean of; only a weighted merge uses it.
            cast: the value may have another floating dtype than the key. It travels as it is; the server converts it
                to the key's dtype before it is merged.

        Raises:
            NotResumed: this worker of a synchronous store was restarted, and has not said where it goes on.
            NotAllowed, ShapeMismatch, DtypeMismatch: the rows do not fit the key. Other errors are the handle's.
        """
        return self._blocking().values.push(key, value, priority, samples, None, cast)

    push_async = push

    def pull(
        self,
        key: Key,
        out: Value = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        *,
        cast: bool = False,
        copy: bool = True,
    ) -> Any:
        """Fills `out`, an array or one per device, with the key's value and returns it; None: a new NumPy array.

        Args:
            ignore_sparse: is there for programs of MXNet. A table is never pulled whole: that raises NotAllowed.
            cast: `out` may have another floating dtype than the key: the value is converted when it has arrived.
            copy: False: a new array that is read-only, and lies in the memory of a server of this host if it can: a
                value whose bytes travelled as they are, in one message, as all of up to `slice_bytes` do, and larger
                ones in a list call of much more. It never changes, and that memory is used again when the array and all
                views of it are gone. A worker may keep two versions of a key there; what is pulled beyond them lies in
                its own memory, as do all other values.

        Raises:
            KeyNotFound: nobody made the key.
            ShapeMismatch, DtypeMismatch: `out` does not fit the key.
            NotAllowed: there is an `out`, and `copy` is False; or an array of `out` is read-only, or shares memory with
                another one or with itself, as an expanded tensor does.
            NodeLost: the value waits for a worker that died, or its server did (with two replicas: both that had it).
        """
        view = not wants_copy(copy, out)
        return self._blocking().values.pull(key, out, priority, cast, view).wait()

    def pull_async(
        self,
        key: Key,
        out: Value = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        *,
        cast: bool = False,
        copy: bool = True,
    ) -> Handle:
        """As `pull`; `out` is filled when the handle is done, with `cast` when it is waited for."""
        view = not wants_copy(copy, out)
        return self._blocking().values.pull(key, out, priority, cast, view)

    def row_sparse_pull(self, key: Key, row_ids: Value, out: Value = None, priority: int = 0) -> Any:
        """Rows of a table, in the order in which `row_ids` names them; the same one any number of times.

        A table is a key that was made with `kvd.RowSparse`. A row that was never updated reads as the initializer of
        the table says. A list of keys takes a list of lists of row ids.

        Args:
            row_ids: whole numbers, shape (n,): an array of an integer dtype, or a list.
            out: an array of shape (n, …row shape), or one per device; None: a new NumPy array.

        Raises:
            KeyNotFound: nobody made the key.
            NotAllowed: it is no table, or has no such row.
            ShapeMismatch, DtypeMismatch: `out` does not fit, or the row ids are no whole numbers of one dimension.
        """
        return self._blocking().tables.row_sparse_pull(key, row_ids, out, priority).wait()

    def row_sparse_pull_async(self, key: Key, row_ids: Value, out: Value = None, priority: int = 0) -> Handle:
        """As `row_sparse_pull`; `out` is filled when the handle is done."""
        return self._blocking().tables.row_sparse_pull(key, row_ids, out, priority)

    def export_table(self, key: Key, path: str | os.PathLike[str], since: int | None = None) -> int:
        """Writes the rows of a table to a safetensors file, and returns a version of the table to give as `since`.

        The file has `ids`, int64 and ascending, and `rows`, those that take memory; its metadata are `format`, which is
        "kvd-table", `key`, `shape`, `initializer` and `version`. An older file is replaced when all was written.

        Args:
            since: what an earlier export returned: only rows that were updated after it are written, and "evicted", the
                ids of those that were evicted after it and are not there, ascending. The table was made with
                ``track_updates=True``. None: all rows.

        Raises:
            KeyNotFound: nobody made the key.
            NotAllowed: it is no table, or does not track updates; or not all that has changed since is known.
            OSError: the file cannot be written. What was there is there still.
        """
        return int(self._blocking().tables.export_table(key, path, since).wait())

    def bind(self, key: Key) -> Any:
        """Arrays to keep for a key: `(gradient, weight)`, the same in each call; of a list of keys, two lists.

        `gradient`, zeros at first, is in memory that a server of this host reads directly: a push of it copies
        nothing. Do not write to it between a push and its end (its handle, or the return of `pushpull`). `weight` has
        the key's value, and changes only in a `pull` or `pushpull` of the key with it as `out`. Servers on other hosts
        get copies. After a call that failed, do not write to the bound gradient until `flush` has returned: messages
        under way may still be read from it.

        Raises:
            KeyNotFound: nobody made the key.
        """
        return self._blocking().binding.bind(key).wait()

    def pushpull(
        self,
        key: Key,
        value: Value,
        out: Value = None,
        priority: int = 0,
        *,
        samples: int = 1,
        cast: bool = False,
        copy: bool = True,
    ) -> Any:
        """Push and pull in one round trip. Without `out` the result is written into `value`. `cast`: as in both.

        With `copy=False` the result is a new array as `pull` gives it, of the key's dtype, and `value` stays as it is.

        Raises:
            ShapeMismatch, DtypeMismatch: `value` or `out` does not fit the key; the message says which.
            NotAllowed: the result cannot be written to `out`, as in `pull`; or to `value` without `out`, as if that
                has only some rows.
        """
        view = copy is not True and not wants_copy(copy, out)
        return self._blocking().values.pushpull_and_wait(key, value, out, priority, samples, cast, view)

    def pushpull_async(
        self,
        key: Key,
        value: Value,
        out: Value = None,
        priority: int = 0,
        *,
        samples: int = 1,
        cast: bool = False,
        copy: bool = True,
    ) -> Handle:
        """As `pushpull`; `out` is filled when the handle is done, with `cast` when it is waited for. Whatever `copy`
        says, the value is copied before this returns."""
        view = not wants_copy(copy, out)
        return self._blocking().values.pushpull(key, value, out, priority, samples, True, None, cast, view)

    def broadcast(self, key: Key, value: Value, out: Value = None, priority: int = 0) -> Any:
        """Gives rank 0's value to everyone's `out` (None: into `value`), and makes the key if it is new.

        All workers call it; only the value of rank 0 is read.
        """
        return self._blocking().assignments.broadcast(key, value, out, priority, None).wait()

    def broadcast_async(self, key: Key, value: Value, out: Value = None, priority: int = 0) -> Handle:
        """As `broadcast`, without waiting."""
        return self._blocking().assignments.broadcast(key, value, out, priority, None)

    def delete(self, key: Key) -> None:
        """Deletes a key, or a list of keys; all workers call it. Returns when it is gone for all of them.

        It waits for the earlier calls of this worker on the key, and for the other workers as a round does: also for
        one that died, until it is restarted and deletes the key. A key of the same name can then be made with another
        shape; nothing that was sent to the deleted key counts in it. A call that timed out goes on: delete again to
        wait for its end.

        Raises:
            KeyNotFound: there is no such key (not after a restart of this worker: its predecessor may have deleted it).
            NodeLost: a worker that has not deleted it died. The key is still there: delete it again.
            NotAllowed: this worker has left the rounds.
        """
        self._blocking().deletion.delete(key).wait()

    def delete_async(self, key: Key) -> Handle:
        """As `delete`, without waiting. Later calls on the key wait for the end of the deletion."""
        return self._blocking().deletion.delete(key)

    # ── rounds and barriers ──

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every push so far is acknowledged, and raises their first unobserved error.

        Raises:
            NodeLost: a push waits for a worker that died. The servers keep it: it counts if that worker is restarted.
        """
        self._blocking().rounds.flush(timeout).wait()

    def barrier(self, name: str = "", timeout: float | None = None) -> None:
        """Waits for all workers that have not left.

        In a program that may be restarted, give the barrier of each place its own name: a restarted worker passes those
        that its predecessor passed.

        Raises:
            BarrierBroken: its `missing` names the workers that died before they came.
        """
        self._blocking().rounds.barrier(name, timeout).wait()

    def join(self, until: str | int | None = None) -> None:
        """Leaves the rounds and stays: the others no longer wait for this worker's pushes (uneven data).

        Args:
            until: the name of a point, such as ``"epoch 3"``: it is left until all workers have come to the same point,
                and returns then; from there on all take part again, and the next loop over `steps` of each begins
                together. None: for good. The same name again is the next point.

        Raises:
            BarrierBroken: with `until`: its `missing` names the workers that died before they came. This one still
                stands by: call it again when they are back.
            NodeLost: a push waits for a worker that died, as in `flush`. This one is still in the rounds.
            NotAllowed: with `until`: in a loop over `steps`, or in two threads at once.
        """
        self._blocking().rounds.join(until).wait()

    def steps(
        self, total: int, keys: Sequence[Key] | None = None, shared: bool = False, restored: bool = False
    ) -> Steps:
        """Iterates over the steps of a training: ``for step in kv.steps(total)``.

        A new worker gets ``range(total)``. A restarted one goes on with the step in which its predecessor stopped, and
        pulls give it the values of that step; in `dist_sync` it ends with the bits of a run that was never disturbed.
        What the program pushes or broadcasts before the loop, and in loops before it, counts once as well: repeat it
        as it was. A program that is restarted has the same loops in the same order.

        Each step pushes each key of the loop once, and broadcasts no key that it pushes. Its pushes wait until those of
        the step before are acknowledged. A barrier in a step is one of that step. The loop ends after its last step,
        with ``break``, or with an exception; a step that was left early stays as far as it has come.

        Args:
            total: how many steps there are.
            keys: those that each step pushes; None: those that the first step pushes.
            shared: all workers together make `total` steps in `dist_async`: a free worker makes the next one, and the
                step of a worker that died is given out again. All of them call it with the same `total`. Bounded
                staleness does not wait for a worker that finds no more steps, and no worker waits for a slow one but
                at the end, for the step that it makes. In other types each worker makes every step.
            restored: the program loads what earlier steps have changed in its own memory, such as weights that an
                optimizer in the worker has updated: from a checkpoint of its own, as of the first step that it gets,
                or by a pull, where the values of the store are all of it. Needed only without an optimizer on the
                servers.

        Raises:
            NotAllowed: a step pushes another key, pushes a key twice or not at all; a loop is open already; the
                predecessor of this worker cannot be continued, since its keys are at different clocks; a broadcast or
                barrier in a shared step.
            NotResumed: steps were made without this process, since it was restarted, joined later or was late, or the
                job was restored; no optimizer is set on the servers, so they do not have what these steps changed, and
                the program has not said `restored`.
            RequestTimeout: shared steps are left that others do not finish within `round_timeout_s`.
        """
        return Steps(StepIteration(self._blocking().steps, total, keys, shared, restored))

    def resume(self) -> None:
        """Says that the program knows where it goes on, as one that has read its own checkpoint.

        This worker then pushes after all that counted of its predecessor, and its loops over `steps` begin with step 0.
        Nothing happens in a worker without a predecessor.

        Raises:
            NotAllowed: in a loop over `steps`, or while pushes are under way.
        """
        self._blocking().rounds.resume().wait()

    def rewind(self, clock: int) -> None:
        """Goes back to the step after push number `clock` of each key: the step in which the predecessor died. Programs
        whose loop is over `steps` need not call it.

        Raises:
            NotAllowed: in a loop over `steps`, or while pushes are under way.
        """
        self._blocking().rounds.rewind(clock).wait()

    def clock(self, key: Key) -> int:
        """How many pushes of this worker to the key count; after a restart, those of its predecessor."""
        return int(self._blocking().rounds.clock(key).wait())

    def version(self, key: Key) -> int:
        """How many rounds (asynchronous stores: pushes) of the key are committed."""
        return int(self._blocking().rounds.version(key).wait())

    # ── servers and optimizer ──

    def send_command_to_servers(self, head: int | str, body: bytes | str) -> list[bytes]:
        """Runs the controller registered for `head` on every server, and returns their answers in rank order.

        With two replicas, a server that is dead and leads nothing is not asked.

        Raises:
            NotAllowed: a server has no such controller, or it failed there.
            NodeLost: a server died before it answered; it may have run the command.
        """
        return list(self._blocking().nodes.send_command(head, body).wait())

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """The servers update the values with it from now on. None: a merged value replaces the stored one.

        The same optimizer again changes nothing. Another one starts with new state; all workers that have set one set
        it, between the same pushes, and each waits for its pushes so far. One worker may also set optimizers for all.

        Raises:
            NotAllowed: other workers have set another one. It names them, and what differs; in all workers calls raise
                it until they agree. Or it cannot update a key, as LARS one of several slices; or a server has no memory
                for what it keeps. The one before is then in use still.
        """
        self._blocking().updates.set_optimizer(optimizer).wait()

    def set_gradient_compression(self, params: Mapping[str, Any]) -> None:
        """Compresses what this worker pushes from now on, such as ``{"type": "2bit", "threshold": 0.5}``.

        The types are "fp16", "bf16", "fp8", "int8", "2bit", "1bit", "onebit", "topk", "randomk", "dithering",
        "powersgd", and those that are installed; "none" turns compression off. In `dist_sync` without an optimizer the
        servers encode what they merge in the same way, and the worker pulls it so; ``"pull": "plain"`` switches that
        off. Weights are pulled plain. Values of fewer bytes than ``"min_bytes"``, which is 65536 if the dict does not
        say it, of integers, or pushed with `cast` are sent plain. With ``"ef": "vanilla"``, the default of those that
        lose much, what compression leaves of a push is added to the next one of the key; with ``"ef": "none"`` it is
        lost. `docs/compression.md` has the parameters.

        Each worker may have its own, and may change it at any time. What is left over begins at zero in a restarted
        worker, unless it is kept in the directory ``"state_dir"``, and when compression is turned off.

        Raises:
            ConfigError: there is no such type, or a parameter is out of its range.
            NotAllowed: a server does not know the compressor; or the store is within one process.
        """
        self._blocking().updates.set_gradient_compression(params).wait()

    def update_optimizer(self, **hyperparameters: Any) -> None:
        """Changes hyperparameters such as the learning rate on every server, from this worker's next push on.

        The state stays.

        Raises:
            NotAllowed: no optimizer is set.
            ConfigError: it has no such field, or the value is out of its range.
        """
        self._blocking().updates.update_optimizer(hyperparameters).wait()

    def set_updater(self, updater: Updater | None) -> None:
        """Types `local` and `device` only: `updater(key, received, stored)` changes `stored` in place.

        Raises:
            NotAllowed: the store belongs to a cluster.
        """
        self._blocking().updates.set_updater(updater)

    def save_optimizer_states(self, path: Any, dump_optimizer: bool = False) -> None:
        """Writes the optimizer's state of all keys to a safetensors file; with `dump_optimizer`, the optimizer too."""
        self._blocking().updates.save_optimizer_states(path, dump_optimizer).wait()

    def load_optimizer_states(self, path: Any) -> None:
        """Reads such a file into the store."""
        self._blocking().updates.load_optimizer_states(path).wait()

    # ── snapshots ──

    def snapshot(self, path: Any) -> None:
        """Writes the whole store into a new folder: values, the optimizer and its state, clocks, and the step.

        All workers call it between two steps: after the pushes of a step of `steps`, before them, or outside of loops.
        Worker 0 writes, and the others wait. The folder has its name when it is complete. It is there already if this
        very snapshot was taken before a restart; then, and at a place that lies before the snapshot that the store was
        restored from, nothing happens.

        Args:
            path: the folder, in one that exists.

        Raises:
            SnapshotError: it cannot be written, or something else has the name; in all workers. What another error is
                in worker 0 is a SnapshotError in the others.
            NotAllowed: in the midst of a step, or in a shared one; or others push meanwhile.
        """
        self._blocking().snapshots.snapshot(path).wait()

    def snapshot_async(self, path: Any) -> Handle:
        """As `snapshot`, but the program goes on while it is written: returns as soon as the state has been read.

        Worker 0 keeps a copy of all values and states until they are written. One snapshot is written at a time: the
        next one is not read before it has ended. `close` waits for it; a process that dies meanwhile leaves nothing
        under the name. An error of the disk is raised by the handle in all workers; in worker 0, if nobody waits for
        the handle, by `flush` or `close`.

        Returns:
            A handle that is done when the folder has its name.

        Raises:
            As `snapshot`, for what is known by then.
        """
        written: Handle = self._blocking().snapshots.snapshot_async(path).wait()
        return written

    def restore(self, path: Any, missing_ok: bool = False, or_older: bool = False) -> int | None:
        """Makes the keys of a snapshot, in place of `init` and `set_optimizer`, with the state of the optimizer.

        All workers call it, in a new job with any number of workers and servers; worker 0 reads. Loops over `steps` go
        on after the step of the snapshot: give them the same totals. To begin another training, call `resume` next.
        Clocks and versions begin with 0. A restarted worker of the job calls it as well, and gets what its predecessor
        got, whatever there is now. `init` of a restored key with its shape, dtype and merge changes nothing, once.

        Args:
            path: the folder of a snapshot, or one that has snapshots of one job: the newest of them, by steps. That of
                worker 0 counts.
            missing_ok: if nothing is there, or an empty folder, return None: the program then begins, with `init` and
                `set_optimizer`.
            or_older: if the snapshot is damaged, take the one before it in the same folder, with a warning in the log.

        Returns:
            How many steps of its loops the program had made.

        Raises:
            SnapshotError: it is no snapshot, damaged, or of a newer kvd. Nothing was made. What another error is in
                worker 0 is a SnapshotError in the others.
            NotAllowed: the job has keys already, or a loop over `steps` has begun.
        """
        steps: int | None = self._blocking().snapshots.restore(path, missing_ok, or_older).wait()
        return steps

    # ── who is dead ──

    def push_staleness(self) -> dict[str, Staleness]:
        """How stale the pushes of each worker were so far, by the name of the worker, such as ``"worker 0"``.

        Measured in `dist_async`; empty in all other types.
        """
        return dict(self._blocking().nodes.push_staleness().wait())

    def num_dead_node(self, node_id: int, timeout: float = 60) -> int:
        """How many of these nodes are dead: declared dead, or silent for `timeout` seconds (0: only the former).

        Args:
            node_id: as in ps-lite: group masks (scheduler 1, servers 2, workers 4, or a sum of them), or one node:
                server r is 8 + 2r, worker r is 9 + 2r. With `max_workers` every worker below that number has an id.

        Raises:
            NotAllowed: the job has no such node; the message lists the ids that it has.
        """
        return count_dead(self._blocking().nodes, node_id, timeout)

    def dead_nodes(self) -> Sequence[Node]:
        """The servers and workers that are declared dead."""
        return self._blocking().nodes.dead_nodes(0)

    # ── the end ──

    def set_barrier_before_exit(self, flag: bool) -> None:
        """Whether `close` waits for all workers. True unless it is changed."""
        self._life.barrier_before_exit = bool(flag)

    def close(self) -> None:
        """Leaves the cluster: flush, leave the rounds, wait for the other workers, go. They stop waiting for this one.

        All of that together takes `round_timeout_s` at most (`request_timeout_s` if a node does not answer).

        Raises:
            KvdError: the first error of the way, or one that nobody observed; the store is closed all the same.
        """
        if self._life.is_open:
            self._blocking()
            if self._life.claim_end():
                self._life.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: _ErrorType | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if ends_well(kind, error):
            self.close()
        else:
            self._life.abandon(failed=True)

    def _blocking(self) -> Backend:
        """The backend, for a call that may block. Raises NotAllowed in coroutines."""
        check_may_block("a blocking call would stop the running event loop: use kvd.aio there, and await it")
        return self._backend


def backend_of(store: KVStore, *, may_block: bool = True) -> Backend:
    """What the store stands on, for `Exchange` and for tests.

    Args:
        may_block: the caller makes a call that may block, which raises NotAllowed in coroutines.
    """
    return store._blocking() if may_block else store._backend


def stopped_in_loop(store: KVStore) -> bool:
    """Whether this worker was restarted, and its predecessor had a loop over `steps`, which says where to go on."""
    return store._backend.steps.is_behind_loops


def healing_of(store: KVStore) -> Healing:
    """The part that passes on the state of a program with its own optimizer, for `kvd.torch`."""
    return store._backend.healing


@uninterrupted
def leave_at_once(store: KVStore) -> None:
    """Leaves in good order without flush and barrier: for a visitor whose request was refused."""
    store._life.abandon(failed=False)


#: The types of kvd: `create` with one of them gives a `KVStore`.
TypeName = Literal["local", "device", "dist_sync", "dist_async", "dist_device_sync", "dist_device_async"]


@overload
def create(type: TypeName = "local", **settings: Any) -> KVStore: ...


@overload
def create(type: str, **settings: Any) -> Any: ...


def create(type: str = "local", **settings: Any) -> Any:  # noqa: A002  the name is part of the public surface
    """Makes a store. In a cluster it returns when all servers are there and all workers have joined.

    Waiting for them takes `join_timeout_s` (300 s) at most. After 3 s a warning in the log names those that are missing
    and how to start them, and again after 9, 21, 45 … s. A worker that joined once and is dead now is not waited for.

    Args:
        type: `local` and `device` live in this process; `dist_sync`, `dist_async`, `dist_device_sync` and
            `dist_device_async` join the cluster that KVD_* (or DMLC_*) variables, a file or `settings` name. Upper and
            lower case are the same. Other names are those of `register_store` and of entry points ``kvd.stores``, then
            MXNet's and BytePS's: `local_update_cpu` and `local_allreduce_cpu` mean `local`, `local_allreduce_device`
            and `nccl` mean `device`, `byteps` and `horovod` mean `dist_sync`, where `pushpull`
            makes the keys that are new.
        settings: fields of `kvd.Config`; a registered store takes what it wants.

    Raises:
        ConfigError: a setting is wrong, or differs from the cluster's; or nothing has this name.
        ConnectError: no scheduler answers, or something else does at its address.
        RequestTimeout: servers or workers are missing; `waiting_for` names them.
        NotAllowed: the cluster is full; or this is a coroutine, which calls `kvd.aio.create`.
        SnapshotError: the setting `restore` wants a snapshot that cannot be restored, or the folder `snapshot_dir`
            cannot be used; in all workers.
    """
    factory = find_factory(type)
    if factory is not None:
        return make_store(type, factory, settings)
    check_may_block("kvd.create blocks, and would stop the running event loop: use await kvd.aio.create(...)")
    return _opened(type, settings)


def visit(type: str, arrival: Arrival, **settings: Any) -> KVStore:  # noqa: A002  as in `create`
    """As `create`, for one that comes for a single request: see `Arrival`."""
    return _opened(type, settings, arrival)


def _opened(type_name: str, settings: dict[str, Any], arrival: Arrival | None = None) -> KVStore:
    opened: list[KVStore] = []

    @uninterrupted
    def work() -> None:
        opened.append(KVStore(open_backend(type_name, settings, arrival)))

    try:
        work()
        return opened[0]
    except BaseException:
        for store in opened:  # a signal handler has raised at the end
            uninterrupted(store._life.withdraw)()
        raise
