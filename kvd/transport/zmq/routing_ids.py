"""Where libzmq's numbers of connections begin.

A ROUTER numbers those who connect, and the number becomes part of their routing id. A peer may choose an id for itself,
also one that the ROUTER would give to somebody later: then libzmq 4.3.5 ends the process ("Assertion failed: ok"). The
first number is meant to be random, but libzmq draws it with the C library's rand() and does not seed it, so it is the
same in every process, and few connections lead from there to any number near it.
"""

from __future__ import annotations

import ctypes
import secrets
from contextlib import suppress


def begin_anywhere() -> None:
    """Lets the next ROUTER of this process begin at a number that nobody can guess."""
    with suppress(OSError, AttributeError):  # a C library without it is not one that libzmq draws from
        ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))
