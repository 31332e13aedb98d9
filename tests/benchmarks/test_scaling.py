"""What grows in `benchmarks.scaling`, what is left out, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.rows import from_objects
from benchmarks.scaling import Memory, Point, Start, free_bytes, lines
from benchmarks.systems import Outcome, System

SYSTEM = System("kvd", ("none",), None, ())
GIB = 1 << 30

# A stand-in for `kvd bench`: says that a step takes 1 ms per worker, and that its processes took ten times the values.
PROGRAM = """
import json, sys
sys.path[:0] = {path!r}
from kvd_cli.bench_work import sizes_of
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
workers, nbytes = int(flags["--workers"]), 4 * sum(sizes_of(flags["--only"]))
row = dict(name=flags["--only"], keys=1, bytes=nbytes, repetition=0, iterations=1, seconds=workers / 1e3)
row.update(p50_us=1e3 * workers, p99_us=1e3 * workers, cpu_s=0.5)
rows = [dict(row, rank=rank) for rank in range(workers)]
rows[0]["servers_cpu_s"] = 0.5
roles = [dict(role="worker", rank=0, peak_bytes=6 * nbytes), dict(role="server", rank=0, peak_bytes=4 * nbytes)]
print(json.dumps(dict(rows=rows, roles=roles)))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bench.py"
    script.write_text(PROGRAM.format(path=sys.path))
    system = System("kvd", ("none",), None, (sys.executable, str(script)))
    monkeypatch.setattr(scaling, "kvd_systems", lambda ways, modes: ([system], []))


def outcome(taken_bytes: int) -> Outcome:
    half = taken_bytes // 2
    return Outcome([], [{"role": role, "rank": 0, "peak_bytes": half} for role in ("worker", "server")])


def test_the_memory_of_a_model_is_predicted_from_the_largest_smaller_one() -> None:
    memory, small, large = Memory(), Point("a", "1MiB", 2), Point("b", "4MiBx64", 2)
    assert memory.needed_bytes(SYSTEM, large) == 6 * 64 * (4 << 20)  # 2 gradients, 2 results, 2 versions
    memory.learn(SYSTEM, small, outcome(100 << 20))
    assert memory.needed_bytes(SYSTEM, large) == 256 * (100 << 20)
    memory.learn(SYSTEM, large, outcome(4 * GIB))
    memory.learn(SYSTEM, small, outcome(900 << 20))  # a later round at a smaller size says less
    assert memory.needed_bytes(SYSTEM, Point("c", "4MiBx128", 2)) == 8 * GIB
    assert memory.needed_bytes(SYSTEM, Point("d", "4MiBx128", 4)) == 10 * (512 << 20)  # other processes: not known


def test_shared_memory_counts_once_where_processes_say_how_much_they_share() -> None:
    memory, point = Memory(), Point("a", "4MiBx64", 2)
    roles = [{"role": "server", "peak_bytes": 4 * GIB, "share_bytes": GIB}, {"role": "scheduler", "peak_bytes": GIB}]
    memory.learn(SYSTEM, point, Outcome([], roles))
    assert memory.needed_bytes(SYSTEM, Point("b", "4MiBx128", 2)) == 4 * GIB


def test_free_memory_is_read_from_the_kernels_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "machine_memory_bytes", lambda: 8 * GIB)
    assert free_bytes("MemTotal: 9 kB\nMemAvailable:    1048576 kB\n") == GIB
    assert free_bytes("MemAvailable:    104857600 kB\n") == 8 * GIB  # the control group has less
    assert free_bytes("MemTotal: 9 kB\n") == 8 * GIB


def test_a_line_compares_with_the_first_of_its_system() -> None:
    printed = {
        "name": "1MiB", "rank": 0, "keys": 1, "bytes": 1 << 20, "repetition": 0, "iterations": 1, "p99_us": 1.0,
    }  # fmt: skip
    points = [Point("1", "1MiB", 1), Point("2", "1MiB", 2)]
    starts = [
        Start(point, SYSTEM, number, Outcome(from_objects([printed | took], "kvd", "none", number), []))
        for point, took in zip(
            points, ({"p50_us": 1e3, "seconds": 1e-3}, {"p50_us": 3e3, "seconds": 2e-3}), strict=True
        )
        for number in range(2)
    ]
    first, second = lines(points, starts)
    assert first[:6] == ("1", "kvd", "1 ms", "1 ms", "1 ms", "1.00")
    assert second[:6] == ("2", "kvd", "3 ms", "3 ms", "3 ms", "3.00")
    assert (first[6], second[6]) == ("1049", "1049")  # twice the workers in twice the time


@pytest.mark.usefixtures("stand_in")
def test_both_growths_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--rounds", "2", "--workers", "1,2", "--models", "1MiB,4MiBx16", "--json", str(out)]
    assert scaling.main(arguments) == 0
    document = json.loads(out.read_text())
    assert [(found["workers"], found["work"], found["round"]) for found in document["workers"]] == [
        (1, "resnet50", 0),
        (2, "resnet50", 0),
        (1, "resnet50", 1),
        (2, "resnet50", 1),
    ]
    assert [found["bytes"] for found in document["models"][:2]] == [1 << 20, 64 << 20]
    assert len(document["models"][0]["cores_gb_s"]) in (0, 1, 2)  # on two cores, and if other work leaves them alone
    assert str(tmp_path) not in out.read_text()
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "kvd", "2", "ms", "2", "ms", "2", "ms", "2.00"] in [line[:9] for line in shown]
    assert ["64", "MiB", "kvd"] in [line[:3] for line in shown]


@pytest.mark.usefixtures("stand_in")
def test_a_model_that_does_not_fit_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "free_bytes", lambda meminfo: 700 << 20)
    assert scaling.main(["--rounds", "2", "--workers", "1", "--models", "4MiBx8,4MiBx16"]) == 0
    captured = capsys.readouterr()
    told = "64 MiB, 2 workers: kvd is left out: it would take 640.0 MiB, and 700.0 MiB are free"
    assert captured.err.count(told) == 1
    assert "32 MiB" in captured.out
    assert "64 MiB" not in captured.out


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--workers", "two"], ["--models", "2GB"], ["--kvd", "x"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        scaling.main(arguments)
    assert arguments[0] in capsys.readouterr().err
