"""The agreement on the cluster's settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvd.core.scheduler.membership.agreement import Agreement
from kvd.protocol.messages import ErrorCode, Join
from tests.core.fakes import OPEN
from tests.core.scheduler_harness import BARE

ASYNC = OPEN._replace(mode="async", merge="mean", staleness=2)


def test_what_is_open_is_adopted_once() -> None:
    agreement = Agreement(BARE)
    assert agreement.adopt_mode(ASYNC)
    assert agreement.adopt_merge(ASYNC)
    assert agreement.settings == BARE._replace(mode="async", merge="mean", staleness=2)
    other = OPEN._replace(mode="sync", merge="sum")
    assert not agreement.adopt_mode(other)
    assert not agreement.adopt_merge(other)
    assert agreement.settings.mode == "async"


def test_nothing_is_adopted_from_a_node_that_says_nothing() -> None:
    agreement = Agreement(BARE)
    assert not agreement.adopt_mode(OPEN)
    assert not agreement.adopt_merge(OPEN)
    assert agreement.settings == BARE


def test_the_settings_of_the_scheduler_before_decide_only_what_this_one_was_not_told() -> None:
    assert Agreement(BARE, ASYNC).settings == BARE._replace(mode="async", merge="mean", staleness=2)
    told = BARE._replace(mode="sync", merge="sum", num_workers=5)
    assert Agreement(told, ASYNC).settings == told


def test_an_objection_answers_the_join_and_names_the_setting() -> None:
    join = Join(9, "worker", "a", "", "h", 1, -1, OPEN._replace(num_workers=7))
    objection = Agreement(BARE).objection(join)
    assert objection is not None
    assert (objection.request, objection.error, objection.key) == (9, ErrorCode.CONFIG_ERROR, "num_workers")
    assert objection.text == ("this node wants num_workers=7, the cluster has 2: start it with the cluster's setting")
    assert Agreement(BARE).objection(replace(join, settings=OPEN)) is None


@pytest.mark.parametrize(
    ("told", "wanted", "refused"),
    [
        ({"num_servers": 1, "replicas": 2}, {}, True),
        ({"num_servers": 2, "replicas": 2}, {}, False),
        ({"num_servers": 0, "replicas": 0}, {"num_servers": 1, "replicas": 2}, True),
        ({"num_servers": 0, "replicas": 0}, {"num_servers": 2, "replicas": 2}, False),
        ({"num_servers": 0, "replicas": 0}, {"replicas": 2}, False),  # it knows no number of servers
        ({"num_servers": 1, "replicas": 1}, {}, False),
        ({"num_servers": 2, "replicas": 2}, {"replicas": 2}, False),
    ],
)
def test_more_replicas_than_servers_are_refused_at_once(told: Any, wanted: Any, refused: bool) -> None:
    join = Join(9, "server", "a", "", "h", 1, -1, OPEN._replace(**wanted))
    objection = Agreement(BARE._replace(**told)).objection(join)
    assert (objection is not None) == refused
    if objection is not None:
        assert (objection.error, objection.key) == (ErrorCode.CONFIG_ERROR, "replicas")
        assert "replicas=2 needs as many servers" in objection.text
        assert "the cluster has 1 server:" in objection.text
