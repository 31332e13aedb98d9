"""What the steps of nodes cost on a machine: measured numbers, which a file keeps."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Of a worker's processor, in seconds.

    Attributes:
        call_s: a call of the program, from its arguments to its result, without what follows.
        key_s: each key of a call.
        message_s: each message, sent or received.
        byte_s: each byte of a value, pushed or pulled.
        switch_s: each time that another process had the core before: what its caches have forgotten.
        cold_key_s: each key that comes first after another process had the core, besides `key_s`: what is kept for it
            has left the caches.
        late_key_s: of `key_s` and for each key, what comes when the messages of the call have left: the servers work
            meanwhile. At most half of it.
    """

    call_s: float
    key_s: float
    message_s: float
    byte_s: float
    switch_s: float = 0.0
    cold_key_s: float = 0.0
    late_key_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """Of a server's processor, in seconds.

    Attributes:
        message_s: each message, sent or received.
        slice_s: each slice of a round.
        merged_slice_s: each slice of each push that is merged.
        byte_s: each byte of a value on its way through a socket, in either direction.
        round_s: each round of a slice, or of slices that are fused.
        merged_byte_s: each byte that is merged.
        version_byte_s: each byte of a new version.
        switch_s: as of a worker.
    """

    message_s: float
    slice_s: float
    merged_slice_s: float
    byte_s: float
    round_s: float
    merged_byte_s: float
    version_byte_s: float
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SchedulerCosts:
    """Of the scheduler's processor, in seconds.

    Attributes:
        message_s: each message, sent or received.
        byte_s: each byte of these.
    """

    message_s: float
    byte_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """All of a machine, for one way in which values travel.

    Attributes:
        wake_s: from an event until a process that sleeps on an idle core handles it.
        memory_bytes_per_s: that all cores of a host can read or write together.
    """

    worker: WorkerCosts
    server: ServerCosts
    scheduler: SchedulerCosts
    wake_s: float
    memory_bytes_per_s: float

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Costs:
        """The opposite of `to_json`.

        Raises:
            ValueError: the text is something else.
        """
        try:
            fields = json.loads(text)
            return Costs(
                WorkerCosts(**fields.pop("worker")),
                ServerCosts(**fields.pop("server")),
                SchedulerCosts(**fields.pop("scheduler")),
                **fields,
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"these are no costs: {error}") from None


def read_costs(text: str) -> dict[str, Costs]:
    """The costs by way of values, from a file of this path that `write_costs` has made.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        found = json.loads(Path(text).read_text())
        return {way: Costs.from_json(json.dumps(costs)) for way, costs in found.items()}
    except (OSError, AttributeError) as error:
        raise ValueError(str(error)) from None


def write_costs(file: Path, costs: dict[str, Costs]) -> None:
    """Keep them for later runs."""
    file.write_text(json.dumps({way: dataclasses.asdict(each) for way, each in costs.items()}, indent=1) + "\n")
