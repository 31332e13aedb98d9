"""The slow network of `kvd.testing.slowlink`, and the steps that `benchmarks.priority` does over it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import priority
from benchmarks.priority import Model, Step, Training, lines, medians
from kvd.core.machine import SCHEDULER, Peer, Span
from kvd.core.principals import Principal
from kvd.testing.cluster import LocalCluster
from kvd.testing.slowlink import Pipe, SlowLink, slow_links
from tests.transport.in_process import MemoryNetwork, MemoryTransport

# ── the pipe, in virtual time ──


def test_things_leave_one_after_the_other_at_the_rate() -> None:
    pipe: Pipe[str] = Pipe(bytes_per_s=10.0, queue_bytes=1000)
    assert pipe.next_at() is None
    assert pipe.put("a", 20, now=1.0)
    assert pipe.put("b", 10, now=1.5)
    assert pipe.next_at() == pytest.approx(3.0)
    assert pipe.take(2.9) == []
    assert pipe.take(3.5) == ["a"]
    assert pipe.next_at() == pytest.approx(4.0)  # behind "a", however late somebody looks
    assert pipe.take(9.0) == ["b"]
    assert pipe.take(9.0) == []
    assert pipe.put("c", 10, now=9.0)
    assert pipe.next_at() == pytest.approx(10.0)  # an idle pipe saves nothing up


def test_a_full_pipe_takes_no_more_until_something_has_left() -> None:
    pipe: Pipe[str] = Pipe(bytes_per_s=10.0, queue_bytes=50)
    assert pipe.put("larger than the queue", 60, now=0.0)
    assert not pipe.put("a", 1, now=0.0)
    assert pipe.take(6.0) == ["larger than the queue"]
    assert pipe.put("a", 30, now=6.0)
    assert pipe.put("b", 20, now=6.0)
    assert not pipe.put("c", 1, now=6.0)
    assert pipe.take(11.0) == ["a", "b"]


# ── the link ──


class Ends:
    """A slow sender and a receiver in one loop."""

    def __init__(self, bytes_per_s: float, queue_bytes: int) -> None:
        network = MemoryNetwork()
        self.received: list[tuple[bytes, bytes]] = []
        self.arrived = asyncio.Event()
        self.slow = SlowLink(MemoryTransport(network), bytes_per_s, queue_bytes)
        self._receiver = MemoryTransport(network)
        self._receiver.start(self._take, self._garbage)
        self.slow.start(self._take, self._garbage)
        self.slow.connect(SCHEDULER, self._receiver.listen("memory:0"))

    def _take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
        self.received.append((header, b"" if payload is None else bytes(payload)))
        self.arrived.set()

    def _garbage(self, peer: Peer, text: str) -> None:
        raise AssertionError(text)

    async def until(self, count: int) -> None:
        while len(self.received) < count:
            self.arrived.clear()
            await self.arrived.wait()


def in_loop(bytes_per_s: float, queue_bytes: int, body: Callable[[Ends], object]) -> Ends:
    """Makes both ends in a loop of their own, and awaits what the body gives."""

    async def main() -> Ends:
        ends = Ends(bytes_per_s, queue_bytes)
        await body(ends)  # type: ignore[misc]
        ends.slow.close(0.0)
        return ends

    return asyncio.run(main())


PART = np.arange(100, dtype=np.uint8)


def test_messages_arrive_in_order_also_from_other_threads() -> None:
    def send_all(ends: Ends) -> None:
        for number in range(20):
            assert ends.slow.send(SCHEDULER, b"%d" % number, [Span(PART, number, 3)])

    async def body(ends: Ends) -> None:
        sender = threading.Thread(target=send_all, args=(ends,))
        sender.start()
        await ends.until(20)
        sender.join()

    ends = in_loop(1e6, 1 << 20, body)
    assert ends.received == [(b"%d" % number, bytes(PART[number : number + 3])) for number in range(20)]


def test_what_the_link_cannot_take_is_refused_by_the_size_of_its_spans() -> None:
    """At so low a rate nothing leaves during the test: what counts is what waits."""

    async def body(ends: Ends) -> None:
        spans: Sequence[Span] = [Span(PART, 0, 50), Span(PART, 50, 40)]
        assert ends.slow.send(SCHEDULER, b"head", spans)
        assert ends.slow.send(SCHEDULER, b"head", spans)
        assert not ends.slow.send(SCHEDULER, b"head", [*spans, Span(PART, 0, 1)])
        assert ends.slow.send(SCHEDULER, b"", [Span(PART, 0, 12)])  # 200 bytes in all
        assert not ends.slow.send(SCHEDULER, b"x", [])

    ends = in_loop(1e-3, 200, body)
    assert ends.received == []
    assert not ends.slow.send(SCHEDULER, b"", [])  # closed


def test_a_link_that_is_started_late_sends_what_was_queued_before() -> None:
    async def main() -> list[bytes]:
        network, got = MemoryNetwork(), asyncio.get_running_loop().create_future()
        receiver = MemoryTransport(network)
        receiver.start(lambda peer, header, payload, principal: got.set_result([header]), lambda peer, text: None)
        slow = SlowLink(MemoryTransport(network), 1e6)
        slow.connect(SCHEDULER, receiver.listen("memory:0"))
        assert slow.send(SCHEDULER, b"early", [])
        slow.start(lambda peer, header, payload, principal: None, lambda peer, text: None)
        headers: list[bytes] = await got
        return headers

    assert asyncio.run(main()) == [b"early"]


# ── the steps ──

MODEL = Model(
    layers=4,
    layer_bytes=64 << 10,
    forward_s=0.001,
    backward_s=0.001,
    bytes_per_s=20e6,
    slice_bytes=16 << 10,
    credit_bytes=32 << 10,
)


def test_a_step_pushes_the_last_layer_first_and_prefers_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(num_workers=1, slice_bytes=MODEL.slice_bytes) as cluster, slow_links(MODEL.bytes_per_s):
        kv = cluster.store()
        training = Training(kv, MODEL)
        pushed: list[tuple[str, int]] = []
        real = kv.pushpull_async

        def seen(key: str, value: object, out: object, priority: int) -> object:
            pushed.append((key, priority))
            return real(key, value, out, priority)

        monkeypatch.setattr(kv, "pushpull_async", seen)
        steps = [training.step(priorities=True), training.step(priorities=False)]
        assert [kv.clock(f"layer{layer}") for layer in range(4)] == [2, 2, 2, 2]
    assert pushed[:4] == [("layer3", 1), ("layer2", 2), ("layer1", 3), ("layer0", 4)]
    assert pushed[4:] == [("layer3", 0), ("layer2", 0), ("layer1", 0), ("layer0", 0)]
    assert all(0 <= step.first_s <= step.whole_s for step in steps)


def test_figures_are_medians_and_their_ratio() -> None:
    found = {
        True: [Step(0.01, 0.3), Step(0.03, 0.1), Step(0.02, 0.2)],
        False: [Step(0.04, 0.4)],
    }
    assert medians(found[True]) == Step(0.02, 0.2)
    assert lines(found) == [
        ("priorities", "20 ms", "200 ms"),
        ("none", "40 ms", "400 ms"),
        ("ratio", "0.50", "0.50"),
    ]
    assert MODEL.transfer_s == pytest.approx(4 * 65536 / 20e6)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    sizes = ["--layers", "3", "--layer-mib", "0.0625", "--forward-ms", "1", "--backward-ms", "1"]
    assert priority.main(["--rounds", "2", *sizes, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert len(document["with_priorities"]) == len(document["without"]) == 2
    assert document["model"]["layer_bytes"] == 65536
    printed = capsys.readouterr().out
    assert printed.startswith("3 layers of 64 KiB")
    assert "priorities" in printed
