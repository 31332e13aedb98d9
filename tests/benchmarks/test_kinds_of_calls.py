"""The table of all kinds of calls: its figures are those of calls that were made, and its ratios are right."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kinds_of_calls import KINDS, ONE_KEY, TWO_KEYS, measure, rows

ROOT = Path(__file__).resolve().parents[2]
FASTER = [{"NumPy": 1e-4, "bind": 3e-4}, {"NumPy": 2e-4, "bind": 2e-4}]
SLOWER = [{"NumPy": 2e-4, "bind": 6e-4}, {"NumPy": 2e-4, "bind": 8e-4}]


def test_every_kind_of_call_is_made() -> None:
    ((times,),) = measure([ROOT], list(KINDS), workers=1, starts=1, turns=1, calls=2)
    assert list(times) == list(KINDS)
    assert min(times.values()) > 0


def test_a_line_has_times_and_ratios_within_a_start() -> None:
    numpy, bind = rows(FASTER, [])
    assert numpy == ["NumPy", "100 / 150 / 200", "1.00 / 1.00 / 1.00"]
    assert bind == ["bind", "200 / 250 / 300", "1.00 / 2.00 / 3.00"]
    numpy, bind = rows(FASTER, SLOWER)
    assert bind[3:] == ["600 / 700 / 800", "0.25 / 0.38 / 0.50", "1.00 / 1.25 / 1.50"]


def test_two_calls_on_one_key_are_compared_by_their_rate() -> None:
    *_, rate = rows([{ONE_KEY: 4e-4, TWO_KEYS: 2e-4}], [])
    assert rate == ["rate on one key ÷ two keys", "", "0.50 / 0.50 / 0.50"]
