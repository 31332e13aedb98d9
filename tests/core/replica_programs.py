"""Workers that do anything with the keys of two servers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from kvd.compression import known_compressors
from kvd.compression import to_wire as to_wire_compressor
from kvd.optimizer import SGD, Adam, Optimizer, RMSProp, to_wire
from kvd.protocol.messages import (
    NO_STEP,
    Coding,
    ComeTo,
    Delete,
    Done,
    KeyId,
    MergedForm,
    SetOptimizer,
    StoreState,
    TakeStep,
    UpdateOptimizer,
)
from tests.core.replica_harness import FLOATS, A, Cluster

OPTIMIZERS: list[Optimizer | None] = [SGD(0.5, momentum=0.5), Adam(0.1), RMSProp(0.05), SGD(0.25)]


class Program:
    """Two workers that do anything, with one key of each kind, and a batch of three.

    Args:
        optimizers: those that they set; with None first, they compress, too.
    """

    def __init__(
        self, run: Cluster, random: Random, dtype: str, optimizers: Sequence[Optimizer | None] = OPTIMIZERS
    ) -> None:
        self.optimizers = optimizers
        self.run, self.random, self.dtype = run, random, dtype
        self.keys = ["a", "b", "c"]
        self.clocks = dict.fromkeys(self.keys, 0)
        self.creations = dict.fromkeys(self.keys, 0)
        self.is_apart = False
        self.optimizer: Any = None
        self.loop = 0
        for key in self.keys:
            run.create(key, self.value())
        for rank in (0, 1):
            run.declare(rank, *self.keys)

    def value(self) -> Any:
        return np.array([self.random.uniform(-2, 2) for _ in range(5)], FLOATS[self.dtype])

    def step(self) -> None:
        does = [self.push, self.push, self.push_together, self.push_together, self.broadcast]
        does += [self.set_optimizer, self.change, self.store, self.come, self.remake, self.loops]
        if not self.optimizers[0]:
            does += [self.push_encoded] * 6
        self.random.choice(does)()

    def push(self) -> None:
        key = self.random.choice(self.keys)
        self.clocks[key] += 1
        self.is_apart = True
        for rank in self.random.sample((0, 1), 2):
            self.run.push(rank, self.clocks[key], self.value(), key=key, creation=self.creations[key], step=rank)

    def push_encoded(self) -> None:
        """Without an optimizer, the servers encode what they merge of it; one worker may ask for something else."""
        key = self.random.choice(self.keys)
        self.clocks[key] += 1
        self.is_apart = True
        name = self.random.choice(["2bit", "topk", "int8", "randomk", "1bit"])
        method = to_wire_compressor(known_compressors()[name]())
        forms = [MergedForm.FED_BACK, self.random.choice([*MergedForm, MergedForm.FED_BACK])]
        for rank in self.random.sample((0, 1), 2):
            coding = Coding(method, self.dtype, 5, forms[rank])
            creation = self.creations[key]
            self.run.push(rank, self.clocks[key], self.value(), key=key, creation=creation, coding=coding)

    def push_together(self) -> None:
        if len(set(self.clocks.values())) > 1 or any(self.creations.values()):
            return self.push()
        for key in self.keys:
            self.clocks[key] += 1
        for rank in self.random.sample((0, 1), 2):
            self.run.push_batch(rank, self.clocks["a"], *[self.value() for _ in self.keys])
        return None

    def broadcast(self) -> None:
        if self.run.settings.mode == "async":
            return self.push()
        key = self.random.choice(self.keys)
        self.clocks[key] += 1
        self.run.push(0, self.clocks[key], self.value(), key=key, how=1, creation=self.creations[key])
        self.run.push(1, self.clocks[key], self.value()[:0], key=key, how=2, creation=self.creations[key])
        return None

    def set_optimizer(self) -> None:
        self.optimizer = self.random.choice(self.optimizers)
        for rank in (0, 1):
            self.run.say(
                rank, SetOptimizer(self.run.request(), None if self.optimizer is None else to_wire(self.optimizer))
            )

    def change(self) -> None:
        if self.optimizer is not None:
            changes = {"learning_rate": self.random.choice([0.5, 0.25, 0.125])}
            for rank in (0, 1):
                self.run.say(rank, UpdateOptimizer(self.run.request(), changes))

    def store(self) -> None:
        if isinstance(self.optimizer, SGD) and self.optimizer.momentum:
            key = self.random.choice(self.keys)
            slot = "float32" if self.dtype == "float16" else self.dtype
            slots = (("slot/momentum", slot),)
            payload = np.array([self.random.uniform(-2, 2) for _ in range(5)], slot).tobytes()
            message = StoreState(self.run.request(), key, 0, self.random.randrange(9), slots, self.creations[key])
            assert self.run.say(0, message, payload)[-1:] == [Done(message.request)]

    def come(self) -> None:
        self.run.say(self.random.randrange(2), ComeTo(self.run.request(), self.random.randrange(1, 5)))

    def remake(self) -> None:
        key = self.random.choice(self.keys)
        name = KeyId(key, self.creations[key])
        for rank in (0, 1):
            self.run.say(rank, Delete(self.run.request(), (name,)))
        self.creations[key] = self.run.nodes[A].table.creation
        self.clocks[key] = 0
        said = self.run.create(key, self.value(), creation=self.creations[key])
        assert isinstance(said[-1], Done), said

    def loops(self) -> None:
        if self.run.settings.mode == "async":
            self.run.say(self.random.randrange(2), TakeStep(self.run.request(), self.loop, 4, NO_STEP))
            self.loop += self.random.random() < 0.3
