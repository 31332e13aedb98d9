"""Requests about all slices that a server leads: their senders must mean the same slices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.core.machine import Received
from kvd.core.membership import ViewState
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.protocol.messages import ClockQuery, Epoch, NotYet, NotYetReason, Partition, View
from tests.core.fakes import NodePeer, cluster, worker_id

SETTINGS = cluster(1, 2, replicas=2)


class Server:
    """The part of a server that sends requests away."""

    def __init__(self) -> None:
        self.view = ViewState()
        self.effects = ServerEffects()
        session: Any = SimpleNamespace(view=self.view, rank=0)
        self.elsewhere = Elsewhere(session, self.effects, lambda: False)

    def learns(self, change: int, *leaders: int) -> None:
        partitions = tuple([Partition(leader, -1, -1, 7) for leader in leaders])
        assert self.view.update(Epoch(1, change), View(SETTINGS, (), (0, 1), (), partitions))

    def answers(self, change: int) -> list[Any]:
        """What a node is told that knows this view."""
        peer: Any = NodePeer(worker_id(0))
        event = Received(peer, worker_id(0), Epoch(1, change), ClockQuery(5, "w"))
        postponed = self.elsewhere.postpones(event)
        told = [effect.message for effect in self.effects.take()]  # type: ignore[union-attr]
        assert postponed is bool(told)
        return told


@pytest.mark.parametrize(("knows", "is_told"), [(1, True), (2, False), (3, True)])
def test_senders_that_know_other_leaders_ask_again(knows: int, is_told: bool) -> None:
    """Else the clocks of slices that another server leads now would be missing from an answer."""
    server = Server()
    server.learns(1, 0, 0)
    assert server.answers(1) == []
    server.learns(2, 0, 1)
    server.elsewhere.gave_up()
    told = server.answers(knows)
    assert [(type(message), message.reason) for message in told] == [(NotYet, NotYetReason.ELSEWHERE)] * is_told


def test_a_server_that_has_given_up_nothing_answers_those_who_know_less() -> None:
    server = Server()
    server.learns(1, 0, 1)
    server.learns(2, 0, 0)
    assert server.answers(1) == []
