"""Every script in this folder comes true with every seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulator.scenario.script import Scenario, ScenarioError

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scenario(script: Path, seed: int) -> None:
    Scenario(script.name, script.read_text(), seed).run()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("spawn 1 scheduler 1 servers 1 workers\ninit w 1.0\nexpect value w 2.0", ":3: expect value w 2.0: it is"),
        ("spawn 1 scheduler 1 servers 1 workers\ninit w 1.0\nexpect worker 0 pull w 2.0", "it got"),
        ("spawn 1 scheduler 1 servers 1 workers\nworker 0 pull w\nexpect ok worker 0", "KeyNotFound"),
        ("spawn 1 scheduler 1 servers 1 workers\nworker 0 flush\nexpect waiting worker 0", "has ended"),
        ("spawn 1 scheduler 1 servers 1 workers\nexpect member worker 0 dead", "sees it as active"),
        ("spawn 1 scheduler 2 servers 1 workers\nexpect partition 1 led by server 0", "sees it led by server 1"),
        ("spawn 1 scheduler 1 servers 1 workers\nworker 0 fly w 1", "no call is named 'fly'"),
        (
            "cluster merge=mean\nspawn 1 scheduler 1 servers 2 workers\nworker 0 barrier x\nexpect barrier x passed",
            "did not",
        ),
    ],
)
def test_scenario_that_does_not_come_true(text: str, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        Scenario("script", text).run()
