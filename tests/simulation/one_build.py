"""Runs of the campaigns of one build, for `tests.simulation.compare`: the program of its child processes.

`python -P one_build.py TREE` reads a task from each line of stdin and writes its result to stdout, as JSON. TREE may
be an older build: the simulator is in `kvd/testing` or in `tests/simulator`, and the fast ways may be there or not.
Other modules may have other names, so what they define is taken from the modules of the simulator that import it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

LAYOUTS: Final = ("kvd.testing", "tests.simulator")

FAST_WAYS: Final = (
    ("kvd.core.worker.lane", "Lane", "begin", False),
    ("kvd.core.worker.express", "Express", "begin", False),
    ("kvd.core.worker.express_flights", "ExpressFlights", "begin", False),
    ("kvd.core.server.lane", "PushLane", "_take", False),
    ("kvd.core.server.lane", "PushLane", "hold", None),
    ("kvd.core.server.row_lane", "RowLane", "_take_push", False),
    ("kvd.core.server.row_lane", "RowLane", "_take_pull", False),
)
"""Module, class and method of each fast way, and the answer with which a call falls back to the general way."""

ABSENCES: Final = ("LOSSES", "ELASTIC", "UNEVEN", "LATENESS", "HEALED")

DATA: Final = frozenset(
    (
        "Done",
        "NotYet",
        "Refused",
        "Attach",
        "Init",
        "Publish",
        "Lookup",
        "KeyInfo",
        "Outdated",
        "Delete",
        "Drop",
        "ClockQuery",
        "Clocks",
        "Activate",
        "WhereAre",
        "TheyAre",
        "StepInto",
        "ComeTo",
        "TakeStep",
        "StepIs",
        "Rest",
        "Push",
        "Staged",
        "Pull",
        "PullRows",
        "ListRows",
        "RowList",
        "Values",
        "Uncounted",
        "DeclareBatch",
        "PushBatch",
        "PullBatch",
        "StartHolding",
        "Install",
        "InstallRows",
        "Hold",
        "HoldRows",
        "HoldPublished",
        "HoldDropped",
        "HoldActivated",
        "HoldPlace",
        "HoldChange",
        "HoldState",
        "HoldOptimizer",
        "HoldReady",
        "HoldLoop",
    )
)
"""Kinds of messages that are about keys, values, clocks and their copies."""

TEXTS: Final = {"Refused": "text", "NotYet": "text", "Attach": "path_reason", "WaitReport": "lines"}
"""Fields for people, by the kind of the message."""

ENDS: Final = re.compile(r"(.* call \d+: \w+|.* halts|.* stops)\b.*", re.DOTALL)


class Task(NamedTuple):
    """One run.

    Attributes:
        how: "digest", "trace", or "calm": without mishaps and faults.
        delays: which delays the network of a calm run draws.
    """

    how: str
    campaign: str
    seed: int
    delays: int = 0


class Recorder:
    """What happened in one World, without its Ticks and without texts for people.

    Attributes:
        lines: all of it, if `keeps_lines`.
        kinds: how often messages of each kind arrived.
    """

    def __init__(self, clock: Any, keeps_lines: bool) -> None:
        self.lines: list[str] = []
        self.kinds: Counter[str] = Counter()
        self._clock = clock
        self._keeps_lines = keeps_lines
        self._hash = blake2b(digest_size=16)

    def record(self, text: str) -> None:
        if text.endswith("Tick"):
            return
        match = ENDS.fullmatch(text)
        line = f"{self._clock.now:.9f} {match[1] if match else text}"
        self._hash.update(f"{line}\n".encode())
        if self._keeps_lines:
            self.lines.append(line)

    def record_message(self, decoded: Any) -> None:
        message = decoded.message
        kind = type(message).__name__
        self.kinds[kind] += 1
        if kind in TEXTS:
            message = dataclasses.replace(message, **{TEXTS[kind]: ""})
        elif kind == "WaitNews":
            message = dataclasses.replace(message, deadlock=("",) * bool(message.deadlock))
        self.record(f"  {decoded.sender} {tuple(decoded.epoch)} run {decoded.run}: {described(message)}")

    def digest(self) -> str:
        return self._hash.hexdigest()


def described(value: Any) -> str:
    """Show a message or a part of one, without fields that have their default: an older build may lack them."""
    if dataclasses.is_dataclass(value):
        fields = [(each.name, each.default) for each in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        defaults: dict[str, Any] = getattr(value, "_field_defaults", {})
        fields = [(name, defaults.get(name, dataclasses.MISSING)) for name in value._fields]
    elif isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    else:
        return repr(value)
    own = ((name, default, getattr(value, name)) for name, default in fields)
    shown = (
        f"{name}={described(given)}"
        for name, default, given in own
        if default is dataclasses.MISSING or given != default
    )
    return f"{type(value).__name__}({', '.join(shown)})"


class Build:
    """The simulator of one tree, with its fast ways off.

    Attributes:
        layout: the package that has the simulator.
        turned_off: the fast ways that the build has.
        campaigns: those of every build and those in which servers die, by name.
        more: those of absent workers and of sparse or encoded values, by name.
    """

    def __init__(self, tree: Path) -> None:
        _use_only(tree)
        self.layout = next(name for name in LAYOUTS if _is_there(tree, name))
        self._campaign = self._part("campaign")
        self._copies = self._part("copies")
        self._recorders: list[Recorder] = []
        self._workloads: list[Any] = []
        self._keeps_lines = False
        self._delays = 0
        self.campaigns = {**self._campaign.CAMPAIGNS, **self._campaign.FAILOVERS}
        absences, sparse = self._part("absences"), self._part("sparse")
        groups = [getattr(absences, name) for name in ABSENCES]
        self.more = {name: campaign for group in (*groups, sparse.SPARSE) for name, campaign in group.items()}
        self.turned_off = [way for way in FAST_WAYS if _turn_off(*way)]
        self._record()
        self._count_no_log_entries()
        self._vary_delays()
        self._note_workloads()

    def run(self, task: Task) -> dict[str, Any]:
        """Run a task and return its result."""
        self._recorders.clear()
        self._workloads.clear()
        self._keeps_lines, self._delays = task.how == "trace", task.delays
        campaign = self.campaigns.get(task.campaign) or self.more[task.campaign]
        if task.how == "calm":
            calm = self._part("mishaps").Mishaps(), self._part("network").CALM
            campaign = dataclasses.replace(campaign, mishaps=calm[0], faults=calm[1])
        world, violation = None, ""
        try:
            world = campaign.run(task.seed)
        except Exception as error:  # noqa: BLE001  a checker's, or whatever a broken build raises
            violation = f"{type(error).__name__}: {error}"
        recorder = self._recorders[0]  # a workload may have run another World for what it expects
        if task.how == "trace":
            return {"lines": recorder.lines, "violation": violation}
        if task.how == "digest" or world is None:
            return {"digest": recorder.digest(), "violation": violation}
        outcome = {f"messages: {kind}": count for kind, count in recorder.kinds.items() if kind in DATA}
        return {"outcome": {**outcome, **dict(self._values(world)), **dict(self._ledgers())}, "violation": violation}

    def _values(self, world: Any) -> Iterator[tuple[str, str]]:
        """Hash what the leader of each slice has."""
        np, view = import_module("numpy"), self._copies.view
        for process, slice_ in self._copies.led(world):
            if slice_.spec.table is None:
                spans = [slice_.span(slice_.log.current)]
            else:
                spans = self._copies._pieces(list(process.runners.values())[-1], slice_)
            parts = b"".join(bytes(view(span, np.dtype(np.uint8))) for span in spans)
            yield f"value: slice {slice_.index} of {slice_.key!r}", blake2b(parts, digest_size=8).hexdigest()

    def _ledgers(self) -> Iterator[tuple[str, str]]:
        """Name what became of each push, in workloads that keep a ledger."""
        for (key, place), outcomes in getattr(self._workloads[0], "outcomes", {}).items():
            yield f"ledger: place {place} of {key!r}", ", ".join(sorted(outcomes))

    def _part(self, name: str) -> Any:
        return import_module(f"{self.layout}.{name}")

    def _record(self) -> None:
        """Let each Trace have a Recorder."""
        trace, decode = self._part("trace").Trace, self._part("shell").decode
        start = trace.__init__

        def starting(own: Any, seed: int, clock: Any) -> None:
            start(own, seed, clock)
            own.recorder = Recorder(clock, self._keeps_lines)
            self._recorders.append(own.recorder)

        trace.__init__ = starting
        trace.record = lambda own, text: own.recorder.record(text)
        trace.record_header = lambda own, header: own.recorder.record_message(decode(header))

    def _count_no_log_entries(self) -> None:
        """A process dies after so many effects: an entry of its log is none of them."""
        shell = self._part("shell")
        by_run, log_entry = shell.by_run, shell.LogEntry
        shell.by_run = lambda *rest: (each for each in by_run(*rest) if not isinstance(each[0], log_entry))

    def _vary_delays(self) -> None:
        """Let the network draw other delays than those of its seed, if the task wants it."""
        simulator = self._part("simulator")
        network = simulator.Network

        def networked(random: Random, *rest: Any) -> Any:
            return network(Random(f"{random.getrandbits(64)} {self._delays}") if self._delays else random, *rest)

        simulator.Network = networked

    def _note_workloads(self) -> None:
        """Keep the workload of a run: its ledger is part of the outcome."""
        workloads = self._campaign.WORKLOADS

        def noting(make: Callable[..., Any]) -> Callable[..., Any]:
            def make_and_note(*arguments: Any) -> Any:
                self._workloads.append(make(*arguments))
                return self._workloads[-1]

            return make_and_note

        workloads.update({name: noting(make) for name, make in list(workloads.items())})


def _use_only(tree: Path) -> None:
    """Import from this tree, and from no other one that this interpreter knows, such as an editable installation."""
    sys.path[:] = [str(tree), *(entry for entry in sys.path if not Path(entry, "kvd", "errors.py").exists())]
    found = Path(str(import_module("kvd").__file__)).resolve()
    if tree.resolve() not in found.parents:
        raise SystemExit(f"{found} is imported instead of the package kvd in {tree}")


def _is_there(tree: Path, layout: str) -> bool:
    return tree.joinpath(*layout.split("."), "campaign.py").exists()


def _turn_off(module: str, name: str, method: str, answer: Any) -> bool:
    """Turn a fast way off. Return False if the build has none of this name."""
    try:
        way = getattr(import_module(module), name, SimpleNamespace())
    except ModuleNotFoundError:
        return False
    if not hasattr(way, method):
        return False
    setattr(way, method, lambda *arguments: answer)
    return True


def main() -> None:
    build = Build(Path(sys.argv[1]))
    about = {
        "layout": build.layout,
        "campaigns": list(build.campaigns),
        "more": list(build.more),
        "off": [way[1:3] for way in build.turned_off],
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(build.run(Task(*json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
