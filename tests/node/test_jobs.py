"""The jobs of a server: bytes in, bytes out, and every error in its JobDone."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from kvd.core.machine import Apply, Contribution, Create, Export, Extent, FirstBytes, Load, Run, Span
from kvd.errors import NotAllowed, ProtocolError
from kvd.node.jobs.runner import JobRunner, ping, view
from kvd.optimizer import SGD
from kvd.protocol.messages import ADD, ASSIGN


def span_of(values: Any, dtype: str = "float32", lead: int = 0) -> Span:
    data = np.asarray(values, dtype).tobytes()
    return Span(bytes(lead) + data, lead, len(data))


def made(runner: JobRunner, values: Any, dtype: str = "float32") -> Any:
    done = runner.run(Create(1, (FirstBytes("w", 0, dtype, span_of(values, dtype, lead=8)),)))
    assert done.error is None
    (first,) = done.result
    return first


def apply(runner: JobRunner, current: Any, *given: Any, assign: bool = False, optimizer: Any = None) -> Any:
    how = ASSIGN if assign else ADD
    contributions = tuple(
        Contribution(rank, 1, None if values is None else span_of(values), 1, how) for rank, values in enumerate(given)
    )
    layout = (Extent("w", 0, 0, current.nbytes),)
    return runner.run(Apply(2, 1, layout, "float32", current.nbytes, current, contributions, assign, "sum", optimizer))


def test_a_slice_is_created_as_a_copy() -> None:
    source = bytearray(np.arange(4, dtype=np.float32).tobytes())
    done = JobRunner().run(Create(5, (FirstBytes("w", 0, "float32", Span(source, 0, 16)),)))
    source[:] = bytes(16)
    assert done.job == 5
    (first,) = done.result
    assert first.view(np.float32).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8"])
def test_empty_slices_of_every_dtype(dtype: str) -> None:
    runner = JobRunner()
    current = made(runner, [], dtype)
    contributions = (Contribution(0, 1, Span(None, 0, 0), 1, ADD),)
    layout = (Extent("w", 0, 0, 0),)
    done = runner.run(Apply(2, 1, layout, dtype, 0, current, contributions, False, "sum", None))
    assert done.error is None
    assert done.result.nbytes == 0


def test_contributions_are_merged_and_assigned() -> None:
    runner = JobRunner()
    current = made(runner, [1, 1])
    assert apply(runner, current, [1, 2], [10, 20]).result.view(np.float32).tolist() == [11, 22]
    assert apply(runner, current, [7, 8], None, assign=True).result.view(np.float32).tolist() == [7, 8]
    assert apply(runner, current, None, None, assign=True).result.view(np.float32).tolist() == [1, 1]
    assert current.view(np.float32).tolist() == [1, 1]


def test_an_assignment_forgets_the_optimizers_state() -> None:
    runner = JobRunner()
    current = made(runner, [0.0])
    momentum = SGD(1.0, momentum=0.5)
    first = apply(runner, current, [-1], optimizer=momentum).result
    second = apply(runner, first, [-1], optimizer=momentum).result
    assert second.view(np.float32).tolist() == [2.5]
    assigned = apply(runner, second, [0], assign=True, optimizer=momentum).result
    assert apply(runner, assigned, [-1], optimizer=momentum).result.view(np.float32).tolist() == [1]
    runner.reset([("w", 0)])
    step, slots, _ = runner.run(Export(3, "w", 0)).result
    assert (step, slots) == (0, ())


def test_states_are_exported_and_loaded() -> None:
    runner, other = JobRunner(), JobRunner()
    momentum = SGD(1.0, momentum=0.5)
    current = apply(runner, made(runner, [0.0, 1.0, 2.0]), [-1, -2, -3], optimizer=momentum).result
    step, slots, spans = runner.run(Export(3, "w", 0)).result
    payload = b"".join(bytes(span.buffer)[: span.nbytes].ljust(-(-span.nbytes // 8) * 8, b"\0") for span in spans)
    made(other, [0.0, 1.0, 2.0])
    assert other.run(Load(4, "w", 0, step, slots, Span(payload, 0, len(payload)))).error is None
    one = apply(runner, current, [-1, -1, -1], optimizer=momentum).result
    two = apply(other, current, [-1, -1, -1], optimizer=momentum).result
    np.testing.assert_array_equal(one, two)


def test_a_state_that_does_not_fit_is_refused() -> None:
    runner = JobRunner()
    made(runner, [0.0, 1.0, 2.0])
    for slots, payload in (
        ((("slot/momentum", "float32"),), bytes(4)),
        ((("slot/momentum", "float32"), ("master", "float32")), bytes(12)),
        ((("slot/momentum", "complex64"),), bytes(24)),
        ((("slot/momentum", "no dtype at all"),), bytes(24)),
        ((("nonsense", "float32"),), bytes(12)),
    ):
        done = runner.run(Load(4, "w", 0, 1, slots, Span(payload, 0, len(payload))))
        assert isinstance(done.error, ProtocolError | NotAllowed), slots
    done = runner.run(Load(4, "unknown", 0, 1, (("master", "float32"),), Span(bytes(12), 0, 12)))
    assert done.error is not None


def test_commands() -> None:
    def fail(body: bytes) -> bytes:
        raise OSError("disk full")

    def leave(body: bytes) -> bytes:
        raise SystemExit(1)

    runner = JobRunner({"ping": ping, "fail": fail, "leave": leave, "wrong": lambda body: "text"})  # type: ignore[dict-item, return-value]
    assert runner.run(Run(1, "ping", Span(b"xxhello", 2, 5))).result == b"hello"
    assert runner.run(Run(1, "ping", Span(None, 0, 0))).result == b""
    for head, text in (
        ("fail", "OSError: disk full"),
        ("wrong", "must be bytes"),
        ("nobody", "fail, leave, ping, wrong"),
    ):
        done = runner.run(Run(2, head, Span(None, 0, 0)))
        assert isinstance(done.error, NotAllowed)
        assert text in str(done.error)
    assert JobRunner().run(Run(1, "ping", Span(b"x", 0, 1))).result == b"x"


def test_a_command_that_cannot_be_loaded_says_so_and_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [
        EntryPoint(name, value, "kvd.commands")
        for name, value in (("gone", "no.such:thing"), ("ok", "base64:b64encode"))
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: installed if group == "kvd.commands" else [])
    runner = JobRunner()
    error = runner.run(Run(1, "gone", Span(None, 0, 0))).error
    assert isinstance(error, NotAllowed)
    assert "the controller for 'gone' cannot be loaded on this server: ModuleNotFoundError" in str(error)
    assert runner.run(Run(2, "ok", Span(b"kvd", 0, 3))).result == b"a3Zk"
    assert runner.run(Run(3, "ping", Span(b"x", 0, 1))).result == b"x"


def test_a_view_starts_where_its_span_does() -> None:
    assert view(span_of([1, 2], lead=16), np.dtype(np.float32)).tolist() == [1, 2]
    assert view(Span(None, 0, 0), np.dtype(np.float32)).size == 0
