"""Commands that ask or tell a whole cluster: ``status``, ``doctor``, ``keys``, ``dead-nodes``, ``command`` …"""

from __future__ import annotations

import sys

import click

from kvd.client.calls.staleness import put_together
from kvd_cli.connect import as_worker, observer
from kvd_cli.copies import Report, columns_of, notes_of, partitions_of
from kvd_cli.flags import common_options
from kvd_cli.health import health_of
from kvd_cli.jobs import print_runs
from kvd_cli.optimizers import optimizer_rows
from kvd_cli.options import current
from kvd_cli.output import ago, print_json, print_table, size

SHARED_MEMORY = "shared memory"  # the usual path, which needs no note


@click.command()
@common_options()
def status() -> None:
    """Show the nodes of the cluster and the state of its servers.

    Exits with 1 if a node is dead or missing, if a worker's process has ended, if a server has left while workers are
    active, if a server does not answer, or if there are fewer copies of the values than there should be.
    """
    report = _ask()
    health = health_of(report)
    if current().output == "json":
        print_json({"healthy": health.is_healthy, "advice": health.advice, **report})
    else:
        print_table(["NODE", "STATE", "ADDRESS", "HEARD", "NOTES"], _member_rows(report))
        if report.get("servers"):
            click.echo()
            print_table(*_server_table(report))
        optimizers = optimizer_rows(report.get("servers", ()))
        if optimizers:
            click.echo()
            print_table(["OPTIMIZER", "SERVER"], optimizers)
        if report["jobs"]:
            click.echo()
            print_runs(report["jobs"])
        paths = _path_rows(report)
        if paths:
            click.echo()
            print_table(["WORKER", "SERVER", "PATH"], paths)
        staleness = _staleness_rows(report)
        if staleness:
            click.echo()
            print_table(["WORKER", "PUSHES", "STALENESS", "MAX"], staleness)
        sys.stdout.flush()
        for line in health.advice:
            click.echo(line, err=True)
    click.get_current_context().exit(0 if health.is_healthy else 1)


@click.command()
@common_options()
def doctor() -> None:
    """Say what is wrong with the cluster, and what to do about it.

    Exits with 1 if something is.
    """
    report = _ask()
    health = health_of(report)
    if current().output == "json":
        print_json({"healthy": health.is_healthy, "advice": health.advice})
    else:
        for line in health.advice or ("all is well",):
            click.echo(line)
    click.get_current_context().exit(0 if health.is_healthy else 1)


def _ask() -> Report:
    with observer("asking the nodes how they are") as cluster:
        report: Report = cluster.status()
    return report


def _member_rows(report: Report) -> list[list[object]]:
    generation, epoch = report["view"]
    loaded = current().loaded
    address = loaded.config.scheduler if loaded is not None else "-"
    rows: list[list[object]] = [["scheduler", "active", address, "now", f"view {generation}.{epoch}"]]
    for member in report["members"]:
        notes = [f"{member['node_id']}, process {member['pid']}"]
        if member["reason"]:
            notes.append(member["reason"])
        rows.append(
            [
                f"{member['role']} {member['rank']}",
                "ended" if member["process_ended"] else member["state"],
                member["address"] or "-",
                "-" if member["state"] == "left" else ago(member["last_heard_s"]),
                ": ".join(notes),
            ]
        )
    rows.extend([name, "missing", "-", "-", "never joined"] for name in report["missing"])
    return rows


def _server_table(report: Report) -> tuple[list[str], list[list[object]]]:
    """The headings and rows of the servers. With two replicas, they say which partitions a server has."""
    partitions = partitions_of(report)
    rows: list[list[object]] = []
    for server in report["servers"]:
        copies = columns_of(server, partitions) if partitions else []
        figures: list[object] = ["-"] * 5
        notes = server.get("error")
        if notes is None:
            held, staged = size(server["bytes_led"]), size(server["bytes_staged"])
            figures = [server["keys"], server["slices"], held, staged, server["requests_waiting"]]
            notes = "; ".join([*_notes_of(server), *notes_of(server, partitions)])
        rows.append([f"server {server['rank']}", *copies, *figures, notes])
    places = ["LEADS", "BACKS UP"] if partitions else []
    return ["SERVER", *places, "KEYS", "SLICES", "HOLDS", "STAGED", "WAITING", "NOTES"], rows


def _notes_of(server: Report) -> list[str]:
    """What the requests of a server wait for, and how it answers."""
    notes = [f"waits for {', '.join(server['waiting_for'])}"] if server["waiting_for"] else []
    if server.get("links", SHARED_MEMORY) != SHARED_MEMORY:
        notes.append(f"answers by {server['links']}")
    return notes


def _path_rows(report: Report) -> list[list[object]]:
    """How messages travel between servers and each worker that has not left. Servers with the same path share a row."""
    gone = {f"{member['role']} {member['rank']}" for member in report["members"] if member["state"] == "left"}
    servers: dict[tuple[str, str], list[str]] = {}
    for server in report.get("servers", ()):
        for worker, path in server.get("paths", {}).items():
            if worker not in gone:
                servers.setdefault((worker, path), []).append(str(server["rank"]))
    return [[worker, ", ".join(ranks), path or "-"] for (worker, path), ranks in sorted(servers.items(), key=_by_rank)]


def _staleness_rows(report: Report) -> list[list[object]]:
    """How stale the pushes of asynchronous workers were: their number, mean and maximum."""
    found = put_together(report.get("servers", ()))
    return [[worker, seen.pushes, f"{seen.mean:.2f}", seen.max] for worker, seen in found.items()]


def _by_rank(entry: tuple[tuple[str, str], list[str]]) -> tuple[int, list[str]]:
    (worker, _), ranks = entry
    return int(worker.rpartition(" ")[2]), ranks


@click.command()
@common_options()
def keys() -> None:
    """List the keys with their shape, dtype, merge, version and location."""
    with observer("listing the keys of all servers") as cluster:
        found = cluster.keys()
    if current().output == "json":
        print_json(found)
        return
    columns = ["KEY", "SHAPE", "DTYPE", "MERGE", "VERSION", "SHARD", "SERVER", "SLICES", "BYTES"]
    rows = [
        [
            key["key"],
            _shape(key),
            key["dtype"],
            key["merge"] or "-",
            key["version"],
            key["shard"],
            ", ".join(map(str, key["servers"])),
            key["slices"],
            size(key["bytes"]),
        ]
        for key in found
    ]
    print_table(columns, rows)


def _shape(key: Report) -> str:
    """Of a table, with the rows that take memory."""
    text = "×".join("∞" if size is None else str(size) for size in key["shape"]) or "scalar"
    return text if key["updated_rows"] is None else f"{text} ({key['updated_rows']} rows updated)"


@click.command("dead-nodes")
@common_options()
def dead_nodes() -> None:
    """List the nodes that were declared dead, and why."""
    with observer("asking the scheduler for the dead") as cluster:
        nodes = cluster.dead_nodes()
    if current().output == "json":
        names = ("role", "rank", "node_id", "reason", "last_seen_s")
        print_json([{name: getattr(node, name) for name in names} for node in nodes])
        return
    rows = [[f"{n.role} {n.rank}", n.node_id, f"{n.last_seen_s:.1f} s", n.reason] for n in nodes]
    print_table(["NODE", "NODE ID", "SILENT FOR", "REASON"], rows)


@click.command()
@click.argument("head")
@click.argument("body", default="")
@common_options()
def command(head: str, body: str) -> None:
    """Run a registered controller on every server.

    HEAD is the name of the controller, BODY is its argument.
    """
    with observer(f"running {head!r} on all servers") as cluster:
        answers = cluster.command(head, body.encode())
    texts = [answer.decode("utf-8", "backslashreplace") for answer in answers]
    if current().output == "json":
        print_json([{"server": rank, "answer": text} for rank, text in enumerate(texts)])
    else:
        print_table(["SERVER", "ANSWER"], list(enumerate(texts)))


@click.command()
@click.argument("name", default="")
@common_options(output_flags=())
def barrier(name: str) -> None:
    """Wait at a barrier until all workers have reached it.

    This joins the cluster as a worker.
    """
    with as_worker(f"waiting at barrier {name!r} for all other workers") as store:
        store.barrier(name)
