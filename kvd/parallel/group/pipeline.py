"""The gradient pipeline: gradients leave while backward still runs, weights are back for the next forward.

Where a gradient waits: for the other devices' gradients in `GradientPipeline.completed`; for its turn and for credit in
the outbox of the store's worker (`kvd.core.outbox`); for the store's answer, which brings the weights, in
`ParameterSlot.wait`, called by `GradientPipeline.receive`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from kvd.client.calls.backend import store_type
from kvd.client.facades.blocking import KVStore, backend_of, stopped_in_loop
from kvd.compute.arrays import sum_devices
from kvd.errors import ConfigError, InputMismatch, NotAllowed
from kvd.optimizer import Optimizer
from kvd.parallel.device import Array, HostArray
from kvd.parallel.group.binding import Binding, BoundModel
from kvd.parallel.group.downloads import Downloads
from kvd.parallel.group.parameter_keys import ParameterKeys
from kvd.parallel.group.parameter_slot import make_slot
from kvd.parallel.group.parameters import host_arrays, put_on_devices, write_means
from kvd.parallel.group.table_parameters import TableParameters
from kvd.transport.links.frames import INLINE_BELOW_BYTES

#: ``"server"``: what comes back is the weight. ``"local"``: it is the merged gradient, and each worker updates.
Update: TypeAlias = Literal["server", "local"]


class GradientPipeline:
    """A group bound to a store; `DataParallelExecutorGroup.bind_to` makes it.

    **When it is made**, every parameter becomes a key with rank 0's value, and all workers pull it; so do states
    (``aux:NAME``). A key that exists already keeps its value. A worker that is restarted under its old node id goes
    back to the step in which its predecessor died.

    **In backward**, a parameter whose gradient is complete on all devices is sent, with ``-i`` as the priority of the
    i-th parameter: the last layer is ready first, but the first layer, which the next forward needs first, overtakes
    it. With ``detect_anomaly`` nothing is sent before all gradients are known to be finite. On CUDA the copies to the
    host have a stream of their own. Gradients of CPUs are not copied to be sent:
    backward writes them, or their sum over several devices, where the servers of this host read them (``kv.bind``).
    The `grad_arrays` of a single CPU are those arrays: only read them between a backward and the next forward.

    A row-sparse parameter (`Embedding` with ``sparse=True``) is a table of the store: the rows of its gradient are
    pushed when backward is done, and each forward of a device pulls the rows that it reads. The other rows on the
    devices are old, until ``get_params`` brings all of them.

    **In the next forward** (and in ``get_params``) the weights are waited for and copied to every device. Until then
    those on the devices are the old ones: a store may answer while backward still reads them. A backward without a
    forward in between, as of another group that shares this one's arrays, waits too before it writes gradients. CPUs
    read weights of up to ``slice_bytes`` where they arrived, within a host in the memory of the server, so this is the
    only copy. The model computes with arrays of its own, which torch needs to be writable.

    **Scale.** A group's gradient is that of the mean loss of this worker's batch. Merged with ``"mean"``, or
    ``"weighted"`` by the samples that each push reports (exact for unequal batches), it is that of the mean over the
    workers that take part in the round. If an optimizer is given and the store merges with ``"sum"``, the keys of the
    parameters are made with ``merge="mean"``. Without an optimizer here, the keys have the merge of the store, and
    keys that exist keep theirs. A `TorchModel` may compute the sum over a batch instead of the mean; over the workers
    it is averaged all the same.

    Attributes:
        kv: the store.
        keys: parameter → key, of all parameters.
        clock: how many steps of this worker the store had counted when this was made: 0, unless the worker was
            restarted, or trained with these keys before.
        rows: the row-sparse parameters.
        done_before: of these, the steps of a predecessor that died: the program continues after them.
        update: as given.

    Raises:
        ConfigError: ``update`` is unknown or lacks its optimizer; a parameter whose ``grad_req`` is ``"add"`` (when
            its sum is complete only the program knows: push it yourself); two parameters with one key.
        NotAllowed: ``update="local"`` with row-sparse parameters: the store keeps their weights.
        InputMismatch: ``names`` has a name that is not a parameter.
        NotAllowed: ``update="local"`` with keys that were trained already: the store holds no weights then.
        ShapeMismatch, DtypeMismatch: the keys are of another model.
        MergeMismatch: an optimizer is given, and a key exists that is merged by ``"sum"``.
        NodeLost, RequestTimeout: as every call of the store.
    """

    def __init__(
        self,
        bound: BoundModel,
        kv: KVStore,
        names: Mapping[str, str | int],
        optimizer: Optimizer | None,
        update: Update,
    ) -> None:
        binding = bound.binding
        self.kv = kv
        self._parameter_keys = ParameterKeys(kv, binding, names)
        self.keys = self._parameter_keys.params
        _check_request(binding, optimizer, update)
        self._bound = bound
        self._lock = threading.Lock()
        self._in_step = self._has_sent = False
        self._samples = 1
        self._sends_when_ready = True
        if update == "server" and optimizer is not None:
            kv.set_optimizer(optimizer)
        self._parameter_keys.init(binding, averaged=optimizer is not None)
        self.clock = self._find_step(update)
        trained = set(binding.trained)
        has_gpu = any(thread.device.is_cuda for thread in bound.threads)
        arrays = {} if has_gpu else self._parameter_keys.bind(binding.trained)
        viewed_above, viewed_nbytes = INLINE_BELOW_BYTES, backend_of(kv).facts.viewed_nbytes
        priorities = {name: -index for index, name in enumerate(self.keys)}
        tables = {name: self.keys[name] for name in binding.description.row_sparse}
        self.rows = TableParameters(kv, tables, priorities)
        self._slots = {
            name: make_slot(
                self.keys[name],
                priorities[name],
                own,
                arrays.get(name),
                optimizer if update == "local" else None,
                name in trained,
                is_viewed=not has_gpu and viewed_above < own.nbytes <= viewed_nbytes,
            )
            for name, own in host_arrays(binding, [name for name in self.keys if name not in tables]).items()
        }
        self._pull_all()  # after it, nothing that was sent before is still on its way
        self.update: Update = update
        self.done_before = self.clock if kv.restarted and not self._parameter_keys.was_used_here() else 0
        if len(binding.executors) == 1:  # a single device computes its gradients in the memory of the store
            binding.executors[0].use_gradients({name: gradient for name, (gradient, _) in arrays.items()})
        self._parameter_keys.claim(list(arrays), self)
        self._downloads = Downloads(bound.threads, store_type(kv.type).on_device, self._send) if has_gpu else None

    def check_covers(self, binding: Binding) -> None:
        """Raises NotAllowed if the binding has a parameter or state without a key here."""
        described = binding.description
        unknown = [name for name in described.params if name not in self.keys]
        unknown += [name for name in described.aux if name not in self._parameter_keys.states]
        if unknown:
            raise NotAllowed(f"shared_group is bound to a store without {', '.join(unknown)}: bind the larger group")

    # ── one step ──

    def begin(self, bound: BoundModel, when_ready: bool) -> None:
        """Backward of a group starts; with ``when_ready`` gradients are sent at once, else by `end`.

        Raises:
            NotAllowed: the last backward failed after some of its gradients had been sent.
            As `receive`, where there was no forward since the backward before.
        """
        self._check_whole()
        for slot in self._slots.values():
            slot.wait()  # its gradient is read until then
        self._in_step, self._has_sent, self._bound = True, False, bound
        self._sends_when_ready = when_ready
        self._samples = bound.binding.batch_size
        for slot in self._slots.values():
            slot.ready = 0
        if self._downloads is not None:
            self._downloads.begin()

    def completed(self, index: int, name: str) -> None:
        """The gradient of parameter ``name`` is complete on device ``index``. Called from the devices' threads.

        The last device to complete it sends it, so a gradient waits here for those of the other devices.
        """
        if name in self.rows:
            return  # `end` sends it
        with self._lock:
            slot = self._slots[name]
            slot.ready += 1
            is_last = slot.ready == len(self._bound.threads)
        if self._sends_when_ready:
            self._hand_over(index, name, is_last)

    def end(self) -> None:
        """Backward is done on all devices; on return the store has every gradient to send."""
        if not self._sends_when_ready:
            for name, slot in self._slots.items():
                for index in range(slot.ready):
                    self._hand_over(index, name, index == slot.ready - 1)
        if self._downloads is not None:
            self._downloads.drain()
        self._has_sent = True
        self.rows.push(self._bound, self._samples)
        self._in_step = False

    def receive(self) -> None:
        """Wait for the weights of the last step; they are on every device on return.

        Raises:
            What the store raises for them, such as NodeLost or RequestTimeout; again when it is called again.
            NotAllowed: as `begin`.
        """
        self._check_whole()
        coming = [name for name, slot in self._slots.items() if slot.handle is not None]
        for name in coming:
            self._slots[name].wait()
        if coming:
            self._to_devices({name: self._slots[name].take() for name in coming})
        for name in coming:
            self._slots[name].handle = None
        self.rows.wait()

    # ── outside the steps ──

    def pull(self) -> None:
        """Take the store's newest weights, as a worker that left the rounds does.

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
        states = list(self._parameter_keys.states)
        if not states:
            return
        self.receive()
        values = host_arrays(self._bound.binding, states)
        write_means(self._bound.binding, values)
        self._parameter_keys.broadcast_states(values)
        self._to_devices(values)

    def local_states(self) -> dict[str, HostArray]:
        """The state of the worker's own optimizer, as arrays ``NAME|…``; empty with ``update="server"``."""
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
            ProtocolError: the arrays are not such states.
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

    def _find_step(self, update: Update) -> int:
        clocks = self._parameter_keys.clocks(self._bound.binding.trained)
        step = min(clocks, default=0)
        if update == "local" and max(clocks, default=0) > 0:
            raise NotAllowed(
                'update="local" with keys that were trained already: the store holds no weights to start from; '
                "start a new store from a checkpoint"
            )
        if clocks and step != max(clocks) and self.kv.restarted:  # a worker that joins may look between two pushes
            self.kv.rewind(step)  # the predecessor died between the keys of one step
        elif self.kv.restarted and not stopped_in_loop(self.kv):
            self.kv.resume()  # the training loop skips the steps that are done
        return step

    def _pull_all(self) -> None:
        values: dict[str, HostArray] = {name: slot.weights for name, slot in self._slots.items()}
        values |= host_arrays(self._bound.binding, list(self._parameter_keys.states))
        self._parameter_keys.pull(values)
        self._to_devices(values)

    def _hand_over(self, index: int, name: str, is_last: bool) -> None:
        gradients: list[Array] = [executor.grads[name] for executor in self._bound.executors]
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
        if slot.is_viewed:
            slot.handle = self.kv.pushpull_async(
                slot.key, value, priority=slot.priority, samples=self._samples, copy=False
            )
        else:
            slot.handle = self.kv.pushpull_async(
                slot.key, value, out=slot.incoming, priority=slot.priority, samples=self._samples
            )

    def _to_devices(self, values: Mapping[str, HostArray]) -> None:
        """A group that shares a part of the parameters only has not all of the names."""
        put_on_devices(self._bound.threads, self._bound.executors, values)


def _check_request(binding: Binding, optimizer: Optimizer | None, update: Update) -> None:
    if update not in get_args(Update):
        raise ConfigError(f'update={update!r} is neither "server" nor "local"', setting="update")
    if update == "local" and optimizer is None:
        raise ConfigError('update="local" needs the optimizer to update with', setting="optimizer")
    tables = binding.description.row_sparse
    if update == "local" and tables:
        raise NotAllowed(f'update="local" keeps no weights in the store, and {tables[0]} is row-sparse: use "server"')
    requests = binding.executors[0].grad_req
    added = [name for name in binding.description.params if requests[name] == "add"]
    if added:
        raise ConfigError(
            f'{", ".join(added)}: gradients of grad_req="add" are sums whose end only the program knows; '
            'push them yourself, or use grad_req="write"',
            setting="grad_req",
        )
