"""``kvd doctor``: faults of a cluster as seen from this host, and their remedies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import click

from kvd.config import named_setting
from kvd.errors import JobEnded, NotAllowed
from kvd.transport.finding import Finding
from kvd_cli.connect import observer
from kvd_cli.copies import Report
from kvd_cli.flags import common_options
from kvd_cli.health import health_of
from kvd_cli.here import advice_for_this_host
from kvd_cli.options import current
from kvd_cli.output import print_advice, print_json

DEFAULT_JOB: Final = named_setting("job").default
UNDER_WAY: Final = ("forming", "running", "failing", "closing")
"""Phases of runs that are examined."""

SCHEDULER_WITHIN_S: Final = 8.0
SERVERS_WITHIN_S: Final = 4.0
"""How long nodes have to answer unless ``--timeout`` says. Handshakes with silent servers take up to 4 s more."""


@click.command()
@common_options()
def doctor() -> None:
    """Find faults of the cluster, and name their remedies.

    Exits with 1 if there is a fault: one for which status exits with 1, or training that stands still. A round or
    barrier stands still when it has waited for 10 times as long as a step usually takes, and for 10 s. With -o json,
    the document is that of status.

    Servers that do not answer within 4 s (--timeout) are probed from this host by a handshake, which finds the cause.

    Without --job (KVD_JOB), all jobs that are under way are examined, as far as the key allows; with -o json, those
    besides the default job are under other_jobs.
    """
    report, handshakes = _ask()
    health, here = health_of(report, handshakes), advice_for_this_host(report)
    others = [] if _names_a_job() else list(_other_jobs(report, handshakes))
    advice = [*health.advice, *here]
    for other in others:
        advice += [f"job {other['job']!r}: {line}" for line in other["advice"] if line not in health.advice]
    is_healthy = health.is_healthy and not here and all(other["healthy"] for other in others)
    if current().output == "json":
        seen = {f"server {rank}": finding.outcome.value for rank, finding in handshakes.items()}
        print_json({"healthy": is_healthy, "advice": advice, **report, "handshakes": seen, "other_jobs": others})
    else:
        print_advice(advice or ["all is well"])
    click.get_current_context().exit(0 if is_healthy else 1)


def _ask(job: str = "") -> tuple[Report, dict[int, Finding]]:
    """Return the status, and the results of handshakes with the servers that did not answer."""
    with observer("asking the nodes how they are", job, within_s=SCHEDULER_WITHIN_S) as cluster:
        report: Report = cluster.status(SERVERS_WITHIN_S if current().timeout_s is None else None)
        silent = [server["rank"] for server in report.get("servers", ()) if "error" in server]
        return report, cluster.handshakes_with(silent) if silent else {}


def _names_a_job() -> bool:
    """Return whether a flag, a variable or a file names the job."""
    loaded = current().loaded
    return loaded is None or loaded.origin["job"] != "default"


def _other_jobs(report: Report, handshakes: dict[int, Finding]) -> Iterator[dict[str, Any]]:
    """Return the reports of all running jobs but the default one, each with its verdict."""
    for run in report["jobs"]:
        if run["job"] == DEFAULT_JOB or run["phase"] not in UNDER_WAY:
            continue
        try:
            other, _ = _ask(f"{run['job']}@{run['run']}")
        except (NotAllowed, JobEnded):
            continue  # the key is of other jobs, or the run has just been given up
        health = health_of(other, handshakes)
        yield {"healthy": health.is_healthy, "advice": health.advice, "job": run["job"], "run": run["run"], **other}
