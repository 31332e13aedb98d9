"""The sizes, settings and timeouts of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.protocol.messages import Settings

NUM_SHARDS = 16


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the nodes wait, in seconds, and for how many workers at least: `quorum`; 0: for all."""

    heartbeat_interval_s: float = 1.0
    server_timeout_s: float = 10.0
    worker_timeout_s: float = 10.0
    call_timeout_s: float = 120.0
    answer_timeout_s: float = 60.0
    notice_s: float = 10.0
    quorum: int = 0
    quorum_grace_s: float = 1.0


@dataclass(frozen=True, slots=True)
class ShellSettings:
    """How the simulated shell carries effects out.

    Attributes:
        job_s: the shortest and the longest time that a job takes.
        persist_s: the shortest and the longest time that saving the scheduler's record takes.
        failing_updates: the fraction of updates that fail.
        state_dir: the scheduler saves its record.
    """

    job_s: tuple[float, float] = (0.0, 0.01)
    persist_s: tuple[float, float] = (0.001, 0.03)
    failing_updates: float = 0.0
    state_dir: bool = True


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What the nodes are started with. Slices and credit are small, so that even little data takes many messages."""

    servers: int = 2
    workers: int = 3
    mode: str = "sync"
    merge: str = "sum"
    staleness: int = -1
    rounds_ahead: int = 2
    replicas: int = 1
    slice_bytes: int = 4096
    credit_bytes: int = 16 << 10
    small_push_bytes: int = 512
    memory_limit_bytes: int = 16 << 20
    on_worker_loss: str = "fail"
    max_workers: int = 0
    timeouts: Timeouts = field(default_factory=Timeouts)
    shell: ShellSettings = field(default_factory=ShellSettings)

    def wire(self, num_shards: int = NUM_SHARDS) -> Settings:
        """The settings as nodes exchange them."""
        return Settings(
            self.mode,
            self.merge,
            self.staleness,
            self.rounds_ahead,
            self.slice_bytes,
            self.workers,
            self.servers,
            num_shards,
            self.replicas,
            self.timeouts.quorum,
            self.timeouts.quorum_grace_s if self.timeouts.quorum else 0.0,
            self.max_workers,
        )
