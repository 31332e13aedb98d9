"""A view goes out as changes: whoever knows an earlier one knows the newest with them, whatever was lost on the way."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvd.core.machine import SCHEDULER, CallerPeer, Received, Send
from kvd.core.membership import ViewState
from kvd.core.pseudonyms import public_view
from kvd.core.scheduler.membership.views import (
    MAX_LEFT,
    MAX_TOLD,
    PAUSE_S,
    TOLD_AT_ONCE,
    Listener,
    ViewHistory,
    Views,
    pages,
)
from kvd.protocol.codec import MAX_HEADER_BYTES, decode, encode
from kvd.protocol.messages import (
    BIGGEST,
    MAX_MEMBERS,
    MAX_RUNS,
    Done,
    Epoch,
    Heartbeat,
    HeartbeatAck,
    Member,
    MemberState,
    Partition,
    RunEntry,
    RunPhase,
    View,
    ViewChange,
    Welcome,
)
from tests.core.fakes import cluster, member, of, session, view, worker_id

CLUSTER = cluster(40, 2)


def take(state: ViewState, epoch: Epoch, messages: Any) -> bool:
    """A node is sent these; True if it knows the view of this epoch now."""
    for message in messages:
        found = decode(encode(message, 1, epoch)).message
        if isinstance(found, View):
            state.update(epoch, found)
        else:
            assert isinstance(found, ViewChange)
            if state.can_take(epoch, found):
                state.change(epoch, found)
    return state.epoch == epoch


def shown(state: ViewState) -> tuple[Any, ...]:
    return state.settings, state.shards, state.runs, state.partitions, state.members


def known(whole: View) -> tuple[Any, ...]:
    state = ViewState()
    state.update(Epoch(1, 1), whole)
    return shown(state)


def altered(rng: Random, before: View) -> View:
    """A view in which something is different."""
    members = {(who.role, who.rank): who for who in before.members}
    for _ in range(rng.randrange(4)):
        rank = rng.randrange(40)
        action = rng.randrange(4)
        if action == 0 and ("worker", rank) in members:
            del members["worker", rank]
        else:
            members["worker", rank] = member("worker", rank, rng.choice(["active", "dead", "done"]), rng.randrange(3))
    partitions = list(before.partitions)
    if partitions and rng.random() < 0.3:
        partitions[rng.randrange(2)] = Partition(rng.randrange(2), -1, -1, rng.randrange(1, 99))
    elif rng.random() < 0.1:
        partitions = [] if partitions else [Partition(0, 1, -1, 5), Partition(1, 0, -1, 6)]
    runs = before.runs
    if rng.random() < 0.2:
        runs = (RunEntry(rng.randrange(1, 9), "job", "token", rng.choice(list(RunPhase)), 2),)
    settings = before.settings if rng.random() < 0.95 else before.settings._replace(merge=rng.choice(["sum", "mean"]))
    return View(settings, tuple(members.values()), before.shards, runs, tuple(partitions))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("to_servers", [True, False])
def test_who_knows_any_earlier_view_knows_the_newest_with_what_it_is_told(seed: int, to_servers: bool) -> None:
    rng = Random(seed)
    newest = view(CLUSTER, [member("server", 0), member("server", 1)])
    history = ViewHistory(newest, 3)
    nodes: list[ViewState] = [ViewState() for _ in range(6)]
    ever: set[int] = set()
    for change in range(3, 90):
        if change > 3:
            newest = altered(rng, newest)
            history.add(newest, change)
        for node in nodes:
            if rng.random() < 0.4:  # the others hear of this one nothing
                base = node.epoch.change if node.epoch.generation else None
                assert take(node, Epoch(1, change), history.told(base, to_servers=to_servers))
                expected = known(newest if to_servers else public_view(newest))
                partitions = newest.partitions or node.partitions  # a view without them does not take them back
                assert shown(node) == (*expected[:3], partitions, expected[4])
                there = {who.incarnation: who for who in node.members.values()}
                ever.update(there)
                assert {number: node.by_incarnation(number) for number in ever} == dict.fromkeys(ever) | there


def test_a_change_may_begin_before_the_view_that_is_known_and_may_come_late_or_twice() -> None:
    first = view(CLUSTER, [member("server", 0)])
    second = view(CLUSTER, [member("server", 0), member("worker", 0)])
    third = view(CLUSTER, [member("server", 0), member("worker", 0, "dead"), member("worker", 1)])
    history, node = ViewHistory(first, 1), ViewState()
    assert take(node, Epoch(1, 1), history.told(None, to_servers=True))
    history.add(second, 2)
    one = history.told(1, to_servers=True)
    history.add(third, 3)
    both = history.told(1, to_servers=True)
    assert take(node, Epoch(1, 2), one)
    assert take(node, Epoch(1, 3), both)
    for late in (one, both):
        take(node, Epoch(1, 2), late)
        assert shown(node) == known(third)


@pytest.mark.parametrize("epoch", [Epoch(2, 9), Epoch(1, 9)])
def test_a_change_of_what_is_not_known_changes_nothing(epoch: Epoch) -> None:
    node = ViewState()
    node.update(Epoch(1, 4), view(CLUSTER, [member("server", 0)]))
    change = ViewChange(5 if epoch.generation == 1 else 4, (member("worker", 0),))
    assert not take(node, epoch, [change])
    assert node.members.keys() == {("server", 0)}


# ── how long it is ──


def giant(count: int) -> View:
    """As long as names may be."""
    long = [
        Member("worker", rank, "\U0001f600" * 128, BIGGEST - rank, "", MemberState.RETURNING, "\U0001f600" * 80, 1e9)
        for rank in range(count)
    ]
    servers = [member("server", rank)._replace(address="\U0001f600" * 108, key="k" * 40) for rank in range(200)]
    partitions = [Partition(rank, rank, rank, BIGGEST, rank) for rank in range(200)]
    settings = cluster(count, 200)._replace(num_shards=4096)
    return View(settings, (*servers, *long), tuple(range(4096)), (), tuple(partitions))


def test_the_largest_view_comes_in_messages_that_are_short_enough_in_any_order() -> None:
    whole = giant(MAX_MEMBERS - 200)
    sent = [encode(page, 1, Epoch(1, 1)) for page in pages(whole)]
    assert max(map(len, sent)) <= MAX_HEADER_BYTES
    Random(1).shuffle(sent)
    node = ViewState()
    for number, header in enumerate([*sent[: len(sent) // 2], *sent], 1):
        assert node.members == {} or number > len(sent)
        page = decode(header).message
        assert isinstance(page, View)
        node.update(Epoch(1, 1), page)
    assert shown(node) == known(whole)


def test_a_page_of_an_earlier_view_is_not_mixed_with_those_of_a_newer_one() -> None:
    old, new = (giant(count) for count in (300, 320))
    node = ViewState()
    *most, last = pages(old)
    take(node, Epoch(1, 1), most)
    assert take(node, Epoch(1, 2), [*pages(new)[:1], last, *pages(new)[1:]])
    assert shown(node) == known(new)
    assert not take(node, Epoch(1, 1), pages(old))


def test_a_change_is_as_long_as_what_has_changed_and_a_long_one_gives_way_to_the_whole_view() -> None:
    many = [member("worker", rank) for rank in range(3000)]
    history = ViewHistory(view(CLUSTER, many), 1)
    history.add(view(CLUSTER, [*many, member("worker", 3000)]), 2)
    (change,) = history.told(1, to_servers=False)
    assert len(encode(change, 1, Epoch(1, 2))) < 100
    history.add(view(CLUSTER, [who._replace(state=MemberState.DONE) for who in many]), 3)
    assert history.told(2, to_servers=False) == pages(public_view(history.newest))


def test_of_places_that_were_given_back_so_many_are_remembered() -> None:
    everyone = [member("worker", rank) for rank in range(MAX_LEFT + 2)]
    history = ViewHistory(view(CLUSTER, everyone), 1)
    for gone in range(1, MAX_LEFT + 2):
        history.add(view(CLUSTER, everyone[gone:]), gone + 1)
    assert isinstance(history.told(1, to_servers=True)[0], View)
    (change,) = history.told(2, to_servers=True)
    assert isinstance(change, ViewChange)
    assert len(change.left) == MAX_LEFT


def test_places_that_are_forgotten_do_not_bring_back_settings_that_have_changed_since() -> None:
    everyone = [member("worker", rank) for rank in range(MAX_LEFT + 2)]
    history = ViewHistory(view(CLUSTER, everyone), 1)
    for gone in range(1, MAX_LEFT + 1):
        history.add(view(CLUSTER, everyone[gone:]), gone + 1)
    decided = CLUSTER._replace(merge="mean")
    history.add(view(decided, everyone[MAX_LEFT:]), MAX_LEFT + 2)
    history.add(view(decided, everyone[MAX_LEFT + 1 :]), MAX_LEFT + 3)
    node = ViewState()
    node.update(Epoch(1, MAX_LEFT), view(CLUSTER, everyone[MAX_LEFT - 1 :]))
    assert take(node, Epoch(1, MAX_LEFT + 3), history.told(MAX_LEFT, to_servers=True))
    assert shown(node) == known(history.newest)


def test_what_nodes_say_that_they_know_takes_no_memory_for_good() -> None:
    history = ViewHistory(view(CLUSTER, []), 0)
    for change in range(1, 3 * MAX_TOLD):
        history.add(view(CLUSTER, [member("worker", change % 40)]), change)
    for base in range(3 * MAX_TOLD):
        assert history.told(base, to_servers=False)
    assert len(history._known) <= MAX_TOLD


def test_a_change_of_servers_and_of_all_runs_is_short_enough_for_a_message() -> None:
    """With the longest names, in characters of 4 bytes."""

    def cluster_of(phase: RunPhase, state: MemberState) -> View:
        runs = tuple(
            [RunEntry(BIGGEST - n, "\U0001f600" * 81, "\U0001f600" * 64, phase, 4000) for n in range(MAX_RUNS)]
        )
        return replace(giant(0), members=tuple([who._replace(state=state) for who in servers]), runs=runs)

    servers = [who._replace(node_id="\U0001f600" * 128) for who in giant(0).members[:30]]
    first = cluster_of(RunPhase.FORMING, MemberState.ACTIVE)
    history, node = ViewHistory(first, 1), ViewState()
    assert take(node, Epoch(1, 1), history.told(None, to_servers=True))
    newest = cluster_of(RunPhase.RUNNING, MemberState.DEAD)
    history.add(newest, 2)
    assert take(node, Epoch(1, 2), history.told(1, to_servers=True))
    assert shown(node) == known(newest)


# ── who is told, and when ──


def listeners(count: int) -> list[Listener]:
    return [Listener(CallerPeer(b"%d" % rank), "worker", worker_id(rank)) for rank in range(count)]


def test_what_leaves_the_view_as_it_is_is_told_to_nobody() -> None:
    """A barrier that is released has to be saved, and that is all."""
    views = Views(1, 0, view(CLUSTER, []))
    node = listeners(1)
    token = views.change(view(CLUSTER, []), [Send(node[0].peer, Done(1))], is_new=False)
    assert views.saved(token, node, 0.0) == [Send(node[0].peer, Done(1))]
    assert views.epoch == Epoch(1, 0)


def test_who_is_let_in_is_sent_the_whole_view_once_after_its_welcome() -> None:
    views = Views(1, 0, view(CLUSTER, []))
    old, new = listeners(2)
    assert [type(send.message) for send in views.all_to(old)] == [View]
    token = views.change(view(CLUSTER, [member("worker", 0)]))
    assert views.when_saved(Send(new.peer, Welcome(1, 0, None)), new) == []
    sends = views.saved(token, [old, new], 0.0)
    assert [(send.peer, type(send.message)) for send in sends] == [
        (old.peer, ViewChange),
        (new.peer, Welcome),
        (new.peer, View),
    ]


def test_with_many_nodes_the_changes_of_a_short_time_are_announced_together() -> None:
    views, nodes = Views(1, 0, view(CLUSTER, [])), listeners(TOLD_AT_ONCE + 1)
    for node in nodes:
        views.all_to(node)
    first = views.saved(views.change(view(CLUSTER, [member("worker", 0)])), nodes, 5.0)
    assert len(first) == len(nodes)
    pause_s = PAUSE_S * len(nodes)
    for rank in (1, 2):
        token = views.change(view(CLUSTER, [member("worker", number) for number in range(rank + 1)]))
        assert views.saved(token, nodes, 5.0 + pause_s / 2) == []
    assert views.next_deadline() == 5.0 + pause_s
    assert not views.is_due(5.0 + pause_s / 2)
    sends = views.announcements(nodes, 5.0 + pause_s)
    assert len(sends) == len(nodes)
    change = sends[0].message
    assert isinstance(change, ViewChange)
    assert [who.rank for who in change.members] == [1, 2]
    assert all(send.message is change for send in sends)  # it is encoded once
    assert views.next_deadline() is None


# ── the node's side ──


def joined() -> Any:
    node = session("worker", 0)
    node.tick(0.0)
    node.receive(Received(SCHEDULER, 1, Epoch(1, 1), Welcome(1, 0, None)), 0.0)
    node.receive(Received(SCHEDULER, 1, Epoch(1, 1), view(CLUSTER, [member("worker", 0)])), 0.0)
    return node


def test_who_lacks_the_base_of_a_change_says_so_at_once_but_not_all_the_time() -> None:
    node = joined()
    for change in (5, 6, 7):
        assert not node.receive(Received(SCHEDULER, 1, Epoch(1, change), ViewChange(change - 1)), 0.5)
        assert node.view.epoch == Epoch(1, 1)
    assert node.next_deadline() == 0.5
    assert [type(send.message) for send in of(Send, node.tick(0.5))] == [Heartbeat]
    node.receive(Received(SCHEDULER, 1, Epoch(1, 8), ViewChange(7)), 0.51)
    assert node.next_deadline() == pytest.approx(0.6)
    assert node.receive(Received(SCHEDULER, 1, Epoch(1, 8), ViewChange(1, (member("worker", 1),))), 0.55)
    assert node.view.epoch == Epoch(1, 8)


def test_a_node_says_less_often_that_it_is_alive_if_the_scheduler_wants_that() -> None:
    node = joined()
    node.tick(1.0)
    node.receive(Received(SCHEDULER, 1, Epoch(1, 1), HeartbeatAck((), 4.0)), 1.0)
    assert node.heartbeat_interval_s == 4.0
    node.tick(2.0)
    assert node.next_deadline() == 6.0
    node.receive(Received(SCHEDULER, 1, Epoch(1, 1), HeartbeatAck((), 0.0)), 2.0)
    assert node.heartbeat_interval_s == 1.0  # as it was told at its start: never more often
