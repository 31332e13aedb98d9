"""A build compared with an earlier one, campaign by campaign and seed by seed.

    python -m tests.simulation.compare --base ../base --seeds 5
    python -m tests.simulation.compare --base ../base --seeds 20 --outcomes
    python -m tests.simulation.compare --base ../base --mutants

Without an option, every run must do the same at the same time: each message that arrives, each call that ends, each
process that dies. Left out are ticks of timers, texts for people, log entries, and fields that have their default. Both
builds go without the fast ways that they have, so a build that has none is compared with the general way of the base.

`--outcomes` is for changes of messages. No run of this build may break a promise. Without mishaps and faults it ends
with the values, ledgers and numbers of messages of the base. What the base itself does not always end with, because it
depends on the delays of the network, is not compared.

`--more` adds the campaigns of absent workers and of sparse or encoded values: twice as many.

`--mutants` names the mutants of the base that this build lacks, without running them.

The exit code is 0 if nothing differs and 1 otherwise. Results of a base whose worktree is clean are kept in `--cache`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from tests.simulation.mutant_list import compare_mutants
from tests.simulation.one_build import Task

TREE: Final = Path(__file__).resolve().parents[2]
PROGRAM: Final = Path(__file__).with_name("one_build.py")
DELAYS: Final = (0, 1, 2)
"""Of calm runs of the base: what is the same in all of them does not depend on delays."""
KEPT_EACH: Final = 40  # runs, after which the cache is written
SHOWN: Final = 3  # runs whose first difference is shown
LINES_BEFORE: Final = 8
LINES_AFTER: Final = 4
LONGEST_LINE: Final = 600

Result: TypeAlias = dict[str, Any]
Say: TypeAlias = Callable[[str], None]


class BuildError(Exception):
    """A build does not run. The text is what its process said."""


@dataclass
class Cache:
    """Results of one commit, in a file.

    Args:
        folder: made if it is missing.
        commit: None: nothing is kept.
    """

    folder: Path
    commit: str | None
    _file: Path = field(init=False)
    _results: dict[str, Result] = field(init=False)

    def __post_init__(self) -> None:
        made_with = (PROGRAM.read_text(encoding="utf-8"), platform.python_version(), version("numpy"))
        kind = blake2b(repr(made_with).encode(), digest_size=8).hexdigest()  # another program has other results
        self._file = self.folder / f"{self.commit}-{kind}.json"
        self._results = self._read()

    def find(self, task: Task) -> Result | None:
        """Return the result of an earlier run."""
        return self._results.get(json.dumps(task))

    def keep(self, results: dict[Task, Result]) -> None:
        """Add results, beside those that other processes have added meanwhile."""
        if self.commit is None or not results:
            return
        self._results = {**self._read(), **{json.dumps(task): result for task, result in results.items()}}
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as file:
            json.dump(self._results, file)
        os.replace(file.name, self._file)

    def _read(self) -> dict[str, Result]:
        if self.commit is None or not self._file.exists():
            return {}
        known: dict[str, Result] = json.loads(self._file.read_text(encoding="utf-8"))
        return known


class _Child:
    """One process that runs the tasks of a build, one after the other."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed in `close`
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=tree,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
            text=True,
        )
        try:
            self.about = self._read()
        except BuildError:
            self.close()
            raise

    def run(self, task: Task) -> Result:
        """Return the result of a task. Raises BuildError if the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what it said is read next
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process: it has no more tasks, or does not finish the one that it has."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self) -> Result:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise BuildError(f"{self._tree}: exit code {code}\n{self._errors.read()}")
        found: Result = json.loads(line)
        return found


class Build:
    """The tree of a build, which is run in child processes.

    Args:
        jobs: the number of processes.
        cache: of its results; None: nothing is kept.

    Raises BuildError if the build does not start.
    """

    def __init__(self, tree: Path, jobs: int, cache: Cache | None = None) -> None:
        self._tree = tree
        self._jobs = jobs
        self._cache = cache
        self._children = [_Child(tree)]
        about = self._children[0].about
        self.campaigns: list[str] = about["campaigns"]
        self.more: list[str] = about["more"]
        self.layout: str = about["layout"]
        self.turned_off = [f"{name}.{method}" for name, method in about["off"]]

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            child.close()

    def run(self, tasks: Sequence[Task]) -> dict[Task, Result]:
        """Return the results of all tasks. Raises BuildError if a process ends too early."""
        known = {task: self._cache.find(task) for task in tasks} if self._cache is not None else {}
        found = {task: result for task, result in known.items() if result is not None}
        todo = [task for task in tasks if task not in found]
        while len(self._children) < min(self._jobs, len(todo)):
            self._children.append(_Child(self._tree))
        for start in range(0, len(todo), KEPT_EACH):
            results = self._run_now(todo[start : start + KEPT_EACH])
            found |= results
            if self._cache is not None:
                self._cache.keep(results)
        return found

    def _run_now(self, tasks: Sequence[Task]) -> dict[Task, Result]:
        free: SimpleQueue[_Child] = SimpleQueue()
        for child in self._children:
            free.put(child)

        def run(task: Task) -> Result:
            child = free.get()
            try:
                return child.run(task)
            finally:
                free.put(child)

        with ThreadPoolExecutor(len(self._children)) as pool:
            return dict(zip(tasks, pool.map(run, tasks), strict=True))


def commit_of(tree: Path) -> str | None:
    """Return the commit of a worktree that has no changes, else None."""
    git = ["git", "-C", str(tree)]
    top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False)
    if top.returncode or Path(top.stdout.strip()).resolve() != tree.resolve():
        return None
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return None if status.stdout else head.stdout.strip()


# ── runs that are the same ──


def compare_runs(base: Build, new: Build, names: Iterable[str], seeds: int, say: Say) -> int:
    """Return the number of runs that differ, or that break a promise."""
    tasks = [Task("digest", name, seed) for name in names for seed in range(seeds)]
    earlier, later = base.run(tasks), new.run(tasks)
    different = [
        task for task in tasks if earlier[task]["digest"] != later[task]["digest"] or _is_new(earlier, later, task)
    ]
    for task in tasks:
        if task in different or later[task]["violation"]:
            say(f"{task.campaign}, seed {task.seed}: {_in_words(earlier[task], later[task])}")
    for task in different[:SHOWN]:
        if earlier[task]["digest"] != later[task]["digest"]:
            traced = task._replace(how="trace")
            for line in first_difference(base.run([traced])[traced]["lines"], new.run([traced])[traced]["lines"]):
                say(line)
    say(f"{len(tasks) - len(different)} of {len(tasks)} runs are equal")
    return len(different)


def _is_new(earlier: dict[Task, Result], later: dict[Task, Result], task: Task) -> bool:
    """Return whether a promise is broken that the base keeps."""
    return bool(later[task]["violation"] and not earlier[task]["violation"])


def _in_words(earlier: Result, later: Result) -> str:
    broken = f"; base: {earlier['violation'] or 'no violation'}; new: {later['violation'] or 'no violation'}"
    is_broken = earlier["violation"] or later["violation"]
    same = "the same run" if earlier["digest"] == later["digest"] else "another run"
    return same + (broken if is_broken else "")


def first_difference(earlier: Sequence[str], later: Sequence[str]) -> Iterator[str]:
    """Yield the last equal lines of two traces, and the first lines after them, those of the base with a minus."""
    pairs = zip_longest(earlier, later)
    start = next((number for number, (old, new) in enumerate(pairs) if old != new), len(earlier))
    yield f"  the first of {len(earlier)} lines that differs is line {start + 1}:"
    for sign, lines in (
        (" ", earlier[max(start - LINES_BEFORE, 0) : start]),
        ("-", earlier[start : start + LINES_AFTER]),
        ("+", later[start : start + LINES_AFTER]),
    ):
        for line in lines:
            yield f"  {sign} {line[:LONGEST_LINE]}"


# ── runs that end with the same ──


def compare_outcomes(base: Build, new: Build, names: Iterable[str], seeds: int, say: Say) -> int:
    """Return the number of runs that end with something else, or that break a promise."""
    runs = [(name, seed) for name in names for seed in range(seeds)]
    broken = _broken(base, new, [Task("digest", *run) for run in runs], say)
    earlier = base.run([Task("calm", *run, delays) for run in runs for delays in DELAYS])
    later = new.run([Task("calm", *run) for run in runs])
    different = compared = left_out = 0
    for run in runs:
        known = [earlier[Task("calm", *run, delays)] for delays in DELAYS]
        now = later[Task("calm", *run)]
        certain, uncertain = _certain([each.get("outcome", {}) for each in known])
        compared += len(certain)
        left_out += uncertain
        ends = now.get("outcome", {})
        lines = [f"{name}: {value}, now {ends.get(name)}" for name, value in certain.items() if value != ends.get(name)]
        if now["violation"] and not any(each["violation"] for each in known):
            lines.insert(0, now["violation"])
        if lines:
            different += 1
            say(f"{run[0]}, seed {run[1]}, calm: {'; '.join(lines[:LINES_AFTER])}")
    say(f"{len(runs) - broken} of {len(runs)} runs break no promise that the base keeps")
    say(f"{len(runs) - different} of {len(runs)} calm runs end with the same")
    say(f"{compared} values and numbers are compared, {left_out} depend on delays")
    return broken + different


def _certain(outcomes: Sequence[Result]) -> tuple[Result, int]:
    """Return what is the same in all outcomes, and the number of what is not."""
    certain = {name: value for name, value in outcomes[0].items() if all(each.get(name) == value for each in outcomes)}
    return certain, len(set().union(*outcomes)) - len(certain)


def _broken(base: Build, new: Build, tasks: Sequence[Task], say: Say) -> int:
    """Return the number of runs of the new build that break a promise, and not in the base."""
    found = {task: result for task, result in new.run(tasks).items() if result["violation"]}
    earlier = base.run(list(found))
    for task, result in found.items():
        known = earlier[task]["violation"] or "no violation"
        say(f"{task.campaign}, seed {task.seed}: {result['violation']} (base: {known})")
    return sum(_is_new(earlier, found, task) for task in found)


# ── the command ──


def main(arguments: Sequence[str] | None = None, say: Say = lambda line: print(line, flush=True)) -> int:
    """Compare and return the exit code."""
    options = _options(arguments)
    if options.mutants:
        return 1 if compare_mutants(options.base, options.new, say) else 0
    commit = commit_of(options.base)
    if commit is None:
        say("the results of the base are not kept: it is no clean worktree")
    try:
        with ExitStack() as stack:
            base = stack.enter_context(Build(options.base, options.jobs, Cache(options.cache, commit)))
            new = stack.enter_context(Build(options.new, options.jobs))
            return 1 if _compare(base, new, options, say) else 0
    except BuildError as error:
        say(str(error))
        return 1


def _compare(base: Build, new: Build, options: Any, say: Say) -> int:
    """Return the number of runs that differ and of campaigns that are not in both builds."""
    for name, build in (("base", base), ("new", new)):
        say(f"{name}: {build.layout}, turned off: {', '.join(build.turned_off) or 'nothing'}")
    wanted = options.campaigns or (base.campaigns + base.more if options.more else base.campaigns)
    names = [name for name in wanted if all(name in build.campaigns + build.more for build in (base, new))]
    gone = [name for name in wanted if name not in names]
    for name in gone:
        say(f"the campaign {name!r} is not in both builds")
    compare = compare_outcomes if options.outcomes else compare_runs
    return len(gone) + compare(base, new, names, options.seeds, say)


def _options(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.compare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", type=_tree, required=True, metavar="WORKTREE", help="the earlier build")
    parser.add_argument(
        "--new", type=_tree, default=TREE, metavar="WORKTREE", help="the later build (default: this one)"
    )
    parser.add_argument("--seeds", type=int, default=1, help="of each campaign (default: 1)")
    parser.add_argument("--campaigns", nargs="+", metavar="NAME", help="default: CAMPAIGNS and FAILOVERS")
    parser.add_argument("--more", action="store_true", help="also campaigns of absences and of sparse values")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: 1)")
    parser.add_argument("--cache", type=Path, default=_cache_folder(), help="folder for the results of the base")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--outcomes", action="store_true", help="compare only how runs end")
    mode.add_argument("--mutants", action="store_true", help="compare only the list of mutants")
    return parser.parse_args(arguments)


def _tree(text: str) -> Path:
    tree = Path(text).resolve()
    if not (tree / "kvd" / "errors.py").exists():
        raise argparse.ArgumentTypeError(f"{text} has no package kvd")
    return tree


def _cache_folder() -> Path:
    return Path(tempfile.gettempdir(), f"kvd-simulation-{os.getuid()}")


if __name__ == "__main__":
    sys.exit(main())
