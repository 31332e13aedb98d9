"""No core dumps of daemons: their memory holds keys, and values of everybody's jobs."""

from __future__ import annotations

import resource

NOT_EVEN_TO_A_PROGRAM = 1  # byte. With 0, Linux writes no file, but gives the memory to a program in core_pattern


def forbid_core_dumps() -> None:
    """Forbid them for this process. Not in programs of users, which may want theirs.

    The hard limit stays, so that whoever looks for a fault can allow them again with prlimit(1). Tracing stays allowed,
    too (a daemon is not made undumpable): the same user could read the key file as well.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    soft = NOT_EVEN_TO_A_PROGRAM if hard == resource.RLIM_INFINITY else min(NOT_EVEN_TO_A_PROGRAM, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
