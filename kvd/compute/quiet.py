"""Calculating without NumPy's warnings about overflow, division by zero and NaN: in a tensor they are values."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import numpy as np

Ts = TypeVarTuple("Ts")
R = TypeVar("R")

_local = threading.local()

# From version 2 on NumPy keeps the setting in a context variable. To run in a context where it is set once and for all
# takes a tenth of the time of `np.errstate`, which counts where 256 elements are added.
_HAS_CONTEXT = int(np.__version__.split(".")[0]) >= 2


def quietly(function: Callable[[*Ts], R], *args: *Ts) -> R:
    """Return ``function(*args)``, calculated without floating-point warnings.

    For our own arithmetic only: ``function`` sees none of the context variables of the program, and must not call
    ``quietly`` itself.
    """
    if not _HAS_CONTEXT:
        with np.errstate(all="ignore"):
            return function(*args)
    context: contextvars.Context | None = getattr(_local, "context", None)
    if context is None:
        context = _local.context = contextvars.Context()
        context.run(np.seterr, all="ignore")
    return context.run(function, *args)
