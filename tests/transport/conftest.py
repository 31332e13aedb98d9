"""Checks and settings that several tests of transports share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvd.testing.cluster import wait_until
from kvd.transport import host
from kvd.transport.zmq.transport import prepare_sending_without_copies
from tests.transport.link_harness import memory_in_use


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaks a descriptor or a map of a segment."""
    prepare_sending_without_copies()  # its descriptors stay
    before = memory_in_use()
    yield
    with suppress(AssertionError):  # a thread closes descriptors that were refused
        wait_until(lambda: memory_in_use() == before, "nothing is left", 20.0)
    assert memory_in_use() == before


@pytest.fixture
def quick_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links without traffic release their payloads after 0.1 s."""
    monkeypatch.setattr(host, "RELEASE_INTERVAL_S", 0.1)
