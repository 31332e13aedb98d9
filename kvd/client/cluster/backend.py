"""A worker joins its cluster, and the parts of its store are put together."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.client.calls.backend import DECLARING_TYPES, Backend, StoreFacts, StoreType
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.healing import Healing
from kvd.client.calls.memory_budget import MemoryBudget
from kvd.client.calls.restored_keys import RestoredKeys
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.binding import ClusterBinding
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.broadcast import ClusterAssignments
from kvd.client.cluster.closing import ClusterClosing
from kvd.client.cluster.compression import GradientCompression
from kvd.client.cluster.deletion import ClusterDeletion, KeyCache
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.healing import ClusterStates
from kvd.client.cluster.joining import Arrival, Joining, warn_of_other_ranks
from kvd.client.cluster.nodes import ClusterNodes
from kvd.client.cluster.plain_calls import PlainCalls
from kvd.client.cluster.rounds import ClusterRounds
from kvd.client.cluster.snapshots import ClusterSnapshots
from kvd.client.cluster.steps import program_steps
from kvd.client.cluster.tables import ClusterTables
from kvd.client.cluster.updates import ClusterUpdates
from kvd.client.cluster.values import ClusterValues
from kvd.config import Config, Loaded
from kvd.core import requests
from kvd.errors import ConfigError
from kvd.protocol.messages import MemberState, Settings


def cluster_settings(loaded: Loaded, kind: StoreType) -> Settings:
    """What this worker insists on: its type, and the settings that it was given. The cluster decides the others."""
    config = loaded.config

    def given(name: str, value: int) -> int:
        return value if loaded.origin.get(name, "default") != "default" else 0

    if "@" in config.job:
        raise ConfigError(f"job = {config.job!r}: only readers name a run; workers name their job", setting="job")
    if config.staleness is not None and kind.mode == "sync":
        raise ConfigError("staleness bounds asynchronous workers: use it with dist_async", setting="staleness")
    return Settings(
        mode="" if kind.mode == "any" else kind.mode,
        merge=config.merge if loaded.origin.get("merge", "default") != "default" else "",
        staleness=-1 if config.staleness is None else config.staleness,
        rounds_ahead=given("rounds_ahead", config.rounds_ahead),
        slice_bytes=given("slice_bytes", config.slice_bytes),
        num_workers=config.num_workers,
        num_servers=config.num_servers,
        num_shards=given("num_shards", config.num_shards),
        replicas=given("replicas", config.replicas),
    )


def open_cluster(kind: StoreType, loaded: Loaded, arrival: Arrival) -> Backend:
    """Joins the cluster as a worker, and waits until it is complete.

    Raises:
        ConnectError, RequestTimeout, ConfigError, NotAllowed: see `Engine` and `Joining.wait`.
    """
    deadline = Deadline(loaded.config.join_timeout_s)  # waiting for a key counts
    engine = arrival.start(loaded.config, "worker", cluster_settings(loaded, kind), deadline)
    try:
        rank = Joining(engine, arrival).wait(deadline)
    except BaseException:
        engine.withdraw()
        raise
    facts = _facts(engine, loaded.config, kind, rank)
    if arrival.wait_for_workers:
        warn_of_other_ranks(rank, facts.num_workers)
    return _parts(engine, loaded.config, facts)


def _facts(engine: Engine, config: Config, kind: StoreType, rank: int) -> StoreFacts:
    view = engine.machine.view
    settings, sync = view.settings, view.is_sync
    return StoreFacts(
        type=kind.name,
        rank=rank,
        local_rank=config.local_rank,
        num_workers=settings.num_workers,
        taking_part=engine.machine.ranks_taking_part,
        num_servers=settings.num_servers,
        merge=(settings.merge or "sum") if sync else "",
        restarted=engine.session.predecessor in (MemberState.DEAD, MemberState.LOST),
        distributed=True,
        versioned=sync,
        job=config.job,
        viewed_nbytes=settings.slice_bytes,
        round_timeout_s=config.round_timeout_s,
    )


def _parts(engine: Engine, config: Config, facts: StoreFacts) -> Backend:
    settings = engine.machine.view.settings
    sync = facts.versioned
    steps = program_steps(engine, is_sync=sync)
    unobserved = UnobservedErrors(lambda: steps.place)
    bound = BoundKeys(engine.written)
    budget = MemoryBudget(config.memory_bound_bytes(), config.request_timeout_s)
    arguments = Arguments(engine, bound, budget, unobserved, settings.slice_bytes)
    tables = ClusterTables(engine, arguments)
    absence_counts = sync or settings.staleness >= 0
    assignments = ClusterAssignments(engine, arguments, unobserved, steps, facts.rank, sync, absence_counts, tables)
    restored = RestoredKeys()
    compression = GradientCompression(
        facts.rank, facts.restarted, lambda name: int(engine.submit(requests.ClockOf(name)).result())
    )
    healing = Healing(steps, ClusterStates(engine))
    snapshots = ClusterSnapshots(engine, steps, facts, unobserved, restored, healing)
    values = ClusterValues(
        engine,
        arguments,
        PlainCalls(bound, settings.slice_bytes),
        bound,
        unobserved,
        steps,
        restored,
        facts.rank,
        config.check_bound,
        compression,
        tables,
        engine.small_calls(bound, settings.slice_bytes),
        declares=facts.type in DECLARING_TYPES,
    )
    caches: Sequence[KeyCache] = [arguments, bound, assignments, restored, compression, tables, values]
    return Backend(
        facts=facts,
        values=values,
        tables=tables,
        assignments=assignments,
        deletion=ClusterDeletion(engine, arguments, unobserved, caches),
        binding=ClusterBinding(engine, arguments, bound),
        rounds=ClusterRounds(engine, unobserved, steps),
        steps=steps,
        updates=ClusterUpdates(engine, steps, compression),
        snapshots=snapshots,
        nodes=ClusterNodes(engine),
        closing=ClusterClosing(engine, unobserved, snapshots, steps),
        healing=healing,
    )
