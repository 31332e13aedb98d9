"""The optimizer on the servers: set by everyone, changed at a step, saved and loaded into another cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import KeyNotFound, NotAllowed
from kvd.optimizer import SGD, Adam
from kvd.testing.cluster import LocalCluster

SHAPES: list[tuple[int, ...]] = [(300, 70), (5,), ()]
KEYS: list[str | int] = ["a", "b|c", 7]
SLICE_BYTES = 16 << 10


def train(kv: kvd.KVStore, first: int, last: int) -> list[Any]:
    for step in range(first, last):
        rng = np.random.default_rng([step, kv.rank])
        kv.push(KEYS, [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES])
    values: list[Any] = kv.pull(KEYS)
    return values


@pytest.mark.parametrize("dump", [True, False])
@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), Adam(0.01)], ids=["SGD", "Adam"])
def test_states_go_through_a_file_into_another_number_of_servers(tmp_path: Path, optimizer: Any, dump: bool) -> None:
    path = tmp_path / "states"

    def whole(kv: kvd.KVStore) -> list[Any]:
        kv.init(KEYS, [np.full(shape, 0.5, np.float32) for shape in SHAPES])
        kv.set_optimizer(optimizer)
        return train(kv, 0, 10)

    def before(kv: kvd.KVStore) -> list[Any]:
        kv.init(KEYS, [np.full(shape, 0.5, np.float32) for shape in SHAPES])
        kv.set_optimizer(optimizer)
        values = train(kv, 0, 5)
        kv.barrier("trained")
        kv.save_optimizer_states(path if kv.rank == 0 else tmp_path / "other", dump)
        return values

    def after(kv: kvd.KVStore) -> list[Any]:
        kv.init(KEYS, weights)
        if not dump:
            kv.set_optimizer(optimizer)
        kv.load_optimizer_states(path)
        kv.barrier("loaded")
        return train(kv, 5, 10)

    with LocalCluster(2, 2, slice_bytes=SLICE_BYTES) as cluster:
        expected = cluster.run(whole)[0]
    with LocalCluster(2, 3, slice_bytes=SLICE_BYTES) as cluster:
        weights = cluster.run(before)[0]
    for num_servers in (1, 2):
        with LocalCluster(2, num_servers, slice_bytes=SLICE_BYTES // 2) as cluster:
            for values in cluster.run(after):
                for value, wanted in zip(values, expected, strict=True):
                    np.testing.assert_array_equal(value, wanted)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "states"]


def test_all_workers_may_save_to_the_same_path(tmp_path: Path) -> None:
    def program(kv: kvd.KVStore) -> None:
        kv.init(KEYS, [np.full(shape, 0.5, np.float32) for shape in SHAPES])
        kv.set_optimizer(SGD(0.1, momentum=0.9))
        train(kv, 0, 1)
        kv.barrier("trained")
        for _ in range(5):
            kv.save_optimizer_states(tmp_path / "states")
        kv.barrier("saved")
        kv.load_optimizer_states(tmp_path / "states")

    with LocalCluster(3, 1) as cluster:
        cluster.run(program)
    assert [file.name for file in tmp_path.iterdir()] == ["states"]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_what_cannot_be_saved_or_loaded(tmp_path: Path, kind: str) -> None:
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store() if kind == "dist_sync" else kvd.create(kind)
        kv.init("w", np.zeros(6, np.float32))
        with pytest.raises(NotAllowed, match="no optimizer is set"):
            kv.save_optimizer_states(tmp_path / "none")
        with pytest.raises(NotAllowed, match="no optimizer is set"):
            kv.update_optimizer(learning_rate=1.0)
        kv.set_optimizer(SGD(0.1, momentum=0.9))
        kv.push("w", np.ones(6, np.float32))
        kv.pull("w")
        good = tmp_path / "good"
        kv.save_optimizer_states(good)
        with pytest.raises(OSError, match="No such file"):
            kv.save_optimizer_states(tmp_path / "no" / "folder" / "file")
        with pytest.raises(FileNotFoundError):
            kv.load_optimizer_states(tmp_path / "nothing")
        data = good.read_bytes()
        for number, bad in enumerate((b"", b"garbage" * 20, data[:-3], data[:100], b"\xff" * 8 + data[8:])):
            path = tmp_path / f"bad-{number}"
            path.write_bytes(bad)
            with pytest.raises(NotAllowed, match="holds no optimizer states"):
                kv.load_optimizer_states(path)
        negative = data.replace(b'{\\"w\\": 1}', b'{\\"w\\":-1}')
        assert negative != data
        (tmp_path / "negative").write_bytes(negative)
        with pytest.raises(NotAllowed, match="holds no optimizer states"):
            kv.load_optimizer_states(tmp_path / "negative")
        with kvd.create("local") as other:
            other.init("w", np.zeros(7, np.float32))
            with pytest.raises(NotAllowed):
                other.load_optimizer_states(good)
        with kvd.create("local") as other, pytest.raises(KeyNotFound):
            other.load_optimizer_states(good)
        kv.load_optimizer_states(good)


def test_an_optimizer_that_every_worker_sets_is_set_once() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(3, np.float32))
        for step in range(4):
            kv.set_optimizer(SGD(1.0, momentum=0.5))
            kv.push("w", np.full(3, -1, np.float32))
            kv.pull("w")
            kv.barrier(f"step {step}")
        return kv.pull("w").tolist()

    # velocity 2, 3, 3.5, 3.75: not forgotten between the steps
    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == [[12.25] * 3] * 2


def test_changed_hyperparameters_count_from_the_next_clock_on() -> None:
    """Rank 0 changes the rate between its clocks 3 and 4, wherever the servers and the others are then."""

    def program(kv: kvd.KVStore) -> Any:
        shape = (70, 130)  # several slices, on both servers
        kv.init("w", np.zeros(shape, np.float32))
        kv.set_optimizer(SGD(1.0))
        seen = []
        for step in range(1, 7):
            if step == 4 and kv.rank == 0:
                kv.update_optimizer(learning_rate=0.25)
            if step % 2:
                value = kv.pushpull("w", np.full(shape, -(kv.rank + 1), np.float32))
            else:
                kv.push("w", np.full(shape, -(kv.rank + 1), np.float32))
                value = kv.pull("w")
            assert (value == value[0, 0]).all()
            seen.append(float(value[0, 0]))
        return seen

    expected = [3.0, 6.0, 9.0, 9.75, 10.5, 11.25]
    with LocalCluster(2, 2, slice_bytes=4 << 10) as cluster:
        assert cluster.run(program) == [expected] * 2


def test_keys_have_learning_rates_and_decays_of_their_own() -> None:
    """In a list, where the servers update small keys together, and in slices; changed while the state is kept."""

    def program(kv: kvd.KVStore) -> Any:
        names: list[str | int] = ["weight", "bias", 7]
        kv.init(names, [np.zeros(2500, np.float32), np.zeros(3, np.float32), np.full(1, 4, np.float32)])
        kv.set_optimizer(SGD(1.0, momentum=0.5, wd=0.25, lr_mult={"bias": 2}, wd_mult={"*": 0, 7: 1}))
        seen = []
        for step in range(3):
            if step == 2:
                kv.barrier("two steps")
                kv.update_optimizer(lr_mult={"weight": 0, 7: 0}, wd_mult={"*": 0})
            kv.push(names, [np.full(shape, -1, np.float32) for shape in ((2500,), (3,), (1,))])
            values = kv.pull(names)
            assert all((value == value[0]).all() for value in values)
            seen.append([float(value[0]) for value in values])
        return seen

    # weight, bias: velocity −n, −1.5n, −1.75n for n workers. 7: with n = 2, g = −2 + 1 = −1, w = 5; g = −2 + 1.25 =
    # −0.75, b = −1.25, w = 6.25; then its rate is 0.
    with LocalCluster(2, 2, slice_bytes=4 << 10) as cluster:
        assert cluster.run(program) == [[[2, 4, 5], [5, 10, 6.25], [5, 13.5, 6.25]]] * 2
    # alone: g = −1 + 1 = 0, w = 4; g = −1 + 1 = 0
    with kvd.create("local") as local:
        assert program(local) == [[1, 2, 4], [2.5, 5, 4], [2.5, 6.75, 4]]


def test_hyperparameters_that_do_not_exist() -> None:
    with LocalCluster(1, 1) as cluster, kvd.create("local") as local:
        for kv in (cluster.store(), local):
            kv.init("w", np.zeros(3, np.float32))
            kv.set_optimizer(SGD(1.0))
            for changes in (
                {"no_such": 1.0},
                {"learning_rate": "fast"},
                {"learning_rate": float("nan")},
                {"wd": -1.0},
                {"lr_mult": {"w": -1}},
            ):
                with pytest.raises((NotAllowed, kvd.KvdError, ValueError, TypeError)):
                    kv.update_optimizer(**changes)
            kv.push("w", np.full(3, -1, np.float32))
            assert kv.pull("w").tolist() == [1] * 3


def test_an_optimizer_does_not_update_integers() -> None:
    with LocalCluster(1, 1) as cluster, kvd.create("local") as local:
        for kv in (cluster.store(), local):
            kv.init("w", np.zeros(3, np.int64))
            kv.set_optimizer(SGD(1.0))
            with pytest.raises(NotAllowed, match="float keys only"):
                kv.pushpull("w", np.ones(3, np.int64))
            kv.set_optimizer(None)
            assert kv.pushpull("w", np.full(3, 2, np.int64)).tolist() == [2] * 3


def test_an_updater_is_for_stores_in_this_process() -> None:
    with LocalCluster(1, 1) as cluster, kvd.create("local") as local:
        with pytest.raises(NotAllowed, match="no code crosses the wire"):
            cluster.store().set_updater(lambda key, received, stored: None)

        def add(key: str, received: Any, stored: Any) -> None:
            stored += received

        local.init("w", np.ones((2, 2), np.float32))
        local.set_updater(add)
        local.push("w", np.full((2, 2), 3, np.float32))
        assert local.pull("w").tolist() == [[4, 4], [4, 4]]
