"""Checks and settings that several tests of transports share."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvd.transport import host
from kvd.transport.zmq.transport import prepare_sending_without_copies
from tests.transport.link_harness import memory_in_use


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaks a descriptor or a map of a segment."""
    prepare_sending_without_copies()  # its descriptors stay
    before = memory_in_use()
    yield
    deadline = time.monotonic() + 20.0
    while memory_in_use() != before and time.monotonic() < deadline:  # a thread closes descriptors that were refused
        time.sleep(0.005)
    assert memory_in_use() == before


@pytest.fixture
def quick_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links without traffic release their payloads after 0.1 s."""
    monkeypatch.setattr(host, "RELEASE_INTERVAL_S", 0.1)
