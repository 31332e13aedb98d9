"""Tables and compressed values under faults, by seed: what holds of values and dense keys holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvd.core.machine import Send
from kvd.protocol.messages import Epoch, Values
from tests.simulator.process import Process
from tests.simulator.shell import Shell
from tests.simulator.sparse import SPARSE
from tests.simulator.workloads.captured import Operators

IN_EVERY_RUN = (  # one seed each
    "ledger, torn records, servers die, tables",
    "deletions, tables",
    "uneven, late, tables",
    "coded, servers die",
    "merges, nasty",
    "captured tables, servers die",
    "delays",
    "delays, servers die",
)
SOAK_SEEDS = 200


@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_campaign(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, [1], monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, SOAK_SEEDS, 50))
@pytest.mark.parametrize("name", SPARSE)
def test_campaign_soak(name: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, range(first, first + 50), monkeypatch)


@pytest.mark.soak
def test_two_that_come_in_when_all_were_lost_push_the_same_step() -> None:
    """Both found nobody in any step, and one of them had begun the first: their pushes of two steps were one round."""
    SPARSE["losses, nasty, tables"].run(12)


def run(name: str, seeds: Sequence[int], patch: pytest.MonkeyPatch) -> None:
    """A campaign in which what it is about does not happen would prove little."""
    sent, taken, deaths = _encoded_answers(patch), _captured_tables(patch), 0
    for seed in seeds:
        world = SPARSE[name].run(seed)
        deaths += sum(process.life for process in world.processes.values() if process.name.startswith("server"))
    if SPARSE[name].mishaps.server_crashes and SPARSE[name].worker_timeout_s >= 10:
        assert deaths >= len(seeds), deaths
    if SPARSE[name].workload == "coded":
        assert len(sent) >= 20 * len(seeds), len(sent)
    if SPARSE[name].workload == "captured tables":
        assert len(taken) >= len(seeds), taken


def _encoded_answers(patch: pytest.MonkeyPatch) -> list[str]:
    """Who sends them, one after the other."""
    sent: list[str] = []
    send = Shell._send

    def counting(shell: Shell, process: Process, effect: Send, run_number: int, epoch: Epoch) -> None:
        if isinstance(effect.message, Values) and effect.message.coding is not None:
            sent.append(process.name)
        send(shell, process, effect, run_number, epoch)

    patch.setattr(Shell, "_send", counting)
    return sent


def _captured_tables(patch: pytest.MonkeyPatch) -> list[int]:
    """How many slices each snapshot has."""
    taken: list[int] = []
    fetch = Operators._fetch

    def counting(operators: Operators, number: int, parts: Sequence[Any]) -> Any:
        slices = yield from fetch(operators, number, list(parts))
        taken.extend([] if slices is None else [len(slices)])
        return slices

    patch.setattr(Operators, "_fetch", counting)
    return taken
