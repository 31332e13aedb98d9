"""What the tests of processes share: a mark that finds processes left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from tests.node.launch.harness import marked


@pytest.fixture
def mark() -> Iterator[dict[str, str]]:
    """A variable that every process of a test inherits. No process with it may be left at the end."""
    name = uuid.uuid4().hex
    yield {"JOB_MARK": name}
    left = marked(name)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left
