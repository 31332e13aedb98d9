"""What one run needs of the memory of a server: for keys that it makes, rows that come, and slices that it holds."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.server.keys import KeyTable
from kvd.core.server.memory import ServerMemory
from kvd.core.session import SchedulerSession
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer
from kvd.protocol.specs import MOST_HELD_VERSIONS

COPIES = 3  # of each slice that a server leads: the version, the one before, and the one that is being made
HELD_COPIES = 5  # of each slice that it holds for another: the same, and two records
ROW_COPIES = 3  # of a row that is pushed to a table: the row, what the optimizer may keep of it, and the row as it was


class MemoryUse:
    """Asks for the memory of a run before it is used.

    Args:
        held_nbytes: bytes of the slices that this server holds for others.
        held_table_nbytes: the memory of parts of tables that it holds for others.
        wanted_ids_nbytes: of the row ids of open pulls.
        optimizer: the one that is set.

    Attributes:
        creating_nbytes: of slices that are being made.
    """

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        memory: ServerMemory,
        held_nbytes: Callable[[], int],
        held_table_nbytes: Callable[[], int],
        wanted_ids_nbytes: Callable[[], int],
        optimizer: Callable[[], Optimizer | None],
    ) -> None:
        self._session = session
        self._view = session.view
        self._table = table
        self._memory = memory
        self._held_nbytes = held_nbytes
        self._held_table_nbytes = held_table_nbytes
        self._wanted_ids_nbytes = wanted_ids_nbytes
        self._optimizer = optimizer
        self.creating_nbytes = 0

    # ── keys ──

    def key_error(self, key: str, nbytes: int, *, is_full: bool) -> str:
        """Why a key cannot be made, of which this server would lead so many bytes more than it does; empty if it can.

        Args:
            is_full: there are too many slices.
        """
        demand = self._demand(nbytes)
        if not is_full and self._memory.grant(self._session.run, demand):
            return ""
        others = self._memory.of_others(self._session.run)
        held = self._held_nbytes() * HELD_COPIES
        copies = self._copies_with(self._optimizer())
        other_copies = "staged" if copies == self._copies_with(None) else "staged or pulled"
        of_replicas = f", {held >> 20} MiB of replicas" if held else ""
        of_others = f", besides {others >> 20} MiB of other runs" if others else ""
        return (
            f"key {key!r} would take {self._session.name} to {demand >> 20} MiB ({COPIES} copies, and "
            f"{copies - COPIES} {other_copies}{of_replicas}), its limit is {self._limit}{of_others}: "
            f"add servers, or raise memory_limit_bytes"
        )

    def check_for(self, optimizer: Optimizer | None) -> None:
        """Raises NotAllowed if there is no memory for what an optimizer makes the server keep of each worker."""
        more = self._copies_with(optimizer) - self._copies_with(self._optimizer())
        demand = self._demand() + self._led * more
        if more > 0 and not self._memory.grant(self._session.run, demand):
            raise NotAllowed(
                f"{type(optimizer).__name__} keeps what each worker has pulled, which would take {self._session.name} "
                f"to {demand >> 20} MiB; its limit is {self._limit}: add servers, raise "
                f"memory_limit_bytes, or use SGD"
            )

    def give_back(self) -> None:
        """Less is needed than before: other runs may have the rest."""
        self._memory.grant(self._session.run, self._demand())

    # ── rows, and what is held for others ──

    def row_error(self, key: str, nbytes: int) -> str:
        """Why there is no memory for a push of so many bytes to a table; empty if there is. All its rows may be new,
        and those of the pushes that were not applied yet."""
        return self._table_error(key, "rows", nbytes * ROW_COPIES)

    def ids_error(self, key: str, nbytes: int) -> str:
        """Why there is no memory for so many bytes of row ids that wait; empty if there is."""
        return self._table_error(key, "row ids", nbytes)

    def _table_error(self, key: str, what: str, nbytes: int) -> str:
        demand = self._demand() + nbytes
        if self._memory.grant(self._session.run, demand):
            return ""
        return (
            f"{self._session.name} has no memory for these {what} of table {key!r}: they could take it to "
            f"{demand >> 20} MiB, its limit is {self._limit}: add servers, or raise memory_limit_bytes"
        )

    def grant_held(self, nbytes: int) -> bool:
        """Whether this server has memory to hold so many more bytes for others."""
        return self._memory.grant(self._session.run, self._demand() + nbytes * HELD_COPIES)

    def grant_held_rows(self, nbytes: int) -> bool:
        """Whether this server has memory for so many more bytes of parts of tables that it holds for others."""
        return self._memory.grant(self._session.run, self._demand() + nbytes)

    # ── how much it is ──

    @property
    def _limit(self) -> str:
        return f"{self._memory.limit_bytes >> 20} MiB"

    @property
    def _led(self) -> int:
        return self._table.bytes_led + self.creating_nbytes

    def _demand(self, more: int = 0) -> int:
        """Bytes in all, if this server leads so many more than it does."""
        led = (self._led + more) * self._copies_with(self._optimizer())
        table = self._table
        of_tables = table.table_nbytes + table.pushed_rows_nbytes * ROW_COPIES
        of_tables += self._wanted_ids_nbytes() + self._held_table_nbytes()
        return led + self._held_nbytes() * HELD_COPIES + of_tables

    def _copies_with(self, optimizer: Optimizer | None) -> int:
        """How often a byte that is led may be held, staged contributions included."""
        settings = self._view.settings
        # Only a worker of this host can hold versions here, and its staged pushes lie in its own memory.
        of_a_worker = max(settings.rounds_ahead, MOST_HELD_VERSIONS)
        copies = COPIES + of_a_worker * settings.most_workers + (settings.replicas - 1)
        if optimizer is not None and optimizer.compensates_delay and not self._view.is_sync:
            copies += settings.most_workers  # of what each has pulled
        return copies
