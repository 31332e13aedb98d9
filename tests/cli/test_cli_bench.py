"""`kvd bench` and the comparison with the peers: the works, the statistics, and what is read from others' output."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvd
from benchmarks import compare, limits, machine, report
from benchmarks.figures import Spread, ratios, spread, summaries
from benchmarks.processes import run
from benchmarks.rows import Row, from_objects, parse
from benchmarks.systems import Effort, System, peer_systems
from kvd.node.launch import Job
from kvd_cli.bench import JobFailed, measure, roles_of, table_lines
from kvd_cli.bench_usage import Usage, Watch, usage_of
from kvd_cli.bench_work import (
    IN_FLIGHT_NAME,
    ROWS_FILE,
    WORK,
    Task,
    iterations_for,
    make_row,
    names_of,
    resnet50_sizes,
    time_steps,
)
from kvd_cli.bench_worker import Bench
from kvd_cli.main import cli

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


def row(system: str, round_number: int, p50_us: float, **fields: float) -> Row:
    """A row with only its time of interest."""
    changed = {**PRINTED, "p50_us": p50_us, "p99_us": 2 * p50_us, **fields}
    [made] = from_objects([changed], system, "none", round_number)
    return made


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
    assert names_of("4KiB, 1KiB,4KiB") == ["4KiB", "1KiB"]
    for wrong in ("1KiB,2KiB", "", ","):
        with pytest.raises(ValueError, match="there are 1KiB, 4KiB"):
            names_of(wrong)


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


# ── what others print ──


def test_rows_are_found_between_garbage() -> None:
    lines = [
        "[00:00:00] WARNING: something about a library",
        json.dumps(PRINTED),
        "",
        "{not json",
        "[1, 2]",
        "null",
        '"1KiB"',
        json.dumps({**PRINTED, "iterations": 0}),
        json.dumps({**PRINTED, "seconds": 0}),
        json.dumps({**PRINTED, "p50_us": "fast"}),
        json.dumps({**PRINTED, "p99_us": float("nan")}),
        json.dumps({**PRINTED, "rank": None}),
        json.dumps({**PRINTED, "name": 7}),
        json.dumps({key: value for key, value in PRINTED.items() if key != "bytes"}),
        json.dumps({**PRINTED, "rank": 0, "more": "than asked for"}),
    ]
    rows, others = parse("\n".join(lines), "mxnet", "sgd", 3)
    assert [(found.rank, found.system, found.mode, found.round) for found in rows] == [
        (1, "mxnet", "sgd", 3),
        (0, "mxnet", "sgd", 3),
    ]
    assert len(others) == len(lines) - 3
    assert rows[0].step_us == pytest.approx(1000)


def test_a_work_with_copies_is_another_system() -> None:
    rows, _ = parse(json.dumps({**PRINTED, "name": "resnet50+copies"}), "gloo", "none", 0)
    assert (rows[0].system, rows[0].name) == ("gloo+copies", "resnet50")


# ── statistics ──


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(1.0, 2.0, 3.0)
    assert spread([1.0, 2.0]) == Spread(1.0, 1.5, 2.0)
    assert spread([4.0]) == Spread(4.0, 4.0, 4.0)


def test_a_start_counts_once_however_many_rows_it_has() -> None:
    rows = [
        *[row("kvd tcp", 0, 100.0)] * 5,  # one start with many rows: 100
        row("kvd tcp", 1, 200.0),
        row("kvd tcp", 1, 220.0),  # the median of this start: 210
        row("kvd tcp", 2, 400.0),
    ]
    [summary] = summaries(rows)
    assert summary.p50_us == Spread(100.0, 210.0, 400.0)
    assert summary.p99_us == Spread(200.0, 420.0, 800.0)
    assert summary.rounds == 3
    assert summary.mb_s == pytest.approx(1.024)  # 1024 bytes, ten times in 10 ms


def test_ratios_are_of_medians_of_the_same_work() -> None:
    ours = [row("kvd tcp", number, p50_us) for number, p50_us in enumerate((90.0, 100.0, 500.0))]
    theirs = [row("mxnet", number, p50_us) for number, p50_us in enumerate((100.0, 400.0, 410.0))]
    elsewhere = [from_objects([{**PRINTED, "name": "4KiB"}], "redis", "none", 0)[0]]
    [ratio] = ratios(summaries([*ours, *theirs, *elsewhere]))
    assert (ratio.system, ratio.peer, ratio.name) == ("kvd tcp", "mxnet", "1KiB")
    assert ratio.p50 == pytest.approx(0.25)
    assert ratio.p99 == pytest.approx(0.25)
    assert ratio.step == pytest.approx(1.0)


def test_the_table_puts_the_ratio_on_the_peers_line() -> None:
    found = summaries([row("kvd tcp", 0, 250.0), row("mxnet", 0, 1000.0), row("kvd tcp", 1, 250.0)])
    ours, theirs = report.lines(found, ratios(found))
    assert ours[:4] == ("1KiB", "none", "kvd tcp", "250 µs")
    assert ours[-2:] == ("", "")
    assert theirs[2:5] == ("mxnet", "1 ms", "1 ms")
    assert theirs[-2:] == ("0.25", "0.25")


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0.5, "0.5 µs"), (77.25, "77.2 µs"), (999.0, "999 µs"), (1234.0, "1.23 ms"), (2.5e6, "2.5 s"), (5e8, "500 s")],
)
def test_times_are_written_with_a_unit_that_suits_them(microseconds: float, text: str) -> None:
    assert report.time_text(microseconds) == text


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
        with pytest.raises(SystemExit, match=r"1KiB: .* wrong, 1\.0 was expected"):
            Bench(kv, task(tmp_path, "1KiB")).run()
    assert not (tmp_path / ROWS_FILE).exists()


def test_usage_is_read_from_the_kernel_and_kept_when_the_process_is_gone() -> None:
    own = usage_of("self")
    assert own is not None
    assert own.peak_bytes > 1 << 20
    assert own.cpu_s > 0
    assert usage_of(1 << 30) is None
    pids: dict[str, int | str] = {"server-0": "self", "server-1": 1 << 30}
    watch = Watch(pids, pids.get)  # type: ignore[arg-type]
    watch.look()
    pids.clear()
    watch.look()
    assert list(watch.last) == ["server-0"]


def test_roles_join_what_was_seen_and_what_was_told() -> None:
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
    result = CliRunner().invoke(cli, ["bench", "--only", "2KiB"])
    assert result.exit_code == 2
    assert "there are 1KiB, 4KiB" in result.stderr


def test_bench_measures_a_cluster_of_its_own_over_tcp() -> None:
    works = f"1KiB,{IN_FLIGHT_NAME}"
    arguments = ["bench", "--only", works, "--seconds", "0.05", "--repetitions", "1", "-o", "json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    rows = from_objects(report["rows"], "kvd tcp", "none", 0)
    assert sorted((found.name, found.rank) for found in rows) == [
        ("1KiB", 0),
        ("1KiB", 1),
        (IN_FLIGHT_NAME, 0),
        (IN_FLIGHT_NAME, 1),
    ]
    assert [(role["role"], role["rank"]) for role in report["roles"]] == [
        ("scheduler", 0),
        ("server", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert all(role["peak_bytes"] > 1 << 20 and role["cpu_s"] > 0 for role in report["roles"])
    assert report["roles"][1]["bytes_led"] == 65 * 1024


def test_bench_measures_several_servers_over_ipc() -> None:
    arguments = ["bench", "--only", "64KiB", "--seconds", "0.05", "--repetitions", "1", "--mode", "sgd"]
    result = CliRunner().invoke(cli, [*arguments, "--transport", "ipc", "--servers", "2", "--slice-bytes", "16KiB"])
    assert result.exit_code == 0, result.output
    headings, line = result.stdout.splitlines()
    assert headings.split()[:3] == ["work", "keys", "bytes"]
    assert line.split()[:3] == ["64KiB", "1", "65536"]


# ── the comparison ──


def effort(*works: str) -> Effort:
    return Effort(works=works, workers=2, servers=1, seconds=0.01, repetitions=1, limit_s=20.0)


def test_every_system_has_its_turn_in_every_round_and_none_is_always_first() -> None:
    one = System("kvd tcp", ("none", "sgd"), tuple(WORK), ())
    two = System("mxnet", ("none", "sgd"), ("1KiB",), ())
    three = System("redis", ("none",), ("1KiB",), ())
    found = [
        (system.name, mode, number)
        for system, mode, number in compare.turns([one, two, three], effort("1KiB"), ("none", "sgd"), 2)
    ]
    assert found == [
        ("kvd tcp", "none", 0),
        ("mxnet", "none", 0),
        ("redis", "none", 0),
        ("kvd tcp", "sgd", 0),
        ("mxnet", "sgd", 0),
        ("mxnet", "none", 1),
        ("redis", "none", 1),
        ("kvd tcp", "none", 1),
        ("mxnet", "sgd", 1),
        ("kvd tcp", "sgd", 1),
    ]
    only_ours = compare.turns([one, two, three], effort(IN_FLIGHT_NAME), ("none",), 1)
    assert [system.name for system, _, _ in only_ours] == ["kvd tcp"]


def fake_peer(folder: Path, program: str) -> System:
    script = folder / "run.py"
    script.write_text(program)
    return System("mxnet", ("none",), ("1KiB",), (sys.executable, str(script), "mxnet"))


def test_a_peer_is_given_the_effort_and_its_rows_are_read(tmp_path: Path) -> None:
    program = f"import json, sys\nprint('a warning')\nprint(json.dumps({PRINTED!r} | {{'iterations': len(sys.argv)}}))"
    outcome = fake_peer(tmp_path, program).start(effort("4KiB", "1KiB"), "none", 4)
    assert outcome.failure == ""
    [found] = outcome.rows
    assert (found.system, found.round) == ("mxnet", 4)
    assert found.iterations == 2 + 2 * len(("only", "mode", "workers", "servers", "seconds", "repetitions", "limit"))


@pytest.mark.parametrize(
    ("program", "failure", "complaints"),
    [
        ("import sys; sys.exit('no such library')", "it ended with code 1", "no such library"),
        ("print('nothing to say')", "it printed no row", ""),
    ],
)
def test_a_peer_that_fails_gives_no_rows_but_a_reason(
    tmp_path: Path, program: str, failure: str, complaints: str
) -> None:
    outcome = fake_peer(tmp_path, program).start(effort("1KiB"), "none", 0)
    assert (outcome.rows, outcome.failure, outcome.complaints) == ([], failure, complaints)


def test_a_command_that_takes_too_long_is_ended() -> None:
    assert run([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.2).code is None


def test_without_the_peers_scripts_it_says_what_to_do(tmp_path: Path) -> None:
    systems, [advice] = peer_systems(("mxnet", "redis"), tmp_path / "nowhere", ("none",))
    assert systems == []
    assert "--peers-dir" in advice


def test_a_peer_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.py").touch()
    monkeypatch.setenv("KVD_PEERS", str(tmp_path))
    assert peer_systems(("gloo",), tmp_path, ("none",))[1][0].startswith("gloo is left out")
    python = tmp_path / "torch" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    systems, advice = peer_systems(("gloo",), tmp_path, ("none", "adam"))
    assert (systems[0].name, systems[0].modes, advice) == ("gloo", ("none",), [])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "2KiB"],
        ["--modes", ""],
        ["--peers", "horovod"],
        ["--rounds", "0"],
        ["--seconds", "nan"],
        ["--json", "/nowhere/out.json"],
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_comparison_ends_in_a_table_and_a_file_that_names_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {"rows": [PRINTED], "roles": [{"role": "server", "rank": 0, "peak_bytes": 1}]}
    ours = System("kvd tcp", ("none",), ("1KiB",), ("sh", "-c", f"echo '{json.dumps(printed)}'"))
    always: Callable[..., System] = lambda transport, modes: ours  # noqa: E731
    monkeypatch.setattr(compare, "kvd_system", always)
    monkeypatch.setattr(limits, "measure", lambda: {"copy_gb_s": 10.0})
    out = tmp_path / "out.json"
    assert compare.main(["--rounds", "2", "--only", "1KiB", "--modes", "none", "--peers", "", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [found["round"] for found in document["rows"]] == [0, 1]
    assert document["roles"][1] == {"system": "kvd tcp", "mode": "none", "round": 1, **printed["roles"][0]}
    assert document["summaries"][0]["p50_us"] == {"minimum": 900.0, "median": 900.0, "maximum": 900.0}
    assert str(tmp_path) not in out.read_text()
    assert "1KiB  none  kvd tcp  900 µs" in capsys.readouterr().out


@pytest.mark.parametrize("printed", ["", "no JSON", "[]", '{"rows": 1}', '{"rows": [1], "roles": []}'])
def test_a_comparison_without_figures_of_kvd_has_failed(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = System("kvd tcp", ("none",), ("1KiB",), ("sh", "-c", f"echo '{printed}'"))
    always: Callable[..., System] = lambda transport, modes: ours  # noqa: E731
    monkeypatch.setattr(compare, "kvd_system", always)
    monkeypatch.setattr(limits, "measure", lambda: {"copy_gb_s": 10.0})
    out = tmp_path / "out.json"
    assert compare.main(["--rounds", "1", "--only", "1KiB", "--modes", "none", "--peers", "", "--json", str(out)]) == 1
    failure = {"system": "kvd tcp", "mode": "none", "round": 0, "failure": "it printed no row"}
    assert json.loads(out.read_text())["failures"] == [failure]


def test_the_machine_is_described_from_the_kernels_tables() -> None:
    assert machine.cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: a b\n") == "Some CPU @ 2 GHz"
    assert machine.cpu_model("BogoMIPS : 5\n") != ""
    assert machine.memory_bytes("MemTotal:        2048 kB\nMemFree: 1 kB\n") == 2 << 20
    assert machine.describe()["cores"] >= 1
