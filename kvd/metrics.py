"""Metrics of a worker for the program's own Prometheus registry.

Schedulers and servers have pages of their own (the setting `metrics_bind`). A worker opens no port: its program
registers a collector, and offers its registry as it likes::

    from prometheus_client import REGISTRY, start_http_server
    import kvd
    import kvd.metrics

    with kvd.create("dist_sync") as kv:
        REGISTRY.register(kvd.metrics.collector(kv))
        start_http_server(8000)

It takes the extra `metrics` (prometheus-client). Nothing is counted in calls: the collector reads at a scrape what the
store knows anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvd.client.cluster.nodes import ClusterNodes
from kvd.client.facades.blocking import KVStore, backend_of
from kvd.core.machine import ServerPeer
from kvd.errors import NotAllowed

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

__all__ = ["collector"]


def collector(store: KVStore) -> Collector:
    """Return a collector of a worker's metrics, for ``CollectorRegistry.register``.

    All are gauges with the label ``kvd_job``:

    - ``kvd_worker_info`` (``rank``, ``type``): 1
    - ``kvd_worker_step``: the newest step in which this worker has pushed
    - ``kvd_worker_open_calls``: calls that have not ended
    - ``kvd_worker_scheduler_silence_seconds``: time since the scheduler was heard
    - ``kvd_worker_servers`` (``path``): servers by the path of messages to them
    - ``kvd_worker_members`` (``role``, ``state``): nodes as this worker sees them

    Args:
        store: of a cluster. After its end there are no series.

    Raises:
        NotAllowed: the store has no cluster.
        ImportError: prometheus-client is not installed.
    """
    nodes = backend_of(store, may_block=False).nodes
    if not isinstance(nodes, ClusterNodes):
        raise NotAllowed(f"a store of type {store.type!r} has no cluster, and no metrics: create a dist_* store")
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

    engine, job, kind = nodes.engine, store.job, store.type

    def gauge(name: str, help_text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        family = GaugeMetricFamily(f"kvd_worker_{name}", help_text, labels=("kvd_job", *labels))
        for more, value in sorted(values.items()):
            family.add_metric((job, *more), value)
        return family

    class WorkerCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            if not engine.is_well:
                return
            machine, session = engine.machine, engine.session
            paths = [path for peer, path in engine.transport.paths().items() if isinstance(peer, ServerPeer)]
            members = machine.view.members.values()
            yield gauge("info", "1.", {(str(session.rank), kind): 1.0}, "rank", "type")
            yield gauge("step", "Newest step in which this worker has pushed.", {(): machine.newest_step})
            yield gauge("open_calls", "Calls that have not ended.", {(): machine.open_calls})
            silence = {(): engine.scheduler_silence_s()}
            yield gauge("scheduler_silence_seconds", "Time since the scheduler was heard.", silence)
            by_path = Counter((str(path.kind),) for path in paths)
            yield gauge("servers", "Servers by the path of messages to them.", by_path, "path")
            by_state = Counter((member.role, str(member.state)) for member in members)
            yield gauge("members", "Nodes as this worker sees them.", by_state, "role", "state")

    return WorkerCollector()
