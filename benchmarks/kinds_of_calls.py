"""Every kind of call beside a NumPy pushpull of the same size: ``python -m benchmarks.kinds_of_calls``.

Two workers push and pull 1 KiB in every way that the client has. All kinds take turns in one program, so the load of
the machine is the same for all. A start of the cluster counts once, with the median of its turns. Shown are the
minimum, the median and the maximum over the starts: of the time of a call, and of its ratio to a NumPy pushpull of the
same start.

``--earlier CHECKOUT`` starts the cluster of an earlier build next to this one. Both make their turns alternately.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

FLOATS: Final = 256
IN_FLIGHT: Final = 16
REFERENCE: Final = "NumPy"
ONE_KEY: Final = "two in flight, one key"
TWO_KEYS: Final = "two in flight, two keys"
WARM_UP_CALLS: Final = 100
FIRST_CALLS: Final = 20  # of each kind in a turn, which do not count
NOTHING: Final = "a worker or a daemon has ended: see the lines above"


class Call(NamedTuple):
    """One kind of call of one worker.

    Attributes:
        run: makes one call; with many in flight, it begins one and waits for the oldest.
        finish: waits for what is in flight.
    """

    run: Callable[[], object]
    finish: Callable[[], object] = lambda: None


Prepare: TypeAlias = Callable[[Any, str], Call]


def arrays() -> tuple[Any, Any]:
    """Return a value and memory for the result."""
    return np.ones(FLOATS, np.float32), np.empty(FLOATS, np.float32)


def with_numpy(store: Any, key: str) -> Call:
    """A pushpull of a NumPy array."""
    value, out = arrays()
    store.init(key, value)
    return Call(lambda: store.pushpull(key, value, out))


def listed(store: Any, key: str) -> Call:
    """A pushpull of a list of one key."""
    value, out = arrays()
    store.init(key, value)
    return Call(lambda: store.pushpull([key], [value], [out]))


def uncopied(store: Any, key: str) -> Call:
    """A pushpull whose result is a view."""
    value, _ = arrays()
    store.init(key, value)
    return Call(lambda: store.pushpull(key, value, copy=False))


def bound(store: Any, key: str) -> Call:
    """A pushpull of the arrays that the store keeps for a key."""
    store.init(key, arrays()[0])
    gradient, weight = store.bind(key)
    return Call(lambda: store.pushpull(key, gradient, weight))


def with_torch(store: Any, key: str) -> Call:
    """A pushpull of a tensor of torch."""
    import torch

    value, out = torch.ones(FLOATS), torch.empty(FLOATS)
    store.init(key, value)
    return Call(lambda: store.pushpull(key, value, out))


def handled(store: Any, key: str) -> Call:
    """A pushpull with a handle, which is waited for."""
    value, out = arrays()
    store.init(key, value)
    return Call(lambda: store.pushpull_async(key, value, out).wait())


def push_then_pull(store: Any, key: str) -> Call:
    """A push that nobody waits for, and a pull."""
    value, out = arrays()
    store.init(key, value)

    def run() -> None:
        store.push(key, value)
        store.pull(key, out)

    return Call(run)


def in_flight(calls: int, keys: int) -> Prepare:
    """Return a kind of which as many calls are always in flight, on these keys in turn."""

    def prepare(store: Any, key: str) -> Call:
        names = [f"{key}/{number}" for number in range(keys)]
        values, outs = np.ones((keys, FLOATS), np.float32), np.empty((calls, FLOATS), np.float32)
        store.init(names, list(values))
        flying: deque[Any] = deque()
        begun = count()

        def run() -> None:
            if len(flying) == calls:
                flying.popleft().wait()
            number = next(begun)
            place = number % keys
            flying.append(store.pushpull_async(names[place], values[place], outs[number % calls]))

        def finish() -> None:
            while flying:
                flying.popleft().wait()

        return Call(run, finish)

    return prepare


KINDS: Final[dict[str, Prepare]] = {
    REFERENCE: with_numpy,
    "list of one": listed,
    "copy=False": uncopied,
    "bind": bound,
    "torch": with_torch,
    "handle and wait": handled,
    f"{IN_FLIGHT} in flight": in_flight(IN_FLIGHT, IN_FLIGHT),
    "push, then pull": push_then_pull,
    ONE_KEY: in_flight(2, 1),
    TWO_KEYS: in_flight(2, 2),
}

# ── a worker, and one start of a cluster: processes that may import an older build ────────────────────────────────────


def work(kinds: Sequence[str]) -> None:
    """Make a turn for each line of stdin, which says how many calls of each kind, and say the seconds of each."""
    import kvd

    with kvd.create("dist_sync") as store:
        calls = {kind: KINDS[kind](store, kind) for kind in kinds}
        for call in calls.values():
            for _ in range(WARM_UP_CALLS):
                call.run()
            call.finish()
        for line in sys.stdin:
            seconds = {kind: timed(call, int(line)) for kind, call in calls.items()}
            print(json.dumps(seconds), flush=True)


def timed(call: Call, calls: int) -> float:
    """Return the seconds of one of so many calls."""
    for _ in range(FIRST_CALLS):
        call.run()
    call.finish()
    began_s = time.perf_counter()
    for _ in range(calls):
        call.run()
    call.finish()
    return (time.perf_counter() - began_s) / calls


def serve(kinds: Sequence[str], workers: int) -> None:
    """Start a cluster and its workers, and pass each line of stdin on to them."""
    from kvd.testing.cluster import LocalCluster

    code = Path(__file__).read_text(encoding="utf-8")
    with LocalCluster(workers, 1, processes=True, heartbeat_interval_s=1.0) as cluster:
        started = [cluster.script(code, number, "--worker", *kinds, stdin=subprocess.PIPE) for number in range(workers)]
        try:
            for line in sys.stdin:
                for worker in started:
                    assert worker.stdin is not None
                    worker.stdin.write(line.encode())
                    worker.stdin.flush()
                first, *_ = [_found(worker) for worker in started]
                print(json.dumps(first), flush=True)
        finally:
            for worker in started:
                worker.kill()
                worker.communicate()


def _found(worker: subprocess.Popen[bytes]) -> Any:
    assert worker.stdout is not None
    line: bytes = worker.stdout.readline()
    if not line.startswith(b"{"):
        raise RuntimeError((line + worker.stdout.read()).decode())
    return json.loads(line)


# ── the measurement ───────────────────────────────────────────────────────────────────────────────────────────────────

Times: TypeAlias = dict[str, float]  # seconds of a call, by kind


class Side:
    """One start of the cluster of a build; a context manager."""

    def __init__(self, tree: Path, kinds: Sequence[str], workers: int) -> None:
        path = os.pathsep.join([str(tree), str(tree / "cli")])
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--side", str(workers), *kinds],
            env={**os.environ, "PYTHONPATH": path},
            cwd=tree,  # where its daemons look for kvd first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._turns: list[Times] = []

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it stops its cluster
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def turn(self, calls: int) -> None:
        """Measure so many calls of each kind. Raises RuntimeError if a process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(NOTHING)
        self._turns.append(json.loads(line))

    def medians(self) -> Times:
        """Return the median of each kind over the turns."""
        return {kind: statistics.median(turn[kind] for turn in self._turns) for kind in self._turns[0]}


def measure(
    trees: Sequence[Path], kinds: Sequence[str], *, workers: int, starts: int, turns: int, calls: int
) -> list[list[Times]]:
    """Return for each tree the times of each start."""
    found: list[list[Times]] = [[] for _ in trees]
    for _ in range(starts):
        with ExitStack() as stack:
            sides = [stack.enter_context(Side(tree, kinds, workers)) for tree in trees]
            for turn in range(turns):
                for side in sides[:: 1 if turn % 2 else -1]:
                    side.turn(calls)
            for times, side in zip(found, sides, strict=True):
                times.append(side.medians())
    return found


def rows(new: Sequence[Times], earlier: Sequence[Times]) -> list[list[str]]:
    """Return the lines of the table: one for each kind, and the rate of two calls on one key."""
    found = []
    for kind in new[0]:
        line = [kind, _spread([times[kind] for times in new], 1e6), _ratios(new, kind, new, REFERENCE)]
        if earlier:
            line += [_spread([times[kind] for times in earlier], 1e6), _ratios(new, kind, earlier, kind)]
            line += [_ratios(new, kind, earlier, REFERENCE)]
        found.append(line)
    if {ONE_KEY, TWO_KEYS} <= new[0].keys():
        rate = ["rate on one key ÷ two keys", "", _ratios(new, TWO_KEYS, new, ONE_KEY)]
        found.append([*rate, "", _ratios(earlier, TWO_KEYS, earlier, ONE_KEY), ""] if earlier else rate)
    return found


def _ratios(upper: Sequence[Times], kind: str, lower: Sequence[Times], reference: str) -> str:
    pairs = zip(upper, lower, strict=True)
    return _spread([times[kind] / others[reference] for times, others in pairs]) if reference in lower[0] else ""


def _spread(figures: Sequence[float], scale: float = 1.0) -> str:
    digits = 2 if scale == 1.0 else 0
    found = (min(figures), statistics.median(figures), max(figures))
    return " / ".join(f"{value * scale:.{digits}f}" for value in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    from rich.console import Console

    from benchmarks import machine
    from benchmarks.arguments import checkout, positive, some_of
    from benchmarks.report import print_table

    parser = argparse.ArgumentParser(prog="python -m benchmarks.kinds_of_calls", description=__doc__)
    parser.add_argument("--kinds", type=some_of(tuple(kind.replace(",", "") for kind in KINDS)), help="some of them")
    parser.add_argument("--workers", type=positive(int), default=2)
    parser.add_argument("--starts", type=positive(int), default=5, help="of the cluster")
    parser.add_argument("--turns", type=positive(int), default=7, help="of each kind in a start")
    parser.add_argument("--calls", type=positive(int), default=200, help="of each kind in a turn")
    parser.add_argument("--earlier", type=checkout, metavar="CHECKOUT", help="an earlier build")
    given = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if given.kinds is None or kind.replace(",", "") in given.kinds]
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    trees = [Path(__file__).resolve().parents[1], *([given.earlier] if given.earlier else [])]
    new, *earlier = measure(
        trees, kinds, workers=given.workers, starts=given.starts, turns=given.turns, calls=given.calls
    )
    headings = ["kind of call", "µs", f"÷ {REFERENCE}"]
    headings += ["earlier: µs", "÷ earlier", f"÷ earlier {REFERENCE}"] if earlier else []
    print_table(Console(), headings, rows(new, earlier[0] if earlier else []))
    print("Minimum / median / maximum over the starts. A call of push, then pull is both.")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    elif sys.argv[1:2] == ["--side"]:
        serve(sys.argv[3:], int(sys.argv[2]))
    else:
        sys.exit(main())
