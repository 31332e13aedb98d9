"""Looks into a cluster and asks its servers, without being one of its workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from kvd.client.calls.backend import Node
from kvd.client.calls.checks import command_body, command_head, seconds, whole
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.held_signals import uninterrupted, with_uninterrupted_methods
from kvd.client.calls.keys import key_list
from kvd.client.calls.tables import no_table_error, table_error
from kvd.client.calls.values import fresh_target, paired, targets_by_name
from kvd.client.cluster.answers import answer_bytes, list_keys
from kvd.client.cluster.cuts import Cuts
from kvd.client.cluster.joining import Arrival
from kvd.client.cluster.row_reads import RowReads
from kvd.client.cluster.saving import Saved, SnapshotSaver
from kvd.config import Config
from kvd.core import requests
from kvd.core.membership import EMPTY_SETTINGS
from kvd.core.placement import shard_of
from kvd.core.requests import Item
from kvd.errors import ConnectError, KeyNotFound, KvdError, NotAllowed, RequestTimeout
from kvd.node.daemon.facts import wall_clock_s
from kvd.node.keys.keyring import Keyring
from kvd.protocol.messages import NO_RUN, Command, EndRun, KeyEntry, MemberState, Shutdown, StatusQuery
from kvd.protocol.specs import ANY_ROW, DTYPES, KeySpec, gradients_text
from kvd.transport.finding import Finding
from kvd.transport.zmq.probe import try_handshake

SAME_VERSION_TRIES = 4
VIEW_PAUSE_S = 0.005
ANNOUNCEMENT_S = 5.0  # how long a server that has joined is waited for in the view
NOT_ANNOUNCED = "it has joined, but the scheduler has not announced it yet"
MOST_HANDSHAKES = 32  # at a time
NEWS_S = 1.0  # how long a scheduler that may be down is waited for
ASYNCHRONOUS = "this cluster trains asynchronously, so its keys have no common versions"


class Reading(NamedTuple):
    """What `Observer.read` returns.

    Attributes:
        version: the step that was read; in asynchronous training the smallest version of a key.
        versions: the version of each key, by name: how many rounds (asynchronous stores: pushes) it has taken.
        values: the arrays, in the order of the keys.
    """

    version: int
    versions: dict[str, int]
    values: list[Any]


@with_uninterrupted_methods
class Observer:
    """Looks into a cluster without a rank; no worker waits for it. `kvd.Observer` is its public form.

    Args:
        config: the settings.
        arrival: how it comes.

    Raises:
        ConfigError: there is no key within `request_timeout_s`, or none that can be used.
        ConnectError: no scheduler answers within `request_timeout_s`.
    """

    @uninterrupted
    def __init__(self, config: Config, arrival: Arrival | None = None) -> None:
        self._config = config
        arrival = arrival or Arrival()
        deadline = Deadline(config.request_timeout_s)  # waiting for a key counts
        self._engine = engine = arrival.start(config, "observer", EMPTY_SETTINGS, deadline)
        seconds = config.request_timeout_s
        try:
            asked = engine.submit(requests.SchedulerStatus(), deadline.left_s())
            arrival.wait(
                asked,
                engine,
                lambda: arrival.unanswered(engine),
                f"this gives up after {seconds:g} s (request_timeout_s)",
            )
            asked.result()  # any scheduler answers that, even while servers are missing
            engine.submit(requests.JoinCluster(), deadline.left_s()).result()  # it has a view then
        except RequestTimeout:
            engine.stop()
            if engine.session.heard:
                where = config.scheduler
                text = f"the scheduler at {where} answered, but has not described its cluster within {seconds:g} s"
                raise RequestTimeout(f"{text}: look at its log", waiting_for=("scheduler",)) from None
            text = f"{arrival.unanswered(engine)}; tried for {seconds:g} s (request_timeout_s)"
            raise ConnectError(text, address=config.scheduler) from None
        except BaseException:
            engine.stop()
            raise
        self._cuts = Cuts(self._engine)
        self._rows = RowReads(self._engine)
        self._known: dict[str, KeySpec] = {}  # of keys that were read

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._engine.stop()

    @property
    def run(self) -> str:
        """The run that it looks at, as `jobs` names it; "0" if there was none when it came."""
        return f"{self._engine.session.run:x}"

    def status(self, servers_within_s: float | None = None) -> dict[str, Any]:
        """The scheduler's status of the cluster; under "servers", the status of each server that is alive.

        All servers are asked at once. One that does not answer in time has an entry with "error" instead of figures.

        Each report has a "clock": `ahead_s`, by which the node's time of day is ahead of that of this host, and
        `error_s`, by which that may be wrong.

        Args:
            servers_within_s: seconds that servers have to answer; None: `request_timeout_s`, counted from the start.
        """
        deadline = Deadline(self._config.request_timeout_s)
        asked_at = wall_clock_s()
        status = with_clock(self._scheduler_status(deadline), asked_at)
        if servers_within_s is not None:
            deadline = Deadline(min(servers_within_s, deadline.left_s()))
        ranks = sorted(
            member["rank"]
            for member in status["members"]
            if member["role"] == "server" and member["state"] == MemberState.ACTIVE
        )
        unknown = self._engine.run(self._unknown(ranks, deadline)).result()
        asked_at = wall_clock_s()
        asked = {
            rank: self._engine.submit(requests.Control((StatusQuery(0),), (rank,)), deadline.left_s())
            for rank in ranks
            if rank not in unknown
        }
        status["servers"] = [{"role": "server", "rank": rank, "error": NOT_ANNOUNCED} for rank in sorted(unknown)]
        for rank, promise in asked.items():
            try:
                (answer,) = promise.result()
                status["servers"].append(with_clock(json.loads(answer_bytes(answer)), asked_at))
            except KvdError as error:
                status["servers"].append({"role": "server", "rank": rank, "error": str(error)})
        return status

    def handshakes_with(self, ranks: Collection[int]) -> dict[int, Finding]:
        """Try a handshake with each of these servers, all at once, and return what that showed, by rank.

        Blocks for up to four seconds, and for the name server.
        """
        view = self._engine.machine.view
        places = {server.rank: (server.address, server.key) for server in view.servers() if server.rank in ranks}
        curve = Keyring(self._config, "observer").curve
        with ThreadPoolExecutor(MOST_HANDSHAKES, "kvd-handshakes") as pool:
            tried = {rank: pool.submit(try_handshake, address, curve, key) for rank, (address, key) in places.items()}
        return {rank: future.result() for rank, future in tried.items()}

    async def _unknown(self, ranks: Sequence[int], deadline: Deadline) -> set[int]:
        """Those of these servers that no view has shown: the scheduler announces a server when its state is saved."""
        view, soon = self._engine.machine.view, Deadline(min(ANNOUNCEMENT_S, deadline.left_s()))
        while unknown := set(ranks) - {server.rank for server in view.servers()}:
            if soon.left_s() == 0:
                break
            await asyncio.sleep(VIEW_PAUSE_S)
            self._engine.check_usable()
        return unknown

    def keys(self) -> list[dict[str, Any]]:
        """Every key, by name: dtype, shape, merge ("" where there are no rounds), version, slices, bytes, the shard of
        its first slice, and its servers. Of a table, the bytes are those that it takes now; `shape` begins with its
        rows, None if any row id may come, and `updated_rows` counts those that take memory. Of other keys that is
        None."""
        rows: dict[str, dict[str, Any]] = {}
        for rank, entry in self._engine.run(list_keys(self._engine)).result():
            self._add_entry(rows, rank, entry)
        return [rows[name] for name in sorted(rows)]

    def _add_entry(self, rows: dict[str, dict[str, Any]], rank: int, entry: KeyEntry) -> None:
        itemsize, settings = DTYPES[entry.dtype].itemsize, self._engine.machine.view.settings
        table = entry.table
        bound = () if table is None else (None if table.rows == ANY_ROW else table.rows,)
        row = rows.setdefault(
            entry.key,
            {
                "key": entry.key,
                "dtype": entry.dtype,
                "shape": [*bound, *entry.shape],
                "merge": (entry.merge or settings.merge or "sum") if settings.mode == "sync" else "",
                "version": entry.version,
                "slices": 0,
                "bytes": 0 if table is not None else int(np.prod(entry.shape, dtype=np.int64)) * itemsize,
                "updated_rows": None if table is None else 0,
                "shard": shard_of(entry.key, 0, len(self._engine.machine.view.shards)),
                "servers": [],
            },
        )
        row["version"] = min(row["version"], entry.version)
        row["slices"] += entry.slices
        row["servers"].append(rank)
        if table is not None:
            row["bytes"] += entry.bytes_led
            row["updated_rows"] += table.updated

    # ── values ──

    def pull(self, keys: Any, version: int | None = None, out: Any = None) -> Any:
        """As `kvd.Observer.pull`."""
        values = self.read(keys, version, out).values
        return values if key_list(keys).many else values[0]

    def read(self, keys: Any, version: int | None = None, out: Any = None) -> Reading:
        """As `kvd.Observer.read`."""
        named = key_list(keys)
        names = named.names
        step = None if version is None else whole("a version", version, 0)
        deadline = Deadline(self._config.request_timeout_s)
        if not self._engine.machine.view.is_up_to_date and deadline.left_s() > 0:
            self._engine.run(self._until_ready(deadline)).result()
        specs = self._specs(names, deadline)
        for name, spec in zip(names, specs, strict=True):
            if spec.table is not None:
                raise table_error(named.written.get(name, name))
            if spec.gradients:
                self._known.clear()  # the key may be made again, for weights
                raise NotAllowed(gradients_text(name), key=name)
        if out is None:
            targets = [fresh_target(spec) for spec in specs]
        else:
            targets = targets_by_name(named, out, self._engine.machine.view.settings.slice_bytes)
        items = tuple(Item(name, target.spec, None, target.data) for name, target in zip(names, targets, strict=True))
        try:
            reached, versions = self._engine.run(self._read(items, step, deadline)).result()
        except KvdError:
            self._known.clear()  # something has changed, perhaps the keys
            raise
        values = [target.finish() for target in targets]
        newest = {name: entry.newest for name, entry in zip(names, versions, strict=True)}
        if named.places is not None:
            values = [values[place] for place in named.places] if out is None else paired(named, out, "outs")
        return Reading(reached, newest, values)

    def row_sparse_pull(self, keys: Any, row_ids: Any, out: Any = None) -> Any:
        """As `kvd.Observer.row_sparse_pull`."""
        named = key_list(keys)
        deadline = Deadline(self._config.request_timeout_s)
        if not self._engine.machine.view.is_up_to_date:
            self._engine.run(self._until_ready(deadline)).result()
        specs = dict(zip(named.names, self._specs(named.names, deadline), strict=True))
        for name, spec in specs.items():
            if spec.table is None:
                raise no_table_error(named.written.get(name, name))
        try:
            return self._rows.read(named, specs, row_ids, out, deadline)
        except KvdError:
            self._known.clear()
            raise

    def _specs(self, names: Sequence[str], deadline: Deadline) -> list[KeySpec]:
        """Shape and dtype of the keys, which never change."""
        unknown = [name for name in names if name not in self._known]
        run = self._engine.session.run  # of the question: the scheduler may tell of one before it is answered
        asked = [self._engine.submit(requests.DescribeKey(name), deadline.left_s()) for name in unknown]
        try:
            found = {name: promise.result() for name, promise in zip(unknown, asked, strict=True)}
        except KeyNotFound:
            if run != NO_RUN or not self._engine.run(self._in_a_run(deadline)).result():
                raise
            return self._specs(names, deadline)
        self._known.update(found)
        return [self._known[name] for name in names]

    async def _in_a_run(self, deadline: Deadline) -> bool:
        """Whether a run has begun since this node came, which the scheduler says when it is asked again."""
        soon = Deadline(min(NEWS_S, deadline.left_s()))
        while self._engine.session.run == NO_RUN and soon.left_s() > 0:
            await asyncio.sleep(VIEW_PAUSE_S)
            self._engine.check_usable()
        return self._engine.session.run != NO_RUN

    async def _read(
        self, items: tuple[Item, ...], step: int | None, deadline: Deadline
    ) -> tuple[int, Sequence[requests.Versions]]:
        if not items:
            return 0, []
        await self._until_ready(deadline)
        if not self._is_sync:
            if step is not None:
                raise NotAllowed(f"{ASYNCHRONOUS}: pull the newest")
            versions = await self._read_async(items, deadline)
            return min(entry.oldest for entry in versions), versions
        if step is None:
            return await self._cuts.read_newest(items, deadline)
        return step, await self._cuts.read_step(items, step, deadline)

    async def _until_ready(self, deadline: Deadline) -> None:
        """Servers and workers may have joined after this node, which the scheduler says when it is asked again."""
        machine, news = self._engine.machine, Deadline(NEWS_S)
        while not machine.view.is_up_to_date and not (machine.view.knows_all_servers and news.left_s() == 0):
            await asyncio.sleep(VIEW_PAUSE_S)
            self._engine.check_usable()
            if deadline.left_s() == 0:
                missing = tuple(f"server {rank}" for rank in self._engine.machine.view.missing_servers())
                text = f"the cluster is not complete, it waits for {', '.join(missing or ('the scheduler',))}"
                raise RequestTimeout(f"{text}: see kvd status", outcome="not_sent", waiting_for=missing)

    async def _read_async(self, items: tuple[Item, ...], deadline: Deadline) -> list[requests.Versions]:
        """The newest values. Keys whose slices were of different versions are read again, a few times."""
        found: dict[str, requests.Versions] = {}
        for _ in range(SAME_VERSION_TRIES):
            asked = tuple([item for item in items if item.key not in found or _is_mixed(found[item.key])])
            if not asked:
                break
            transfer = requests.Transfer(asked, push=False, pull=True, any_version=True)
            versions = await self._engine.call(transfer, deadline.left_s())
            found.update({item.key: version for item, version in zip(asked, versions, strict=True)})
        return [found[item.key] for item in items]

    def version(self) -> int:
        """As `kvd.Observer.version`."""
        return int(self._engine.run(self._version(Deadline(self._config.request_timeout_s))).result())

    async def _version(self, deadline: Deadline) -> int:
        there = await self._cuts.available((), deadline)
        while there.highest == 0 and not self._engine.machine.view.is_up_to_date and deadline.left_s() > 0:
            await asyncio.sleep(VIEW_PAUSE_S)  # a run has begun of which this reader has yet to be told
            there = await self._cuts.available((), deadline)  # raises at the deadline
        if there.highest == 0:
            return 0
        await self._until_ready(deadline)
        if self._is_sync:
            return there.newest
        return min([entry.version for _, entry in await list_keys(self._engine)], default=0)

    def wait_for(self, version: int, timeout: float | None = None) -> int:
        """As `kvd.Observer.wait_for`."""
        step = whole("a version", version, 0)
        timeout_s = self._config.request_timeout_s if timeout is None else seconds(timeout)
        if not self._is_sync:
            raise NotAllowed(f"{ASYNCHRONOUS} to wait for")
        return int(self._engine.run(self._cuts.wait_for(step, Deadline(timeout_s), timeout_s)).result())

    @property
    def _is_sync(self) -> bool:
        return self._engine.machine.view.is_sync

    def save(self, folder: Path) -> Saved:
        """Writes a snapshot of the job, while it trains.

        Raises:
            SnapshotError: it cannot be written.
            NotAllowed: the job has no keys, or this node has not the key of an operator.
        """
        deadline = Deadline(self._config.request_timeout_s)
        self._engine.run(self._until_ready(deadline)).result()
        saved: Saved = self._engine.run(SnapshotSaver(self._engine).save(folder)).result()
        return saved

    # ── commands and deaths ──

    def command(self, head: int | str, body: bytes) -> list[bytes]:
        """Runs the controller registered for `head` on every server; their answers in rank order."""
        name, data = command_head(head), command_body(body)
        control = requests.Control((Command(0, name),), payload=data, nbytes=len(data))
        return [answer_bytes(answer) for answer in self._ask(control)]

    def jobs(self) -> list[dict[str, Any]]:
        """The runs of all jobs, in the order in which they began: job, run, phase, workers, num_workers,
        max_workers."""
        rows: list[dict[str, Any]] = self._scheduler_status(Deadline(self._config.request_timeout_s))["jobs"]
        return rows

    def end_job(self, job: str) -> None:
        """Ends the latest run of the job, and gives up its values. Its workers get JobEnded.

        Raises:
            NotAllowed: there is no such run.
        """
        self._ask(requests.TellScheduler(EndRun(0, job)))

    def shut_down(self, *, force: bool) -> None:
        """Ends the scheduler and all servers.

        Raises:
            NotAllowed: a job is running, and `force` is not set.
        """
        self._ask(requests.TellScheduler(Shutdown(0, force)))

    def dead_nodes(self) -> list[Node]:
        """The servers and workers that are declared dead."""
        return [
            Node(member["role"], member["rank"], member["node_id"], member["reason"], member["silent_s"])
            for member in self._scheduler_status(Deadline(self._config.request_timeout_s))["members"]
            if member["state"] in (MemberState.DEAD, MemberState.GONE)
        ]

    def _scheduler_status(self, deadline: Deadline) -> dict[str, Any]:
        payload, nbytes = self._engine.submit(requests.SchedulerStatus(), deadline.left_s()).result()
        status: dict[str, Any] = json.loads(bytes(payload[:nbytes]))
        return status

    def _ask(self, request: requests.Request) -> Any:
        return self._engine.submit(request).result()


def with_clock(report: dict[str, Any], asked_at: float) -> dict[str, Any]:
    """Add to a report how far the clock of its node is ahead of that of this host.

    Args:
        report: has come by now.
        asked_at: when it was asked for, by the clock of this host.
    """
    if "time" in report:
        now = wall_clock_s()
        ahead_s, error_s = report["time"] - (asked_at + now) / 2, (now - asked_at) / 2
        report["clock"] = {"ahead_s": round(ahead_s, 3), "error_s": round(error_s, 3)}
    return report


def _is_mixed(versions: requests.Versions) -> bool:
    return versions.oldest != versions.newest
