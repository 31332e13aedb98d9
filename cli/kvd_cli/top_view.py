"""The picture of ``kvd top``: rates from two looks at a cluster, a row for each node, and the oldest wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd_cli.copies import Report
from kvd_cli.output import STYLES, ago, lasting, printable, size

SAMPLES: Final = 60
"""Looks that a sparkline shows."""

_BARS: Final = "▁▂▃▄▅▆▇█"
_PUSHES: Final = ("push", "push_batch")
_AROUND_ROWS: Final = 6  # lines of the picture that are no rows


class Order(Enum):
    """What rows are sorted by."""

    NODE = "node"
    TRAFFIC = "traffic"
    MEMORY = "memory"

    def following(self) -> Order:
        """Return the next one, in turn."""
        orders = list(Order)
        return orders[(orders.index(self) + 1) % len(orders)]


@dataclass(frozen=True, slots=True)
class Row:
    """One node.

    Attributes:
        pushes_per_s, bytes_per_s: None for workers, which are not asked, and after the first look.
        memory_bytes, memory_limit_bytes: what live jobs need, and the limit; 0 for others than servers.
        notes: path of a worker, or what holds it up.
    """

    name: str
    state: str
    step: int | None
    pushes_per_s: float | None
    bytes_per_s: float | None
    memory_bytes: int
    memory_limit_bytes: int
    notes: str


class TopView:
    """Takes looks at a cluster, and draws them.

    Args:
        title: of the picture.

    Attributes:
        order: of the rows.
        first: the row at the top.
        trouble: why there is no newer look; "" if there is one.
    """

    def __init__(self, title: str) -> None:
        self.order = Order.NODE
        self.first = 0
        self.trouble = ""
        self._title = title
        self._report: Report = {}
        self._rows: list[Row] = []
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._before: dict[str, tuple[int, int]] = {}  # totals at the last look, by incarnation
        self._looked_at = 0.0
        self._step_before = 0

    def take(self, report: Report, now: float) -> None:
        """Take a look.

        Args:
            report: the status of the cluster.
            now: when it came, in seconds of a steady clock.
        """
        self.trouble = ""
        self._report = report
        servers = {server["rank"]: server for server in report.get("servers", ()) if "error" not in server}
        paths = {worker: path for server in servers.values() for worker, path in server.get("paths", {}).items()}
        awaited = {
            name for server in servers.values() for entry in server["open_rounds"][:1] for name in entry["waits_for"]
        }
        totals = {server["incarnation"]: _totals(server) for server in servers.values()}
        passed_s = now - self._looked_at
        rates = {
            name: tuple((new - old) / passed_s for new, old in zip(totals[name], self._before[name], strict=True))
            for name in totals
            if name in self._before
        }
        self._rows = [
            self._row(member, servers if member["role"] == "server" else {}, rates, paths, awaited)
            for member in report["members"]
        ]
        step = self.step
        if self._before:
            self._rates.append(max(0.0, (step - self._step_before) / passed_s))
        self._before, self._looked_at, self._step_before = totals, now, step

    def _row(
        self,
        member: Report,
        servers: Mapping[int, Report],
        rates: Mapping[str, tuple[float, ...]],
        paths: Mapping[str, str],
        awaited: Collection[str],
    ) -> Row:
        name, server = f"{member['role']} {member['rank']}", servers.get(member["rank"])
        pushes_per_s, bytes_per_s = (None, None) if server is None else rates.get(server["incarnation"], (None, None))
        return Row(
            name,
            _state(member),
            None if server is None else server["step"],
            pushes_per_s,
            bytes_per_s,
            0 if server is None else server["memory_of_live_runs_bytes"],
            0 if server is None else server["memory_limit_bytes"],
            _notes(member, server, paths.get(name, ""), is_awaited=name in awaited),
        )

    @property
    def step(self) -> int:
        """The newest step of any server."""
        return max((row.step for row in self._rows if row.step is not None), default=0)

    @property
    def rows(self) -> list[Row]:
        """The rows in their order."""
        if self.order is Order.TRAFFIC:
            return sorted(self._rows, key=lambda row: -(row.bytes_per_s or 0.0))
        if self.order is Order.MEMORY:
            return sorted(self._rows, key=lambda row: -row.memory_bytes)
        return self._rows

    def scroll(self, by: int, height: int) -> None:
        """Move the rows by so many lines."""
        self.first = max(0, min(self.first + by, len(self._rows) - max(1, height - _AROUND_ROWS)))

    def line(self) -> str:
        """Return the look in one line, for a log."""
        if self.trouble or not self._report:
            return self.trouble or "no look yet"
        bad = [f"{row.name} {row.state}" for row in self._rows if row.state not in ("active", "idle", "done", "left")]
        parts = [
            f"step {self.step}",
            f"{self._rates[-1]:.1f} steps/s" if self._rates else "- steps/s",
            f"{sum(row.pushes_per_s or 0.0 for row in self._rows):.0f} pushes/s",
            f"{size(sum(row.bytes_per_s or 0.0 for row in self._rows))}/s",
            *bad,
            *self._waits()[:1],
        ]
        return printable("  ".join(parts))

    def picture(self, width: int, height: int) -> RenderableType:
        """Draw the look.

        Args:
            width, height: of the terminal, in characters.
        """
        rates = sparkline(list(self._rates)[-max(1, min(SAMPLES, width - 50)) :])
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append("kvd top", "bold").append(f"  {printable(self._title)}")
        pace = Text(no_wrap=True, overflow="ellipsis")
        now = f"{self._rates[-1]:.1f}" if self._rates else "-"
        pace.append(f"step {self.step}  {now} steps/s  ").append(rates, "green")
        shown = self.rows[self.first : self.first + max(1, height - _AROUND_ROWS)]
        hidden = len(self._rows) - len(shown)
        foot = Text(no_wrap=True, overflow="ellipsis")
        if self.trouble:
            foot.append(printable(self.trouble), "bold red")
        elif not self._report:
            foot.append("asking the cluster", "dim")
        else:
            waits = self._waits()
            foot.append(printable(waits[0]) if waits else "nobody waits", "yellow" if waits else "dim")
        keys = f"q quits   s sorts (by {self.order.value})   ↑ ↓ scroll" + (f"   {hidden} more" if hidden else "")
        return Group(head, pace, self._table(shown, width), foot, Text(keys, "dim", no_wrap=True, overflow="ellipsis"))

    def _table(self, rows: Sequence[Row], width: int) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=True)
        for title in ("NODE", "STATE"):
            table.add_column(title, no_wrap=True)
        for title in ("STEP", "PUSHES/S", "BYTES/S"):
            table.add_column(title, no_wrap=True, justify="right", min_width=9)
        table.add_column("MEMORY" if width < 100 else "MEMORY OF LIMIT", no_wrap=True, justify="right")
        table.add_column("NOTES", no_wrap=True, overflow="ellipsis", ratio=1)
        for row in rows:
            memory = (
                size(row.memory_bytes) if width < 100 else f"{size(row.memory_bytes)} of {size(row.memory_limit_bytes)}"
            )
            table.add_row(
                row.name,
                Text(row.state, STYLES.get(row.state, "")),
                "" if row.step is None else str(row.step),
                "" if row.pushes_per_s is None else f"{row.pushes_per_s:.0f}",
                "" if row.bytes_per_s is None else size(row.bytes_per_s),
                memory if row.memory_limit_bytes else "",
                Text(printable(row.notes)),
                style="dim" if self.trouble else "",
            )
        return table

    def _waits(self) -> list[str]:
        """The waits, the oldest first."""
        members = {f"{member['role']} {member['rank']}": member for member in self._report.get("members", ())}
        waits: list[tuple[float, str, Sequence[str]]] = []
        for server in self._report.get("servers", ()):
            for entry in server.get("open_rounds", ()):
                what = f"round {entry['round']} of {entry['key']!r}" if entry["round"] else f"init of {entry['key']!r}"
                waits.append((entry["age_s"], what, entry["waits_for"]))
        waits += [
            (wait["age_s"], f"{wait['entered'][0]} at a barrier", wait["waits_for"])
            for wait in self._report.get("barrier_waits", ())
        ]
        waits.sort(key=lambda wait: -wait[0])
        return [
            f"{what} waits {lasting(age_s)} for {_who(names, members)}" for age_s, what, names in waits if age_s >= 1
        ]


def _totals(server: Report) -> tuple[int, int]:
    """The pushes and bytes of a server so far."""
    counters = server["counters"]
    pushes = sum(counters["received"].get(kind, 0) for kind in _PUSHES)
    return pushes, counters["received_bytes"] + counters["sent_bytes"]


def _who(names: Sequence[str], members: Mapping[str, Any]) -> str:
    first = members.get(names[0]) if names else None
    if first is None:
        return ", ".join(names) or "nobody"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]} (process {first['pid']} on {first.get('host_name') or 'its host'}){more}"


def _state(member: Report) -> str:
    return "ended" if member["process_ended"] else "silent" if member["is_silent"] else str(member["state"])


def _notes(member: Report, server: Report | None, path: str, *, is_awaited: bool) -> str:
    if member["state"] in ("dead", "gone", "lost"):
        return str(member["reason"])
    if member["is_silent"] or (member["role"] == "server" and server is None):
        return f"heard {ago(member['last_heard_s'])}"
    if server is not None:
        oldest = server["open_rounds"][:1]
        return f"a round waits {lasting(oldest[0]['age_s'])}" if oldest and oldest[0]["age_s"] >= 1 else ""
    return f"awaited; {path}" if is_awaited else path


def sparkline(values: Sequence[float]) -> str:
    """Return values as bars, relative to the largest."""
    top = max(values, default=0.0)
    if top <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)
