"""`kvd bench`: the works, what a worker does and writes, and whole runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

import kvd
from benchmarks.rows import from_objects, parse
from kvd.client.facades.open import open_backend
from kvd.node.launch import Job
from kvd_cli.bench_report import table_lines
from kvd_cli.bench_run import JobFailed, make_job, measure, roles_of
from kvd_cli.bench_usage import Usage, Watch, cpu_s_of, share_bytes_of, usage_of
from kvd_cli.bench_work import (
    IN_FLIGHT_NAME,
    ROWS_FILE,
    WORK,
    Task,
    iterations_for,
    make_row,
    names_of,
    resnet50_sizes,
    sizes_of,
    time_steps,
)
from kvd_cli.bench_worker import Bench
from kvd_cli.program import cli

PRINTED = {
    "name": "1KiB",
    "rank": 1,
    "keys": 1,
    "bytes": 1024,
    "repetition": 0,
    "iterations": 10,
    "seconds": 0.01,
    "p50_us": 900.0,
    "p99_us": 1500.0,
}


# ── the works ──


def test_resnet50_has_the_sizes_of_the_model() -> None:
    sizes = resnet50_sizes()
    assert len(sizes) == 161
    assert sum(sizes) == 25_557_032
    assert sizes[:6] == [9408, 64, 64, 4096, 64, 64]
    assert sizes[-2:] == [2_048_000, 1000]


@pytest.mark.parametrize(
    ("name", "keys", "nbytes"),
    [("1KiB", 1, 1 << 10), ("64KiB", 1, 1 << 16), ("64MiB", 1, 1 << 26), ("1KiBx1000", 1000, 1000 << 10)],
)
def test_a_work_has_the_bytes_that_its_name_says(name: str, keys: int, nbytes: int) -> None:
    assert len(WORK[name]) == keys
    assert 4 * sum(WORK[name]) == nbytes


def test_names_of_works_are_checked() -> None:
    assert names_of("4KiB, 1KiB,4KiB, 4MiBx64") == ["4KiB", "1KiB", "4MiBx64"]
    for wrong in ("1KiB,2KB", "", ",", "0KiB", "1KiBx0", "4KiBx", "-1KiB", "6B", "1GiB", "999999MiBx999999"):
        with pytest.raises(ValueError, match="there are 1KiB, 4KiB"):
            names_of(wrong)


@pytest.mark.parametrize(("name", "keys", "nbytes"), [("3KiB", 1, 3 << 10), ("4MiBx3", 3, 12 << 20), ("64Bx9", 9, 576)])
def test_a_work_of_any_size_has_the_bytes_that_its_name_says(name: str, keys: int, nbytes: int) -> None:
    assert len(sizes_of(name)) == keys
    assert 4 * sum(sizes_of(name)) == nbytes


def test_the_fixed_works_mean_what_their_names_would() -> None:
    """The peers know the fixed works only by name."""
    assert WORK["1KiBx1000"] == [256] * 1000
    for name in ("1KiB", "4KiB", "64KiB", "1MiB", "4MiB", "64MiB"):
        assert WORK[name] == sizes_of(f"{name}x1")


def test_the_count_of_iterations_follows_the_median_trial_within_bounds() -> None:
    assert iterations_for([0.01, 0.02, 9.0], seconds=1.0) == 50
    assert iterations_for([5.0], seconds=1.0) == 3
    assert iterations_for([0.0], seconds=1.0) == 20_000
    assert iterations_for([0.64], seconds=1.0, calls_per_step=64) == 100


def test_a_row_has_the_fields_of_the_peers_and_their_percentiles() -> None:
    each = [number / 1000 for number in range(100, 0, -1)]
    made = make_row("1KiB", 1, 2, each, total_s=5.05)
    assert made.keys() == PRINTED.keys()
    assert made["p50_us"] == pytest.approx(51_000)
    assert made["p99_us"] == pytest.approx(100_000)
    assert (made["rank"], made["repetition"], made["iterations"], made["bytes"]) == (1, 2, 100, 1024)
    assert make_row(IN_FLIGHT_NAME, 0, 0, each, 1.0)["bytes"] == 1024  # of one call


def test_steps_are_timed_one_by_one() -> None:
    calls: list[int] = []
    each, total_s = time_steps(lambda: calls.append(1), 5)
    assert len(calls) == len(each) == 5
    assert 0 <= sum(each) <= total_s


# ── kvd bench ──


def test_the_table_of_a_run_has_medians_over_ranks_and_repetitions() -> None:
    printed = [
        {**PRINTED, "p50_us": 100.0, "p99_us": 900.0, "seconds": 0.1},
        {**PRINTED, "p50_us": 200.0, "p99_us": 800.0, "seconds": 0.2},
        {**PRINTED, "p50_us": 999.0, "p99_us": 700.0, "seconds": 0.4},
        {**PRINTED, "name": "4KiB", "keys": 1, "bytes": 4096, "seconds": 2.0},
    ]
    assert table_lines(printed) == [
        ("1KiB", "1", "1024", "200", "800", "50.0", "0.1"),
        ("4KiB", "1", "4096", "900", "1500", "5.0", "0.0"),
    ]


def task(folder: Path, *works: str, mode: str = "none") -> Task:
    return Task(works=works, mode=mode, seconds=0.01, repetitions=2, folder=str(folder))


def test_a_task_survives_its_way_to_the_worker(tmp_path: Path) -> None:
    there = task(tmp_path, "1KiB", "4KiB")
    assert Task.from_json(there.to_json()) == there


@pytest.mark.parametrize("mode", ["none", "sgd", "adam"])
def test_a_worker_does_each_work_and_writes_its_rows(tmp_path: Path, mode: str) -> None:
    with kvd.create("local") as kv:
        Bench(kv, task(tmp_path, "1KiB", "1KiBx1000", IN_FLIGHT_NAME, mode=mode)).run()
    rows, others = parse((tmp_path / ROWS_FILE).read_text(), "kvd", mode, 0)
    assert others == []
    assert all(found.cpu_s is not None and found.cpu_s > 0 for found in rows)
    assert [(found.name, found.repetition, found.keys, found.bytes) for found in rows] == [
        ("1KiB", 0, 1, 1024),
        ("1KiB", 1, 1, 1024),
        ("1KiBx1000", 0, 1000, 1_024_000),
        ("1KiBx1000", 1, 1000, 1_024_000),
        (IN_FLIGHT_NAME, 0, 1, 1024),
        (IN_FLIGHT_NAME, 1, 1, 1024),
    ]


def test_a_worker_stops_at_a_wrong_sum(tmp_path: Path) -> None:
    def wrong(key: object, received: object, stored: object) -> None:
        """Keeps the first value, 1, and adds a half."""
        stored[:] = 1.5  # type: ignore[index]

    with kvd.create("local") as kv:
        kv.set_updater(wrong)
        with pytest.raises(SystemExit, match=r"1KiB: .* wrong: expected 1\.0 everywhere"):
            Bench(kv, task(tmp_path, "1KiB")).run()
    assert not (tmp_path / ROWS_FILE).exists()


def test_usage_is_read_from_the_kernel_and_kept_when_the_process_is_gone() -> None:
    own = usage_of("self")
    assert own is not None
    assert own.peak_bytes > 1 << 20
    assert own.cpu_s > 0
    assert usage_of(1 << 30) is None
    share_bytes = share_bytes_of("self")
    assert share_bytes is not None
    assert 1 << 20 < share_bytes <= own.peak_bytes
    assert share_bytes_of(1 << 30) is None
    pids: dict[str, int | str] = {"server-0": "self", "server-1": 1 << 30}
    told: list[object] = []
    watch = Watch(pids, pids.get, told.append)  # type: ignore[arg-type]
    watch.look()
    assert told == [pids]
    pids.clear()
    watch.look()
    assert list(watch.last) == ["server-0"]
    assert len(told) == 1


def test_a_watch_reports_processes_once_all_of_them_run() -> None:
    told: list[object] = []
    watch = Watch(["server-0", "server-1"], {"server-0": os.getpid()}.get, told.append)
    watch.look()
    assert told == []


def test_processor_time_of_several_processes_is_known_only_if_all_are_there() -> None:
    own = cpu_s_of(["self"])
    assert own is not None
    assert cpu_s_of([os.getpid(), os.getpid()]) >= 2 * own  # type: ignore[operator]
    assert cpu_s_of(["self", 1 << 30]) is None


def test_roles_join_observations_and_reports() -> None:
    watch = Watch([], lambda name: None)
    watch.last = {"scheduler": Usage(1, 0.1), "server-1": Usage(2, 0.2)}
    told = [
        {"role": "worker", "rank": 0, "peak_bytes": 3, "cpu_s": 0.3},
        {"role": "server", "rank": 1, "bytes_led": 4},
    ]
    assert roles_of(watch, told) == [
        {"role": "scheduler", "rank": 0, "peak_bytes": 1, "cpu_s": 0.1},
        {"role": "server", "rank": 1, "peak_bytes": 2, "cpu_s": 0.2, "bytes_led": 4},
        {"role": "worker", "rank": 0, "peak_bytes": 3, "cpu_s": 0.3},
    ]


def test_a_job_that_fails_ends_with_its_code_and_the_end_of_its_log(tmp_path: Path) -> None:
    says = [sys.executable, "-c", "import sys; sys.exit('the address is taken')"]
    job = Job(command=["true"], workers=1, servers=1, daemon=says)
    with pytest.raises(JobFailed, match="the address is taken") as caught:
        asyncio.run(measure(job, task(tmp_path, "1KiB")))
    assert caught.value.code == 1


def test_bench_refuses_a_work_that_does_not_exist() -> None:
    result = CliRunner().invoke(cli, ["bench", "--only", "2KB"])
    assert result.exit_code == 2
    assert "there are 1KiB, 4KiB" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "1KiB,resnet50,128MiB", "--plot", "out.svg"], "--only names no work with one value"),
        (["--plot", "nowhere/out.svg"], "there is no directory nowhere"),
    ],
)
def test_bench_refuses_a_chart_that_it_could_not_draw(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["bench", *arguments])
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_bench_refuses_bound_arrays_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvd.KVStore, "is_capable", staticmethod(lambda capability: capability != "bind"))
    result = CliRunner().invoke(cli, ["bench", "--bound"])
    assert result.exit_code == 2
    assert "kv.bind is not available" in result.stderr


def test_a_worker_pushes_and_pulls_the_arrays_that_the_store_gives_it(tmp_path: Path) -> None:
    bound: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

    class BindingStore(kvd.KVStore):
        """Gives arrays, and takes no others."""

        def bind(self, key: list[str]) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
            for name in key:
                bound.setdefault(name, (np.zeros(256, np.float32), np.zeros(256, np.float32)))
            return [bound[name][0] for name in key], [bound[name][1] for name in key]

        def pushpull(
            self, key: Any, value: Any, out: Any = None, priority: int = 0, *, samples: int = 1, **options: Any
        ) -> Any:
            for name, gradient, weight in zip(key, value, out, strict=True):
                assert gradient is bound[name][0]
                assert weight is bound[name][1]
            return super().pushpull(key, value, out, priority, samples=samples)

    with BindingStore(open_backend("local", {})) as kv:
        Bench(kv, dataclasses.replace(task(tmp_path, "1KiB", "1KiBx3"), bound=True)).run()
    assert list(bound) == ["1KiB/0", "1KiBx3/0", "1KiBx3/1", "1KiBx3/2"]
    assert len((tmp_path / ROWS_FILE).read_text().splitlines()) == 4


def test_without_copies_every_step_gets_new_arrays(tmp_path: Path) -> None:
    given: list[Any] = []

    class ViewingStore(kvd.KVStore):
        """Notes what a list call gives."""

        def pushpull(
            self, key: Any, value: Any, out: Any = None, priority: int = 0, *, samples: int = 1, **options: Any
        ) -> Any:
            assert out is None
            given.append(super().pushpull(key, value, samples=samples, **options))
            return given[-1]

    with ViewingStore(open_backend("local", {})) as kv:
        Bench(kv, dataclasses.replace(task(tmp_path, "1KiBx3", IN_FLIGHT_NAME), copy_free=True)).run()
    assert len(given) > 2
    assert not any(array.flags.writeable for arrays in given for array in arrays)


@pytest.mark.parametrize(("transport", "shared"), [("auto", None), ("tcp", "off"), ("ipc", "off")])
def test_sockets_alone_are_measured_without_shared_memory(tmp_path: Path, transport: str, shared: str | None) -> None:
    job = make_job(task(tmp_path, "1KiB"), 1, 1, transport, {})
    assert job.environment.get("KVD_SHARED_MEMORY") == shared
    assert (job.daemon[0] == "/bin/sh") is (transport == "ipc")


def test_bench_measures_a_cluster_of_its_own_and_draws_it(tmp_path: Path) -> None:
    works = f"1KiB,{IN_FLIGHT_NAME},4KiB,64KiB"
    file = tmp_path / "out.svg"
    arguments = ["bench", "--only", works, "--seconds", "0.05", "--repetitions", "1", "-o", "json", "--plot", str(file)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    rows = from_objects(report["rows"], "kvd", "none", 0)
    assert all(found.cpu_s is not None for found in rows)
    assert all((found.servers_cpu_s is not None) is (found.rank == 0) for found in rows)
    names = [title.text for title in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}title")]
    assert [str(name).split(",")[0] for name in names] == ["kvd: 4 KiB", "kvd: 64 KiB"]
    assert sorted((found.name, found.rank) for found in rows) == [
        ("1KiB", 0),
        ("1KiB", 1),
        (IN_FLIGHT_NAME, 0),
        (IN_FLIGHT_NAME, 1),
        ("4KiB", 0),
        ("4KiB", 1),
        ("64KiB", 0),
        ("64KiB", 1),
    ]
    assert [(role["role"], role["rank"]) for role in report["roles"]] == [
        ("scheduler", 0),
        ("server", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert all(role["peak_bytes"] > 1 << 20 and role["cpu_s"] > 0 for role in report["roles"])
    assert report["roles"][1]["bytes_led"] == (1 + 64 + 4 + 64) * 1024
    assert all(1 << 20 < role["share_bytes"] <= role["peak_bytes"] for role in report["roles"][1:])


def test_bench_measures_several_servers_over_ipc() -> None:
    arguments = ["bench", "--only", "64KiB", "--seconds", "0.05", "--repetitions", "1", "--mode", "sgd", "-v"]
    result = CliRunner().invoke(cli, [*arguments, "--transport", "ipc", "--servers", "2", "--slice-bytes", "16KiB"])
    assert result.exit_code == 0, result.output
    headings, line, *counted = result.stdout.splitlines()
    assert headings.split()[:3] == ["work", "keys", "bytes"]
    assert line.split()[:3] == ["64KiB", "1", "65536"]
    found = [re.split(r"  +", entry) for entry in counted]
    assert found[0] == ["work", "of a step", "CPU µs", "context switches", "system calls", "functions"]
    assert [entry[:2] for entry in found[1:]] == [["64KiB", "a worker"], ["64KiB", "all servers"]]
    for _, _, cpu_us, switches, system_calls, functions in found[1:]:
        assert float(cpu_us) >= 0
        assert float(switches) >= 0
        assert float(functions) > 20
        if system_calls == "-":
            assert "note: " in result.stderr
        else:
            assert float(system_calls) > 1
