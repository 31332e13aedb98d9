"""A hostile process in the simulator: it says valid messages with arbitrary fields to every daemon, and to workers in
the name of a daemon. The simulator validates each machine after each step, and encodes all that it answers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from kvd.core.machine import SCHEDULER, Effect, Event, ServerPeer
from kvd.errors import ProtocolError
from kvd.protocol.codec import encode
from kvd.protocol.messages import BIGGEST, NO_RUN, NO_VIEW, Epoch
from tests.fuzz.making import KINDS, TEXTS, Maker
from tests.simulator.machines import SCHEDULER_ADDRESS
from tests.simulator.process import Process
from tests.simulator.simulator import World

SMALL = (0, 1, 2, 3, 4, 5, 8, 16, 63, 4096, BIGGEST - 1, BIGGEST)
NAMES = (*TEXTS, "t", "u", "worker-0", "worker-1", "server-0", "program", "kvd:exit", "barrier")
PAYLOADS = (0, 1, 8, 20, 64, 200, 488, 512, 4096)  # some are row ids, and some rows of a table


class Deaf:
    """A machine that does nothing with what it hears."""

    incarnation = 0x666
    run = NO_RUN
    epoch = NO_VIEW

    def step(self, event: Event, now: float) -> list[Effect]:
        return []

    def next_deadline(self) -> float | None:
        return None

    def explain(self, now: float, run: int = NO_RUN) -> dict[str, object]:
        return {}

    def validate(self) -> None:
        pass


class Hostile:
    """Says something at times that its seed draws, until the world ends.

    Args:
        world: where it does harm.
        kinds: the messages that it knows.
        knows: whether it knows the incarnations of the others, and speaks in their name.
        to_workers: whether it also speaks to workers, as if it were their scheduler or server.
        **given: fields of its messages that it does not choose.

    Attributes:
        said: how many messages so far.
    """

    def __init__(
        self,
        world: World,
        seed: int,
        kinds: Sequence[type[Any]] = KINDS,
        *,
        knows: bool,
        to_workers: bool = False,
        **given: Any,
    ) -> None:
        self.said = 0
        self._world = world
        self._random = Random(seed)
        self._kinds = kinds
        self._knows = knows
        self._to_workers = to_workers
        self._given = given
        self._process = Process("hostile", 0, Deaf())
        world.clock.after(0.01, self._act)

    def _act(self) -> None:
        for _ in range(self._random.randrange(1, 6)):
            message = self._message()
            if message is not None:
                self._say(*message)
        self._world.clock.after(self._random.uniform(0.01, 0.15), self._act)

    def _message(self) -> tuple[bytes, bytes | None] | None:
        random = self._random
        numbers = [*SMALL, *self._incarnations(), *self._runs()] if self._knows else SMALL
        maker = Maker(random, numbers, NAMES)
        sender = random.getrandbits(61) + 1
        if self._knows and random.random() < 0.7:
            sender = random.choice(self._incarnations())
        run = random.choice([NO_RUN, *self._runs(), random.getrandbits(61)])
        epoch = Epoch(random.choice(SMALL[:4]), random.choice(SMALL)) if random.random() < 0.7 else NO_VIEW
        try:
            header = encode(maker.message(self._kinds, **self._given), sender, epoch, run)
        except (ProtocolError, OverflowError):  # too long, or plain data that msgpack does not have
            return None
        return header, None if random.random() < 0.4 else random.randbytes(random.choice(PAYLOADS))

    def _say(self, header: bytes, payload: bytes | None) -> None:
        world, random = self._world, self._random
        self.said += 1
        workers = [process for process in world.processes.values() if process.name.startswith("worker")]
        if self._to_workers and workers and random.random() < 0.5:
            self._say_as_a_daemon(random.choice(workers), header, payload)
            return
        peer, address = random.choice(
            [(SCHEDULER, SCHEDULER_ADDRESS)]
            + [
                (ServerPeer(process.machine.incarnation), process.address)
                for process in world.processes.values()
                if process.name.startswith("server")
            ]
        )
        if peer not in self._process.connections:
            world.network.connect(self._process, peer, address)
        world.network.send(self._process, peer, header, payload)

    def _say_as_a_daemon(self, worker: Process, header: bytes, payload: bytes | None) -> None:
        """On a connection that the worker has opened, from its other end."""
        if worker.connections:
            connection = self._random.choice(list(worker.connections.values()))
            if connection.server is not None:
                self._world.network.send(connection.server, connection.route, header, payload)

    def _incarnations(self) -> list[int]:
        return [process.machine.incarnation for process in self._world.processes.values()]

    def _runs(self) -> list[int]:
        return sorted({process.machine.run for process in self._world.processes.values()} - {NO_RUN})
