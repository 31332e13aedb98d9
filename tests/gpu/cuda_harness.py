"""What the tests on GPUs share: the device, and the reason to skip them where there is none."""

from __future__ import annotations

import pytest

from kvd.errors import ConfigError
from kvd.parallel import Device

CUDA = Device.parse("cuda:0")


def why_not() -> str:
    """Why this host cannot use the device; empty if it can."""
    try:
        CUDA.check()
    except ConfigError as error:
        return str(error)
    return ""


NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not())]
