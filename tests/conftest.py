"""What all tests share: how the messages of their clusters travel."""

from __future__ import annotations

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
