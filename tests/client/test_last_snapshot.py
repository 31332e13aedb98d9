"""The status of a cluster says after which step its program has written its last snapshot, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

import kvd
from kvd.client.calls.promise import Promise
from kvd.client.cluster.observer import Observer
from kvd.client.cluster.publication import NAME, Publication
from kvd.config import load
from kvd.core.requests import Tell
from kvd.errors import RequestTimeout, SnapshotError
from kvd.protocol.messages import LAST_SNAPSHOT
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import ones


def last_snapshot(cluster: LocalCluster) -> Any:
    with Observer(load({**cluster.settings, "scheduler": cluster.address}).config) as observer:
        return observer.status()["last_snapshot"]


@pytest.mark.parametrize("call", ["snapshot", "snapshot_async"])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_the_step_and_the_time(tmp_path: Path, kind: str, call: str) -> None:
    with LocalCluster(1, 1) as cluster:

        def program(kv: kvd.KVStore) -> None:
            kv.init("w", ones() * 0)
            assert last_snapshot(cluster) is None
            for step in kv.steps(3):
                kv.pushpull("w", ones())
                if step == 1:
                    before = int(time.time())
                    taken = getattr(kv, call)(tmp_path / "taken")
                    if taken is not None:
                        taken.wait()
                    seen = wait_until(lambda: last_snapshot(cluster), "the scheduler has the note")
                    assert seen["step"] in (1, 2)
                    assert before <= seen["at"] <= time.time() + 1
                    (tmp_path / "file").touch()
                    with pytest.raises(SnapshotError):
                        kv.snapshot(tmp_path / "file" / "not possible")
                    assert last_snapshot(cluster) == seen

        cluster.run(program, kind)


def test_the_other_workers_hear_of_a_snapshot_though_the_status_does_not() -> None:
    heard: list[str] = []

    class SlowEngine:
        def run(self, work: Coroutine[Any, Any, Any]) -> None:
            asyncio.run(work)

        async def call(self, request: Tell) -> None:
            if request.name == LAST_SNAPSHOT:
                raise RequestTimeout("the scheduler is gone", outcome="unknown")
            heard.append(request.name)

    written, engine = Promise(), SlowEngine()
    written.set_result(None)
    Publication(engine, 0, is_writer=True).announce(written, "token", 3)  # type: ignore[arg-type]
    assert heard == [NAME]
