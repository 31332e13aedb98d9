"""Buckets: parameters whose gradients travel together, in one list call.

Each parameter is a key of its own, so a bucket is no flat buffer but a list of keys. Its gradients lie side by side in
memory that servers of this host read in place (`kvd.client.calls.bound_arrays`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvd.client.calls.backend import Backend
from kvd.client.calls.bound_arrays import BoundList
from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import key_list
from kvd.client.calls.values import Array
from kvd.parallel.device import Device
from kvd.parallel.models.torch.tensors import as_tensor
from kvd.torch.parameters import DTYPES, Named

_HOST = Device("cpu")


class Slot:
    """The place of one parameter in its bucket.

    Attributes:
        name: the key.
        parameter: what is trained, or averaged.
        number: its place among all parameters of the optimizer.
        bucket: that it is in.
        dtype, shape: of the parameter, when it was wrapped.
        is_ready: whether its gradient of this pass is complete.
        gradient: that gradient, until its bucket is sent; None counts as zeros.
        is_used: whether it had a gradient in this pass.
    """

    __slots__ = (
        "_address",
        "_address_type",
        "_memory",
        "bucket",
        "dtype",
        "gradient",
        "is_ready",
        "is_used",
        "name",
        "nbytes",
        "number",
        "parameter",
        "shape",
    )

    def __init__(self, name: str, parameter: torch.Tensor, number: int) -> None:
        self.name = name
        self.parameter = parameter
        self.number = number
        self.nbytes = parameter.numel() * DTYPES[parameter.dtype]
        self.dtype, self.shape = parameter.dtype, parameter.shape
        self.bucket: Bucket
        self.is_ready = self.is_used = False
        self.gradient: torch.Tensor | None = None
        self._address_type: Any = ctypes.c_ubyte * self.nbytes
        self._address = 0
        self._memory = np.empty(0, np.uint8)

    def memory_of(self, tensor: torch.Tensor) -> Array | None:
        """Return the bytes of a tensor like the parameter, as uint8; None if they lie elsewhere or in another order.

        The array does not keep the memory alive.
        """
        if not tensor.is_cpu or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        if address != self._address:
            self._address = address
            self._memory = np.frombuffer(self._address_type.from_address(address), np.uint8)
        return self._memory


class Bucket:
    """Slots whose gradients are pushed and pulled in one call.

    Args:
        slots: in the order of the call.
        priority: of the call; higher ones leave first.
        also: a further key of the call, of int32; None: there is none.

    Attributes:
        missing: how many gradients of this pass are not complete, and what else is to be there before the call.
        also_sent, also_received: what the further key sends, and what has come of it.
    """

    def __init__(self, slots: Sequence[Slot], priority: int, also: tuple[str, int] | None = None) -> None:
        self.slots = tuple(slots)
        self.names = [slot.name for slot in slots]
        self.missing = 0
        self.also_sent: Array | None = None
        self.also_received: Array | None = None
        if also is not None:
            name, size = also
            self.names.append(name)
            self.also_received = np.zeros(size, np.int32)
        self._keys = key_list(self.names)
        self._priority = priority
        self._handle: Handle | None = None
        self._bound: BoundList | None = None
        self._sent: list[torch.Tensor] = []  # the memory that gradients are sent from
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for slot in slots:
            slot.bucket = self

    def bind(self, backend: Backend) -> None:
        """Give the slots memory for their gradients. The keys exist."""
        bound: BoundList = backend.binding.gradients(self._keys).wait()
        self._sent = [as_tensor(gradient, _HOST) for gradient, _ in zip(bound.gradients, self.slots, strict=False)]
        if self.also_received is not None:
            self.also_sent = bound.gradients[-1]
        self._bound = bound

    def restart(self) -> None:
        """Begin a pass: no gradient is ready."""
        self.missing = len(self.names)
        for slot in self.slots:
            slot.is_ready = False

    def send(self, backend: Backend, destination: Callable[[Slot], torch.Tensor]) -> None:
        """Push the gradients, and pull the values to their destinations when `receive` is called.

        Args:
            destination: gives the tensor that the value of a slot goes to; called in `receive`.
        """

        def targets() -> list[Array]:
            arrays = [self._target(slot, destination(slot)) for slot in self.slots]
            if self.also_received is not None:
                arrays.append(self.also_received.view(np.uint8))
            return arrays

        self._stage()
        assert self._bound is not None
        self._handle = backend.values.pushpull_bound(self._bound, targets, self._priority)

    def _stage(self) -> None:
        """Copy the gradients to where they are sent from."""
        staged, gradients = self._sent, []
        for slot, sent in zip(self.slots, staged, strict=True):
            if slot.gradient is None:
                sent.zero_()
            else:
                gradients.append(slot.gradient)
                slot.gradient = None
        if len(gradients) < len(staged):
            staged = [sent for slot, sent in zip(self.slots, staged, strict=True) if slot.is_used]
        if gradients:
            with torch.no_grad():
                torch._foreach_copy_(staged, gradients)

    def receive(self) -> None:
        """Wait for the values, which are at their destinations then.

        Raises:
            KvdError: the call has failed.
        """
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        if self._staged:
            with torch.no_grad():
                for tensor, host in self._staged:
                    tensor.copy_(host)
            self._staged = []

    def _target(self, slot: Slot, tensor: torch.Tensor) -> Array:
        memory = slot.memory_of(tensor)
        if memory is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._staged.append((tensor, host))
            memory = slot.memory_of(host)
            assert memory is not None
        return memory


def divide(trained: Sequence[Named], *, first_bytes: int, most_bytes: int) -> list[list[Slot]]:
    """Put the parameters into buckets, from the last one to the first, as backward completes their gradients.

    Args:
        trained: name and parameter, in the order of the model.
        first_bytes: the size of the first bucket, which can leave early.
        most_bytes: the size of the others. A larger parameter has a bucket of its own.
    """
    buckets: list[list[Slot]] = []
    nbytes = 0
    for number in reversed(range(len(trained))):
        slot = Slot(*trained[number], number)
        limit = first_bytes if len(buckets) == 1 else most_bytes
        if not buckets or nbytes + slot.nbytes > limit:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(slot)
        nbytes += slot.nbytes
    return buckets
