"""How ``kvd status`` judges a report: the exit code, the advice, and the optimizer in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from kvd.optimizer import SGD, Adam, schedule
from kvd.optimizer.wire import to_wire
from kvd_cli.health import health_of
from tests.cli.reports import member, report, server


def test_a_healthy_cluster(status: Callable[..., Result]) -> None:
    result = status(report(server(0), server(1)))
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_cluster_without_keys_is_healthy_and_each_status_says_so(status: Callable[..., Result]) -> None:
    result = status(report(server(0), server(1), insecure=True))
    assert result.exit_code == 0
    assert result.stderr.startswith("insecure: this cluster has no keys. Whoever reaches its ports can read and change")
    shown = json.loads(status(report(server(0), server(1), insecure=True), "-o", "json").stdout)
    assert (shown["insecure"], shown["healthy"]) == (True, True)


def test_a_server_that_does_not_answer_is_unhealthy(status: Callable[..., Result]) -> None:
    given = report(server(0), {"role": "server", "rank": 1, "error": "status did not finish within 3 s"})
    result = status(given)
    assert result.exit_code == 1
    assert "no answer: server 1. " in result.stderr
    assert "status did not finish" in result.stdout
    as_json = status(given, "-o", "json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["healthy"] is False


def test_the_keys_of_a_dead_server_are_lost() -> None:
    members = [member("server", 0), member("server", 1, "dead"), member("worker", 0)]
    health = health_of(report(server(0), members=members))
    assert not health.is_healthy
    [line] = health.advice
    assert line == (
        "dead: server 1. With replicas=1 its part of the keys is gone: start the job again from a checkpoint."
    )


def test_a_job_that_goes_on_without_a_worker_is_degraded() -> None:
    members = [member("server", 0), member("worker", 0), member("worker", 1, "lost"), member("worker", 2, "back")]
    health = health_of(report(server(0), members=members))
    assert not health.is_healthy
    lost, back = health.advice
    assert lost.startswith("lost: worker 1. The job continues without, degraded. Start it again under the same node id")
    assert back.startswith("back: worker 2, and not in the rounds yet. ")


def test_a_worker_that_joins_a_job_under_way_is_nothing_wrong() -> None:
    members = [member("server", 0), member("worker", 0), {**member("worker", 2, "back"), "is_new": True}]
    health = health_of(report(server(0), members=members))
    assert health.is_healthy
    assert health.advice == (
        "new: worker 2, not in the rounds yet: from the next step of kv.steps on, or after kv.resume().",
    )


def test_a_late_worker_is_told_apart_from_one_that_was_lost() -> None:
    late = {
        **member("worker", 1, "back"),
        "is_late": True,
        "reason": "late: 2 or more others have waited for it for 1 s",
    }
    health = health_of(report(server(0), members=[member("worker", 0), late, member("worker", 2)]))
    assert not health.is_healthy
    [line] = health.advice
    assert line.startswith(
        "late: worker 1. The others continue without, degraded, until the program reaches its next step"
    )


def test_a_dead_worker_may_come_back() -> None:
    members = [member("server", 0), member("worker", 0, "dead"), member("worker", 1, "dead")]
    health = health_of(report(server(0), members=members))
    assert not health.is_healthy
    assert health.advice == (
        "dead: worker 0, worker 1. Start them again under the same node id, and they get their ranks back.",
    )


def test_a_worker_whose_process_ended_is_unhealthy_before_its_timeout(status: Callable[..., Result]) -> None:
    members = [member("server", 0), member("worker", 0), member("worker", 1, process_ended=True)]
    result = status(report(server(0), members=members))
    assert result.exit_code == 1
    assert ["worker", "1", "ended"] in [line.split()[:3] for line in result.stdout.splitlines()]
    line = "process ended: worker 1. Start it again under the same node id, and it gets its rank back."
    assert result.stderr == f"{line}\n"
    as_json = json.loads(status(report(server(0), members=members), "-o", "json").stdout)
    assert (as_json["healthy"], as_json["advice"]) == (False, [line])
    assert [shown["process_ended"] for shown in as_json["members"]] == [False, False, True]


def test_nobody_waits_for_a_worker_that_left_the_rounds_and_ended() -> None:
    members = [member("server", 0), member("worker", 0), member("worker", 1, "done", process_ended=True)]
    assert health_of(report(server(0), members=members)).is_healthy


def test_a_server_that_left_its_workers_is_unhealthy(status: Callable[..., Result]) -> None:
    members = [member("server", 0, "left"), member("worker", 0)]
    result = status(report(members=members))
    assert result.exit_code == 1
    assert ["server", "0", "left"] in [line.split()[:3] for line in result.stdout.splitlines()]
    assert result.stderr == (
        "left: server 0, while workers are active. With replicas=1 its part of the keys is gone: start the job again "
        "from a checkpoint.\n"
    )
    as_json = json.loads(status(report(members=members), "-o", "json").stdout)
    assert (as_json["healthy"], len(as_json["advice"])) == (False, 1)


def test_servers_may_leave_after_the_workers() -> None:
    members = [member("server", 0, "left"), member("server", 1, "left"), member("worker", 0, "left")]
    assert health_of(report(members=members)).is_healthy


def test_missing_nodes_are_named() -> None:
    health = health_of(report(server(0), missing=["server 1"]))
    assert (health.is_healthy, health.advice) == (
        False,
        ("missing: server 1. The job waits until all have joined.",),
    )


@pytest.mark.parametrize(
    ("servers", "is_empty"),
    [
        ((server(0, 8), server(1, 0)), True),  # 16 slices
        ((server(0, 1), server(1, 0)), False),  # an accident
        ((server(0, 1, ["SGD", {}]), server(1, 0)), True),
        ((server(0, 1, ["SGD", {}]), server(1, 0, ["SGD", {}])), False),
        ((server(0, 0, ["SGD", {}]), server(1, 0)), False),  # nothing is stored yet
        ((server(0, 0), server(1, 0)), False),
    ],
)
def test_a_server_that_came_back_empty(servers: tuple[dict[str, Any], ...], is_empty: bool) -> None:
    health = health_of(report(*servers))
    assert health.is_healthy
    assert bool(health.advice) == is_empty
    assert all("empty: server 1 holds no keys" in line for line in health.advice)


def test_the_optimizer_reads_as_in_a_program(status: Callable[..., Result]) -> None:
    sgd = json.loads(json.dumps(to_wire(SGD(learning_rate=0.1, momentum=0.9))))
    assert "SGD(learning_rate=0.1, momentum=0.9" in status(report(server(0, optimizer=sgd))).stdout
    planned = json.loads(json.dumps(to_wire(Adam(learning_rate=schedule.Step(0.5, 10, 0.1)))))
    assert (
        "Adam(learning_rate=Step(base=0.5, step=10, factor=0.1)" in status(report(server(0, optimizer=planned))).stdout
    )
    assert "wd=" not in status(report(server(0, optimizer=sgd))).stdout  # what it has anyhow
    factors = json.loads(json.dumps(to_wire(SGD(0.1, lr_mult={f"key_{n}": 0.5 for n in range(40)}))))
    assert "SGD(learning_rate=0.1, lr_mult=40 entries)  0\n" in status(report(server(0, optimizer=factors))).stdout
    both = report(server(0, optimizer=sgd), server(1, optimizer=sgd), server(2, optimizer=planned))
    shown = [" ".join(line.split()) for line in status(both).stdout.splitlines()]
    place = shown.index("OPTIMIZER SERVER")
    assert shown[place + 1] == "SGD(learning_rate=0.1, momentum=0.9) 0, 1"
    assert shown[place + 2] == "Adam(learning_rate=Step(base=0.5, step=10, factor=0.1)) 2"
    own = ["TheirOwn", {"learning_rate": 0.1, "wd": 0.0}]
    assert "TheirOwn(learning_rate=0.1, wd=0.0)" in status(report(server(0, optimizer=own))).stdout
    for strange in ("x", ["SGD"], [1, {}], [[], {"a": 1}]):
        assert str(strange) in status(report(server(0, optimizer=strange))).stdout
