"""How a program was started, as messages show it."""

from __future__ import annotations

import pytest

from kvd.config import program_command


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["python", "train.py"], "python train.py"),
        (["/opt/bin/python3.11", "-u", "-W", "error", "train.py", "--lr", "1"], "python -u -W error train.py --lr 1"),
        (["python3", "-m", "my.train", "-x"], "python -m my.train -x"),
        (["python", "my train.py"], "python 'my train.py'"),
        (["python", "train.py", "x" * 300], "python train.py …"),
        (["python"], ""),
        (["python", "-"], ""),
        (["python", "-c", "import kvd"], ""),
        (["python", "-cimport kvd"], ""),
        (["python", "-m", "ipykernel_launcher", "-f", "x.json"], ""),
        (["python", "/usr/bin/ipython"], ""),
        (["uwsgi", "train.py"], ""),
    ],
)
def test_a_program_is_shown_as_it_was_started(arguments: list[str], shown: str) -> None:
    assert program_command(arguments) == shown
