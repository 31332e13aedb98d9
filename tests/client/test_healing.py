"""Workers with an optimizer of their own are killed at named moments, and end with the bits of an undisturbed run."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.facades.blocking import healing_of
from kvd.errors import Deadlock, NotAllowed, RequestTimeout, StateLost
from kvd.testing.cluster import LocalCluster, engine_of, wait_until
from tests.client import healing_program as program
from tests.faults.programs import finish

WORKERS = 3
SETTINGS: dict[str, Any] = {"on_worker_loss": "wait", "worker_timeout_s": 30.0, "request_timeout_s": 60.0}
CODE = "from tests.client.healing_program import main; main()"
PATIENCE_S = 240.0


def undisturbed(total: int) -> str:
    """The digest, by a calculation in one process: contributions are added in the order of the ranks."""
    weights = program.first_weights()
    momentum = {key: np.zeros_like(array) for key, array in weights.items()}
    for step in range(total):
        for key in program.SIZES:
            merged = program.gradient(key, weights[key], 0, step)
            for rank in range(1, WORKERS):
                merged = merged + program.gradient(key, weights[key], rank, step)
            program.update(weights[key], momentum[key], merged)
    return program.digest_of(weights, momentum)


def supervise(cluster: LocalCluster, total: int, deaths: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the program in all workers, starts those again that kill themselves, and returns their results."""
    marks = cluster.folder / "deaths"
    marks.mkdir()

    def start(number: int) -> subprocess.Popen[bytes]:
        return cluster.script(CODE, number, str(total), str(marks), *deaths)

    running = [start(number) for number in range(WORKERS)]
    until = time.monotonic() + PATIENCE_S
    try:
        while any(process.poll() is None for process in running) or any(each.returncode == -9 for each in running):
            for number, process in enumerate(running):
                if process.poll() == -9:
                    assert process.stdout is not None
                    process.stdout.close()
                    running[number] = start(number)
            assert time.monotonic() < until, f"not done: {sorted(path.name for path in marks.iterdir())}"
            time.sleep(0.02)  # a turn: several processes may end, and some are started again
        results = [finish(process) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert len(list(marks.iterdir())) == len(deaths), "a death did not happen"
    return results


def check(results: Sequence[dict[str, Any]], total: int) -> None:
    assert {result["digest"] for result in results} == {undisturbed(total)}
    assert all(result["made"] == sorted(set(result["made"])) for result in results)


@pytest.mark.timeout(PATIENCE_S + 30)
def test_each_moment_of_death() -> None:
    total = 18
    deaths = [
        *("1:1:before", "2:3:half", "0:4:sent", "1:6:over", "2:8:updated", "0:9:updated"),
        *("0:10:half", "2:10:half"),  # two in one step
        *("0:12:before", "1:*:serving"),  # the donor, too
        *("2:14:before", "2:*:receiving", "2:*:received"),  # the newcomer again
        *("1:17:updated", "2:18:end"),
    ]
    with LocalCluster(WORKERS, 2, processes=True, **SETTINGS) as cluster:
        check(supervise(cluster, total, deaths), total)


# ── workers in threads ──


class Number:
    """The state is one number, and as many bytes as wanted."""

    def __init__(self, value: float, name: str = "weight", more: int = 0) -> None:
        self.values = np.full(1 + more, value)
        self._name = name
        self.givers: list[str] = []
        self.is_broken = False

    def layout(self) -> bytes:
        if self.is_broken:
            raise OSError("unreadable")
        return self._name.encode()

    def nbytes(self) -> int:
        return self.values.nbytes

    def read(self, offset: int, target: memoryview) -> None:
        target[:] = self.values.view(np.uint8).data[offset : offset + len(target)]

    def title(self) -> str:
        return "the number"

    def weights(self) -> dict[str, Any]:
        return {}

    def weights_nbytes(self) -> int:
        return 0

    def write_weight(self, key: str, value: Any) -> None:
        raise NotImplementedError

    def begin_write(self, layout: bytes, donor: str) -> int:
        if layout != self.layout():
            raise NotAllowed(f"{donor} has a parameter {layout.decode()!r}, this model {self._name!r}")
        self.givers.append(donor)
        return self.values.nbytes

    def write(self, offset: int, data: memoryview) -> None:
        self.values.view(np.uint8)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def end_write(self) -> None:
        pass


def trains(kv: kvd.KVStore, state: Number, total: int = 4) -> Iterator[int]:
    """Makes the steps of a loop, each of which adds the mean of the ranks plus one. Gives each step before it."""
    kv.init("w", np.zeros(1))
    healing = healing_of(kv)
    healing.hold(state)
    for step in healing.steps(total, "w"):
        yield step
        merged = kv.pushpull("w", np.full(1, kv.rank + 1.0))
        healing.updating()
        state.values[0] += merged[0]


def dies(kv: kvd.KVStore) -> None:
    """As a process that ends with an error, which is told at once."""
    kv.__exit__(RuntimeError, None, None)


def test_a_state_is_lost_when_nobody_has_it_and_all_are_told() -> None:
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1, **SETTINGS) as cluster:

        def lives(number: int) -> int:
            kv = cluster.store(node_id=f"worker-{number}", preferred_rank=number)
            seen = 0
            for step in trains(kv, Number(float(number))):
                seen = step
                if step == 2:
                    break
            dies(kv)
            return seen

        assert list(pool.map(lives, range(2))) == [2, 2]

        def lives_again(number: int) -> StateLost:
            kv = cluster.store(node_id=f"worker-{number}", preferred_rank=number)
            with pytest.raises(StateLost, match="no living worker has the weights") as raised:
                list(trains(kv, Number(0.0)))
            return raised.value

        lost = list(pool.map(lives_again, range(2)))
        assert [error.steps for error in lost] == [2, 2]


def test_another_model_gets_an_error_and_the_others_wait_for_the_right_one() -> None:
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1, **SETTINGS) as cluster:
        zero, one = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in range(2)])
        given, taken = Number(7.0, more=3_000_000), Number(0.0, more=3_000_000)  # 24 MB: several parts

        def all_steps(kv: kvd.KVStore, state: Number) -> list[int]:
            return list(trains(kv, state))

        stays = pool.submit(all_steps, zero, given)
        for step in trains(one, taken):
            assert step < 2
            if step == 1:
                break
        assert taken.givers == ["worker 0"]
        assert (taken.values[0], taken.values[-1]) == (7.0 + 3.0, 7.0)
        dies(one)

        wrong = cluster.store(node_id="worker-1", preferred_rank=1)
        with pytest.raises(NotAllowed, match="worker 0 has a parameter 'weight', this model 'other'"):
            list(trains(wrong, Number(0.0, "other")))
        dies(wrong)

        right = Number(0.0, more=3_000_000)
        assert all_steps(cluster.store(node_id="worker-1", preferred_rank=1), right) == [1, 2, 3]
        assert stays.result(60) == [0, 1, 2, 3]
        assert (given.values[0], right.values[0], right.values[-1]) == (7.0 + 4 * 3.0, 7.0 + 4 * 3.0, 7.0)
        with pytest.raises(NotAllowed, match="passes on the state of one optimizer"):
            healing_of(zero).hold(Number(0.0))


def test_a_state_that_cannot_be_read_is_an_error_of_its_owner_who_may_give_it_later() -> None:
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1, **SETTINGS) as cluster:
        stores = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in range(2)])
        owned, taken = Number(5.0), Number(0.0)

        def dies_in_step_1(kv: kvd.KVStore) -> None:
            for step in trains(kv, Number(0.0), 3):
                if step == 1:
                    break
            dies(kv)

        def gives(kv: kvd.KVStore) -> list[str]:
            loop = trains(kv, owned, 3)
            assert [next(loop), next(loop)] == [0, 1]
            owned.is_broken = True
            with pytest.raises(OSError, match="unreadable"):
                next(loop)
            assert not taken.givers
            owned.is_broken = False
            while not taken.givers:
                with pytest.raises(RequestTimeout):
                    kv.barrier("elsewhere", timeout=0.5)
            return taken.givers

        first = pool.submit(gives, stores[0])
        pool.submit(dies_in_step_1, stores[1]).result(60)
        again = cluster.store(node_id="worker-1", preferred_rank=1)
        loop = trains(again, taken, 3)
        assert next(loop) == 1
        assert first.result(60) == ["worker 0"]
        assert taken.values[0] == 5.0 + 3.0


@pytest.mark.parametrize("is_updated", [True, False])
@pytest.mark.parametrize("death", ["in the loop", "behind it", "in the next one"])
def test_loops_that_are_left_early(death: str, is_updated: bool) -> None:
    """A worker that dies there comes to the end of the loop with the state of the others."""

    def train(kv: kvd.KVStore, state: Number, dies_at: str = "") -> float:
        kv.init("w", np.zeros(1))
        healing = healing_of(kv)
        healing.hold(state)

        def update() -> None:
            merged = kv.pushpull("w", np.full(1, kv.rank + 1.0))
            healing.updating()
            state.values[0] += merged[0]

        for step in healing.steps(1000, "w"):
            if step == 2 and not is_updated:
                break
            update()
            if step == 2:
                break
        if dies_at == "in the loop":
            raise EOFError
        kv.barrier("between", timeout=PATIENCE_S)
        if dies_at == "behind it":
            raise EOFError
        for _ in healing.steps(3, "w"):
            break
        if dies_at == "in the next one":
            raise EOFError
        for _ in healing.steps(2, "w"):
            update()
        kv.barrier("end", timeout=PATIENCE_S)
        return float(state.values[0])

    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1, **SETTINGS) as cluster:
        zero, one = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in range(2)])
        survivor = pool.submit(train, zero, Number(5.0))
        with pytest.raises(EOFError):
            train(one, Number(0.0), death)
        dies(one)
        again = cluster.store(node_id="worker-1", preferred_rank=1)
        expected = 5.0 + (2 + is_updated + 2) * 3.0
        assert pool.submit(train, again, Number(0.0)).result(PATIENCE_S) == expected
        assert survivor.result(PATIENCE_S) == expected


def test_a_state_is_given_in_any_wait() -> None:
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1, **SETTINGS) as cluster:
        zero, one = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in range(2)])

        def meets(kv: kvd.KVStore) -> float:
            state = Number(kv.rank + 5.0)
            for _ in trains(kv, state, 1):
                pass
            kv.barrier("after", timeout=120)
            return float(state.values[0])

        waits = pool.submit(meets, zero)
        for _ in trains(one, Number(1.0), 1):
            pass
        dies(one)  # the other one waits in a barrier, with a timeout of its own
        again = cluster.store(node_id="worker-1", preferred_rank=1)
        assert pool.submit(meets, again).result(120) == 8.0
        assert waits.result(60) == 8.0


def test_a_notice_names_the_worker_that_nobody_restarts_and_the_remedies(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1, **{**SETTINGS, "notice_s": 0.5}) as cluster:
        zero, one = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in range(2)])
        state = Number(5.0)
        waits = pool.submit(lambda: list(trains(zero, state)))
        for step in trains(one, Number(0.0)):
            if step == 1:
                break
        dies(one)
        wait_until(lambda: [text for text in caplog.messages if "again under the same node id" in text], "a notice")
        (notice, *_) = [text for text in caplog.messages if "again under the same node id" in text]
        for part in (
            "pushpull of 'w' (push 2) has waited",
            "for worker 1 (",
            "Start worker 1 again",
            "--restart N",
            '"shrink"',
        ):
            assert part in notice
        again = cluster.store(node_id="worker-1", preferred_rank=1)
        assert pool.submit(lambda: list(trains(again, Number(0.0)))).result(120) == [1, 2, 3]
        assert waits.result(60) == [0, 1, 2, 3]


def test_a_deadlock_is_found_though_states_are_offered() -> None:
    settings = {**SETTINGS, "notice_s": 0.5, "round_timeout_s": 300.0}
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1, **settings) as cluster:

        def run(rank: int) -> Deadlock:
            kv = cluster.store(node_id=f"worker-{rank}", preferred_rank=rank)
            list(trains(kv, Number(rank + 5.0), 1))
            with pytest.raises(Deadlock) as raised:
                kv.pushpull("w", np.zeros(1)) if rank else kv.barrier("elsewhere")
            return raised.value

        assert len(list(pool.map(run, range(2)))) == 2


def test_steps_that_are_fast_cost_no_message() -> None:
    with LocalCluster(1, 1, **SETTINGS) as cluster:
        kv = cluster.store()
        loop = trains(kv, Number(0.0), 200)
        for _ in range(5):  # the first ones ask what those behind them need not ask again
            next(loop)
        outbox = engine_of(kv).machine._outbox
        before = outbox.activity
        for _ in range(100):
            next(loop)
        assert outbox.activity - before <= 2 * 100  # of each pushpull: added and settled
        wait_until(lambda: list(loop)[-1] == 199, "the loop ends")


def test_a_store_without_a_cluster_makes_the_same_steps() -> None:
    state = Number(1.0)
    kv = kvd.create("local")
    assert list(trains(kv, state)) == [0, 1, 2, 3]
    assert state.values[0] == 5.0


def test_what_a_restarted_worker_could_not_repeat_is_refused() -> None:
    with LocalCluster(1, 1, **SETTINGS) as cluster:
        kv = cluster.store()
        kv.init(["w", "metric"], [np.zeros(1)] * 2)
        healing = healing_of(kv)
        healing.hold(Number(0.0))
        for _ in healing.steps(2, ["w"]):
            kv.barrier("before")
            kv.broadcast("metric", np.zeros(1))
            kv.pushpull("w", np.zeros(1))
            healing.updating()
            for call in (lambda: kv.barrier("after"), lambda: kv.broadcast("metric", np.zeros(1))):
                with pytest.raises(NotAllowed, match=r"within a step comes before backward"):
                    call()
            with pytest.raises(NotAllowed, match="'metric' is not one of the keys of this loop"):
                kv.push("metric", np.zeros(1))
        kv.barrier("between")
        with pytest.raises(NotAllowed, match="needs a state, and the keys"):
            healing.steps(2, None)


def test_a_worker_that_joins_gets_the_state_of_the_step_that_it_comes_into() -> None:
    joined = threading.Event()

    def makes(kv: kvd.KVStore, state: Number) -> list[int]:
        steps = []
        for step in trains(kv, state, 1500):
            steps.append(step)
            joined.wait(0.0 if kv.rank else 0.005)
        return steps

    settings = {**SETTINGS, "max_workers": 2, "merge": "mean"}
    with ThreadPoolExecutor(2) as pool, LocalCluster(1, 1, **settings) as cluster:
        states = [Number(3.0), Number(0.0)]
        first = pool.submit(makes, cluster.store(node_id="first"), states[0])
        second = cluster.store(node_id="second")
        late = pool.submit(makes, second, states[1])
        wait_until(lambda: states[1].givers, "the second worker has the state")
        joined.set()
        steps = late.result(120)
        assert first.result(60) == list(range(1500))
        assert steps == list(range(steps[0], 1500))
        alone = steps[0]
        assert alone > 0
        assert {state.values[0] for state in states} == {3.0 + alone * 1.0 + (1500 - alone) * 1.5}
        assert states[1].givers == ["worker 0"]


def test_a_late_worker_that_comes_back_has_no_stale_state() -> None:
    overtaken = threading.Event()

    def makes(kv: kvd.KVStore, state: Number) -> list[int]:
        steps = []
        for step in trains(kv, state, 60):
            steps.append(step)
            if step == 10:
                overtaken.set()
            elif kv.rank == 2 and step == 5:
                assert overtaken.wait(PATIENCE_S)
        return steps

    settings = {**SETTINGS, "quorum": 2, "quorum_grace_s": 0.5, "merge": "mean"}
    with ThreadPoolExecutor(3) as pool, LocalCluster(3, 1, **settings) as cluster:
        stores = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in range(3)])
        states = [Number(float(number)) for number in range(3)]
        made = list(pool.map(makes, stores, states))
        assert made[0] == made[1] == list(range(60))
        assert len(made[2]) < 60
        assert len({state.values[0] for state in states}) == 1
        assert len(states[2].givers) >= 2
