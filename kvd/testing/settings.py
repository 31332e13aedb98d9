"""The sizes, settings and patience of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.protocol.messages import Settings


@dataclass(frozen=True, slots=True)
class Cluster:
    """What its nodes are started with. Slices and credit are small, so that little data takes many messages."""

    servers: int = 2
    workers: int = 3
    mode: str = "sync"
    merge: str = "sum"
    staleness: int = -1
    rounds_ahead: int = 2
    num_shards: int = 16
    slice_bytes: int = 4096
    credit_bytes: int = 16 << 10
    small_push_bytes: int = 512
    memory_limit_bytes: int = 16 << 20
    heartbeat_interval_s: float = 1.0
    server_timeout_s: float = 10.0
    worker_timeout_s: float = 10.0
    call_timeout_s: float = 120.0
    fail_on_worker_loss: bool = True
    job_s: tuple[float, float] = (0.0, 0.01)
    persist_s: tuple[float, float] = (0.001, 0.03)
    failing_updates: float = 0.0  # so many of 1
    state_dir: bool = True  # the scheduler saves its record

    def settings(self, mode: str | None = None) -> Settings:
        """As the scheduler is given them, or a worker that insists on a mode."""
        return Settings(
            self.mode if mode is None else mode,
            self.merge,
            self.staleness,
            self.rounds_ahead,
            self.slice_bytes,
            self.workers,
            self.servers,
            self.num_shards,
        )
