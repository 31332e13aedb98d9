"""Workers that set different optimizers, while messages are lost and doubled."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.requests import Barrier, ClockOf, Control, Depart, Flush
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import Departure, SetOptimizer
from tests.simulation.seeds import seeds
from tests.simulation.test_regressions import begun, full, pull, push
from tests.simulator.checkers import check_everything_ended
from tests.simulator.network import NASTY
from tests.simulator.process import Coroutine, Sleep
from tests.simulator.settings import ClusterSettings
from tests.simulator.simulator import Me, World


@pytest.mark.parametrize("seed", seeds(5, soak=50))
def test_workers_whose_optimizers_differ_all_learn_of_it_and_agree(seed: int) -> None:
    """Each is told by the call that it makes, and no push is lost or counts twice."""
    errors: list[str] = []

    def set_optimizer(rate: float) -> Any:
        return Control((SetOptimizer(0, to_wire(SGD(learning_rate=rate))),))

    def program(me: Me) -> Coroutine:
        yield from begun(me, "w")
        if me.rank:
            yield Barrier("the others have set theirs")
            try:
                yield set_optimizer(2.0)
            except NotAllowed as error:
                errors.append(str(error))
            yield Sleep(20.0)
            yield set_optimizer(1.0)
        else:
            yield set_optimizer(1.0)
            yield Barrier("the others have set theirs")
            try:
                yield push("w", -1.0)
            except NotAllowed as error:
                errors.append(str(error))
        yield Barrier("they agree")
        if (yield ClockOf("w")) == 0:  # else the push is kept
            yield push("w", -1.0)
        yield Flush()
        yield Barrier("pushed")
        values = full(0.0)
        yield pull("w", values)
        assert set(values.tolist()) == {3.0}
        yield Depart(Departure.LEFT)

    world = World(seed, ClusterSettings(workers=3, servers=2), NASTY)
    world.start_all(program)
    world.run(400)
    check_everything_ended(world)
    assert sum("sets SGD(learning_rate=2.0), but" in text for text in errors) == 3
