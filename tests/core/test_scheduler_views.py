"""The publication of views: saved first, announced then, and answers withheld until then."""

from __future__ import annotations

from kvd.core.machine import CallerPeer, Send
from kvd.core.scheduler.membership.views import Listener, Views
from kvd.protocol.messages import Done, Epoch, View, Welcome
from tests.core.fakes import OPEN

A, B = CallerPeer(b"a"), CallerPeer(b"b")
ALICE, BOB = Listener(A, "server", 1), Listener(B, "server", 2)
FIRST, SECOND, THIRD = (View(OPEN._replace(num_workers=count), (), ()) for count in (1, 2, 3))


def test_a_view_is_announced_when_it_is_saved() -> None:
    views = Views(4, 0, FIRST)
    token = views.change(SECOND)
    assert (views.epoch, views.told_to("server")) == (Epoch(4, 0), FIRST)
    assert views.saved(token, [ALICE, BOB], 0.0) == [Send(A, SECOND), Send(B, SECOND)]
    assert (views.epoch, views.told_to("server")) == (Epoch(4, token), SECOND)
    assert views.saved(token, [ALICE], 0.0) == []  # reported twice


def test_only_the_newest_view_is_announced_and_each_answer_comes_with_its_own() -> None:
    views = Views(1, 0, FIRST)
    second = views.change(SECOND, [Send(A, Done(1))])
    third = views.change(THIRD, [Send(A, Done(2))])
    assert views.saved(second, [ALICE], 0.0) == [Send(A, Done(1))]
    assert views.told_to("server") == SECOND
    assert views.saved(third, [ALICE], 0.0) == [Send(A, THIRD), Send(A, Done(2))]


def test_a_record_that_is_saved_out_of_order_takes_the_earlier_ones_with_it() -> None:
    views = Views(1, 0, FIRST)
    second = views.change(SECOND, [Send(A, Done(1))])
    third = views.change(THIRD, [Send(A, Done(2))])
    assert views.saved(third, [], 0.0) == [Send(A, Done(1)), Send(A, Done(2))]
    assert views.saved(second, [ALICE], 0.0) == []
    assert views.epoch == Epoch(1, third)


def test_an_answer_that_depends_on_an_unsaved_view_is_withheld() -> None:
    views = Views(1, 0, FIRST)
    assert views.when_saved(Send(A, Done(1))) == [Send(A, Done(1))]
    token = views.change(SECOND)
    assert views.when_saved(Send(A, Done(2))) == []
    assert views.when_saved(Send(B, Welcome(1, 0, None)), BOB) == []
    assert views.saved(token, [ALICE, BOB], 0.0) == [
        Send(A, SECOND),
        Send(A, Done(2)),
        Send(B, Welcome(1, 0, None)),
        Send(B, SECOND),
    ]


def test_a_welcome_that_waits_for_nothing_brings_the_view() -> None:
    welcome = Send(A, Welcome(1, 0, None))
    assert Views(1, 0, FIRST).when_saved(welcome, ALICE) == [welcome, Send(A, FIRST)]


def test_it_continues_after_a_later_view_that_a_node_knows() -> None:
    views = Views(1, 3, FIRST)
    views.continue_after(Epoch(7, 9))
    assert views.epoch > Epoch(7, 9)
