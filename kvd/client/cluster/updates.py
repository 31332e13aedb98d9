"""How the servers update values: the optimizer, its hyperparameters and its state."""

from __future__ import annotations

from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.backend import SentHyperparameters, Updater
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.handle import Handle
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.restored_optimizer import is_kept
from kvd.client.cluster.compression import GradientCompression
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.optimizer_states import fetch_optimizer, fetch_states, store_states, try_optimizer
from kvd.client.cluster.transfers import nothing
from kvd.compression import parse
from kvd.compression import to_wire as to_wire_compressor
from kvd.core import requests
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer, changes_to_wire, to_wire
from kvd.protocol.messages import CompressorQuery, SetOptimizer, UpdateOptimizer


class ClusterUpdates:
    """Optimizers are data: no code crosses the wire."""

    def __init__(self, engine: Engine, steps: ProgramSteps, compression: GradientCompression) -> None:
        self._engine = engine
        self._compression = compression
        self._steps = steps
        self.last_sent: SentHyperparameters | None = None
        self._set: list[Optimizer | None] = []  # what this process has set last, if anything

    @property
    def last_set(self) -> Optimizer | None:
        return self._set[0] if self._set else None

    def current(self) -> Handle:
        return Handle(self._engine.run(fetch_optimizer(self._engine)), what="the optimizer of the servers")

    def set_optimizer(self, optimizer: Optimizer | None) -> Handle:
        known = checks.known_optimizer(optimizer)
        message = SetOptimizer(0, None if known is None else to_wire(known))
        checks.check_sendable("the optimizer", message)
        changes = self._set not in ([], [known])
        self._set = [known]
        deadline = Deadline(self._engine.config.request_timeout_s)

        is_past = self._steps.is_before_restored

        async def work() -> None:
            if is_past and is_kept(await fetch_optimizer(self._engine), known):
                return
            if known is not None:
                await try_optimizer(self._engine, known, deadline.left_s())
            if changes:  # the rounds before belong to the optimizer before
                await self._engine.call(requests.Flush(kept=False), deadline.left_s())
            await self._engine.call(requests.Control((message,)), deadline.left_s())

        return Handle(self._engine.run(work()), nothing, "set_optimizer")

    def set_gradient_compression(self, params: object) -> Handle:
        self._engine.check_usable()
        compression = parse(params)
        if compression is None:
            self._compression.use(None)
            return Handle.of(None)
        message = CompressorQuery(0, to_wire_compressor(compression.compressor))
        deadline = Deadline(self._engine.config.request_timeout_s)

        async def work() -> None:
            await self._engine.call(requests.Control((message,)), deadline.left_s())
            self._compression.use(compression)

        return Handle(self._engine.run(work()), nothing, "set_gradient_compression")

    def set_updater(self, updater: Updater | None) -> None:
        raise NotAllowed("an updater is code, and no code crosses the wire: use set_optimizer with a cluster")

    def update_optimizer(self, changes: dict[str, Any]) -> Handle:
        message = UpdateOptimizer(0, changes_to_wire(checks.hyperparameters(changes)))
        if self._steps.is_before_restored:
            return Handle.of(None)
        control = requests.Control((message,), staged_first=True)
        return Handle(self._engine.submit(control), nothing, "update_optimizer")

    def save_optimizer_states(self, path: Any, dump_optimizer: bool) -> Handle:
        return Handle(self._engine.run(fetch_states(self._engine, checks.file_path(path), dump_optimizer)), what="save")

    def load_optimizer_states(self, path: Any) -> Handle:
        return Handle(self._engine.run(store_states(self._engine, checks.file_path(path))), what="load")
