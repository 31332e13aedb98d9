"""How ``kvd status`` and ``kvd doctor`` show a cluster with two copies of every value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from kvd_cli.health import health_of
from tests.cli.reports import copy_of, member, partition, report, server

WHOLE = [partition(0, 0, 1), partition(1, 1, 0)]
BOTH = (copy_of(0, [0], [1]), copy_of(1, [1], [0]))
SERVER_1_DIED = [member("server", 0), member("server", 1, "dead"), member("worker", 0)]
SERVER_1_LEFT = [member("server", 0), member("server", 1, "left"), member("worker", 0)]
ALONE = [partition(0, 0), partition(1, 0)]
LOSABLE = "of the keys have one copy, on server 0; if that server dies, they are lost."


def rows_of(result: Result) -> list[list[str]]:
    """The table of the servers: the first three columns."""
    lines = result.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("SERVER "))
    assert lines[start].split()[:5] == ["SERVER", "LEADS", "BACKS", "UP", "KEYS"]
    edges = [lines[start].index(title) for title in ("SERVER", "LEADS", "BACKS UP", "KEYS")]
    table = [line for line in lines[start + 1 :] if line.startswith("server ")]
    return [[line[edges[n] : edges[n + 1]].strip() for n in range(3)] for line in table]


def test_each_server_leads_some_partitions_and_backs_up_others(status: Callable[..., Result]) -> None:
    given = report(*BOTH, partitions=WHOLE)
    result = status(given)
    assert (result.exit_code, result.stderr) == (0, "")
    assert rows_of(result) == [["server 0", "0", "1"], ["server 1", "1", "0"]]
    assert json.loads(status(given, "-o", "json").stdout)["partitions"] == WHOLE
    healthy = status(given, command="doctor")
    assert (healthy.exit_code, healthy.stdout) == (0, "all is well\n")


def test_one_server_that_is_left_runs_on_degraded(status: Callable[..., Result]) -> None:
    given = report(copy_of(0, [0, 1], []), members=SERVER_1_DIED, partitions=ALONE)
    lines = [
        "dead: server 1. Nothing is lost: other servers lead what it led. Start it again under the same node id.",
        f"degraded: partitions 0, 1 {LOSABLE} Start server 1 again: it is sent a copy while the job continues.",
    ]
    result = status(given)
    assert (result.exit_code, result.stderr.splitlines()) == (1, lines)
    assert rows_of(result) == [["server 0", "0, 1", "-"]]
    doctor = status(given, command="doctor")
    assert (doctor.exit_code, doctor.stdout.splitlines()) == (1, lines)
    as_json = json.loads(status(given, "-o", "json", command="doctor").stdout)
    assert (as_json["healthy"], as_json["advice"]) == (False, lines)


def test_a_server_that_came_back_is_sent_a_copy(status: Callable[..., Result]) -> None:
    partitions = [partition(0, 0, syncing=1), partition(1, 0, 1)]
    result = status(report(copy_of(0, [0, 1], [], waiting=3), copy_of(1, [], [0, 1]), partitions=partitions))
    assert result.exit_code == 1
    assert result.stderr == (
        "degraded: partition 0 of the keys has one copy, on server 0; if that server dies, it is lost. A copy "
        "is being sent to server 1; the job continues meanwhile.\n"
    )
    assert rows_of(result) == [["server 0", "0, 1", "-"], ["server 1", "-", "0 (copying), 1"]]
    assert "3 records on the way to the backup" in result.stdout


def test_a_server_that_cannot_hold_a_copy_is_named_with_the_reason(status: Callable[..., Result]) -> None:
    why = "server 1 has no memory to hold key 'w': raise memory_limit_bytes"
    failure = {"partition": 0, "server": "server 1", "why": why, "again_s": 12.5}
    partitions = [partition(0, 0, syncing=1), partition(1, 1, 0)]
    result = status(report(BOTH[0] | {"not_backed_up": [failure]}, BOTH[1], partitions=partitions), command="doctor")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == (
        f"no copy: server 1 cannot back up partition 0, which server 0 leads: {why}. It is tried again in 12.5 s."
    )


def test_a_copy_that_was_none_makes_the_cluster_unhealthy(status: Callable[..., Result]) -> None:
    text = "its copy of slice 3 of key 'w' has other bytes than the leader's at version 7"
    found = {"slices_that_differed": 1, "last_difference": {"partition": 1, "backup": "server 0", "text": text}}
    result = status(report(BOTH[0], BOTH[1] | found, partitions=WHOLE), command="doctor")
    assert result.exit_code == 1
    assert result.stdout.startswith(
        "not the same: 1 slice led by server 1 had other bytes at the backup, last on server 0"
    )
    assert text in result.stdout
    clean = {"slices_compared": 100, "slices_that_differed": 0}
    assert health_of(report(BOTH[0] | clean, BOTH[1] | clean, partitions=WHOLE)).is_healthy


def test_a_partition_that_is_handed_over_is_shown(status: Callable[..., Result]) -> None:
    rows = [partition(0, 1, 0) | {"successor": "server 0"}, partition(1, 1, 0)]
    result = status(report(copy_of(0, [], [0, 1]), copy_of(1, [0, 1], []), partitions=rows))
    assert rows_of(result) == [["server 0", "-", "0 (about to lead), 1"], ["server 1", "0, 1", "-"]]


def test_a_server_that_leads_nothing_yet_has_lost_nothing() -> None:
    servers = (copy_of(0, [0, 1], [], keys=100), copy_of(1, [], [0, 1]))
    assert health_of(report(*servers, partitions=[partition(0, 0, 1), partition(1, 0, 1)])).advice == ()


def test_a_server_that_left_when_others_had_its_keys_is_missed_by_nobody() -> None:
    members = [*SERVER_1_LEFT, member("server", 2)]
    partitions = [partition(0, 0, 2), partition(1, 2, 0), partition(2, 2, 0)]
    assert health_of(report(copy_of(0, [0], [1, 2]), members=members, partitions=partitions)).is_healthy


def test_a_server_that_left_leaves_one_copy() -> None:
    health = health_of(report(copy_of(0, [0, 1], []), members=SERVER_1_LEFT, partitions=ALONE))
    assert not health.is_healthy
    assert health.advice == (
        f"degraded: partitions 0, 1 {LOSABLE} Start server 1 again: it is sent a copy while the job continues.",
    )


@pytest.mark.parametrize(
    ("members", "says"),
    [(SERVER_1_DIED, "dead: server 1. "), (SERVER_1_LEFT, "left: server 1, while workers are active. ")],
)
def test_the_last_copy_is_gone(members: list[dict[str, Any]], says: str) -> None:
    health = health_of(report(copy_of(0, [0], []), members=members, partitions=[partition(0, 0), partition(1, 1)]))
    assert not health.is_healthy
    assert health.advice == (
        f"{says}No other server has partition 1 of the keys. If it was only stopped or cut off, let it continue, and "
        "nothing is lost. Otherwise start the job again from a checkpoint.",
        "degraded: partition 0 of the keys has one copy, on server 0; if that server dies, it is lost. Start server 1 "
        "again: it is sent a copy while the job continues.",
    )


def test_a_server_that_has_not_heard_who_leads_now_is_noted(status: Callable[..., Result]) -> None:
    partitions = [partition(0, 0, syncing=1), partition(1, 0, syncing=1)]
    result = status(report(copy_of(0, [0, 1], []), copy_of(1, [1], []), partitions=partitions))
    assert "says that it leads 1" in result.stdout
    assert "says that it leads 0" not in result.stdout


def test_with_one_replica_nothing_is_said_of_partitions(status: Callable[..., Result]) -> None:
    result = status(report(server(0), server(1)))
    assert "LEADS" not in result.stdout
    assert "partition" not in result.output
