"""Diagnosis of servers that do not answer this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kvd.config import parse_address
from kvd.errors import ConfigError
from kvd.transport.finding import Finding, Outcome
from kvd_cli.copies import Report

_SEEN: Final = {
    Outcome.REFUSED: (
        "nothing listens there ({detail})",
        "Its process has ended, or the address leads elsewhere from this host. Look at its log{there}, and start it "
        "again under the same node id.",
    ),
    Outcome.NO_ANSWER: (
        "{detail}",
        "Its process is stopped, or a firewall drops what this host sends. See the process with ps -o pid,stat,cmd -p "
        "{pid}{there}: if that is T, kill -CONT {pid} lets it continue. Otherwise open the port to this host.",
    ),
    Outcome.SUCCEEDED: (
        "it accepts connections, and answers nothing",
        "Its event loop is busy or hangs. See where with py-spy dump --pid {pid}{there}.",
    ),
    Outcome.NOT_ZMQ: (
        "there is {detail} instead",
        "Another program has the port, or the address leads elsewhere from this host. Start the server again with a "
        "free port (--bind).",
    ),
    Outcome.OTHER_KEY: (
        "the node there has another key than the server",
        "It is of another cluster, or was started again with another key. Look at the process that listens "
        "there{there}, and start the server with a port of its own (--bind).",
    ),
    Outcome.WITH_KEYS: (
        "the node there has keys, and this cluster has none",
        "It is of another cluster: start the server with a port of its own (--bind).",
    ),
    Outcome.WITHOUT_KEYS: (
        "the node there has no keys, and this cluster has",
        "It is of another cluster: start the server with a port of its own (--bind).",
    ),
    Outcome.NOT_ADMITTED: (
        "it does not let the key of this process in",
        "Add the key to the server's list of allowed keys, and send the server SIGHUP.",
    ),
    Outcome.UNKNOWN_NAME: (
        "its host's name is not known here ({detail})",
        "Add the name to the name server, or give the server an address in numbers (--bind).",
    ),
}
"""By what a handshake showed: what is wrong, and what to do."""


def no_answers(report: Report, handshakes: Mapping[int, Finding]) -> list[str]:
    """Describe the servers that did not answer.

    Args:
        report: the status of the cluster.
        handshakes: the results of handshakes with servers from this host, by rank; of others nothing is known.
    """
    servers = {member["rank"]: member for member in report["members"] if member["role"] == "server"}
    silent = [server["rank"] for server in report.get("servers", ()) if "error" in server]
    untried = [f"server {rank}" for rank in silent if rank not in handshakes or rank not in servers]
    lines = [_line(servers[rank], handshakes[rank]) for rank in silent if rank in handshakes and rank in servers]
    if untried:
        lines.append(
            f"no answer: {', '.join(untried)}. Check its log, whether its process hangs or is stopped, and whether "
            "this host can reach its address. kvd doctor tries its address from here."
        )
    return lines


def _line(member: Report, finding: Finding) -> str:
    host = member.get("host_name", "")
    known = {"detail": finding.detail, "pid": member["pid"], "there": f" on host {host}" if host else ""}
    seen, remedy = (text.format(**known) for text in _SEEN[finding.outcome])
    return (
        f"no answer: server {member['rank']} (node {member['node_id']}) at {member['address']}: {seen}. "
        f"{' '.join((remedy, *_doubts(member['address'])))}"
    )


def _doubts(address: str) -> Iterator[str]:
    """Describe the oddities of an address."""
    try:
        where = parse_address(address)
    except ConfigError:
        return
    if where.scheme != "tcp":
        yield "It listens on a Unix socket, which only processes of its own host reach."
    elif where.is_local:
        yield f"It listens on {where.host}, which only processes of its own host reach."
