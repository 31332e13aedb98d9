"""The comparison with the peers: the statistics, the table, and what is read from others' output."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import arguments, compare, floor, limits, machine, report
from benchmarks.figures import Spread, peaks, ratios, spread, summaries
from benchmarks.processes import run
from benchmarks.rows import Row, from_objects, parse
from benchmarks.systems import Effort, System, earlier_systems, kvd_systems, peer_systems
from kvd_cli.bench_work import IN_FLIGHT_NAME, WORK, make_row

PRINTED = {**make_row("1KiB", 1, 0, [0.001] * 10, 0.01), "p50_us": 900.0, "p99_us": 1500.0}


def row(system: str, round_number: int, p50_us: float, **fields: float) -> Row:
    """A row with only its time of interest."""
    changed = {**PRINTED, "p50_us": p50_us, "p99_us": 2 * p50_us, **fields}
    [made] = from_objects([changed], system, "none", round_number)
    return made


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
    ours, theirs = report.lines(found, ratios(found), {})
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
        ["--only", "2KB"],
        ["--modes", ""],
        ["--kvd", "udp"],
        ["--plot", "/nowhere/out.svg"],
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


def test_a_comparison_ends_in_a_table_and_a_file_without_local_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {"rows": [PRINTED], "roles": [{"role": "server", "rank": 0, "peak_bytes": 1}]}
    ours = System("kvd tcp", ("none",), ("1KiB",), ("sh", "-c", f"echo '{json.dumps(printed)}'"))
    monkeypatch.setattr(compare, "kvd_systems", lambda ways, modes: ([ours], []))
    monkeypatch.setattr(limits, "measure", lambda workers: {"copy_gb_s": 10.0})
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
    monkeypatch.setattr(compare, "kvd_systems", lambda ways, modes: ([ours], []))
    monkeypatch.setattr(limits, "measure", lambda workers: {"copy_gb_s": 10.0})
    out = tmp_path / "out.json"
    assert compare.main(["--rounds", "1", "--only", "1KiB", "--modes", "none", "--peers", "", "--json", str(out)]) == 1
    failure = {"system": "kvd tcp", "mode": "none", "round": 0, "failure": "it printed no row"}
    assert json.loads(out.read_text())["failures"] == [failure]


def test_the_machine_is_described_from_the_kernels_tables() -> None:
    assert machine.cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: a b\n") == "Some CPU @ 2 GHz"
    assert machine.cpu_model("BogoMIPS : 5\n") != ""
    assert machine.memory_bytes("MemTotal:        2048 kB\nMemFree: 1 kB\n") == 2 << 20
    assert machine.describe()["cores"] >= 1


def test_the_ways_to_run_kvd_differ_in_name_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.systems.KVStore.is_capable", staticmethod(lambda capability: True))
    systems, advice = kvd_systems(("auto", "tcp", "bound", "bound-copy-free"), ("none",))
    assert advice == []
    assert [(system.name, system.is_ours) for system in systems] == [
        ("kvd", True),
        ("kvd tcp", True),
        ("kvd bound", True),
        ("kvd bound copy-free", True),
    ]
    assert [system.command[-2:] for system in systems[:2]] == [("--transport", "auto"), ("--transport", "tcp")]
    assert systems[2].command[-1] == "--bound"
    assert systems[3].command[-2:] == ("--bound", "--copy-free")
    assert systems[0].does(effort("4MiBx7"), "none")  # what no fixed work is called


def test_an_earlier_kvd_is_started_from_its_own_tree_and_measured_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for folder in ("kvd", "cli/kvd_cli"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "kvd" / "__init__.py").touch()
    tree = arguments.checkout(str(tmp_path))
    ours = System("kvd tcp", ("none",), None, ())
    command = ("sh", "-c", f"echo $PYTHONPATH$PYTHONSAFEPATH >{tmp_path}/path; :")  # the flags become its arguments
    (earlier,) = earlier_systems(tree, [replace(ours, command=command)])
    assert (earlier.name, earlier.is_ours, earlier.is_kvd) == ("earlier kvd tcp", False, True)
    earlier.start(effort("1KiB"), "none", 0)
    assert (tmp_path / "path").read_text().strip() == f"{tree}{os.pathsep}{tree / 'cli'}1"


def test_an_earlier_kvd_is_compared_with_the_same_way_to_run_it() -> None:
    systems = ("kvd", "kvd tcp", "earlier kvd", "earlier kvd tcp", "mxnet")
    found = ratios(summaries(row(system, 0, 50.0) for system in systems))
    assert [(ratio.system, ratio.peer) for ratio in found] == [
        ("kvd", "earlier kvd"),
        ("kvd", "mxnet"),
        ("kvd tcp", "earlier kvd tcp"),
        ("kvd tcp", "mxnet"),
    ]


def test_a_folder_without_kvd_is_no_earlier_one(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"no kvd is checked out in .*: git worktree add"):
        arguments.checkout(str(tmp_path))


def test_kvd_without_bind_is_compared_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.systems.KVStore.is_capable", staticmethod(lambda capability: False))
    systems, [advice, _] = kvd_systems(("auto", "bound", "bound-copy-free"), ("none",))
    assert [system.name for system in systems] == ["kvd"]
    assert advice.startswith("kvd bound is left out")


# ── the limit of the machine, processors and memory ──


def test_the_least_time_moves_each_byte_once() -> None:
    """Two workers: the server reads 2 B and writes B, each worker reads B and writes B."""
    nbytes = 100_000_000
    assert floor.bytes_moved(nbytes, workers=2) == (300_000_000, 400_000_000)
    assert floor.least_us(nbytes, 2, {"all_add_gb_s": 3.0, "all_copy_gb_s": 4.0}) == pytest.approx(200_000)
    assert floor.least_us(1 << 20, 2, {"all_add_gb_s": 3.0, "all_copy_gb_s": 4.0}) is None  # it lies in a cache
    assert floor.least_us(nbytes, 2, {"copy_gb_s": 3.0}) is None
    assert 1 <= floor.cores_assumed(1) <= 2


def test_processor_time_counts_for_all_ranks_and_their_servers() -> None:
    two_ranks = [
        row("kvd", 0, 100.0, cpu_s=1.0, servers_cpu_s=0.5, bytes=5_000_000),
        row("kvd", 0, 100.0, cpu_s=1.5, bytes=5_000_000),
    ]
    assert summaries(two_ranks)[0].cpu_s_per_gb == pytest.approx(3.0 / 0.2)  # ten times 5 MB there and back, each
    assert summaries(two_ranks[1:])[0].cpu_s_per_gb is None  # the servers' part is missing
    assert summaries([two_ranks[0], row("kvd", 0, 100.0)])[0].cpu_s_per_gb is None


def test_the_table_has_the_ratio_to_the_limit_for_kvd_only() -> None:
    found = summaries([row("kvd", 0, 250.0, cpu_s=0.01, servers_cpu_s=0.01), row("gloo", 0, 100.0)])
    ours, theirs = report.lines(found, ratios(found), {("none", "1KiB"): 100.0})
    assert ours[report.HEADINGS.index("÷ limit")] == "2.50"
    assert float(ours[report.HEADINGS.index("CPU s/GB")]) == pytest.approx(0.02 / 20_480e-9, rel=0.01)
    assert theirs[report.HEADINGS.index("÷ limit")] == theirs[report.HEADINGS.index("CPU s/GB")] == ""


def test_of_each_role_the_process_with_most_memory_counts() -> None:
    start = {"system": "kvd", "mode": "none", "round": 0}
    roles = [
        {**start, "role": "worker", "rank": 0, "peak_bytes": 5},
        {**start, "role": "worker", "rank": 1, "peak_bytes": 7},
        {**start, "role": "server", "rank": 0, "bytes_led": 1},
    ]
    assert peaks(roles) == {("kvd", "none", "worker"): 7}


def test_the_limits_count_what_the_cores_move_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARRAY_NBYTES", 1 << 16)
    monkeypatch.setattr(limits, "_with_peer", lambda answer, measure_on: 1.0)
    found = limits.measure(workers=1)
    assert found["cores"] == floor.cores_assumed(1)
    assert all(value > 0 for value in found.values())
    assert set(found) == set(report.LIMITS)


def test_a_comparison_draws_the_curves_without_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {"rows": [{**PRINTED, "name": name, "bytes": nbytes} for name, nbytes in SIZES.items()], "roles": []}
    ours = System("kvd", ("none", "sgd"), None, ("sh", "-c", f"echo '{json.dumps(printed)}'"))
    monkeypatch.setattr(compare, "kvd_systems", lambda ways, modes: ([ours], []))
    monkeypatch.setattr(limits, "measure", lambda workers: {"copy_gb_s": 10.0})
    file = tmp_path / "out.svg"
    arguments = ["--rounds", "1", "--peers", "", "--plot", str(file)]
    assert compare.main([*arguments, "--modes", "none,sgd"]) == 0
    titles = [title.text for title in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["kvd: 4 KiB, 4.096", "kvd: 64 KiB, 65.54"]
    file.unlink()
    assert compare.main([*arguments, "--modes", "sgd"]) == 0
    assert not file.exists()
    assert "is not drawn" in capsys.readouterr().err


SIZES = {"4KiB": 4 << 10, "64KiB": 64 << 10, "resnet50": 102_228_128}
