"""Daemons that are stopped for a while: their processes exist and answer nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvd.testing.cluster import ProcessNode


@contextmanager
def stopped(*nodes: Any) -> Iterator[None]:
    """The processes are stopped by SIGSTOP."""
    for node in nodes:
        assert isinstance(node, ProcessNode)
        os.kill(node.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for node in nodes:
            os.kill(node.process.pid, signal.SIGCONT)
