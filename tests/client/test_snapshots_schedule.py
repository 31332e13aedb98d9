"""The settings snapshot_dir, snapshot_every, snapshot_keep and restore: programs that have no line for snapshots."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import ConfigError, KeyExists, NotAllowed, NotResumed, ShapeMismatch, SnapshotError
from kvd.optimizer import SGD
from kvd.snapshots.folder import NewFolder
from kvd.snapshots.reader import StoredSnapshot
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import SLOW_TO_JUDGE, ones

KINDS = ["local", "dist_sync", "dist_async"]
EVERY = 3


class Killed(Exception):
    """The program dies here."""


def program(kv: kvd.KVStore, dies: Any = None) -> tuple[list[tuple[int, int]], Any]:
    """Two loops of five steps, with all that a program does before and between. Values are sums of powers of ten, so
    they do not depend on the order of workers."""
    kv.init(["w", "once"], [np.zeros(4)] * 2)
    kv.set_optimizer(SGD(1.0))
    first = np.full(4, 7.0 if kv.rank == 0 else 0.0)
    kv.broadcast("given", first)
    kv.push("once", -np.ones(4))
    made = []
    for epoch in range(2):
        for step in kv.steps(5, keys=["w"]):
            made.append((epoch, step))
            kv.push("w", np.full(4, -(10.0 ** (5 * epoch + step))))
            if dies is not None:
                dies(kv, 5 * epoch + step)
            if (epoch, step) == (0, 1):
                kv.flush()
                kv.barrier("all have pushed it")
                kv.update_optimizer(learning_rate=2.0)
        kv.push("once", -np.ones(4))
    kv.flush()
    kv.barrier("end")
    return made, [value.tolist() for value in kv.pull(["w", "once", "given"])]


def run(kind: str, dies: Any = None, program: Any = program, **settings: Any) -> Any:
    if kind == "local":
        with kvd.create("local", **settings) as kv:
            return [program(kv, dies)]
    with LocalCluster(2, 2, job="train", **settings) as cluster:
        return cluster.run(lambda kv: program(kv, dies), kind)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def taken(folder: Path, name: str) -> Any:
    return lambda: (folder / name).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_are_taken_and_the_oldest_go(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "made" / "by kvd"
    run(kind, snapshot_dir=folder, snapshot_every=EVERY, snapshot_keep=2)
    assert names(folder) == ["step-000006", "step-000009"]
    origins = [StoredSnapshot.open(folder / name).manifest.origin for name in names(folder)]
    assert [origin.steps for origin in origins] == [6, 9]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 4, 7])
def test_a_program_without_a_line_for_it_goes_on(tmp_path: Path, kind: str, step: int) -> None:
    """It dies as a whole, in step 1, 4 or 7, and is started again as it is."""
    (undisturbed,) = {str(values) for _, values in run(kind)}
    settings = {"snapshot_dir": tmp_path, "snapshot_every": EVERY, "restore": "auto"}
    newest = step // EVERY * EVERY

    def dies(kv: kvd.KVStore, made: int) -> None:
        if made == step:
            if newest:
                wait_until(taken(tmp_path, f"step-{newest:06d}"), "it is written")
            raise Killed

    with pytest.raises(Killed):
        run(kind, dies, **settings)
    results = run(kind, **settings)
    assert {str(values) for _, values in results} == {undisturbed}
    assert [made[0] for made, _ in results] == [divmod(newest, 5)] * len(results)
    assert names(tmp_path) == ["step-000003", "step-000006", "step-000009"]


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("step", [2, 3])
def test_a_worker_that_dies_beside_a_snapshot_is_started_again(tmp_path: Path, kind: str, rank: int, step: int) -> None:
    """In the step before it, which may be before or after the others read it, and in the step after it. Once in a run
    that was restored."""
    (undisturbed,) = {str(values) for _, values in run(kind)}
    settings: dict[str, Any] = {
        "snapshot_dir": str(tmp_path), "snapshot_every": EVERY, "restore": "auto", "job": "train"
    }  # fmt: skip
    with LocalCluster(2, 2, **settings, **SLOW_TO_JUDGE) as cluster:
        first = with_a_death(cluster, kind, rank, step)
    assert {str(values) for _, values in first} == {undisturbed}
    assert names(tmp_path)[-1] == "step-000009"
    for name in ("step-000009", "step-000006"):
        (tmp_path / name).rename(tmp_path / f".{name}")
    with LocalCluster(2, 1, **settings, **SLOW_TO_JUDGE) as cluster:
        second = with_a_death(cluster, kind, rank, step + 3)
    assert {str(values) for _, values in second} == {undisturbed}


def with_a_death(cluster: LocalCluster, kind: str, rank: int, step: int) -> list[Any]:
    """The results of two workers, one of which dies in a step and is started again."""

    def dies(kv: kvd.KVStore, made: int) -> None:
        if (kv.rank, made) == (rank, step) and not kv.restarted:
            raise Killed

    def run(store: kvd.KVStore) -> Any:
        try:
            result = program(store, dies)
            store.close()
            return result
        except Killed:
            store.__exit__(Killed, None, None)
            return run(cluster.store(kind, node_id=f"worker-{rank}", preferred_rank=rank))

    stores = cluster.open_stores(kind, [{"node_id": f"worker-{number}"} for number in range(2)])
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run, store) for store in stores]
    return [future.result() for future in running]


# ── restored keys and optimizers ──


@pytest.mark.parametrize("kind", KINDS)
def test_init_of_a_restored_key_changes_nothing_once(tmp_path: Path, kind: str) -> None:
    def before(kv: kvd.KVStore, _: Any) -> None:
        kv.init(["a", "b"], [ones() * 5] * 2)
        kv.snapshot(tmp_path / "taken")

    def after(kv: kvd.KVStore, _: Any) -> None:
        kv.restore(tmp_path)  # the newest in it
        with pytest.raises(ShapeMismatch, match="key 'a' has shape"):
            kv.init("a", ones(7))
        kv.init(["a", "new"], [ones()] * 2)
        assert [value.tolist() for value in kv.pull(["a", "new"])] == [[5.0] * 4, [1.0] * 4]
        kv.barrier("pulled")
        with pytest.raises(KeyExists):
            kv.init("a", ones())
        kv.delete("b")
        kv.init("b", ones(2))
        assert kv.pull("b").tolist() == [1.0] * 2

    run(kind, program=before)
    run(kind, program=after)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_the_optimizer_stays_and_a_program_that_wants_another_is_told(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(kv: kvd.KVStore, rate: Any) -> Any:
        kv.init("w", ones() * 0)
        kv.set_optimizer(SGD(rate or 1.0, momentum=1.0))
        for step in kv.steps(4):
            kv.push("w", -ones() / kv.num_workers)
            if step == 1 and not rate:
                kv.snapshot(tmp_path / "step-2")
                break
        kv.flush()
        kv.barrier()
        return kv.pull("w").tolist()

    run(kind, None, train)
    with caplog.at_level(logging.WARNING, "kvd"):
        values = run(kind, 0.5, train, snapshot_dir=tmp_path, restore="auto")
    assert values == [[10.0] * 4] * len(values)  # 1 + 2 + 3 + 4
    assert "the optimizer stays SGD(" in caplog.text


# ── what is refused ──


def test_settings_that_do_not_fit() -> None:
    for settings in ({"snapshot_every": 5}, {"restore": "auto"}, {"restore": "older"}):
        with pytest.raises(ConfigError, match="needs a folder: set snapshot_dir") as caught:
            kvd.create("local", **settings)
        assert caught.value.setting == "snapshot_dir"
    for name, value in (("snapshot_every", -1), ("snapshot_keep", 0), ("restore", "newest")):
        with pytest.raises(ConfigError, match=f"{name} = .*expected"):
            kvd.create("local", **{"snapshot_dir": "/tmp", name: value})


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_what_cannot_be_restored_is_said_by_create_in_all_workers(tmp_path: Path, kind: str) -> None:
    settings = {"snapshot_dir": tmp_path, "snapshot_every": EVERY, "snapshot_keep": 2}
    run(kind, **settings)
    part = max((tmp_path / "step-000009").glob("part-*"))  # of the keys that have changed: no other snapshot has it
    data = bytearray(part.read_bytes())
    data[-3] ^= 1
    part.write_bytes(data)
    with pytest.raises(SnapshotError, match="damaged: its checksum") as caught:
        run(kind, **settings, restore="auto")
    assert caught.value.path == str(part)
    with pytest.raises(SnapshotError, match=r"step-000006 is a snapshot of this job after 6 steps.*restore = auto"):
        run(kind, **settings)
    results = run(kind, **settings, restore="older")
    assert results[0][0][0] == (1, 1)
    assert names(tmp_path) == ["step-000006", "step-000009"]
    StoredSnapshot.open(tmp_path / "step-000009").verify()  # the damaged one made room
    with pytest.raises(SnapshotError, match=r"has snapshots of job .*, and none of this one, which is"):
        run("dist_sync" if kind == "local" else "local", **settings, restore="auto")


def test_loops_and_programs_that_have_no_place_for_snapshots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def shared(kv: kvd.KVStore, _: Any) -> None:
        kv.init("w", ones())
        with pytest.raises(NotAllowed, match="workers that share their steps come to no place"):
            next(iter(kv.steps(4, shared=True)))

    def without(kv: kvd.KVStore, _: Any) -> None:
        kv.init("w", ones())
        kv.push("w", ones())

    settings = {"snapshot_dir": tmp_path, "snapshot_every": EVERY}
    run("dist_async", program=shared, **settings)
    for kind in ("local", "dist_sync"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvd"):
            run(kind, program=without, **settings)
        assert "this program has no loop over kv.steps: no snapshot was taken" in caplog.text


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = NewFolder.write, ["part-00000.safetensors"]

    def once_full(folder: NewFolder, name: str, *what: Any) -> None:
        if full and name == full[0]:
            full.clear()
            raise OSError(28, "No space left on device")
        write(folder, name, *what)

    monkeypatch.setattr(NewFolder, "write", once_full)
    run(kind, snapshot_dir=tmp_path, snapshot_every=EVERY)
    assert names(tmp_path) == ["step-000006", "step-000009"]
    assert "no snapshot after step 3, the training goes on: " in caplog.text
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_folder_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="snapshot_dir is to be a folder that worker 0 can write to"):
        run(kind, snapshot_dir=tmp_path / "file" / "folder", snapshot_every=EVERY, worker_timeout_s=2.0)


@pytest.mark.asyncio
async def test_in_an_event_loop(tmp_path: Path) -> None:
    settings = {"snapshot_dir": tmp_path, "snapshot_every": 2, "restore": "auto"}
    for begins in (0, 4):
        async with await kvd.aio.create("local", **settings) as kv:
            await kv.init("w", ones() * 0)
            made = []
            async for step in kv.steps(5, restored=True):
                made.append(step)
                await kv.push("w", ones())
            assert made == list(range(begins, 5))
    assert names(tmp_path) == ["step-000002", "step-000004"]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_job_without_an_optimizer_does_not_skip_steps_in_silence(tmp_path: Path, kind: str) -> None:
    """The launcher restores the values of the store, of which the program need not know."""

    def make(kv: kvd.KVStore, how: Any) -> list[int]:
        kv.init("w", ones() * 0)
        made = []
        for step in kv.steps(5, **(how or {})):
            kv.push("w", ones())
            made.append(step)
        return made

    settings: dict[str, Any] = {"program": make, "snapshot_dir": tmp_path, "snapshot_every": 2, "restore": "auto"}
    assert run(kind, **settings)[0] == list(range(5))
    with pytest.raises(NotResumed, match=r"the job was restored from a snapshot, and kv.steps skips"):
        run(kind, **settings, worker_timeout_s=2.0)
    assert run(kind, {"restored": True}, **settings)[0] == [4]
