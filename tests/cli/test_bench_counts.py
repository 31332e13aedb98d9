"""What `kvd bench -v` counts: each number by itself, and how they are shown. `test_bench.py` has a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvd_cli.bench_counting import Calls, CountFailed, total_of
from kvd_cli.bench_counts import Counts, Neighbours
from kvd_cli.bench_report import count_lines, count_notes


def test_calls_of_functions_are_counted_one_by_one() -> None:
    def called() -> None:
        pass

    calls = Calls()
    calls.begin()
    for _ in range(7):
        called()
    assert calls.end() == 7 + 1  # and `end` itself
    called()
    calls.begin()
    assert calls.end() == 1


@pytest.mark.parametrize("errors", ["", "14"])
def test_the_number_of_system_calls_is_in_the_last_line_of_strace(errors: str) -> None:
    table = f"""% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 92.04    0.043978        1022        43           epoll_wait
------ ----------- ----------- --------- --------- ----------------
100.00    0.047782           8      5356        {errors:>2} total
"""
    assert total_of(table) == 5356
    with pytest.raises(CountFailed, match="no totals"):
        total_of("\n".join(table.splitlines()[:-1]))


def test_without_strace_the_reason_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    taken = [
        Counts(Neighbours(rank, [], tmp_path, lambda: None), lambda steps: sum(range(steps)), 10).take()[0]
        for rank in range(2)
    ]
    assert [row["system_calls"] for row in taken] == [None, None]
    assert count_notes(taken) == ["system calls are counted where strace is installed"]


def test_the_counts_of_a_run_are_means_over_workers_beside_their_processor_time() -> None:
    rows = [
        {"name": "1KiB", "rank": rank, "iterations": 10, "cpu_s": 0.002, "servers_cpu_s": 0.003}
        for rank in (0, 1)
        for _ in range(2)
    ]
    counts: list[dict[str, Any]] = [
        {"name": "1KiB", "process": "worker", "rank": 0, "switches": 1.0, "functions": 200.0, "system_calls": None},
        {"name": "1KiB", "process": "worker", "rank": 1, "switches": 2.0, "functions": 100.0, "system_calls": None},
        {"name": "1KiB", "process": "servers", "switches": None, "functions": 40.0, "system_calls": 12.25},
    ]
    assert count_lines(rows, counts) == [
        ("1KiB", "a worker", "200", "1.5", "-", "150"),
        ("1KiB", "all servers", "300", "-", "12.2", "40.0"),
    ]
