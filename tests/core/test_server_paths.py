"""What a server reports of the paths that its workers' messages take."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import CallerPeer, LinkPeer, PeerPath
from kvd.protocol.messages import Attach, PathKind
from tests.core.server_harness import Harness

LINK, OTHER_LINK, CALLER = LinkPeer("link 7"), LinkPeer("link 8"), CallerPeer(b"routing id")


def paths(harness: Harness) -> Any:
    return harness.machine.explain(0.0)["paths"]


def test_a_worker_reports_its_path() -> None:
    harness = Harness(attach=False)
    assert paths(harness) == {}
    harness.say(1, Attach(1, 1, PathKind.ZMQ, "turned off"), peer=CALLER)
    harness.say(0, Attach(1, 0, PathKind.SHARED_MEMORY), peer=LINK)
    assert paths(harness) == {"worker 0": "shared memory", "worker 1": "zmq: turned off"}
    harness.say(1, Attach(2, 1, PathKind.UNIX_SOCKET, "no memory"), peer=OTHER_LINK)
    assert paths(harness)["worker 1"] == "unix socket: no memory"


@pytest.mark.parametrize(
    "said", [PeerPath(PathKind.SHARED_MEMORY), PeerPath(PathKind.UNIX_SOCKET, "no memory")], ids=PeerPath.describe
)
def test_a_broken_link_is_no_longer_reported(said: PeerPath) -> None:
    harness = Harness(attach=False)
    harness.say(0, Attach(1, 0, *said), peer=LINK)
    harness.say(1, Attach(1, 1, *said), peer=OTHER_LINK)
    harness.init("w", b"\0")
    harness.push(0, 1, peer=LINK)
    harness.push(1, 1, peer=OTHER_LINK)
    assert paths(harness) == {"worker 0": said.describe(), "worker 1": said.describe()}
    harness.push(0, 2, peer=CALLER)
    assert paths(harness) == {"worker 0": "zmq: the link is gone", "worker 1": said.describe()}


def test_a_successor_reports_its_own_path() -> None:
    harness = Harness(attach=False)
    harness.say(0, Attach(1, 0, PathKind.SHARED_MEMORY), peer=LINK)
    harness.look(harness.members["worker", 0]._replace(incarnation=harness.members["worker", 0].incarnation + 1))
    assert paths(harness) == {}


def test_a_worker_that_reports_no_path_has_none() -> None:
    assert paths(Harness()) == {"worker 0": "", "worker 1": ""}
