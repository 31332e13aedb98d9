"""What a server tells of how its workers' messages travel."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.protocol.messages import Attach
from tests.core.server_bench import Bench

LINK, OTHER_LINK, ZMQ = ("link", 7), ("link", 8), b"routing id"


def paths(bench: Bench) -> Any:
    return bench.machine.explain(0.0)["paths"]


def test_a_worker_says_how_its_messages_travel() -> None:
    bench = Bench(attach=False)
    assert paths(bench) == {}
    bench.say(1, Attach(1, 1, "zmq: turned off"), peer=ZMQ)
    bench.say(0, Attach(1, 0, "shared memory"), peer=LINK)
    assert paths(bench) == {"worker 0": "shared memory", "worker 1": "zmq: turned off"}
    bench.say(1, Attach(2, 1, "unix socket: no memory"), peer=OTHER_LINK)
    assert paths(bench)["worker 1"] == "unix socket: no memory"


@pytest.mark.parametrize("said", ["shared memory", "unix socket: no memory"])
def test_a_link_that_broke_is_no_link_any_more(said: str) -> None:
    bench = Bench(attach=False)
    bench.say(0, Attach(1, 0, said), peer=LINK)
    bench.say(1, Attach(1, 1, said), peer=OTHER_LINK)
    bench.init("w", b"\0")
    bench.push(0, 1, peer=LINK)
    bench.push(1, 1, peer=OTHER_LINK)
    assert paths(bench) == {"worker 0": said, "worker 1": said}
    bench.push(0, 2, peer=ZMQ)
    assert paths(bench) == {"worker 0": "zmq: the link is gone", "worker 1": said}


def test_a_successor_speaks_for_itself() -> None:
    bench = Bench(attach=False)
    bench.say(0, Attach(1, 0, "shared memory"), peer=LINK)
    bench.look(bench.members["worker", 0]._replace(incarnation=bench.members["worker", 0].incarnation + 1))
    assert paths(bench) == {}


def test_who_says_nothing_is_shown_so() -> None:
    assert paths(Bench()) == {"worker 0": "", "worker 1": ""}
