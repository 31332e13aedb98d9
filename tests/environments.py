"""The variables of processes that tests start, and whether the process of a test has keys."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_KEYS = "KVD_INSECURE"


def without_settings(**more: str) -> dict[str, str]:
    """The variables of a process that finds this checkout and has no settings of kvd, except that of the option
    `--kvd-insecure` of the tests."""
    kept = {name: value for name, value in os.environ.items() if name == WITHOUT_KEYS or not is_setting(name)}
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}", **more}


def is_setting(name: str) -> bool:
    """Whether kvd reads settings from this variable."""
    return name.startswith(("KVD_", "DMLC_"))
