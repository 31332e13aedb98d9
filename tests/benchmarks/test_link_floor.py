"""The processor time of a step over TCP without kvd."""

from __future__ import annotations

import re

import pytest

from benchmarks import link_floor


def test_it_prints_a_line_for_each_kind_of_link(capsys: pytest.CaptureFixture[str]) -> None:
    link_floor.main(["--rounds", "1", "--steps", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for kind in link_floor.KINDS:
        (row,) = [row for row in rows if row and row[0] == kind]
        server, workers, both = map(float, row[1:4])
        assert 0 < server < both
        assert both == pytest.approx(server + workers, abs=0.002)


def test_a_congestion_control_that_the_system_does_not_have_ends_it() -> None:
    with pytest.raises(OSError, match=re.escape("[Errno 2]")):
        link_floor.measure(1, is_sealed=False, congestion="none such")
