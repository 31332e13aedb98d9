"""The metrics of daemons: names, units, labels, and how each is read from status reports.

Names are those of Prometheus: base units, ``_total`` for counters. Labels are bounded: roles, states, kinds of messages
and jobs, never a key, a node or an address. The label of a job is ``kvd_job``, because ``job`` is Prometheus's own.
`docs/operations.md` lists them; a test compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

Report: TypeAlias = Mapping[str, Any]
Sample: TypeAlias = tuple[tuple[str, ...], float]

LAG_BUCKETS_S: Final = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
"""Upper bounds of the histogram of loop lag, in seconds."""

_SCHEDULER: Final = ("scheduler",)
_SERVER: Final = ("server",)
_BOTH: Final = ("scheduler", "server")
_GONE: Final = ("dead", "gone", "lost", "left")


class LoopLag(NamedTuple):
    """A histogram of how late an event loop was.

    Attributes:
        counts: looks with a lag of at most each of `LAG_BUCKETS_S`, and of any, cumulative.
        total_s: all lags added up.
    """

    counts: tuple[int, ...]
    total_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The status reports of a daemon at one time.

    Attributes:
        role: of the daemon.
        process: the report that is of no job, with the facts of the process.
        jobs: the reports of the jobs that are under way, by name.
        lag: of its event loop.
    """

    role: str
    process: Report
    jobs: Mapping[str, Report]
    lag: LoopLag

    @property
    def counters(self) -> Report:
        """Totals since the process began."""
        counters: Report = self.process["counters"]
        return counters


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        kind: counter or gauge.
        help: what it counts or measures.
        labels: names of the labels.
        roles: the daemons that have it.
        samples: the values of the labels, and the value, of each series.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...]
    roles: Sequence[str]
    samples: Callable[[Seen], Iterable[Sample]]


def _alone(value: float) -> Iterable[Sample]:
    return [((), value)]


def _fact(name: str) -> Callable[[Seen], Iterable[Sample]]:
    return lambda seen: _alone(seen.process[name])


def _total(name: str) -> Callable[[Seen], Iterable[Sample]]:
    return lambda seen: _alone(seen.counters[name])


def _by_label(name: str) -> Callable[[Seen], Iterable[Sample]]:
    return lambda seen: [((label,), count) for label, count in sorted(seen.counters[name].items())]


def _of_jobs(value: Callable[[Report], float | None]) -> Callable[[Seen], Iterable[Sample]]:
    """One series for each job for which there is a value."""
    return lambda seen: [
        ((job,), found) for job, report in sorted(seen.jobs.items()) if (found := value(report)) is not None
    ]


def _counted(labels_of: Callable[[str, Report], Iterable[tuple[str, ...]]]) -> Callable[[Seen], Iterable[Sample]]:
    """How often each tuple of labels occurs in the reports of the jobs."""

    def samples(seen: Seen) -> Iterable[Sample]:
        found = Counter(labels for job, report in seen.jobs.items() for labels in labels_of(job, report))
        return sorted(found.items())

    return samples


def _members(job: str, report: Report) -> Iterable[tuple[str, ...]]:
    return [(job, member["role"], _state(member)) for member in report["members"]]


def _state(member: Report) -> str:
    return "ended" if member["process_ended"] else "silent" if member["is_silent"] else str(member["state"])


def _copies(job: str, report: Report) -> Iterable[tuple[str, ...]]:
    gone = {f"{member['role']} {member['rank']}" for member in report["members"] if member["state"] in _GONE}
    for partition in report.get("partitions", ()):
        copies = [name for name in (partition["leader"], partition["backup"]) if name is not None and name not in gone]
        yield (job, str(len(copies)))


def _phases(seen: Seen) -> Iterable[Sample]:
    return sorted(((phase,), count) for phase, count in Counter(run["phase"] for run in seen.process["jobs"]).items())


def _deaths(seen: Seen) -> Iterable[Sample]:
    return [
        ((job, role), count)
        for job, report in sorted(seen.jobs.items())
        for role, count in sorted(report.get("deaths", {}).items())
    ]


def _oldest_barrier(report: Report) -> float:
    return max((float(wait["age_s"]) for wait in report["barrier_waits"]), default=0.0)


def _snapshot(name: str) -> Callable[[Seen], Iterable[Sample]]:
    return _of_jobs(lambda report: None if report["last_snapshot"] is None else report["last_snapshot"][name])


def _snapshot_interval(seen: Seen) -> Iterable[Sample]:
    """In asynchronous jobs, `kvd_step` counts updates, which are no steps of the program."""
    return [
        ((job,), 0.0 if report["settings"]["mode"] == "async" else report["last_snapshot"]["every"])
        for job, report in sorted(seen.jobs.items())
        if report["last_snapshot"] is not None
    ]


def _oldest_round(report: Report) -> float:
    return max((float(entry["age_s"]) for entry in report["open_rounds"]), default=0.0)


def _stalled_rounds(report: Report) -> float:
    return sum(bool(entry["age_s"] >= entry["standstill_s"]) for entry in report["open_rounds"])


def _paths(job: str, report: Report) -> Iterable[tuple[str, ...]]:
    return [(job, path.partition(": ")[0] or "unknown") for path in report["paths"].values()]


_MEMORY: Final = {
    "led": "bytes_led",
    "staged": "bytes_staged",
    "readers": "bytes_held_by_readers",
    "captured": "bytes_captured",
    "backed up": "bytes_held",
}


def _memory(seen: Seen) -> Iterable[Sample]:
    return [
        ((job, what), report[name])
        for job, report in sorted(seen.jobs.items())
        for what, name in _MEMORY.items()
        if name in report
    ]


def _traffic(seen: Seen) -> Iterable[Sample]:
    return [(("received",), seen.counters["received_bytes"]), (("sent",), seen.counters["sent_bytes"])]


FAMILIES: Final = (
    Family(
        "kvd_build_info",
        "gauge",
        "1, with the version of kvd and the role of the daemon.",
        ("version", "role"),
        _BOTH,
        lambda seen: [((seen.process["version"], seen.role), 1.0)],
    ),
    Family("kvd_uptime_seconds", "gauge", "Time since the daemon began.", (), _BOTH, _fact("uptime_s")),
    Family("kvd_open_files", "gauge", "Descriptors that the daemon has open.", (), _BOTH, _fact("files_open")),
    Family("kvd_open_files_limit", "gauge", "Descriptors it may have; 0: no limit.", (), _BOTH, _fact("files_limit")),
    Family(
        "kvd_resident_memory_bytes", "gauge", "Memory of the process.", (), _BOTH, _fact("memory_resident_bytes")
    ),
    Family(
        "kvd_messages_received_total", "counter", "Messages by kind.", ("kind",), _BOTH, _by_label("received")
    ),
    Family("kvd_messages_sent_total", "counter", "Messages by kind.", ("kind",), _BOTH, _by_label("sent")),
    Family("kvd_bytes_total", "counter", "Payloads, shared memory included.", ("direction",), _BOTH, _traffic),
    Family("kvd_refused_total", "counter", "Refusals sent, by error.", ("reason",), _BOTH, _by_label("refused")),
    Family(
        "kvd_postponed_total", "counter", 'Answers "not yet", by reason.', ("reason",), _BOTH, _by_label("postponed")
    ),
    Family(
        "kvd_invalid_frames_total", "counter", "Frames that were no messages.", (), _BOTH, _total("invalid_frames")
    ),
    Family(
        "kvd_members", "gauge", "Nodes of a job by role and state.", ("kvd_job", "role", "state"), _SCHEDULER,
        _counted(_members),
    ),
    Family(
        "kvd_missing_members", "gauge", "Nodes that have never joined.", ("kvd_job",), _SCHEDULER,
        _of_jobs(lambda report: len(report["missing"])),
    ),
    Family("kvd_deaths_total", "counter", "Nodes declared dead.", ("kvd_job", "role"), _SCHEDULER, _deaths),
    Family(
        "kvd_partitions", "gauge", "Partitions by the number of living copies; only with replicas = 2.",
        ("kvd_job", "copies"), _SCHEDULER, _counted(_copies),
    ),
    Family("kvd_runs", "gauge", "Runs by phase, those that are over included.", ("phase",), _SCHEDULER, _phases),
    Family(
        "kvd_oldest_barrier_wait_seconds", "gauge", "Age of the oldest wait at a barrier; 0: nobody waits.",
        ("kvd_job",), _SCHEDULER, _of_jobs(_oldest_barrier),
    ),
    Family(
        "kvd_snapshot_last_success_timestamp_seconds", "gauge", "Time of the last snapshot by the program.",
        ("kvd_job",), _SCHEDULER, _snapshot("at"),
    ),
    Family("kvd_snapshot_step", "gauge", "Step of that snapshot.", ("kvd_job",), _SCHEDULER, _snapshot("step")),
    Family(
        "kvd_snapshot_interval_steps", "gauge", "Steps from one to the next; 0: no schedule, or asynchronous.",
        ("kvd_job",), _SCHEDULER,
        _snapshot_interval,
    ),
    Family(
        "kvd_state_unsaved", "gauge", "1 while the scheduler cannot save its state.", (), _SCHEDULER,
        lambda seen: _alone(float(bool(seen.process["cannot_save"]))),
    ),
    Family("kvd_keys", "gauge", "Keys of which the server leads a part.", ("kvd_job",), _SERVER,
           _of_jobs(lambda report: report["keys"])),
    Family("kvd_slices", "gauge", "Slices that the server leads.", ("kvd_job",), _SERVER,
           _of_jobs(lambda report: report["slices"])),
    Family("kvd_memory_bytes", "gauge", "Bytes by use.", ("kvd_job", "what"), _SERVER, _memory),
    Family(
        "kvd_memory_needed_bytes", "gauge", "What live jobs need, as counted against the limit.", (), _SERVER,
        _fact("memory_of_live_runs_bytes"),
    ),
    Family("kvd_memory_limit_bytes", "gauge", "The setting memory_limit_bytes.", (), _SERVER,
           _fact("memory_limit_bytes")),
    Family("kvd_requests_waiting", "gauge", "Requests that wait for others.", ("kvd_job",), _SERVER,
           _of_jobs(lambda report: report["requests_waiting"])),
    Family("kvd_rounds_total", "counter", "Rounds closed, of all slices.", ("kvd_job",), _SERVER,
           _of_jobs(lambda report: report["rounds"])),
    Family("kvd_step", "gauge", "Newest step of the server's keys.", ("kvd_job",), _SERVER,
           _of_jobs(lambda report: report["step"])),
    Family("kvd_usual_step_seconds", "gauge", "Time that a step usually takes.", ("kvd_job",), _SERVER,
           _of_jobs(lambda report: report["usual_step_s"])),
    Family("kvd_open_round_age_seconds", "gauge", "Age of the oldest open round; 0: none is.", ("kvd_job",), _SERVER,
           _of_jobs(_oldest_round)),
    Family("kvd_stalled_rounds", "gauge", "Rounds that stand still, as kvd doctor counts them (at most 4).",
           ("kvd_job",), _SERVER, _of_jobs(_stalled_rounds)),
    Family("kvd_updates_total", "counter", "Updates of values.", (), _SERVER, _total("updates")),
    Family("kvd_update_seconds_total", "counter", "Time spent in updates, from one in 16.", (), _SERVER,
           _total("update_s")),
    Family("kvd_attached_workers", "gauge", "Workers by the path of their messages.", ("kvd_job", "path"), _SERVER,
           _counted(_paths)),
    Family("kvd_slices_compared_total", "counter", "Slices compared with their copies.", ("kvd_job",), _SERVER,
           _of_jobs(lambda report: report.get("slices_compared"))),
    Family("kvd_slices_differed_total", "counter", "Those that were not the same.", ("kvd_job",), _SERVER,
           _of_jobs(lambda report: report.get("slices_that_differed"))),
)  # fmt: skip
"""All metrics but the histogram `kvd_loop_lag_seconds`, which both daemons have."""

LAG: Final = "kvd_loop_lag_seconds"


def page_of(seen: Seen) -> bytes:
    """Render the metrics in Prometheus's text format. Takes some milliseconds: call it in a thread.

    Raises:
        ImportError: the extra `metrics` (prometheus-client) is not installed.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector

    class Daemon(Collector):
        def collect(self) -> Iterable[Any]:
            for family in FAMILIES:
                if seen.role in family.roles:
                    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                    metric = kind(family.name, family.help, labels=family.labels)
                    for labels, value in family.samples(seen):
                        metric.add_metric(labels, value)
                    yield metric
            bounds = [*map(str, LAG_BUCKETS_S), "+Inf"]
            buckets = list(zip(bounds, seen.lag.counts, strict=True))
            lag = HistogramMetricFamily(LAG, "Lateness of the daemon's event loop.")
            lag.add_metric((), buckets, seen.lag.total_s)
            yield lag

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Daemon())
    return generate_latest(registry)
