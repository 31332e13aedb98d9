"""Init, push, pull and pushpull in a cluster."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.handle import Handle
from kvd.client.calls.memory_budget import Reservation
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.calls.values import Target, fresh_target
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.transfers import nothing, pull_into, pulled
from kvd.core import requests
from kvd.core.requests import Item
from kvd.node.reassembly import ReassemblyBuffer


class ClusterValues:
    """Each call becomes one request, submitted before the call returns: calls on a key keep their order.

    Args:
        rank: the rank of this worker; rank 0 makes the keys.
        check_bound: whether the end of a push tells if its bound gradients were written to.
    """

    def __init__(
        self,
        engine: Engine,
        arguments: Arguments,
        bound: BoundKeys,
        unobserved: UnobservedErrors,
        steps: ProgramSteps,
        rank: int,
        check_bound: bool,
    ) -> None:
        self._engine = engine
        self._arguments = arguments
        self._watched = unobserved.watch
        self._steps = steps
        self._rank = rank
        self._submit_push = bound.verified(engine.submit) if check_bound else engine.submit

    def init(self, key: Any, value: Any) -> Handle:
        names, many = self._arguments.names(key)
        sources = self._arguments.init_sources(names, many, value, copy=self._rank == 0)  # only these are sent
        items = tuple(Item(name, spec, data) for name, (data, spec) in zip(names, sources, strict=True))
        return self._watched(names, Handle(self._engine.submit(requests.InitKeys(items)), what="init"))

    def push(self, key: Any, value: Any, priority: int, samples: int, reservation: Reservation | None) -> Handle:
        names, many = self._arguments.names(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        sources = self._arguments.sources(names, many, value, copy=True, reservation=reservation)
        if not names:
            return Handle.of(None)
        items = tuple(Item(name, spec, data) for name, (data, spec) in zip(names, sources, strict=True))
        if not self._steps.take_pushes(names):
            return Handle.of(None)
        place = self._steps.place
        transfer = requests.Transfer(items, push=True, pull=False, priority=priority, samples=samples, place=place)
        return self._watched(names, Handle(self._submit_push(transfer), nothing, "push", self._engine.wait))

    def pull(self, key: Any, out: Any, priority: int) -> Handle:
        names, many = self._arguments.names(key)
        priority, _ = checks.priority_and_samples(priority)
        if out is None or not names:
            return self._pull_fresh(names, many, priority)
        return self._pull_into(names, many, self._arguments.targets(names, many, out), priority)

    def _pull_into(self, names: list[str], many: bool, targets: list[Target], priority: int) -> Handle:
        promise = self._engine.submit(pull_into(names, targets, priority))
        return Handle(promise, pulled(targets, many), "pull", self._engine.wait)

    def _pull_fresh(self, names: list[str], many: bool, priority: int) -> Handle:
        """Pulls into new arrays. Their shapes may be unknown still, but the call must keep its place among the others
        on its keys: so it is submitted at once, and the bytes become arrays when the handle is waited on."""
        if not names:
            return Handle.of([])
        specs = [self._engine.submit(requests.DescribeKey(name)) for name in names]  # known before the bytes arrive
        pieces = [ReassemblyBuffer() for _ in names]
        items = tuple(Item(name, None, None, piece) for name, piece in zip(names, pieces, strict=True))
        transfer = requests.Transfer(items, push=False, pull=True, priority=priority)

        def finish(_: Any) -> Any:
            targets = [fresh_target(spec.result()) for spec in specs]
            for target, piece in zip(targets, pieces, strict=True):
                piece.move_to(target.data)
            return pulled(targets, many)(None)

        return Handle(self._engine.submit(transfer), finish, "pull", self._engine.wait)

    def pushpull(
        self, key: Any, value: Any, out: Any, priority: int, samples: int, copy: bool, reservation: Reservation | None
    ) -> Handle:
        names, many = self._arguments.names(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        targets = self._arguments.targets(names, many, value if out is None else out)
        sources = self._arguments.sources(names, many, value, copy=copy, reservation=reservation)
        if not names:
            return Handle.of([])
        items = tuple(
            Item(name, spec, data, target.data)
            for name, (data, spec), target in zip(names, sources, targets, strict=True)
        )
        for (_, spec), target, name in zip(sources, targets, names, strict=True):
            spec.check_same(target.spec, name)
        if not self._steps.take_pushes(names):
            return self._pull_into(names, many, targets, priority)
        place = self._steps.place
        transfer = requests.Transfer(items, push=True, pull=True, priority=priority, samples=samples, place=place)
        reclaim = None if copy else partial(self._engine.take_back, [data for data, _ in sources])
        handle = Handle(self._submit_push(transfer), pulled(targets, many), "pushpull", self._engine.wait, reclaim)
        return self._watched(names, handle)
