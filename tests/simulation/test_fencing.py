"""A process that was replaced without its knowledge changes nothing, and acknowledges nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.core.machine import Event, Received, Send, ServerPeer
from kvd.protocol.messages import Done, Push, PushBatch
from tests.simulation.seeds import seeds
from tests.simulation.test_failover_mutants import acks_before_the_backup_holds
from tests.simulator.campaign import WORKERS
from tests.simulator.mishaps import Mishaps, live_through
from tests.simulator.process import Process
from tests.simulator.settings import ClusterSettings
from tests.simulator.shell import Shell
from tests.simulator.simulator import World
from tests.simulator.workloads.ledger import Ledger

LONG_S = 25.0  # more than the timeout of servers


class Watch:
    """Pushes that are sent to a server from now on, and which of them it acknowledges.

    Attributes:
        sent: (worker, request).
        acknowledged: the same.
    """

    def __init__(self, server: Process, patch: pytest.MonkeyPatch) -> None:
        self.sent: set[tuple[str, int]] = set()
        self.acknowledged: set[tuple[str, int]] = set()
        send, feed = Shell._send, Shell.feed
        watched = ServerPeer(server.machine.incarnation)

        def watching_send(shell: Shell, process: Process, effect: Send, run: int, epoch: object) -> None:
            if effect.peer == watched and isinstance(effect.message, Push | PushBatch):
                self.sent.add((process.name, effect.message.request))
            send(shell, process, effect, run, epoch)  # type: ignore[arg-type]

        def watching_feed(shell: Shell, process: Process, event: Event) -> None:
            if isinstance(event, Received) and event.peer == watched and isinstance(event.message, Done):
                self.acknowledged.add((process.name, event.message.request))
            feed(shell, process, event)

        patch.setattr(Shell, "_send", watching_send)
        patch.setattr(Shell, "feed", watching_feed)


def cut_off(world: World) -> None:
    """Neither the scheduler nor its backup hears server 0, nor it them; the workers do."""
    pairs = [("server 0", other) for other in ("scheduler", "server 1")]
    world.network.one_way |= {*pairs, *[(other, name) for name, other in pairs]}


def stop(world: World) -> None:
    world.pause("server 0", LONG_S)


@pytest.mark.parametrize("fence", [cut_off, stop])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("seed", seeds(2, soak=100))
def test_a_leader_that_is_replaced_without_its_knowledge_acknowledges_nothing(
    seed: int, mode: str, fence: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back as a backup."""
    world = World(seed, ClusterSettings(servers=2, workers=WORKERS, replicas=2, mode=mode))
    ledger = Ledger(WORKERS, 20, pace_s=1.0)
    watches: list[Watch] = []
    sent: set[tuple[str, int]] = set()

    def begin() -> None:
        assert world.is_replicated()
        watches.append(Watch(world.processes["server 0"], monkeypatch))
        fence(world)

    def end() -> None:
        sent.update(watches[0].sent)
        leaders = {entry.leader for entry in world.server(1).session.view.partitions}
        assert leaders == {1}, "server 1 leads everything"
        world.network.one_way.clear()

    start_s = 4.0 + seed % 7
    world.clock.at(start_s, begin)
    world.clock.at(start_s + LONG_S - 0.1, end)
    live_through(world, ledger.program, Mishaps(within_s=start_s + LONG_S + 1.0))
    ledger.check(world)
    assert sent
    assert not sent & watches[0].acknowledged
    assert world.processes["server 0"].life == 0
    assert world.is_replicated(), "it is a backup"


def test_an_early_acknowledgement_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that does not wait for its backup."""
    acks_before_the_backup_holds(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_leader_that_is_replaced_without_its_knowledge_acknowledges_nothing(0, "async", cut_off, monkeypatch)
