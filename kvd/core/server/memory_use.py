"""What one run needs of the memory of a server: for keys that it makes, rows that come, and slices that it holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvd.core.server.keys import KeyTable
from kvd.core.server.memory import ServerMemory
from kvd.core.session import SchedulerSession
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer
from kvd.optimizer.registry import slots_of
from kvd.protocol.specs import MOST_HELD_VERSIONS, ROW_ID_BYTES, KeySpec

COPIES = 3  # of each slice that a server leads: the version, the one before, and the one that is being made
ENCODED_COPIES = (
    2  # more, if merged values are encoded: two versions in their other form, half as long, and what is left over
)
HELD_COPIES = 5  # of each slice that it holds for another: the same, and two records
ROW_COPIES = 3  # of a row that is pushed to a table: what was pushed, the row, and the row as it was
ROW_OVERHEAD_NBYTES = 96  # of a new row, besides: to find it, and to know when it goes (docs/tables.md)
GROWTH = 16  # the memory of a table grows by one part in so many, or by what is pushed if that is more
SPARE = 64  # one part in so many of the free memory is asked for in advance, for pushes and pulls of rows
LEAST_SPARE_NBYTES = 1 << 20  # less is not worth it


def rows_need(spec: KeySpec, nbytes: int, optimizer: Optimizer | None) -> int:
    """The memory that a push of so many bytes to a table may take until it is applied, in bytes.

    All its rows may be new. Without an optimizer there is a merged copy of them, where one would keep its state.
    """
    num_rows = nbytes // (ROW_ID_BYTES + spec.row_nbytes)
    return nbytes * (ROW_COPIES + max(1, slots_of(optimizer))) + num_rows * ROW_OVERHEAD_NBYTES


class MemoryUse:
    """Asks for the memory of a run before it is used.

    Args:
        held_nbytes: bytes of the slices that this server holds for others.
        held_table_nbytes: the memory of parts of tables that it holds for others.
        wanted_ids_nbytes: of the row ids of open pulls.
        copied_nbytes: of rows that are copied for a snapshot.
        state_nbytes: of parts of workers' states that are passed on.
        give_up_copies: gives these up, and says whether there were any: training goes first.
        optimizer: the one that is set.

    What is used and what is free is worked out when somebody asks, which takes longer than a push of few rows may. So
    some more is asked for with it (`SPARE`), and rows take of that, until it is used up and all is worked out again.

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
        copied_nbytes: Callable[[], int],
        state_nbytes: Callable[[], int],
        give_up_copies: Callable[[], bool],
        optimizer: Callable[[], Optimizer | None],
    ) -> None:
        self._session = session
        self._view = session.view
        self._table = table
        self._memory = memory
        self._held_nbytes = held_nbytes
        self._held_table_nbytes = held_table_nbytes
        self._wanted_ids_nbytes = wanted_ids_nbytes
        self._copied_nbytes = copied_nbytes
        self._state_nbytes = state_nbytes
        self._give_up_copies = give_up_copies
        self._optimizer = optimizer
        self.creating_nbytes = 0
        self._are_encoded = False
        self._spare_nbytes = 0  # granted, and used by nothing yet
        self._is_exact = True  # since `give_back` nothing was asked for but what was spare

    # ── keys ──

    def key_error(self, key: str, nbytes: int, *, is_full: bool) -> str:
        """Why a key cannot be made, of which this server would lead so many bytes more than it does; empty if it can.

        Args:
            is_full: there are too many slices.
        """
        demand = self._demand(nbytes)
        if not is_full and self._is_granted(demand - self._demand()):
            return ""
        others = self._memory.of_others(self._session.run)
        held = self._held_nbytes() * HELD_COPIES
        optimizer = self._optimizer()
        copies = self._copies_with(optimizer)
        delays = optimizer is not None and optimizer.compensates_delay
        other_copies = "staged or pulled" if delays or self._are_encoded else "staged"
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
        if more > 0 and not self._is_granted(self._led * more):
            raise NotAllowed(
                f"{type(optimizer).__name__} keeps what each worker has pulled, which would take {self._session.name} "
                f"to {demand >> 20} MiB; its limit is {self._limit}: add servers, raise "
                f"memory_limit_bytes, or use SGD"
            )

    def encoded_error(self, key: str) -> str:
        """Why there is no memory to encode what is merged, as a push asks for; empty if there is."""
        if self._are_encoded or not self._view.is_sync or self._optimizer() is not None:
            return ""
        more = self._led * ENCODED_COPIES
        if not self._is_granted(more):
            beyond = (self._demand() + more) >> 20
            return (
                f"{self._session.name} has no memory to encode what is merged of key {key!r} and others: it would "
                f"take it to {beyond} MiB, its limit is {self._limit}: raise memory_limit_bytes, or compress with "
                "pull='plain'"
            )
        self._are_encoded = True
        return ""

    def give_back(self) -> None:
        """Less is needed than before: other runs may have the rest, but for what is spare."""
        self._is_exact = True
        self._grant(self._demand())

    def rows_applied(self) -> None:
        """The same after an update of a table. Pushes that took what was spare alone give nothing back: that is worked
        out again when it is used up."""
        if not self._is_exact:
            self.give_back()

    # ── rows, and what is held for others ──

    def row_error(self, key: str, spec: KeySpec, nbytes: int) -> str:
        """Why there is no memory for a push of so many bytes to a table; empty if there is. All its rows may be new,
        and those of the pushes that were not applied yet."""
        growth = self._table.table_nbytes // GROWTH
        return self._table_error(key, "rows", max(growth, rows_need(spec, nbytes, self._optimizer())) if nbytes else 0)

    def ids_error(self, key: str, nbytes: int) -> str:
        """Why there is no memory for so many bytes of row ids that wait; empty if there is."""
        return self._table_error(key, "row ids", nbytes)

    def copy_error(self, key: str, nbytes: int) -> str:
        """Why there is no memory to copy so many bytes of a table for a snapshot; empty if there is."""
        demand = self._demand() + nbytes
        if self._grant(demand):
            return ""
        return (
            f"{self._session.name} has no memory for a copy of table {key!r}: it would take it to {demand >> 20} MiB, "
            f"its limit is {self._limit}: add servers, or raise memory_limit_bytes"
        )

    def state_error(self, nbytes: int) -> str:
        """Why there is no memory for so many bytes of a worker's state that is passed on; empty if there is."""
        if self._is_granted(nbytes):
            return ""
        demand = self._demand() + nbytes
        return (
            f"{self._session.name} has no memory to pass on the state of a worker: it would take it to "
            f"{demand >> 20} MiB, its limit is {self._limit}: add servers, or raise memory_limit_bytes"
        )

    def _table_error(self, key: str, what: str, nbytes: int) -> str:
        if nbytes <= self._spare_nbytes:
            self._spare_nbytes -= nbytes
            return ""
        if self._is_granted(nbytes):
            return ""
        demand = self._demand() + nbytes
        return (
            f"{self._session.name} has no memory for these {what} of table {key!r}: they could take it to "
            f"{demand >> 20} MiB, its limit is {self._limit}: add servers, or raise memory_limit_bytes"
        )

    def grant_held(self, nbytes: int) -> bool:
        """Whether this server has memory to hold so many more bytes for others."""
        return self._is_granted(nbytes * HELD_COPIES)

    def grant_held_rows(self, nbytes: int) -> bool:
        """Whether this server has memory for so many more bytes of parts of tables that it holds for others."""
        return self._is_granted(nbytes)

    def _is_granted(self, more: int) -> bool:
        """Whether the run may use so many bytes more. Copies for a snapshot give way."""
        self._is_exact = False
        return self._grant(self._demand() + more) or (self._give_up_copies() and self._grant(self._demand() + more))

    def _grant(self, nbytes: int) -> bool:
        """Whether the run may use so many bytes in all. Then it gets some more, which are spare."""
        run, memory = self._session.run, self._memory
        if not memory.grant(run, nbytes):
            return False
        spare = (memory.limit_bytes - memory.of_others(run) - nbytes) // SPARE
        self._spare_nbytes = spare if spare >= LEAST_SPARE_NBYTES and memory.grant(run, nbytes + spare) else 0
        return True

    # ── how much it is ──

    @property
    def _limit(self) -> str:
        return f"{self._memory.limit_bytes >> 20} MiB"

    @property
    def _led(self) -> int:
        return self._table.bytes_led + self.creating_nbytes

    @property
    def used_nbytes(self) -> int:
        """What this run needs now, as counted against the limit, in bytes."""
        return self._demand()

    def _demand(self, more: int = 0) -> int:
        """Bytes in all, if this server leads so many more than it does."""
        led = (self._led + more) * self._copies_with(self._optimizer())
        table = self._table
        optimizer = self._optimizer()
        of_tables = table.table_nbytes + table.pushed_rows_need(partial(rows_need, optimizer=optimizer))
        of_tables += self._wanted_ids_nbytes() + self._held_table_nbytes() + self._copied_nbytes()
        return led + self._held_nbytes() * HELD_COPIES + of_tables + self._state_nbytes()

    def _copies_with(self, optimizer: Optimizer | None) -> int:
        """How often a byte that is led may be held, staged contributions included."""
        settings = self._view.settings
        # Only a worker of this host can hold versions here, and its staged pushes lie in its own memory.
        of_a_worker = max(settings.rounds_ahead, MOST_HELD_VERSIONS)
        copies = COPIES + of_a_worker * settings.most_workers + (settings.replicas - 1)
        if optimizer is not None and optimizer.compensates_delay and not self._view.is_sync:
            copies += settings.most_workers  # of what each has pulled
        if optimizer is None and self._are_encoded:
            copies += ENCODED_COPIES
        return copies
