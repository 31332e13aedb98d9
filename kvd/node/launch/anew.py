"""A job whose values are gone begins again from its newest snapshot: how often, and how soon."""

from __future__ import annotations

from kvd.node.launch.job import Job
from kvd.node.launch.restart_policy import Restart, RestartCount


class Anew:
    """Counts the runs of a job that restores.

    Attributes:
        is_due: whether all processes are to end, and the next run is to begin.
    """

    def __init__(self, job: Job) -> None:
        self.is_due = False
        self._job = job
        self._count = RestartCount(job.restarts)
        self._delay_s = 0.0
        self._servers_ended = 0  # in this run

    @property
    def may_have_lost_copies(self) -> bool:
        """Whether so many servers have ended in this run that both copies of a value may be gone."""
        return self._job.replicas > 1 and self._servers_ended >= self._job.replicas

    def server_ended(self) -> None:
        """One more server has ended, whatever becomes of it."""
        self._servers_ended += 1

    def plan(self, ran_s: float) -> Restart | None:
        """Have the job begin again.

        Args:
            ran_s: how long that process had run whose end is the reason.

        Returns:
            The restart, or None: the job does not restore, or has had all of its restarts.
        """
        if self.is_due or not self._job.restores:
            return None
        restart = self._count.next(ran_s)
        if restart is not None:
            self.is_due, self._delay_s = True, restart.delay_s
        return restart

    def begin(self) -> float:
        """The next run begins, after so many seconds."""
        self.is_due = False
        self._servers_ended = 0
        return self._delay_s
