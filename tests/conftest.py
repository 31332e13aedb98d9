"""What all tests share: the message path of their clusters, their keys, Ctrl-C, and a garbage collector with less to
scan."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvd.node.keys.keyfiles import new_cluster_key, write_key
from kvd.testing.cluster import PATHS, LocalCluster
from tests.environments import WITHOUT_KEYS
from tests.phases import FAILURES_OPTION

settings.register_profile("kvd", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("kvd")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kvd-path",
        choices=PATHS,
        default=LocalCluster.default_path,
        help="how messages travel in the clusters of tests that do not name a path",
    )
    parser.addoption(
        FAILURES_OPTION, type=Path, metavar="FILE", help="write the names of the tests that fail to this file"
    )
    parser.addoption("--kvd-insecure", action="store_true", help="tests that are not about keys use none")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported: modules are no garbage, and looking for some takes a quarter of the time
    LocalCluster.default_path = config.getoption("--kvd-path")
    _make_keys(config)
    # A background job of a shell ignores SIGINT, a program under nohup SIGHUP, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _make_keys(config: pytest.Config) -> None:
    """Tests and the processes that they start have a user's key of their own, and use it unless told otherwise."""
    home = Path(tempfile.mkdtemp(prefix="kvd-test-keys-"))
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    os.environ["XDG_CONFIG_HOME"] = str(home)
    write_key(home / "kvd" / "cluster.key", new_cluster_key())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the names for `tests.phases`."""
    file = config.getoption(FAILURES_OPTION)
    if file is not None:
        reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
        names = dict.fromkeys(str(report.nodeid) for report in reports)
        file.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


@pytest.hookimpl(tryfirst=True)  # before fixtures of a module make clusters
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is marked `keys` uses them whatever the option says."""
    LocalCluster.default_insecure = item.config.getoption("--kvd-insecure") and not item.get_closest_marker("keys")
    if LocalCluster.default_insecure:
        os.environ[WITHOUT_KEYS] = "1"
    else:
        os.environ.pop(WITHOUT_KEYS, None)


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All is imported."""
    gc.enable()
