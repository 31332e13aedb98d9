"""The agreement: the settings that all nodes of a cluster share, and whether a Join agrees with them."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.protocol import specs
from kvd.protocol.messages import (
    MAX_MEMBERS,
    MAX_REPLICATED_WORKERS,
    MAX_SERVERS,
    ErrorCode,
    Join,
    Refused,
    Settings,
)

NODES = ("server", "worker")
ROLES = (*NODES, "observer")
MODES = ("", "sync", "async")
MERGES = ("", *specs.MERGES)
NO_ROUNDS = (
    "this cluster has quorum={quorum}, which is about rounds that wait for workers, and asynchronous types have no "
    "rounds: use dist_sync, or start the scheduler without --quorum"
)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The cluster's settings ("" and 0: the first worker decides), how long the scheduler waits for its nodes, and what
    `explain` tells of its transport."""

    cluster: Settings
    heartbeat_interval_s: float
    server_timeout_s: float
    worker_timeout_s: float
    break_on_loss: bool  # a dead worker breaks the barriers that it is missing from
    shrink_on_loss: bool = False  # rounds and barriers go on without a dead worker
    insecure: bool = False  # connections have no keys


class Agreement:
    """The cluster's settings. A mode or merge that the scheduler was not told stays open until a worker decides it."""

    def __init__(self, told: Settings, earlier: Settings | None = None) -> None:
        """`earlier` are the settings of the scheduler before, which decide what this one was not told."""
        self.settings = told
        if earlier is not None:
            self.adopt_mode(earlier)
            self.adopt_merge(earlier)

    def objection(self, join: Join) -> Refused | None:
        """Why this Join cannot be accepted: it is malformed, or its settings differ from the cluster's."""
        malformed = malformation(join)
        if malformed is not None:
            return malformed
        if problem := size_problem(self.settings):
            return _objection(join, *problem)
        if (text := _too_many_replicas(self.settings)) or (text := self._text_on_replicas(join)):
            return _objection(join, "replicas", text)
        if self.settings.quorum and "async" in (join.settings.mode, self.settings.mode) and join.role == "worker":
            return _objection(join, "quorum", NO_ROUNDS.format(quorum=self.settings.quorum))
        for field, wanted, have in zip(Settings._fields, join.settings, self.settings, strict=True):
            if not self._agrees(field, wanted, have):
                text = (
                    f"this node wants {field}={wanted!r}, the cluster has {have!r}: start it with the cluster's setting"
                )
                return _objection(join, field, text)
        return None

    def adopt_mode(self, wanted: Settings) -> bool:
        """Takes mode and staleness from a worker that says them first; True if that changed the settings."""
        if self.settings.mode != "" or wanted.mode == "":
            return False
        self.settings = self.settings._replace(mode=wanted.mode, staleness=wanted.staleness)
        return True

    def adopt_merge(self, wanted: Settings) -> bool:
        """Takes the merge rule from a worker that says it first; True if that changed the settings."""
        if self.settings.merge != "" or wanted.merge == "":
            return False
        self.settings = self.settings._replace(merge=wanted.merge)
        return True

    def _text_on_replicas(self, join: Join) -> str:
        """What is wrong if the server has taken part in a run whose values it need not lead itself."""
        if not join.partitions.partitions or self.settings.replicas > 1:
            return ""
        return (
            "the servers keep two copies of every value, this scheduler was started for one: start it with --replicas 2"
        )

    def _agrees(self, field: str, wanted: object, have: object) -> bool:
        if field == "staleness":  # -1 is both "unbounded" and "as the cluster has it"; the mode decides it
            return wanted in (-1, have) or self.settings.mode == ""
        unset = type(wanted)()
        return wanted in (unset, have) or have == unset


def malformation(join: Join) -> Refused | None:
    """Why this Join could not be accepted anywhere."""
    if join.role not in ROLES:
        return _objection(join, "role", f"a node joins as server, worker or observer, not {join.role!r}")
    if join.role != "observer" and not join.node_id:
        return _objection(join, "node_id", "a node needs a node_id")
    for field, word, words in (("mode", join.settings.mode, MODES), ("merge", join.settings.merge, MERGES)):
        if word not in words:
            return _objection(join, field, f"{field} is {' or '.join(words[1:])}, not {word!r}")
    if problem := size_problem(join.settings):
        return _objection(join, *problem)
    text = _too_many_replicas(join.settings)
    return _objection(join, "replicas", text) if text else None


def size_problem(settings: Settings) -> tuple[str, str] | None:
    """The setting that makes a cluster too large, and what is wrong with it; None if nothing is."""
    workers, servers = settings.most_workers, settings.num_servers
    field = "max_workers" if settings.is_elastic else "num_workers"
    if servers > MAX_SERVERS:
        return "num_servers", f"a cluster has at most {MAX_SERVERS} servers, not {servers}"
    if workers + servers > MAX_MEMBERS:
        return field, f"a cluster has at most {MAX_MEMBERS} nodes in all, not {workers + servers}"
    if settings.replicas > 1 and workers > MAX_REPLICATED_WORKERS:
        text = f"with two copies of every value a job has at most {MAX_REPLICATED_WORKERS} workers, not {workers}"
        return field, f"{text}: start fewer, or set replicas=1"
    return None


def _too_many_replicas(settings: Settings) -> str:
    """What is wrong with the number of copies; "" if nothing is, or the number of servers is open."""
    if not 0 < settings.num_servers < settings.replicas:
        return ""
    servers = "1 server" if settings.num_servers == 1 else f"{settings.num_servers} servers"
    return (
        f"replicas={settings.replicas} needs as many servers, each with its own copy, and the cluster has {servers}: "
        "start more servers, or set replicas=1"
    )


def _objection(join: Join, field: str, text: str) -> Refused:
    return Refused(join.request, ErrorCode.CONFIG_ERROR, text, key=field)
