"""What the work of each role costs, by measured numbers; and how often there was what, from which they are measured.

The names of what is counted are those of the fields in `benchmarks.virtual.costs`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.virtual.costs import SchedulerCosts, ServerCosts, WorkerCosts
from benchmarks.virtual.hosts import Work
from kvd.core.machine import Apply, Copy, Create, Event, LocalCall
from kvd.core.requests import Transfer

COPY_TRAFFIC = 2  # bytes of memory that are read or written for each byte that is copied


class WorkerPricing:
    """A worker copies what it pushes, and what it pulls; or it writes and reads that through sockets."""

    def __init__(self, costs: WorkerCosts) -> None:
        self.counts = defaultdict[str, float](float)
        self._costs = costs
        self._coldness = 0.0  # how probable it is that another process had the core since keys were handled

    def event(self, event: Event) -> float:
        if not (isinstance(event, LocalCall) and isinstance(event.request, Transfer)):
            return 0.0
        self.counts["call_s"] += 1
        keys = len(event.request.items)
        return self._costs.call_s / 2 + self._keys(keys / 2) - keys * self._costs.late_key_s

    def after(self, event: Event) -> float:
        if not (isinstance(event, LocalCall) and isinstance(event.request, Transfer)):
            return 0.0
        return len(event.request.items) * self._costs.late_key_s

    def _keys(self, keys: float) -> float:
        """Half of what is to be done with keys: at the beginning of their call, or at its end."""
        self.counts["key_s"] += keys
        cost_s = keys * self._costs.key_s
        cold_keys, self._coldness = keys * self._coldness, 0.0
        self.counts["cold_key_s"] += cold_keys
        return cost_s + cold_keys * self._costs.cold_key_s

    def send(self, message: Any, header_nbytes: int, nbytes: int, *, by_reference: bool) -> Work:
        return self._message(nbytes)

    def take(self, message: Any, nbytes: int, *, by_reference: bool) -> Work:
        return self._message(nbytes)

    def _message(self, nbytes: int) -> Work:
        self.counts["message_s"] += 1
        self.counts["byte_s"] += nbytes
        return Work(self._costs.message_s + nbytes * self._costs.byte_s, COPY_TRAFFIC * nbytes)

    def job(self, job: Create | Apply) -> Work:
        raise TypeError("workers have no jobs")

    def copy(self, copy: Copy) -> float:
        return self._keys(len(copy.rows) / 2)

    def complete(self) -> float:
        return self._costs.call_s / 2

    def switched(self, others: float) -> float:
        self._coldness = max(self._coldness, others)
        self.counts["switch_s"] += others
        return others * self._costs.switch_s


class ServerPricing:
    """A server merges where values lie, and sends new versions from where it made them."""

    def __init__(self, costs: ServerCosts) -> None:
        self.counts = defaultdict[str, float](float)
        self._costs = costs

    def event(self, event: Event) -> float:
        return 0.0

    def after(self, event: Event) -> float:
        return 0.0

    def send(self, message: Any, header_nbytes: int, nbytes: int, *, by_reference: bool) -> Work:
        return self._message(nbytes, by_reference=by_reference)

    def take(self, message: Any, nbytes: int, *, by_reference: bool) -> Work:
        return self._message(nbytes, by_reference=by_reference)

    def _message(self, nbytes: int, *, by_reference: bool) -> Work:
        self.counts["message_s"] += 1
        if by_reference:
            return Work(self._costs.message_s)
        self.counts["byte_s"] += nbytes
        return Work(self._costs.message_s + nbytes * self._costs.byte_s, COPY_TRAFFIC * nbytes)

    def job(self, job: Create | Apply) -> Work:
        costs = self._costs
        if isinstance(job, Create):
            nbytes = sum([first.source.nbytes for first in job.slices])
            return Work(costs.round_s + nbytes * costs.version_byte_s, COPY_TRAFFIC * nbytes)
        merged = sum([given.span.nbytes for given in job.contributions if given.span is not None])
        slices = len(job.layout)
        self.counts["round_s"] += 1
        self.counts["slice_s"] += slices
        self.counts["merged_slice_s"] += slices * len(job.contributions)
        self.counts["merged_byte_s"] += merged
        self.counts["version_byte_s"] += job.nbytes
        cpu_s = costs.round_s + slices * (costs.slice_s + len(job.contributions) * costs.merged_slice_s)
        return Work(cpu_s + merged * costs.merged_byte_s + job.nbytes * costs.version_byte_s, merged + job.nbytes)

    def copy(self, copy: Copy) -> float:
        raise TypeError("servers have no local calls")

    def complete(self) -> float:
        raise TypeError("servers have no local calls")

    def switched(self, others: float) -> float:
        self.counts["switch_s"] += others
        return others * self._costs.switch_s


class SchedulerPricing:
    """The scheduler has no values."""

    def __init__(self, costs: SchedulerCosts) -> None:
        self.counts = defaultdict[str, float](float)
        self._costs = costs

    def event(self, event: Event) -> float:
        return 0.0

    def after(self, event: Event) -> float:
        return 0.0

    def send(self, message: Any, header_nbytes: int, nbytes: int, *, by_reference: bool) -> Work:
        self.counts["message_s"] += 1
        self.counts["byte_s"] += header_nbytes
        return Work(self._costs.message_s + header_nbytes * self._costs.byte_s)

    def take(self, message: Any, nbytes: int, *, by_reference: bool) -> Work:
        self.counts["message_s"] += 1
        return Work(self._costs.message_s)

    def job(self, job: Create | Apply) -> Work:
        raise TypeError("a scheduler has no jobs")

    def copy(self, copy: Copy) -> float:
        raise TypeError("a scheduler has no local calls")

    def complete(self) -> float:
        raise TypeError("a scheduler has no local calls")

    def switched(self, others: float) -> float:
        return 0.0
