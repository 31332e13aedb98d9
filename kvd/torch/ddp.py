"""A communication hook of DistributedDataParallel: a store merges the gradients."""

# Without the annotations of the future, which are texts: DDP compares those of a hook with the types themselves.

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from kvd.client.calls.handle import Handle
from kvd.client.calls.promise import Promise
from kvd.client.facades.blocking import KVStore, backend_of, create
from kvd.errors import NotAllowed
from kvd.torch.broadcast import PREFIX


class BucketReducer:
    """The state of the hook: sends the buckets of one model and gets what they are merged into.

    DDP makes its buckets again after the first step, in the order in which gradients were ready. So the keys are
    numbers and sizes of buckets, and those of buckets that are gone are deleted.

    Args:
        store: of this worker, of a synchronous type.
        op: the merge of the keys.
        name: of the model.
    """

    def __init__(self, store: KVStore, op: Literal["mean", "sum"], name: str) -> None:
        self.store = store
        self._op = op
        self._prefix = f"{PREFIX}/ddp/{name}"
        self._keys: set[str] = set()
        self._used: set[str] = set()
        self._sent: list[Handle] = []  # in this backward

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Send a bucket. The future has its merged gradients, in the memory of the bucket."""
        buffer = bucket.buffer()
        dtype = str(buffer.dtype).removeprefix("torch.")
        key = f"{self._prefix}/{bucket.index()}/{buffer.numel()}/{dtype}"
        if key not in self._keys:
            self.store.init(key, torch.zeros_like(buffer), merge=self._op)
            self._keys.add(key)
        # Buckets with the parameters of the first layers are ready last, and are needed first.
        handle = self.store.pushpull_async(key, buffer, priority=bucket.index())
        if bucket.index() == 0:  # the first of a backward; an error may have ended the last one early
            self._sent = []
            torch.autograd.Variable._execution_engine.queue_callback(self._raise_errors)
        self._sent.append(handle)
        devices = [buffer.device] if buffer.device.type != "cpu" else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

        def complete(promise: Promise) -> None:
            error = handle.exception()  # it is done
            if error is None:
                future.set_result(handle.result())
            else:
                future.set_exception(error)  # type: ignore[arg-type]

        handle.on_end(complete)
        self._used.add(key)
        if bucket.is_last():
            self._delete_unused()
        return future

    def _raise_errors(self) -> None:
        """Raise the first error of a bucket at the end of a backward: of that of a future DDP shows the text only."""
        sent, self._sent = self._sent, []
        for error in [handle.exception() for handle in sent]:
            if error is not None:
                raise error

    def _delete_unused(self) -> None:
        unused = sorted(self._keys - self._used)
        if unused:
            self.store.delete_async(unused)
        self._keys, self._used = self._used, set()


def reduce_bucket(
    state: BucketReducer,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Send a bucket of gradients through the store of the state."""
    return state.reduce(bucket)


def ddp_hook(
    store: KVStore | None = None,
    *,
    op: Literal["mean", "sum"] = "mean",
    compression: Mapping[str, Any] | None = None,
    name: str = "model",
) -> tuple[BucketReducer, Any]:
    """Return the state and the hook for ``model.register_comm_hook``: DDP merges its gradients by the store.

    ::

        model = DistributedDataParallel(module, broadcast_buffers=False)
        model.register_comm_hook(*kt.ddp_hook())

    With two workers and ``op="mean"`` the gradients are bitwise those of DDP. DDP still needs its process group: its
    constructor compares the models, and with ``broadcast_buffers=True``, its default (from torch 2.13 on
    ``forward_sync_buffers``), each forward sends the buffers through the group. So pass False, and call
    `kvd.torch.broadcast_buffers` where worker 0's buffers are wanted.

    A worker that dies ends the job, as with any DDP. Do not put the loop into ``kv.steps``, whose steps push the same
    keys each time: DDP makes its buckets again after the first step. `DistributedOptimizer` has neither limit.

    Args:
        store: of this worker; None: ``kvd.create("dist_sync")``, which stays open as ``state.store``.
        op: how the gradients of the workers become one.
        compression: as in ``store.set_gradient_compression``, for all that this worker pushes; None: as it is set.
        name: tells the models of a program apart that have such a hook.

    Raises:
        NotAllowed: `op` is neither; or an optimizer is set on the store, which would take the gradients for updates.
    """
    if op not in ("mean", "sum"):
        raise NotAllowed(f'op is "mean" or "sum", not {op!r:.40}')
    if store is None:
        store = create("dist_sync")
    if compression is not None:
        store.set_gradient_compression(compression)
    if backend_of(store).steps.has_optimizer().result():
        raise NotAllowed(
            "an optimizer is set on the store, and would use the gradients of DDP for updates: take a store without "
            "one, or kvd.torch.DistributedOptimizer"
        )
    return BucketReducer(store, op, name), reduce_bucket
