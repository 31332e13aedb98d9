"""How a worker waits until its cluster is complete: what it says meanwhile, and the error at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from kvd.client.calls.deadline import Deadline
from kvd.client.calls.held_signals import signals
from kvd.client.cluster.engine import Engine
from kvd.config import parse_address, rank_contradictions
from kvd.core.membership import ViewState, in_words, name_of
from kvd.core.requests import JoinCluster
from kvd.errors import ConfigError, ConnectError, RequestTimeout
from kvd.protocol.messages import Member

FIRST_NOTICE_S = 3.0
"""When a line says what is missing. The next ones come after 9, 21, 45 … s."""

SILENCE_S = 3.0
"""A scheduler that has been silent for so long may be what everyone waits for."""

MAX_NAMED = 8
"""Nodes that a text names."""

logger = logging.getLogger("kvd")


@dataclass
class Arrival:
    """How a worker comes to its cluster.

    Attributes:
        wait_for_workers: whether it waits for all workers, or for the servers alone.
        operator: it comes for one command, see `Join.operator`.
        tell: takes a line for the person who waits.
    """

    wait_for_workers: bool = True
    operator: bool = False
    tell: Callable[[str], None] = logger.warning
    given_up: bool = False
    _woken: SimpleQueue[None] = field(default_factory=SimpleQueue)

    def give_up(self) -> None:
        """Ends the waiting, from any thread."""
        self.given_up = True
        self.wake()

    def wake(self) -> None:
        """Something has happened that the one who waits should look at."""
        self._woken.put(None)

    def sleep(self, seconds: float) -> None:
        """Waits until `wake`, for `seconds` at most. May return early."""
        signals.pause(self._woken, seconds)


class Joining:
    """One worker, one cluster."""

    def __init__(self, engine: Engine, arrival: Arrival) -> None:
        self._engine = engine
        self._arrival = arrival
        self._where = engine.config.scheduler
        self._timeout_s = engine.config.join_timeout_s

    def wait(self, deadline: Deadline) -> int:
        """Waits until all servers are active and all workers have joined. Returns the rank.

        Raises:
            ConnectError: nothing answers at the scheduler's address.
            RequestTimeout: the scheduler answers, but nodes are missing, or the arrival was given up.
            ConfigError, NotAllowed: the cluster refuses this node.
        """
        arrival = self._arrival
        promise = self._engine.submit(JoinCluster(arrival.wait_for_workers), deadline.left_s())
        promise.on_end(lambda _: arrival.wake())
        begun = time.monotonic()
        notice_s = FIRST_NOTICE_S
        while not promise.done() and not arrival.given_up:
            arrival.sleep(max(0.0, begun + notice_s - time.monotonic()))
            if not promise.done() and not arrival.given_up and time.monotonic() >= begun + notice_s:
                arrival.tell(f"{self._problem().text}; this gives up after {self._timeout_s:g} s (join_timeout_s)")
                notice_s = 2 * notice_s + FIRST_NOTICE_S
        if not promise.done():
            raise RequestTimeout("the creation of this store was given up", outcome="not_sent")
        try:
            rank: int = promise.result()
        except RequestTimeout:
            raise self._error() from None
        return rank

    def _error(self) -> ConnectError | RequestTimeout:
        problem = self._problem()
        text = f"the cluster was not complete after {self._timeout_s:g} s (join_timeout_s): {problem.text}"
        if not self._engine.session.heard:
            return ConnectError(text, address=self._where)
        return RequestTimeout(text, outcome="not_sent", waiting_for=problem.nodes)

    def _problem(self) -> Problem:
        """Why the cluster is not complete, as far as this worker knows."""
        session, config = self._engine.session, self._engine.config
        if not session.heard:
            workers, servers = config.num_workers or "N", config.num_servers or "N"
            return Problem(
                ("scheduler",),
                f"no scheduler answers at {self._where}: start one there (kvd scheduler --scheduler {self._where} "
                f"--num-workers {workers} --num-servers {servers}), or set KVD_SCHEDULER to where it is",
            )
        silence_s = self._engine.scheduler_silence_s()
        if silence_s > max(SILENCE_S, 3 * session.heartbeat_interval_s):
            return Problem(
                ("scheduler",),
                f"the scheduler at {self._where} answered, and has been silent for {silence_s:.0f} s now: look at its "
                "log, and start it again if it has ended",
            )
        if not session.joined and not session.view.missing_servers():
            return Problem((), session.why_not_joined or f"the scheduler at {self._where} has yet to let this node in")
        return missing_nodes(
            session.view,
            self._engine.machine.unreached_servers(),
            self._where,
            wait_for_workers=self._arrival.wait_for_workers and session.joined,
        )


def warn_of_other_ranks(rank: int, num_workers: int) -> None:
    """Warn if a launcher's variables contradict the place that the cluster gave this worker."""
    found = rank_contradictions(rank, num_workers)
    if found:
        logger.warning(
            "%s, but the store has this as worker %d of %d: a program that divides its data by these variables takes "
            "the wrong part. Use kv.rank and kv.num_workers, or set the variables to the same numbers",
            " and ".join(f"{name} = {value}" for name, value in found.items()),
            rank,
            num_workers,
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """What a cluster lacks.

    Attributes:
        nodes: the names of the nodes that are missing.
        text: for the person who waits, with what to do about it.
    """

    nodes: tuple[str, ...]
    text: str


def missing_nodes(
    view: ViewState, unreached: Sequence[Member], scheduler: str, *, wait_for_workers: bool = True
) -> Problem:
    """Names those that are missing, how many are there, and how to start or find the others.

    Args:
        unreached: the active servers that do not answer this worker.
        scheduler: its address.
    """
    servers, workers = view.missing_servers(), view.missing_workers() if wait_for_workers else []
    names = [name_of("server", rank) for rank in servers] + [name_of("worker", rank) for rank in workers]
    parts = []
    if names:
        parts.append(f"waiting for {_listed([*_with_state(view, servers), *names[len(servers) :]])} at {scheduler}")
        parts[0] += f": {_counted(view, servers, workers)}; {_how_to_start(scheduler, servers, workers)}"
    parts += [_unreached_text(server, scheduler) for server in unreached[:MAX_NAMED]]
    names += [name_of("server", server.rank) for server in unreached]
    if not names:
        return Problem((), f"the cluster at {scheduler} has just become complete, and this worker needs a moment more")
    return Problem(tuple(names), "; ".join(parts))


def _with_state(view: ViewState, ranks: Sequence[int]) -> list[str]:
    """The names of missing servers; one that was there before says what became of it."""
    members = [view.members.get(("server", rank)) for rank in ranks]
    return [
        name_of("server", rank) if member is None else f"{name_of('server', rank)} (which {in_words(member.state)})"
        for rank, member in zip(ranks, members, strict=True)
    ]


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`; a long list ends with how many more there are."""
    if len(names) > MAX_NAMED:
        return f"{', '.join(names[:MAX_NAMED])} and {len(names) - MAX_NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _counted(view: ViewState, servers: Sequence[int], workers: Sequence[int]) -> str:
    counts = []
    for missing, size, role in (
        (servers, view.settings.num_servers, "servers"),
        (workers, view.settings.num_workers, "workers"),
    ):
        if missing:
            counts.append(f"{size - len(missing)} of {size} {role} have joined")
    return ", ".join(counts)


def _how_to_start(scheduler: str, servers: Sequence[int], workers: Sequence[int]) -> str:
    ways = []
    if servers:
        ways.append(f"start each missing server with kvd server --scheduler {scheduler}")
    if workers:
        ways.append(f"start each missing worker with kvd worker --scheduler {scheduler} -- python PROGRAM")
    return ", and ".join(ways)


def _unreached_text(server: Member, scheduler: str) -> str:
    """An active server that does not answer: where it listens, and why that may not be reached."""
    text = (
        f"{name_of('server', server.rank)} (node {server.node_id}) has joined, but does not answer this worker at "
        f"{server.address}: "
    )
    try:
        listening, asked = parse_address(server.address), parse_address(scheduler)
    except ConfigError:
        return text + "this is no address; look at the server's log"
    if listening.scheme == "tcp" and listening.is_local and not asked.is_local:
        return text + (
            f"it listens on {listening.host}, which only processes of its own host reach; start it without --bind (it "
            "then listens where it reaches the scheduler), or with an address of its host that this host reaches"
        )
    if listening.scheme != "tcp":
        return text + "it listens on a Unix socket, which only processes of its own host reach"
    return text + (
        f"check that this host reaches {listening.host} at port {listening.port} (firewall, route), and that the "
        "server's process is not stopped"
    )
