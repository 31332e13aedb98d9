"""Looks into a cluster and asks its servers, without being one of its workers."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import numpy as np

from kvd.client.calls.backend import Node
from kvd.client.calls.checks import command_body, command_head
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.keys import key_name
from kvd.client.calls.values import fresh_target
from kvd.client.cluster.answers import answer_bytes, list_keys
from kvd.client.cluster.engine import Engine
from kvd.config import Config
from kvd.core import requests
from kvd.core.membership import EMPTY_SETTINGS
from kvd.core.placement import shard_of
from kvd.core.requests import Item
from kvd.errors import ConnectError, KvdError, NotAllowed, RequestTimeout
from kvd.protocol.messages import Command, EndRun, KeyEntry, MemberState, Shutdown, StatusQuery
from kvd.protocol.specs import DTYPES

SAME_VERSION_TRIES = 20


class Observer:
    """Looks into a cluster without a rank; no worker waits for it.

    Raises:
        ConnectError: no scheduler answers within `request_timeout_s`, or its host is not known.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        deadline = Deadline(config.request_timeout_s)  # looking up the host's name counts
        self._engine = Engine(config, "observer", EMPTY_SETTINGS)
        try:
            self._scheduler_status(deadline)  # any scheduler answers that, even while servers are missing
            self._engine.submit(requests.JoinCluster(), deadline.left_s()).result()  # it has a view then
        except RequestTimeout:
            heard = self._engine.session.heard
            self._engine.stop()
            where, seconds = config.scheduler, config.request_timeout_s
            if heard:
                text = f"the scheduler at {where} answered, but has not described its cluster within {seconds:g} s"
                raise RequestTimeout(f"{text}: look at its log", waiting_for=("scheduler",)) from None
            raise ConnectError(
                f"no scheduler answers at {where} after {seconds:g} s: start one there "
                f"(kvd scheduler --scheduler {where}), or name its address with --scheduler or KVD_SCHEDULER",
                address=where,
            ) from None
        except BaseException:
            self._engine.stop()
            raise

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._engine.stop()

    def status(self) -> dict[str, Any]:
        """The scheduler's status of the cluster; under "servers", the status of each server that is alive.

        All servers are asked at once. One that does not answer within `request_timeout_s`, counted from the start of
        this call, has an entry with "error" in place of its figures.
        """
        deadline = Deadline(self._config.request_timeout_s)
        status = self._scheduler_status(deadline)
        ranks = sorted(
            member["rank"]
            for member in status["members"]
            if member["role"] == "server" and member["state"] == MemberState.ACTIVE
        )
        asked = {
            rank: self._engine.submit(requests.Control((StatusQuery(0),), (rank,)), deadline.left_s()) for rank in ranks
        }
        status["servers"] = []
        for rank, promise in asked.items():
            try:
                (answer,) = promise.result()
                status["servers"].append(json.loads(answer_bytes(answer)))
            except KvdError as error:
                status["servers"].append({"role": "server", "rank": rank, "error": str(error)})
        return status

    def keys(self) -> list[dict[str, Any]]:
        """Every key, by name: dtype, shape, version, slices, bytes, the shard of its first slice, and its servers."""
        rows: dict[str, dict[str, Any]] = {}
        for rank, entry in self._engine.run(list_keys(self._engine)).result():
            self._add_entry(rows, rank, entry)
        return [rows[name] for name in sorted(rows)]

    def _add_entry(self, rows: dict[str, dict[str, Any]], rank: int, entry: KeyEntry) -> None:
        itemsize = DTYPES[entry.dtype].itemsize
        row = rows.setdefault(
            entry.key,
            {
                "key": entry.key,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "version": entry.version,
                "slices": 0,
                "bytes": int(np.prod(entry.shape, dtype=np.int64)) * itemsize,
                "shard": shard_of(entry.key, 0, len(self._engine.machine.view.shards)),
                "servers": [],
            },
        )
        row["version"] = min(row["version"], entry.version)
        row["slices"] += entry.slices
        row["servers"].append(rank)

    def pull(self, key: str | int) -> np.ndarray[Any, Any]:
        """The key's value, all of it of one version.

        Raises:
            KeyNotFound: nobody made it.
            NotAllowed: it changes too fast to be read in one version.
        """
        name = key_name(key)
        spec = self._ask(requests.DescribeKey(name))
        target = fresh_target(spec)
        item = Item(name, spec, None, target.data)
        for _ in range(SAME_VERSION_TRIES):
            (versions,) = self._ask(requests.Transfer((item,), push=False, pull=True, any_version=True))
            if versions.oldest == versions.newest:
                value: np.ndarray[Any, Any] = target.finish()
                return value
        raise NotAllowed(f"key {name!r} changes too fast to be read in one version: try again between steps", key=name)

    def command(self, head: int | str, body: bytes) -> list[bytes]:
        """Runs the controller registered for `head` on every server; their answers in rank order."""
        name, data = command_head(head), command_body(body)
        control = requests.Control((Command(0, name),), payload=data, nbytes=len(data))
        return [answer_bytes(answer) for answer in self._ask(control)]

    def jobs(self) -> list[dict[str, Any]]:
        """The runs of all jobs, in the order in which they began: job, run, phase, workers, num_workers."""
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
