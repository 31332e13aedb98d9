"""The reader without a rank: `kvd.Observer`."""

from __future__ import annotations

from types import TracebackType
from typing import Any, ClassVar

from kvd.client.calls.process_bound import ProcessBound
from kvd.client.cluster.joining import Arrival
from kvd.client.cluster.observer import Observer as ClusterObserver
from kvd.client.cluster.observer import Reading
from kvd.client.facades.event_loops import check_may_block
from kvd.config import load


class Observer(ProcessBound):
    """Reads values of a running training without being one of its workers: it has no rank, and nobody waits for it.

    In `dist_sync`, all keys of one `pull` are of one step: they are what they were when the workers had pushed the
    same steps of their program to all of them, whatever the number of keys, slices and servers, and however fast the
    training goes on. The version is the number of that step: how often the key that is pushed most often was pushed.
    So it is the version of every key that is pushed in each step. docs/consistency.md has the exact definition.

    In `dist_async`, a pull gives the newest values. A key of up to `slice_bytes` (1 MiB by default) is of one version;
    the slices of a larger key may be of different versions.

    Thread-safe; the pulls of one observer come one after the other. A pull takes at most `request_timeout_s`.

    Args:
        settings: fields of `kvd.Config`; without `scheduler`, the cluster is found as by `kvd.create`.

    Raises:
        ConfigError: a setting is wrong.
        ConnectError: no scheduler answers within `request_timeout_s`, or something else does at its address.
        NotAllowed: this is a coroutine, and the call would stop its event loop. In a notebook it blocks the cell.
    """

    _NOT_COPYABLE: ClassVar[str] = (
        "an observer cannot be copied, pickled or saved, since it belongs to the process that created it: create one "
        "in each process, after its start"
    )

    def __init__(self, **settings: Any) -> None:
        _check_may_block()
        loaded = load(settings, overrides_from="keyword")
        self._cluster = ClusterObserver(loaded.config, Arrival(scheduler_given=loaded.is_given("scheduler")))

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ── values ──

    def pull(self, keys: Any, version: int | None = None, out: Any = None) -> Any:
        """The values of one key, or of a list of keys, of one step.

        Args:
            keys: a key (str or int), or a list of different keys.
            version: the step to read; None: the newest that is complete. The servers keep the newest step and the one
                before.
            out: an array of the key's shape and dtype to fill, for a list of keys a list of arrays; None: new NumPy
                arrays.

        Returns:
            The array, of the shape and dtype of the key; for a list of keys a list of arrays. `out`, if it was given.

        Raises:
            KeyNotFound: nobody made a key.
            VersionUnavailable: `version` is not complete yet, or not kept any more; it says which versions there are.
            ShapeMismatch, DtypeMismatch: an `out` does not fit its key.
            NodeLost: a server that leads a part of a key died; with two replicas, also its backup. Open a new observer
                when the job was started again.
            RequestTimeout: a server does not answer.
            NotAllowed: a key is in the list twice, or is a table, see `row_sparse_pull`; it holds merged gradients
                (`kvd.torch` with ``where="workers"``); or `version` was given in asynchronous training.
        """
        _check_may_block()
        return self._cluster.pull(keys, version, out)

    def read(self, keys: Any, version: int | None = None, out: Any = None) -> Reading:
        """As `pull`, and says which versions were read.

        Returns:
            `version`: the step. `versions`: the version of each key by name, which is smaller for a key that is not
            pushed in every step. `values`: a list of arrays, also for one key.
        """
        _check_may_block()
        return self._cluster.read(keys, version, out)

    def row_sparse_pull(self, keys: Any, row_ids: Any, out: Any = None) -> Any:
        """The newest rows of a table, or of each table of a list.

        In `dist_sync` all rows of a table are of one version; in `dist_async` those of one server are. Two tables of a
        list may be of different versions.

        Args:
            keys: a key (str or int) that is a table, or a list of such keys.
            row_ids: whole numbers, shape (n,), each any number of times; for a list of keys a list of such.
            out: an array of shape (n, …row_shape) and the dtype of the table, to fill; None: a new NumPy array.

        Returns:
            The rows in the order asked; for a list of keys a list of arrays. `out`, if it was given.

        Raises:
            KeyNotFound: nobody made a key.
            NotAllowed: a key is no table, or has no such row; or one server has more than 128 MiB of the rows.
            ShapeMismatch, DtypeMismatch: row ids are none, or an `out` does not fit.
            NodeLost: a server that leads a part of a table died; with two replicas, also its backup.
            RequestTimeout: a server does not answer, or the table is updated faster than the rows are read.
        """
        _check_may_block()
        return self._cluster.row_sparse_pull(keys, row_ids, out)

    def version(self) -> int:
        """The newest step that is complete on all keys of the cluster; 0 before the first.

        In asynchronous training: the smallest number of pushes that a key has taken.
        """
        _check_may_block()
        return self._cluster.version()

    def wait_for(self, version: int, timeout: float | None = None) -> int:
        """Waits until a step is complete on all keys.

        Args:
            version: the number of the step.
            timeout: in seconds; None: `request_timeout_s`.

        Returns:
            The newest complete step, which may be a later one.

        Raises:
            RequestTimeout: it was not complete in time.
            NotAllowed: the cluster trains asynchronously.
        """
        _check_may_block()
        return self._cluster.wait_for(version, timeout)

    # ── what there is ──

    def keys(self) -> list[dict[str, Any]]:
        """Every key in the order of the names: a dict of `key` (its name), `dtype`, `shape` (a list), `version` (the
        smallest of its slices), `slices`, `bytes`, ``shard`` (of its first slice) and ``servers`` (their ranks)."""
        _check_may_block()
        return self._cluster.keys()

    def status(self) -> dict[str, Any]:
        """The nodes of the cluster, as `kvd status -o json` shows them; under ``servers`` the state of each server. One
        that does not answer within `request_timeout_s` has an ``error`` there."""
        _check_may_block()
        return self._cluster.status()

    def close(self) -> None:
        """Leaves. Later calls raise StoreClosed; a second `close` does nothing."""
        self._cluster.close()


def _check_may_block() -> None:
    check_may_block("an observer blocks, and would stop the running event loop: use it in asyncio.to_thread(...)")
