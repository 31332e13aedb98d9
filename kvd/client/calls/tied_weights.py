"""Tied weights: one torch tensor under several names, as `state_dict()` has them, makes one key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any
from weakref import ref

from kvd.client.calls.keys import KeyList
from kvd.compute.tensors import elements_at, is_parameter
from kvd.errors import NotAllowed


class TensorsOfKeys:
    """The tensors that keys of one store were made of, as long as the program has them."""

    def __init__(self) -> None:
        self._keys: dict[tuple[Any, ...], tuple[str | int, str, ref[Any]]] = {}  # by where their elements lie

    def note(self, keys: KeyList, values: Sequence[Any]) -> None:
        """An init makes the keys of these values.

        One and the same tensor for several keys is allowed, unless it is a parameter: that is how programs give many
        keys their zeros.

        Raises:
            NotAllowed: two keys would be two names of one tensor. A program would push the one, and pull the other,
                which never changes.
        """
        noted: dict[tuple[Any, ...], tuple[str | int, str, ref[Any]]] = {}
        for name, value in zip(keys.names, values, strict=True):
            elements = elements_at(value)
            if elements is None:
                continue
            key, first, tensor = noted.get(elements) or self._keys.get(elements) or ("", name, None)
            other = None if tensor is None else tensor()
            if first == name or other is None or elements_at(other) != elements:  # its `data` may be another's now
                gone = partial(self._forget_tensor, elements)
                noted[elements] = keys.key(name), name, ref(value, gone)
            elif other is not value or is_parameter(value):
                raise NotAllowed(
                    f"keys {key!r} and {keys.key(name)!r} are two names of one tensor (tied weights), which would "
                    f"become two values that drift apart: leave {keys.key(name)!r} out, as module.named_parameters() "
                    f"does; two keys that begin with the same values need a copy, tensor.clone()",
                    key=keys.key(name),
                )
        self._keys.update(noted)  # no key is made if one is refused

    def forget(self, names: Collection[str]) -> None:
        """The keys are deleted: others may be made of their tensors."""
        for elements, (_, name, _) in list(self._keys.items()):
            if name in names:
                self._keys.pop(elements, None)

    def _forget_tensor(self, elements: tuple[Any, ...], tensor: ref[Any]) -> None:
        known = self._keys.get(elements)
        if known is not None and known[2] is tensor:
            self._keys.pop(elements, None)
