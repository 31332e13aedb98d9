"""Between a group and a store: gradients leave while backward still runs, weights are back for the next forward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from kvd.compute.arrays import sum_devices
from kvd.errors import ConfigError, InputMismatch, KeyExists, NotAllowed
from kvd.optimizer import Optimizer, with_hyperparameters
from kvd.parallel.device import Array, HostArray
from kvd.parallel.device_threads import run_on_all
from kvd.parallel.group.downloads import Downloads
from kvd.parallel.group.parameters import copy_out, host_arrays
from kvd.parallel.group.pipeline_slot import LocalUpdate, Slot

if TYPE_CHECKING:
    from kvd.client.store import KVStore
    from kvd.parallel.group.group import DataParallelExecutorGroup

#: ``"server"``: what comes back is the weight. ``"local"``: it is the merged gradient, and each worker updates.
Update: TypeAlias = Literal["server", "local"]


#: The stores that this process has fed: what they counted for this worker since is its own work. For each, the feed
#: that has the bound arrays of a key: a second one would write into what the first has sent.
_fed: weakref.WeakKeyDictionary[KVStore, weakref.WeakValueDictionary[str, Feed]] = weakref.WeakKeyDictionary()


class Feed:
    """A group bound to a store; `DataParallelExecutorGroup.bind_to` makes it.

    **When it is made**, every parameter becomes a key with rank 0's value, and all workers pull it; so do states
    (``aux:NAME``). A key that is there already keeps its value. A worker that is started anew under its old node id
    goes back to the step in which its predecessor died.

    **In backward**, a parameter whose gradient is complete on all devices is sent, with ``-i`` as the priority of the
    i-th parameter: the last layer is ready first, but the first layer, which the next forward needs first, overtakes
    it. With ``detect_anomaly`` nothing is sent before all gradients are known to be finite. On CUDA the way to the
    host is a stream of its own, see `kvd.parallel.feed_cuda`. Gradients of CPUs are not copied to be sent: backward
    writes them, or their sum over several devices, where the servers of this host read them (``kv.bind``). The
    `grad_arrays` of a single CPU are those arrays: only read them between a backward and the next forward.

    **In the next forward** (and in ``get_params``) the weights are waited for and copied to every device. Until then
    those on the devices are the old ones: a store may answer while backward still reads them. A backward without a
    forward in between, as of another group that shares this one's arrays, waits too before it writes gradients.

    **Scale.** A group's gradient is that of the mean loss of this worker's batch. Merged with ``"mean"``, or
    ``"weighted"`` by the samples that each push reports (exact for unequal batches), it is that of the mean over all
    workers. Where the store merges with ``"sum"``, the optimizer given here gets ``rescale_grad / num_workers``, which
    gives the same for equal batches. An optimizer that was set on the store elsewhere is left alone.

    Attributes:
        kv: the store.
        keys: parameter → key, of all parameters.
        clock: how many steps of this worker the store had counted when this was made: 0, unless the worker was
            started anew, or trained with these keys before.
        done_before: of these, the steps of a predecessor that died: the program goes on after them.
        update: as given.

    Raises:
        ConfigError: ``update`` is unknown or lacks its optimizer; a parameter whose ``grad_req`` is ``"add"`` (when
            its sum is complete only the program knows: push it yourself); two parameters with one key.
        InputMismatch: ``names`` has a name that is no parameter.
        NotAllowed: ``update="local"`` with keys that were trained already: the store holds no weights then.
        ShapeMismatch, DtypeMismatch: the keys are of another model.
        NodeLost, RequestTimeout: as every call of the store.
    """

    def __init__(
        self,
        group: DataParallelExecutorGroup,
        kv: KVStore,
        names: Mapping[str, str | int],
        optimizer: Optimizer | None,
        update: Update,
    ) -> None:
        self.kv = kv
        self.keys = _keys(group.param_names, names)
        _check_request(group, optimizer, update)
        self._group = group
        self._lock = threading.Lock()
        self._aux_keys = {name: f"aux:{name}" for name in group.aux_names}
        self._in_step = self._has_sent = False
        self._samples = 1
        self._sends_when_ready = True
        if optimizer is not None:
            scale = 1 / kv.num_workers if kv.merge == "sum" else 1.0
            optimizer = with_hyperparameters(optimizer, {"rescale_grad": optimizer.rescale_grad * scale})
        if update == "server" and optimizer is not None:
            kv.set_optimizer(optimizer)
        self._init_keys()
        self.clock = self._find_step(update)
        has_gpu = any(device.is_cuda for device in group.devices)
        bound = {} if has_gpu else self._bound_arrays()
        self._slots = self._make_slots(bound, optimizer if update == "local" else None)
        self._pull_all()  # and then nothing that was sent before is on its way any more
        self.update: Update = update
        self.done_before = self.clock if kv.restarted and kv not in _fed else 0
        self._take_over(bound)
        self._downloads = Downloads(group.lanes, "device" in kv.type, self._send) if has_gpu else None

    def check_covers(self, group: DataParallelExecutorGroup) -> None:
        """Raises NotAllowed if the group has a parameter or state without a key here."""
        unknown = [name for name in group.param_names if name not in self._slots]
        unknown += [name for name in group.aux_names if name not in self._aux_keys]
        if unknown:
            raise NotAllowed(f"shared_group is bound to a store without {', '.join(unknown)}: bind the larger group")

    # ── one step ──

    def begin(self, group: DataParallelExecutorGroup, when_ready: bool) -> None:
        """Backward of ``group`` starts; with ``when_ready`` gradients are sent at once, else by `end`.

        Raises:
            NotAllowed: the backward before failed when some of its gradients had gone.
            As `receive`, where there was no forward since the backward before.
        """
        self._check_whole()
        for slot in self._slots.values():
            slot.wait()  # its gradient is read until then
        self._in_step, self._has_sent, self._group = True, False, group
        self._sends_when_ready = when_ready
        self._samples = group.get_batch_size()
        for slot in self._slots.values():
            slot.ready = 0

    def completed(self, index: int, name: str) -> None:
        """The gradient of parameter ``name`` is complete on device ``index``. Called from the devices' threads."""
        with self._lock:
            slot = self._slots[name]
            slot.ready += 1
            is_last = slot.ready == len(self._group.devices)
        if self._sends_when_ready:
            self._hand_over(index, name, is_last)

    def end(self) -> None:
        """Backward is done on all devices; on return every gradient is on its way."""
        if not self._sends_when_ready:
            for name, slot in self._slots.items():
                for index in range(slot.ready):
                    self._hand_over(index, name, index == slot.ready - 1)
        if self._downloads is not None:
            self._downloads.drain()
        self._in_step = False

    def receive(self) -> None:
        """Returns when the weights of the last step are on every device.

        Raises:
            What the store raises for them: NodeLost, RequestTimeout and the like; again when it is called again.
            NotAllowed: as `begin`.
        """
        self._check_whole()
        coming = [name for name, slot in self._slots.items() if slot.handle is not None]
        for name in coming:
            self._slots[name].wait()
        if coming:
            self._to_devices({name: self._slots[name].weights for name in coming})
        for name in coming:
            self._slots[name].handle = None

    # ── besides the steps ──

    def pull(self) -> None:
        """Take the store's newest weights, as a worker does that left the rounds.

        Raises:
            NotAllowed: ``update="local"``: the store holds no weights.
        """
        if any(slot.local is not None for slot in self._slots.values()):
            raise NotAllowed('with update="local" the store holds gradients, no weights')
        self.receive()
        self._pull_all()

    def share_states(self) -> None:
        """Give rank 0's states (running means and the like; the mean over its devices) to all workers.

        All workers call it, at the same point of their programs; it is a round of the store.
        """
        if not self._aux_keys:
            return
        self.receive()
        executors, names = self._group.executors, list(self._aux_keys)
        own = host_arrays(executors, names)
        copy_out(executors, replace(self._group.description, params={}), {}, own)
        self.kv.broadcast(list(self._aux_keys.values()), [own[name] for name in names])
        self._to_devices(own)

    def local_states(self) -> dict[str, HostArray]:
        """What the workers' own optimizer remembers, as arrays ``NAME|…``; empty with ``update="server"``."""
        return {
            f"{name}|{part}": array
            for name, slot in self._slots.items()
            if slot.local is not None
            for part, array in slot.local.state.export().items()
        }

    def load_local_states(self, arrays: Mapping[str, HostArray]) -> None:
        """Take over what `local_states` gave.

        Raises:
            InputMismatch: it is of other parameters, or of ``update="server"``.
            ProtocolError: the arrays are no such states.
        """
        wanted = {name for name, slot in self._slots.items() if slot.local is not None}
        if {name.rpartition("|")[0] for name in arrays} != wanted:
            raise InputMismatch('the states are not those of this group and its update="local"', setting="update")
        for name in wanted:
            own = {key.rpartition("|")[2]: array for key, array in arrays.items() if key.rpartition("|")[0] == name}
            self._slots[name].load(own)

    # ── inside ──

    def _check_whole(self) -> None:
        if self._in_step and self._has_sent:
            raise NotAllowed(
                "the last backward failed after it had sent some gradients: restart this worker to redo it"
            )

    def _bound_arrays(self) -> dict[str, tuple[HostArray, HostArray]]:
        """Name → the store's arrays for gradient and weight, of each trained parameter whose no other feed has."""
        taken: Collection[str] = _fed.get(self.kv, ())
        names = [name for name in self._group.executors[0].grads if self.keys[name] not in taken]
        gradients, weights = self.kv.bind([self.keys[name] for name in names])
        return dict(zip(names, zip(gradients, weights, strict=True), strict=True))

    def _make_slots(self, bound: Mapping[str, tuple[HostArray, HostArray]], local: Optimizer | None) -> dict[str, Slot]:
        executors, slots = self._group.executors, {}
        for index, (name, own) in enumerate(host_arrays(executors, self._group.param_names).items()):
            is_trained = name in executors[0].grads
            gradient, incoming = bound.get(name, (None, own))
            if (incoming.shape, incoming.dtype) != (own.shape, own.dtype):
                incoming = own  # a key of another model: the pull that comes next says so
            if local is not None and is_trained:
                slots[name] = Slot(
                    self.keys[name], -index, own, gradient, LocalUpdate.of(local, own, incoming), is_trained
                )
            else:
                slots[name] = Slot(self.keys[name], -index, incoming, gradient, None, is_trained)
        return slots

    def _take_over(self, bound: Mapping[str, tuple[HostArray, HostArray]]) -> None:
        """From now on gradients are made in the memory of the store: by a single device itself."""
        executors = self._group.executors
        if len(executors) == 1:
            executors[0].use_gradients({name: gradient for name, (gradient, _) in bound.items()})
        taken = _fed.setdefault(self.kv, weakref.WeakValueDictionary())
        taken.update(dict.fromkeys([self.keys[name] for name in bound], self))

    def _init_keys(self) -> None:
        own = host_arrays(self._group.executors, [*self.keys, *self._aux_keys])
        params = {name: own[name] for name in self.keys}
        states = {name: own[name] for name in self._aux_keys}
        copy_out(self._group.executors, self._group.description, params, states)
        keys = {**self.keys, **self._aux_keys}
        errors: list[BaseException | None] = []
        handles = []
        for name, value in own.items():
            try:
                handles.append(self.kv.init_async(keys[name], value))
            except KeyExists as error:  # a store in this process answers at once
                errors.append(error)
        errors += [handle.exception() for handle in handles]
        for failure in errors:  # a key that is live keeps its value, whoever made it
            if failure is not None and not isinstance(failure, KeyExists):
                raise failure

    def _find_step(self, update: Update) -> int:
        clocks = [self.kv.clock(self.keys[name]) for name in self._group.executors[0].grads]
        step = min(clocks, default=0)
        if update == "local" and max(clocks, default=0) > 0:
            raise NotAllowed(
                'update="local" with keys that were trained already: the store holds no weights to start from; '
                "start a new store from a checkpoint"
            )
        if clocks and step != max(clocks) and self.kv.num_servers:
            self.kv.rewind(step)  # the predecessor died between the keys of one step
        return step

    def _pull_all(self) -> None:
        values: dict[str, HostArray] = {name: slot.weights for name, slot in self._slots.items()}
        values |= host_arrays(self._group.executors, list(self._aux_keys))
        keys = {**self.keys, **self._aux_keys}
        handles = [self.kv.pull_async(keys[name], out=value) for name, value in values.items()]
        for handle in handles:
            handle.wait()
        self._to_devices(values)

    def _hand_over(self, index: int, name: str, is_last: bool) -> None:
        gradients: list[Array] = [executor.grads[name] for executor in self._group.executors]
        if self._downloads is not None:
            self._downloads.completed(index, name, gradients)
        elif is_last:
            self._send(name, gradients)

    def _send(self, name: str, gradients: Sequence[HostArray]) -> None:
        slot = self._slots[name]
        if slot.gradient is not None and gradients[0] is not slot.gradient:
            sum_devices(gradients, out=slot.gradient)
        value = list(gradients) if slot.gradient is None else slot.gradient
        self._has_sent = True
        slot.handle = self.kv.pushpull_async(
            slot.key, value, out=slot.incoming, priority=slot.priority, samples=self._samples
        )

    def _to_devices(self, values: Mapping[str, HostArray]) -> None:
        executors = self._group.executors

        def copy(index: int) -> None:
            executor = executors[index]
            for name, value in values.items():
                target = executor.params.get(name)
                if target is None:
                    target = executor.aux.get(name)
                if target is not None:  # of a group that shares a part of the parameters only
                    executor.device.put(target, value)

        run_on_all(self._group.lanes, copy)


def _keys(params: Sequence[str], names: Mapping[str, str | int]) -> dict[str, str]:
    unknown = [name for name in names if name not in params]
    if unknown:
        raise InputMismatch(f"names has {', '.join(unknown)}, no parameter of the model", setting="names")
    keys = {name: str(names.get(name, name)) for name in params}
    if len(set(keys.values())) < len(keys):
        raise ConfigError("two parameters have one key", setting="names")
    return keys


def _check_request(group: DataParallelExecutorGroup, optimizer: Optimizer | None, update: Update) -> None:
    if update not in get_args(Update):
        raise ConfigError(f'update={update!r} is neither "server" nor "local"', setting="update")
    if update == "local" and optimizer is None:
        raise ConfigError('update="local" needs the optimizer to update with', setting="optimizer")
    requests = group.executors[0].grad_req
    added = [name for name in group.param_names if requests[name] == "add"]
    if added:
        raise ConfigError(
            f'{", ".join(added)}: gradients of grad_req="add" are sums whose end only the program knows; '
            'push them yourself, or use grad_req="write"',
            setting="grad_req",
        )
