"""An operator restores a snapshot before the workers come: a new run of the job begins with its keys, and waits.

The operator comes as worker 0, makes the keys, leaves a note with the scheduler, and gives its place back as if it had
never come. The scheduler lets the next program of the job into that run (`kvd.core.scheduler.runs.table`). There,
worker 0 finds the note when the program calls `kv.restore`, and all workers go on after the step of the snapshot. A run
without the note is not prepared: if the operator dies before that, nobody gets what it has made.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvd.client.calls.backend import store_type
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.held_signals import uninterrupted
from kvd.client.calls.snapshot_outcome import Outcome
from kvd.client.cluster.answers import list_keys
from kvd.client.cluster.backend import cluster_settings
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.joining import Arrival, Joining
from kvd.client.cluster.restoring import restore_keys
from kvd.config import Loaded
from kvd.core import requests
from kvd.core.membership import name_of
from kvd.errors import NotAllowed
from kvd.protocol.messages import PREPARED
from kvd.snapshots.reader import StoredSnapshot


class Prepared(NamedTuple):
    """What a run was given.

    Attributes:
        steps: its program goes on after so many.
    """

    keys: int
    nbytes: int
    steps: int
    num_workers: int
    num_servers: int


class Preparation:
    """One snapshot for the next run of a job.

    Raises:
        SnapshotError: it is damaged, not finished, or none.
        NotAllowed: it has the state of a program, which worker 0 reads itself.
    """

    def __init__(self, folder: Path) -> None:
        self._snapshot = StoredSnapshot.open(folder)
        if self._snapshot.manifest.program is not None:
            raise NotAllowed(
                f"{folder} has weights and optimizer states that the workers keep themselves, and that servers cannot "
                f"give them: start the program with the settings snapshot_dir and restore = auto, or have it call "
                f"kv.restore"
            )
        self._snapshot.verify()  # before a run begins

    @property
    def type_name(self) -> str:
        """The type of the stores that train in the run, unless another is wanted."""
        own = self._snapshot.manifest.origin.type
        return own if own.startswith("dist") else "dist_sync"

    @uninterrupted
    def make(self, loaded: Loaded, type_name: str, arrival: Arrival) -> Prepared:
        """Begins the run, and gives it the keys.

        Args:
            arrival: how the operator comes.

        Raises:
            JobBusy: the job is running.
            NotAllowed: it has keys, or its workers are coming already.
            ConnectError, RequestTimeout, ConfigError: see `Joining.wait`.
        """
        config = replace(loaded.config, run="", preferred_rank=0)  # no program's token: a run that fails is nobody's
        deadline = Deadline(config.join_timeout_s)
        engine = arrival.start(config, "worker", cluster_settings(loaded, store_type(type_name)), deadline)
        try:
            rank = Joining(engine, arrival).wait(deadline)
            if rank != 0:
                text = f"worker 0 of job {loaded.config.job!r} is there already, as this is {name_of('worker', rank)}"
                raise NotAllowed(f"{text}: restore before its program starts, or call kv.restore in it")
            prepared: Prepared = engine.run(self._make(engine)).result()
        finally:
            engine.withdraw()
        return prepared

    async def _make(self, engine: Engine) -> Prepared:
        content = self._snapshot.manifest
        found = await list_keys(engine)
        if found:
            text = f"this job has keys already, such as {found[0][1].key!r}: was it prepared before?"
            raise NotAllowed(f"{text} kvd jobs shows it; kvd jobs end {engine.config.job} frees its name")
        await restore_keys(engine, self._snapshot)
        outcome = Outcome(content.origin.steps, content.origin.lineage)
        await engine.call(requests.Tell(PREPARED, outcome.to_note()))
        settings = engine.machine.view.settings
        nbytes = sum(part.nbytes for part in content.parts)
        return Prepared(len(content.keys), nbytes, content.origin.steps, settings.num_workers, settings.num_servers)
