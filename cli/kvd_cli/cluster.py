"""Commands on a whole cluster: ``status``, ``keys``, ``dead-nodes``, ``command`` …"""

from __future__ import annotations

import sys

import click

from kvd.client.calls.staleness import put_together
from kvd.node.daemon.facts import wall_clock_s
from kvd_cli.connect import as_worker, observer
from kvd_cli.copies import Report, columns_of, notes_of, partitions_of
from kvd_cli.flags import common_options
from kvd_cli.health import health_of
from kvd_cli.jobs import print_runs
from kvd_cli.optimizers import optimizer_rows
from kvd_cli.options import current
from kvd_cli.output import ago, lasting, print_advice, print_json, print_table, size

SHARED_MEMORY = "shared memory"  # the usual path, which needs no note


@click.command()
@common_options()
def status() -> None:
    """Show the nodes of the cluster and the state of its servers.

    Exits with 1 if a node is dead, missing or silent, if a worker's process has ended, if a server has left while
    workers are active, if a server does not answer, if training stands still, or if there are fewer copies of the
    values than there should be.
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
            click.echo()
            print_table(_PROGRESS, _progress_rows(report))
        optimizers = optimizer_rows(report.get("servers", ()))
        if optimizers:
            click.echo()
            print_table(["OPTIMIZER", "SERVER"], optimizers)
        if report["jobs"]:
            click.echo()
            print_runs(report["jobs"])
        snapshot = report.get("last_snapshot")
        if snapshot is not None:
            click.echo()
            click.echo(f"last snapshot: step {snapshot['step']}, {ago(wall_clock_s() - snapshot['at'])}")
        paths = _path_rows(report)
        if paths:
            click.echo()
            print_table(["WORKER", "SERVER", "PATH"], paths)
        staleness = _staleness_rows(report)
        if staleness:
            click.echo()
            print_table(["WORKER", "PUSHES", "STALENESS", "MAX"], staleness)
        sys.stdout.flush()
        print_advice(health.advice, err=True)
    click.get_current_context().exit(0 if health.is_healthy else 1)


def _ask() -> Report:
    with observer("asking the nodes how they are") as cluster:
        report: Report = cluster.status()
    return report


def _member_rows(report: Report) -> list[list[object]]:
    generation, epoch = report["view"]
    loaded = current().loaded
    address = loaded.config.scheduler if loaded is not None else "-"
    version = report.get("version", "")
    own = f"view {generation}.{epoch}" + (f", kvd {version}, {_uptime(report)}" if version else "")
    rows: list[list[object]] = [["scheduler", "active", address, "now", own]]
    servers = {server["rank"]: server for server in report.get("servers", ()) if "version" in server}
    for member in report["members"]:
        notes = [f"{member['node_id']}, process {member['pid']}"]
        server = servers.get(member["rank"]) if member["role"] == "server" else None
        if server is not None:
            other = f", kvd {server['version']}" if server["version"] != version else ""
            notes[0] += f"{other}, {_uptime(server)}"
        if member["reason"]:
            notes.append(member["reason"])
        rows.append(
            [
                f"{member['role']} {member['rank']}",
                "ended" if member["process_ended"] else "silent" if member.get("is_silent") else member["state"],
                member["address"] or "-",
                "-" if member["state"] == "left" else ago(member["last_heard_s"]),
                ": ".join(notes),
            ]
        )
    rows.extend([name, "missing", "-", "-", "never joined"] for name in report["missing"])
    return rows


def _uptime(report: Report) -> str:
    return f"up {lasting(report['uptime_s'])}"


def _server_table(report: Report) -> tuple[list[str], list[list[object]]]:
    """Return the headings and rows of the servers, with their partitions if there are two replicas."""
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


_PROGRESS = ["SERVER", "STEP", "PER SECOND", "USUAL", "OPEN FOR", "WAITS FOR", "MEMORY"]


def _progress_rows(report: Report) -> list[list[object]]:
    """How far training has come by each server, which of its rounds is open the longest, and the memory that it uses of
    its limit."""
    rows: list[list[object]] = []
    for server in report["servers"]:
        if "error" in server or "step" not in server:
            continue
        usual_s, open_rounds = server["usual_step_s"], server["open_rounds"]
        oldest = open_rounds[0] if open_rounds else None
        used = server["memory_used_bytes"] + server["memory_of_other_runs_bytes"]
        rows.append(
            [
                f"server {server['rank']}",
                server["step"],
                f"{server['steps_per_s']:.2f}",
                "-" if usual_s is None else lasting(usual_s),
                "-" if oldest is None else lasting(oldest["age_s"]),
                "-" if oldest is None else ", ".join(oldest["waits_for"]),
                f"{size(used)} of {size(server['memory_limit_bytes'])}",
            ]
        )
    return rows


def _notes_of(server: Report) -> list[str]:
    """Describe the waiting requests of a server, and how it answers."""
    notes = [f"waits for {', '.join(server['waiting_for'])}"] if server["waiting_for"] else []
    if server.get("links", SHARED_MEMORY) != SHARED_MEMORY:
        notes.append(f"answers by {server['links']}")
    return notes


def _path_rows(report: Report) -> list[list[object]]:
    """Return the paths between servers and workers that have not left. Servers with the same path share a row."""
    gone = {f"{member['role']} {member['rank']}" for member in report["members"] if member["state"] == "left"}
    servers: dict[tuple[str, str], list[str]] = {}
    for server in report.get("servers", ()):
        for worker, path in server.get("paths", {}).items():
            if worker not in gone:
                servers.setdefault((worker, path), []).append(str(server["rank"]))
    return [[worker, ", ".join(ranks), path or "-"] for (worker, path), ranks in sorted(servers.items(), key=_by_rank)]


def _staleness_rows(report: Report) -> list[list[object]]:
    """Return the staleness of asynchronous workers' pushes: number, mean and maximum."""
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
    """Return the shape of a table, with the rows that take memory."""
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
