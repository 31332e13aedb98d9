"""The simulated shell, with a machine that does what the test says."""

from __future__ import annotations

from random import Random

import numpy as np

from kvd.core.machine import (
    Apply,
    Contribution,
    Create,
    Effect,
    Event,
    Export,
    Extent,
    FirstBytes,
    JobDone,
    ResetState,
    Span,
    Tick,
)
from kvd.optimizer import SGD
from kvd.protocol.messages import ADD
from tests.node.driver_harness import Scripted
from tests.simulator.clock import VirtualClock
from tests.simulator.network import CALM, Network
from tests.simulator.process import Process
from tests.simulator.settings import ShellSettings
from tests.simulator.shell import Shell
from tests.simulator.trace import Trace

ONES = Span(np.ones(4, np.float32).tobytes(), 0, 16)
MOMENTUM = SGD(1.0, momentum=0.5)


def test_a_job_that_was_started_before_a_reset_uses_the_state_before() -> None:
    """As in the driver, where jobs run at once: else replicas of a simulated server would differ from it."""
    script: list[list[Effect]] = []
    process = Process("server 0", 0, Scripted(lambda event: script.pop(0) if script else []))
    clock, random = VirtualClock(), Random(1)
    shell = Shell(
        ShellSettings(job_s=(0.1, 0.2)),
        clock,
        random,
        Network(random, CALM, clock),
        Trace(1, clock),
        lambda process: None,
        lambda process, call: None,
    )

    def step(*effects: Effect) -> list[Event]:
        """Carries out effects. Returns the events that come of it."""
        before = len(process.machine.events) + 1  # type: ignore[attr-defined]
        script.append(list(effects))
        shell.feed(process, Tick())
        clock.run(1.0)
        return process.machine.events[before:]  # type: ignore[attr-defined, no-any-return]

    def apply(job: int, current: object) -> Apply:
        given = (Contribution(0, job, ONES, 1, ADD),)
        layout = (Extent("w", 0, 0, 16),)
        return Apply(job, 1, layout, "float32", 16, current, given, False, "sum", MOMENTUM)

    (made,) = step(Create(1, (FirstBytes("w", 0, "float32", ONES),)))
    assert isinstance(made, JobDone)
    (first,) = step(apply(2, made.result[0]))
    assert isinstance(first, JobDone)
    (second,) = step(apply(3, first.result), ResetState((("w", 0),)))
    assert isinstance(second, JobDone)
    assert second.result.view(np.float32).tolist() == [1 - 1 - 1.5] * 4  # with the momentum of the first
    (exported,) = step(Export(4, "w", 0))
    assert isinstance(exported, JobDone)
    assert exported.result == (0, (), ())
