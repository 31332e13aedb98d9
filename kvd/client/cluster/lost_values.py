"""Whether values of the job are gone since this worker came: a snapshot without them would be taken for a whole one."""

from __future__ import annotations

from kvd.core.membership import ViewState, name_of
from kvd.errors import NodeLost


class LostValues:
    """Remembers the lineage of each partition: it changes when nobody has its contents any more."""

    def __init__(self, view: ViewState) -> None:
        self._view = view
        self._lineages: dict[int, int] = {}
        self.check()

    def check(self) -> None:
        """Raises NodeLost if the contents of a partition were lost since it was first seen."""
        for partition in self._view.partition_numbers():
            lineage = self._view.lineage_of(partition)
            if lineage and self._lineages.setdefault(partition, lineage) != lineage:
                node = name_of("server", partition)
                text = (
                    f"{node} died, and its part of the keys is gone: no snapshot can be taken of the rest; start the "
                    f"job again from its newest snapshot"
                )
                raise NodeLost(text, node=node)
