"""What all tests share: the message path of their clusters, Ctrl-C, and a garbage collector with less to scan."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

from kvd.testing.cluster import PATHS, LocalCluster


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kvd-path",
        choices=PATHS,
        default=LocalCluster.default_path,
        help="how messages travel in the clusters of tests that do not name a path",
    )


def pytest_configure(config: pytest.Config) -> None:
    LocalCluster.default_path = config.getoption("--kvd-path")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell; our children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _ctrl_c_stays_as_it_is() -> Iterator[None]:
    """A test that leaves Ctrl-C without effect breaks tests of other files, later and elsewhere: it fails itself."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    left, _ = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGINT, handler)
    assert left is handler, f"the test has left {left!r} to handle SIGINT"


def pytest_collection_finish() -> None:
    """Modules such as torch stay loaded: tests that collect garbage need not scan their objects each time."""
    gc.collect()
    gc.freeze()
