"""Tables in a cluster: there are none yet, and whoever asks for one is told so."""

from __future__ import annotations

from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import KeyList, key_list
from kvd.client.calls.tables import has_tables
from kvd.errors import NotAllowed

_TEXT = "a cluster has no tables yet: make them in a store of type local or device"


class NoTables:
    """The part of a store that has no tables."""

    def row_sparse_pull(self, key: Any, row_ids: Any, out: Any, priority: int) -> Handle:
        """Raises NotAllowed."""
        key_list(key)
        checks.priority_and_samples(priority)
        raise NotAllowed(_TEXT)


def check_no_tables(keys: KeyList, value: Any) -> None:
    """Raises NotAllowed if the call has a value that only a table takes."""
    if has_tables(keys, value):
        raise NotAllowed(_TEXT)
