"""Values of keys whose shapes may be unknown when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvd.client.calls.checks import forked_error
from kvd.client.calls.keys import KeyList
from kvd.client.calls.values import Array, fresh_target, in_places
from kvd.client.cluster.held_versions import HeldVersions
from kvd.node.shell.payloads import ReassemblyBuffer
from kvd.protocol.specs import KeySpec


class NewValues:
    """Where the values of one call arrive, and the arrays that they become.

    Args:
        held: makes the arrays read-only, where they arrived if it can be. None: they are the program's own.
    """

    def __init__(self, names: Sequence[str], held: HeldVersions | None = None) -> None:
        self.buffers = [ReassemblyBuffer() for _ in names]
        self._names = names
        self._held = held
        self._specs: Sequence[KeySpec] = ()
        self._pid = os.getpid()

    def found(self, specs: Sequence[KeySpec]) -> None:
        """The keys have these shapes and dtypes: to be told before the bytes arrive."""
        self._specs = specs

    def given(self, keys: KeyList) -> Any:
        """The values, in the places of the keys."""
        return in_places(keys, self.arrays(), shared=self._held is not None)

    def arrays(self) -> list[Array]:
        """The values, one per name.

        Raises:
            StoreClosed: in a child of the process that asked for them: that lets their memory be used again.
        """
        self._check_process()
        if self._held is not None:
            return self._held.arrays(self._names, self.buffers, self._specs)
        targets = [fresh_target(spec) for spec in self._specs]
        for target, buffer in zip(targets, self.buffers, strict=True):
            buffer.move_to(target.data)
        return [target.finish() for target in targets]

    def move_to(self, targets: Sequence[Array]) -> None:
        """Copy the values into these contiguous arrays, one per name.

        Raises:
            StoreClosed: as `arrays`.
        """
        self._check_process()
        for buffer, target in zip(self.buffers, targets, strict=True):
            buffer.move_to(target)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise forked_error()
