"""What a server tells of how its workers' messages travel."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.protocol.messages import Attach
from tests.core.server_harness import Harness

LINK, OTHER_LINK, ZMQ = ("link", 7), ("link", 8), b"routing id"


def paths(harness: Harness) -> Any:
    return harness.machine.explain(0.0)["paths"]


def test_a_worker_says_how_its_messages_travel() -> None:
    harness = Harness(attach=False)
    assert paths(harness) == {}
    harness.say(1, Attach(1, 1, "zmq: turned off"), peer=ZMQ)
    harness.say(0, Attach(1, 0, "shared memory"), peer=LINK)
    assert paths(harness) == {"worker 0": "shared memory", "worker 1": "zmq: turned off"}
    harness.say(1, Attach(2, 1, "unix socket: no memory"), peer=OTHER_LINK)
    assert paths(harness)["worker 1"] == "unix socket: no memory"


@pytest.mark.parametrize("said", ["shared memory", "unix socket: no memory"])
def test_a_link_that_broke_is_no_link_any_more(said: str) -> None:
    harness = Harness(attach=False)
    harness.say(0, Attach(1, 0, said), peer=LINK)
    harness.say(1, Attach(1, 1, said), peer=OTHER_LINK)
    harness.init("w", b"\0")
    harness.push(0, 1, peer=LINK)
    harness.push(1, 1, peer=OTHER_LINK)
    assert paths(harness) == {"worker 0": said, "worker 1": said}
    harness.push(0, 2, peer=ZMQ)
    assert paths(harness) == {"worker 0": "zmq: the link is gone", "worker 1": said}


def test_a_successor_speaks_for_itself() -> None:
    harness = Harness(attach=False)
    harness.say(0, Attach(1, 0, "shared memory"), peer=LINK)
    harness.look(harness.members["worker", 0]._replace(incarnation=harness.members["worker", 0].incarnation + 1))
    assert paths(harness) == {}


def test_who_says_nothing_is_shown_so() -> None:
    assert paths(Harness()) == {"worker 0": "", "worker 1": ""}
