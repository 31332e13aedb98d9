"""What all tests share: how the messages of their clusters travel, and a process that Ctrl-C interrupts."""

from __future__ import annotations

import signal

import pytest

from kvd.testing.cluster import PATHS, LocalCluster


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kvd-path",
        choices=PATHS,
        default=LocalCluster.default_path,
        help="how messages travel in the clusters of tests that do not say it themselves",
    )


def pytest_configure(config: pytest.Config) -> None:
    LocalCluster.default_path = config.getoption("--kvd-path")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell; our children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
