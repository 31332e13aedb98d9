"""Nesterov momentum on the worker, ahead of compression, as in BytePS.

::

    m = mu · m + x      m starts at 0
    x = x + mu · m

Where m is no finite number it becomes 0: a NaN or an infinity is sent once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.feedback import drop_what_is_not_finite
from kvd.compute.quiet import quietly


def with_momentum(values: NDArray[np.float32], momentum: NDArray[np.float32], mu: float) -> NDArray[np.float32]:
    """Return the values with momentum, and update ``momentum``."""
    return quietly(_with_momentum, values, momentum, np.float32(mu))


def _with_momentum(values: NDArray[np.float32], momentum: NDArray[np.float32], mu: np.float32) -> NDArray[np.float32]:
    momentum *= mu
    momentum += values
    ahead = mu * momentum
    ahead += values
    drop_what_is_not_finite(momentum)
    return ahead
