"""A rank resumes, and its request comes once more behind its later pushes: that counts nothing, here or at a backup."""

from __future__ import annotations

import numpy as np

from kvd.optimizer import SGD
from kvd.protocol.messages import Activate, Done, Staged, StepInto
from tests.core.fakes import member
from tests.core.replica_harness import A, B
from tests.core.test_promotion import fail_over, ready
from tests.core.test_records import ONE


def test_a_late_copy_of_an_activation_does_not_make_count_what_was_only_staged() -> None:
    """Worker 1 comes back after round 1, and its request arrives once more behind its push of round 2."""
    run = ready()
    run.workers[1] = member("worker", 1, "done")
    run.look()
    run.push(0, 1, ONE)
    run.workers[1] = member("worker", 1)
    run.look()
    activate = Activate(run.request(), "w", 1)
    assert run.say(1, activate)[-1:] == [Done(activate.request)]
    assert run.push(1, 2, ONE, request=501) == [Staged(501)]
    run.say(1, activate)
    progress = run.nodes[B].held().table.slices["w", 0].log.progress_of(1)
    assert (progress.staged, progress.skipped) == (1, 1)
    fail_over(run)
    assert run.push(1, 2, ONE, request=501, at=B) == [Staged(501)]
    assert run.push(0, 2, 3 * ONE, request=502, at=B) == [Done(501), Done(502)]
    assert run.value(B).tolist() == [4, 8]  # without an optimizer, the sum of the round


def test_a_late_copy_of_a_step_into_the_rounds_does_not_either() -> None:
    run = ready()
    for rank in (0, 1):
        run.push(rank, 1, ONE)
    into = StepInto(run.request(), 0, 0)
    assert run.say(1, into)[-1:] == [Done(into.request)]
    assert run.push(1, 2, ONE, request=501) == [Staged(501)]
    run.say(1, into)
    progress = run.nodes[B].held().table.slices["w", 0].log.progress_of(1)
    assert (progress.staged, progress.skipped) == (1, 0)
    fail_over(run)
    assert run.push(1, 2, ONE, request=501, at=B) == [Staged(501)]
    assert run.push(0, 2, 3 * ONE, request=502, at=B) == [Done(501), Done(502)]
    assert run.value(B).tolist() == [4, 8]


def test_in_async_mode_a_late_copy_of_a_step_into_the_rounds_moves_nobody() -> None:
    """Others have pushed since: their clocks are not those that the worker goes on from."""
    run = ready(SGD(1.0), mode="async")
    for clock in (1, 2, 3):
        run.push(0, clock, 0 * ONE)
    into = StepInto(run.request(), 0, 0)
    assert run.say(1, into) == [Done(into.request)]
    for clock in (4, 5):
        run.push(0, clock, 0 * ONE)
    assert run.say(1, into) == [Done(into.request)]
    assert run.push(1, 4, ONE, request=501) == [Done(501)]
    assert run.value(A).tolist() == run.value(B).tolist() == [0, 0]  # the first value, less the gradient
    assert run.picture(A) == run.picture(B)


def test_in_async_mode_a_late_copy_of_an_activation_counts_nothing_after_a_failover_either() -> None:
    """The push of worker 1 waits for the update of worker 0 when the copy comes, and then the server dies."""
    run = ready(SGD(1.0), mode="async")
    activate = Activate(run.request(), "w", 3)
    assert run.say(1, activate) == [Done(activate.request)]
    run.nodes[A].holds_jobs = True
    run.push(0, 1, [np.float32(8), np.float32(8)], request=500)
    assert run.push(1, 4, [np.float32(1), np.float32(0)], request=501) == [Staged(501)]
    run.say(1, activate)
    progress = run.nodes[B].held().table.slices["w", 0].log.progress_of(1)
    assert (progress.staged, progress.counted, progress.committed) == (3, 3, 3)
    fail_over(run)
    before = run.value(B).tolist()
    assert run.push(1, 4, [np.float32(1), np.float32(0)], request=501, at=B) == [Done(501)]
    assert run.value(B).tolist() == [before[0] - 1, before[1]]
