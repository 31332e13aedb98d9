"""Which seeds run when."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(always: int, soak: int) -> list[Any]:
    """Seeds of a test: the first ones run in `make test`, the others up to `soak` under -m soak."""
    return [*range(always), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(always, soak))]
